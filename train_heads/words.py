"""The draft vocabulary: the target ids that a head learns to say, and the rows of the target's LM head for them.

Most of a small head's work is the product with its LM head. What is rare in the answers is rarely right as a draft, so
heads may learn the most frequent ids alone (FR-Spec, Zhao et al. 2025); the rest teaches nothing and counts as a miss.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import UserError
from jaxspec.model.layers import product
from jaxspec.model.llama import ModelDef


@dataclasses.dataclass(frozen=True)
class Words:
    """N target ids, ascending; ``ids`` is empty where all V are meant."""

    vocab: int  # V
    ids: tuple[int, ...] = ()

    @classmethod
    def most_frequent(cls, counts_V: np.ndarray, size: int | None, always: Iterable[int] = ()) -> "Words":
        """The ``size`` most frequent ids, ties by id, with those of ``always`` (the end of a text) among them."""
        vocab = len(counts_V)
        if size is None or size == vocab:
            return cls(vocab)
        if not 1 <= size <= vocab:
            raise UserError(f"draft_vocab_size: expected 1 to {vocab}, the target's vocabulary, got {size}")
        counts_V = counts_V.astype(np.int64)
        counts_V[list(always)] = np.iinfo(np.int64).max
        return cls(vocab, tuple(sorted(np.argsort(-counts_V, kind="stable")[:size].tolist())))

    @property
    def size(self) -> int:
        """N."""
        return len(self.ids) or self.vocab

    @property
    def whole(self) -> bool:
        return not self.ids

    def place(self, ids: jax.Array) -> jax.Array:
        """Which word each target id is; N for one that is none."""
        if self.whole:
            return ids
        place_V = np.full((self.vocab,), self.size, np.int32)
        place_V[list(self.ids)] = np.arange(self.size)
        return jnp.asarray(place_V)[ids]

    def target_ids(self, words: jax.Array) -> jax.Array:
        """The inverse of :meth:`place`, for words."""
        return words if self.whole else jnp.asarray(self.ids, jnp.int32)[words]

    def rows(self, table_VD: jax.Array) -> jax.Array:
        """[N, D] of a table over the target's ids."""
        return table_VD if self.whole else table_VD[jnp.asarray(self.ids, jnp.int32)]


@dataclasses.dataclass(frozen=True)
class WordLogits:
    """The target's LM head, for the words alone: float32 [B, T, N] of hidden states [B, T, D]."""

    model: ModelDef
    rows_ND: jax.Array

    @classmethod
    def of(cls, model: ModelDef, params: Mapping[str, jax.Array], words: Words) -> "WordLogits":
        name = "embed" if model.config.tie_word_embeddings else "lm_head"
        return cls(model, words.rows(jax.lax.stop_gradient(params[name])))

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        return self.model.sharding.constrain(product(hidden_BTD, self.rows_ND, 1), "batch", "tokens", "vocab")
