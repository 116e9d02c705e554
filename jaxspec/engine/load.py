"""From folders and options to a decoder with its parameters: everything that can be refused is refused here."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxspec.checkpoint import Checkpoint, open_checkpoint, restore_params
from jaxspec.engine.params import STOP_TOKEN_IDS_MAX, STOPS_MAX, SpeculationConfig
from jaxspec.errors import UserError
from jaxspec.model.llama import ModelDef, define
from jaxspec.model.params import param_specs
from jaxspec.shapes import GAMMA_BUCKETS, GAMMA_MAX
from jaxspec.sharding import Sharding, make_sharding
from jaxspec.speculate.drafters import Drafter
from jaxspec.speculate.drafters.linear import LinearDrafter
from jaxspec.speculate.drafters.ngram import NgramDrafter
from jaxspec.speculate.drafters.none import NoDrafter
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
    draft_context: int  # tokens that the draft model can follow; the target's own limit where there is none
    notes: tuple[str, ...]  # what was replicated or ignored


def load(
    target: str | Path,
    *,
    draft: str | Path | None,
    speculation: SpeculationConfig,
    mesh: str | Mapping[str, int],
    dtype: str | None,
    max_slots: int,
    max_len: int,
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
    # A folder given as ``draft`` decides the method only when no other method was asked for.
    draft = draft if draft is not None else speculation.model
    notes = []
    if draft is not None and speculation.method != "draft_model":
        notes.append(f"draft {draft}: ignored by method {speculation.method}")
    if draft is None and speculation.method == "draft_model":
        raise UserError("draft: method draft_model needs a draft checkpoint, got none")

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
    draft_model: ModelDef | None = None
    draft_params: dict[str, Any] = {}
    if speculation.method == "draft_model" and draft is not None:
        draft_checkpoint = open_checkpoint(draft)
        check_pair(checkpoint, draft_checkpoint)
        draft_model = define(draft_checkpoint.config, sharding, jnp.dtype(dtype), cache_dtype)
        draft_params = restore_params(draft_checkpoint, draft_model.shardings(), jnp.dtype(dtype))
        if draft_model.config.max_position_embeddings < max_len:
            limit = draft_model.config.max_position_embeddings
            notes.append(f"draft {draft}: trained for {limit} positions, past them rows decode without it")
    law = cast(Law, speculation.rejection_sample_method)
    decoder = Decoder(model, make_drafter(speculation, draft_model, vocab, valid_vocab), valid_vocab, law)
    params = Params(restore_params(checkpoint, model.shardings(), jnp.dtype(dtype)), draft_params)
    gamma = 0 if speculation.method == "none" else GAMMA_MAX
    # Where drafts cost nothing, three rows take as long as five: a bucket of its own would not pay.
    gammas = GAMMA_BUCKETS if draft_model is not None else (0, 4, 8)
    notes += replicated(model, sharding)
    for note in notes:
        LOG.info(note)
    return Loaded(
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        programs=Programs(decoder, params, Shapes.of(max_slots, max_len, gamma, gammas=gammas)),
        speculation=speculation,
        dtype=dtype,
        eos_ids=tuple(sorted(eos_ids)),
        draft_context=trained if draft_model is None else draft_model.config.max_position_embeddings,
        notes=tuple(notes),
    )


def make_drafter(speculation: SpeculationConfig, draft_model: ModelDef | None, vocab: int, valid_vocab: int) -> Drafter:
    """The drafter that the method names."""
    match speculation.method:
        case "none":
            return NoDrafter()
        case "ngram":
            return NgramDrafter(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
        case "draft_model" if draft_model is not None:
            return LinearDrafter(draft_model, vocab, valid_vocab)
        case method:
            raise UserError(f"method: cannot make a drafter for {method!r}")


def check_pair(target: Checkpoint, draft: Checkpoint) -> None:
    """A draft must speak the target's very tokens. Raises UserError with both sides."""
    ours, theirs = target.manifest, draft.manifest
    if ours.tokenizer_fingerprint != theirs.tokenizer_fingerprint:
        raise UserError(
            f"draft {draft.path}: its tokenizer differs from the target's: expected fingerprint "
            f"{ours.tokenizer_fingerprint}, got {theirs.tokenizer_fingerprint}"
        )
    if (ours.family, ours.model_version) != (theirs.family, theirs.model_version):
        raise UserError(
            f"draft {draft.path}: expected family {ours.family} {ours.model_version} as the target, "
            f"got {theirs.family} {theirs.model_version}"
        )
    if ours.tokenizer_fingerprint is None and target.config.vocab_size != draft.config.vocab_size:
        raise UserError(
            f"draft {draft.path}: without tokenizers the vocabularies must agree: expected "
            f"{target.config.vocab_size} ids, got {draft.config.vocab_size}"
        )


def replicated(model: ModelDef, sharding: Sharding) -> list[str]:
    """What could not be split over the mesh; one layer stands for all."""
    specs = {name: (spec.axes, spec.shape) for name, spec in param_specs(model.config).items()}
    return sharding.describe(
        {name: spec for name, spec in specs.items() if not name.startswith("layers.") or name.startswith("layers.0.")}
    )
