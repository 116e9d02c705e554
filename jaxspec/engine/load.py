"""From folders and options to a decoder with its parameters: everything that can be refused is refused here."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp

from jaxspec.checkpoint import Checkpoint, open_checkpoint, restore_params
from jaxspec.engine.drafting import Target, make_drafting
from jaxspec.engine.params import STOP_TOKEN_IDS_MAX, STOPS_MAX, SpeculationConfig
from jaxspec.errors import UserError
from jaxspec.model.llama import ModelDef, define
from jaxspec.model.params import param_specs
from jaxspec.sharding import Sharding, make_sharding
from jaxspec.speculate.judge import Law
from jaxspec.speculate.programs import Programs, Shapes
from jaxspec.speculate.state import STOP_IDS
from jaxspec.speculate.step import Decoder, Params
from jaxspec.text import Tokenizer

LOG = logging.getLogger("jaxspec")
DTYPES = ("float32", "bfloat16")
LARGEST_MAX_LEN = 1 << 20
# A row has room for these besides every stop id and every stop string (which may spell a special token) of a request.
EOS_IDS_MAX = STOP_IDS - STOPS_MAX - STOP_TOKEN_IDS_MAX


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What the engine runs on."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    programs: Programs
    speculation: SpeculationConfig
    dtype: str
    eos_ids: tuple[int, ...]
    draft_context: int  # tokens that the drafter can follow
    notes: tuple[str, ...]  # what was replicated or ignored


def load(
    target: str | Path,
    *,
    draft: str | Path | None,
    heads: str | Path | None = None,
    speculation: SpeculationConfig,
    mesh: str | Mapping[str, int],
    dtype: str | None,
    max_slots: int,
    max_len: int,
    deterministic: bool = False,
) -> Loaded:
    """Opens the checkpoints and puts their parameters on the mesh. Raises UserError for all that does not fit."""
    if not 1 <= max_slots <= 1024:
        raise UserError(f"max_slots: expected 1..1024, got {max_slots}")
    checkpoint = open_checkpoint(target)
    trained = checkpoint.config.max_position_embeddings
    if not 2 <= max_len <= min(trained, LARGEST_MAX_LEN):
        raise UserError(f"max_len: expected 2..{trained} (positions that the target was trained for), got {max_len}")
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise UserError(f"dtype: expected {' or '.join(DTYPES)}, got {dtype!r}")
    sharding = make_sharding(mesh)
    tokenizer = None if checkpoint.tokenizer_dir is None else Tokenizer.load(checkpoint.tokenizer_dir)
    vocab = checkpoint.config.vocab_size
    valid_vocab = vocab if tokenizer is None else min(vocab, tokenizer.size)
    eos_ids = set(checkpoint.config.eos_token_ids) | set(() if tokenizer is None else tokenizer.eos_ids)
    if len(eos_ids) > EOS_IDS_MAX:
        raise UserError(f"{target}: expected at most {EOS_IDS_MAX} end-of-sequence ids, got {len(eos_ids)}")

    # XLA's CPU backend has no bfloat16 scatter: each write would convert the whole cache there and back.
    cache_dtype = jnp.dtype("float32") if jax.default_backend() == "cpu" else jnp.dtype(dtype)
    model = define(checkpoint.config, sharding, jnp.dtype(dtype), cache_dtype)
    drafting = make_drafting(speculation, Target(checkpoint, model, valid_vocab), draft, heads, max_len)
    law = cast(Law, speculation.rejection_sample_method)
    decoder = Decoder(model, drafting.drafter, valid_vocab, law, by_position=deterministic)
    target_params = restore_params(checkpoint, model.shardings(), jnp.dtype(dtype))
    params = Params(target_params, drafting.params(target_params))
    gammas = drafting.gammas
    if deterministic and speculation.method == "none":
        gammas = (speculation.num_speculative_tokens,)  # drafts nothing, but has the shape of a server that would
    shapes = Shapes.of(max_slots, max_len, gammas[-1], gammas=gammas, deterministic=deterministic)
    notes = (*drafting.notes, *replicated(model, sharding))
    for note in notes:
        LOG.info(note)
    return Loaded(
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        programs=Programs(decoder, params, shapes),
        speculation=speculation,
        dtype=dtype,
        eos_ids=tuple(sorted(eos_ids)),
        draft_context=drafting.context,
        notes=notes,
    )


def replicated(model: ModelDef, sharding: Sharding) -> list[str]:
    """What could not be split over the mesh; one layer stands for all."""
    specs = {name: (spec.axes, spec.shape) for name, spec in param_specs(model.config).items()}
    return sharding.describe(
        {name: spec for name, spec in specs.items() if not name.startswith("layers.") or name.startswith("layers.0.")}
    )
