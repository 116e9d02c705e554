"""A draft model whose head is trimmed to the ids that it may say.

Most of a small draft's time goes into the product with its head, whose rows are all ids of a large vocabulary. Rare ids
are rarely right, so leaving them out costs few accepted tokens. Which ids stay is told by the list DRAFT_VOCAB in the
draft's folder, most frequent first; without one the first ids stay, since byte-pair encodings number their tokens in
the order of the merges, which is roughly that of their frequency.
"""

import dataclasses
import json
from pathlib import Path
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.params import DRAFT_VOCAB_MIN
from jaxspec.errors import UserError
from jaxspec.model.llama import define
from jaxspec.model.params import param_specs
from jaxspec.speculate.drafters.linear import TRIMMED_HEAD, TRIMMED_PLACE, LinearDrafter
from jaxspec.speculate.state import STOP_IDS

DRAFT_VOCAB: Final = "draft_vocab.json"

assert DRAFT_VOCAB_MIN > STOP_IDS


def trim_vocab(
    drafter: LinearDrafter, params: dict[str, jax.Array], folder: Path, size: int
) -> tuple[LinearDrafter, dict[str, jax.Array]]:
    """The drafter that says the ``size`` most frequent ids alone. Raises UserError for a size or a list that is wrong.

    A head of its own is dropped for its trimmed rows; one that is the embedding stays whole beside them.
    """
    model = drafter.model
    known = min(model.config.vocab_size, drafter.valid_vocab)
    if size > known:
        raise UserError(f"draft_vocab_size: expected at most {known}, the ids that draft and target know, got {size}")
    listed = _read_list(folder / DRAFT_VOCAB, size, known)
    ids_N = np.arange(size, dtype=np.int32) if listed is None else np.array(listed, np.int32)

    name = "embed" if model.config.tie_word_embeddings else "lm_head"
    axes, (_, width) = param_specs(model.config)[name].axes, params[name].shape
    out = model.sharding.named(axes, (size, width))
    trimmed = dict(params)
    trimmed[TRIMMED_HEAD] = jax.jit(lambda head_VD: head_VD[ids_N], out_shardings=out)(params[name])
    if listed is not None:
        place_V = np.full((drafter.vocab,), size, np.int32)
        place_V[ids_N] = np.arange(size)
        trimmed[TRIMMED_PLACE] = jax.device_put(jnp.asarray(place_V), model.sharding.replicated)
    if name == "lm_head":
        del trimmed["lm_head"]
        # To the module the head is then the embedding, which nobody asks for logits.
        config = dataclasses.replace(model.config, tie_word_embeddings=True)
        model = define(config, model.sharding, model.dtype, model.cache_dtype)
    kind = "first" if listed is None else "listed"
    return dataclasses.replace(drafter, model=model, trimmed=kind), trimmed


def _read_list(path: Path, size: int, known: int) -> list[int] | None:
    """The first ``size`` ids of the list, or None without a file. Raises UserError naming what is wrong with it."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected a JSON list of token ids ({error})") from None
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected a JSON list of token ids ({error})") from None
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise UserError(f"{path}: expected a JSON list of token ids, most frequent first")
    wrong = [token_id for token_id in ids if not 0 <= token_id < known]
    if wrong:
        raise UserError(f"{path}: expected ids from 0 to {known - 1}, got {wrong[0]} ({len(wrong)} such)")
    if len(set(ids)) < len(ids):
        raise UserError(f"{path}: expected each id once, got {len(ids) - len(set(ids))} repetitions")
    if len(ids) < size:
        raise UserError(f"{path}: expected at least draft_vocab_size={size} ids, got {len(ids)}")
    return ids[:size]
