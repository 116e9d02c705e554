"""A draft model, or heads, whose LM head is trimmed to the ids that it may say.

Most of a small draft's time goes into the product with its head, whose rows are all ids of a large vocabulary. Rare ids
are rarely right, so leaving them out costs few accepted tokens (FR-Spec, Zhao et al. 2025). Which ids stay is told by
the list DRAFT_VOCAB in the draft's folder, most frequent first; without one the first ids stay, since byte-pair
encodings number their tokens in the order of the merges, which is roughly that of their frequency.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.manifest import DRAFT_VOCAB
from jaxspec.engine.params import DRAFT_VOCAB_MIN
from jaxspec.errors import UserError
from jaxspec.model.heads.config import HeadsConfig
from jaxspec.model.llama import ModelDef, define
from jaxspec.model.params import param_specs
from jaxspec.speculate.drafters.linear import TRIMMED_HEAD, TRIMMED_PLACE, LinearDrafter
from jaxspec.speculate.state import STOP_IDS

assert DRAFT_VOCAB_MIN > STOP_IDS


def trim_vocab(
    drafter: LinearDrafter, folder: Path, size: int
) -> tuple[LinearDrafter, Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]]:
    """The drafter that says the ``size`` most frequent ids alone, and what makes its parameters of the whole ones.

    A head of its own is dropped for its trimmed rows; one that is the embedding stays whole beside them. Raises
    UserError for a size or a list that is wrong.
    """
    model = drafter.model
    known = min(model.config.vocab_size, drafter.valid_vocab)
    if size > known:
        raise UserError(f"draft_vocab_size: expected at most {known}, the ids that draft and target know, got {size}")
    listed = read_list(folder / DRAFT_VOCAB, size, known)
    ids_N = np.arange(size, dtype=np.int32) if listed is None else np.array(listed, np.int32)

    whole, name = model, _head_name(model)
    if name == "lm_head":
        # To the module the head is then the embedding, which nobody asks for logits.
        config = dataclasses.replace(model.config, tie_word_embeddings=True)
        model = define(config, model.sharding, model.dtype, model.cache_dtype)

    def trim(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        trimmed = dict(params)
        trimmed[TRIMMED_HEAD] = _rows(params[name], ids_N, whole)
        if listed is not None:
            place_V = np.full((drafter.vocab,), size, np.int32)
            place_V[ids_N] = np.arange(size)
            trimmed[TRIMMED_PLACE] = jax.device_put(jnp.asarray(place_V), whole.sharding.replicated)
        if name == "lm_head":
            del trimmed["lm_head"]
        return trimmed

    kind = "first" if listed is None else "listed"
    return dataclasses.replace(drafter, model=model, trimmed=kind), trim


@dataclasses.dataclass(frozen=True)
class TrimmedHeads:
    """Heads that say some ids alone. ``config``: theirs from then on; ``ids_N``: the ids, as the target numbers them;
    ``rows_N``: their rows in the LM head."""

    config: HeadsConfig
    ids_N: np.ndarray
    rows_N: np.ndarray

    def params(
        self, own: Mapping[str, jax.Array], target: Mapping[str, jax.Array], model: ModelDef
    ) -> dict[str, jax.Array]:
        """From the heads' own parameters and those of the target ``model``. Heads without an LM head of their own get
        the rows of the target's."""
        names = [name for name in own if name.endswith("lm_head")]
        heads = {name: own[name] for name in names} or {"lm_head": target[_head_name(model)]}
        trimmed = dict(own) | {name: _rows(head_VD, self.rows_N, model) for name, head_VD in heads.items()}
        trimmed["target_ids"] = jax.device_put(jnp.asarray(self.ids_N, jnp.int32), model.sharding.replicated)
        return trimmed


def trim_heads(
    config: HeadsConfig, own_ids: Sequence[int] | None, folder: Path, size: int, valid_vocab: int
) -> TrimmedHeads | None:
    """Heads that say the ``size`` most frequent ids alone; None where those are all that they say anyway.

    ``own_ids``: the ids of a head that has a vocabulary of its own (EAGLE-3); the most frequent ones of those stay.
    Raises UserError for a size or a list that is wrong.
    """
    known = config.vocab_size if own_ids is None else len(own_ids)
    limit = min(known, valid_vocab)
    if size > limit:
        raise UserError(f"draft_vocab_size: expected at most {limit}, the ids that heads and target know, got {size}")
    listed = read_list(folder / DRAFT_VOCAB, size, valid_vocab, own_ids)
    if size == known:
        return None
    first = range(size) if own_ids is None else sorted(own_ids)[:size]
    ids = sorted(first if listed is None else listed)
    row_of = {token_id: row for row, token_id in enumerate(own_ids or ())}
    rows = ids if own_ids is None else [row_of[token_id] for token_id in ids]
    return TrimmedHeads(dataclasses.replace(config, draft_vocab_size=size), np.array(ids), np.array(rows))


def _head_name(model: ModelDef) -> str:
    return "embed" if model.config.tie_word_embeddings else "lm_head"


def _rows(head_VD: jax.Array, ids_N: np.ndarray, model: ModelDef) -> jax.Array:
    """Rows of an LM head, sharded as it is."""
    out = model.sharding.named(param_specs(model.config)["embed"].axes, (len(ids_N), head_VD.shape[1]))
    return jax.jit(lambda head_VD: head_VD[ids_N], out_shardings=out)(head_VD)


def wanted_size(size: int | None, folder: Path, known: int) -> int | None:
    """How many ids a draft of ``known`` ids may say: as the option has it, or as many as its folder lists. None: all.

    So a draft that learnt some words alone says these, without being told. Raises UserError as reading the list does.
    """
    if size is not None:
        return size
    listed = len(read_list(folder / DRAFT_VOCAB, None, known) or ())
    return listed if DRAFT_VOCAB_MIN <= listed < known else None


def read_list(path: Path, size: int | None, known: int, own_ids: Sequence[int] | None = None) -> list[int] | None:
    """The first ``size`` ids of the list (None: all of it), or None without a file.

    Raises UserError naming what is wrong with it. ``own_ids``: others are passed over.
    """
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
    if own_ids is not None:
        own = set(own_ids)
        ids = [token_id for token_id in ids if token_id in own]
    if size is not None and len(ids) < size:
        raise UserError(f"{path}: expected at least draft_vocab_size={size} ids, got {len(ids)}")
    return ids[:size]
