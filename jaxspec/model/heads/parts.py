"""What the modules of all heads share."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class TargetTables(NamedTuple):
    """The target's own ends, for heads that have none of their own: ``Llama.embed`` and ``Llama.logits``."""

    embed: Callable[[jax.Array], jax.Array]  # tokens_BT -> float32 [B, T, D]
    logits: Callable[[jax.Array], jax.Array]  # hidden_BTD -> float32 [B, T, V]


class Vector(nnx.Module):
    """A bias."""

    def __init__(self, size: int, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((size,), dtype))

    def add(self, x_BTD: jax.Array) -> jax.Array:
        """The float32 sum."""
        return x_BTD + self.weight[...].astype(jnp.float32)[None, None, :]


class TargetIds(nnx.Module):
    """The target's id of every draft id (what the field keeps as offsets and calls d2t)."""

    def __init__(self, size: int) -> None:
        self.weight = nnx.Param(jnp.arange(size, dtype=jnp.int32))

    def __call__(self, draft_ids: jax.Array) -> jax.Array:
        return self.weight[...][draft_ids]

    def spread(self, values: jax.Array, vocab: int, fill: float) -> jax.Array:
        """[.., draft ids] as [.., V] over the target's ids, ``fill`` at those that are not drafted."""
        whole = jnp.full((*values.shape[:-1], vocab), fill, values.dtype)
        return whole.at[..., self.weight[...]].set(values)
