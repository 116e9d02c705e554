"""Common to all kinds of training: a frozen target looks at packed rows, and a loss is summed chunk by chunk."""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxspec.model.cache import empty_cache
from jaxspec.model.heads.parts import TargetTables
from jaxspec.model.llama import Llama, ModelDef, Output
from train_heads.losses import Summed
from train_heads.packing import Rows, packed_tree

Params = dict[str, jax.Array]

# Tokens of a row whose logits over the vocabulary exist at once.
CHUNK: Final = 128
# Ranks at which a guess counts as a hit, for trees with so many children.
RANKS: Final = (1, 4)


class Measured(NamedTuple):
    """What a batch gave: the sum that is minimised, and sums that are only shown, by name."""

    loss: Summed
    shown: dict[str, Summed]


class Objective(Protocol):
    """One kind of training. Parameters are float32 masters by name; what is not trained is ``fixed``."""

    def init(self, target: Mapping[str, jax.Array], seed: int) -> tuple[Params, Params]:
        """(trained, fixed) parameters at the start, in their shardings."""
        ...

    def __call__(self, trained: Params, fixed: Params, target: Params, rows: Rows, key: jax.Array) -> Measured:
        """The sums over ``rows``; differentiable in ``trained``. ``key``: of this batch alone."""
        ...


def look(
    target: ModelDef, params: Mapping[str, jax.Array], rows: Rows, taps: tuple[int, ...] = ()
) -> tuple[Llama, Output]:
    """The target, and its pass over packed rows: serving's own, on a cache of the rows' length. No gradient enters."""
    model = target.merge(jax.lax.stop_gradient(dict(params)))
    return model, jax.lax.stop_gradient(run(model, target, rows, taps))


def run(model: Llama, definition: ModelDef, rows: Rows, taps: tuple[int, ...] = ()) -> Output:
    """A model's pass over packed rows."""
    count, T = rows.tokens_BT.shape
    cache = empty_cache(definition.config, definition.sharding, count, T, definition.cache_dtype)
    tokens_BT, positions_BT, segments_BT = (jnp.asarray(array) for array in rows[:3])
    return model(tokens_BT, positions_BT, cache, packed_tree(segments_BT), taps)


def tables_of(model: Llama) -> TargetTables:
    """The target's two ends, for heads that have none of their own."""
    return TargetTables(model.embed, model.logits)


def cast(params: Mapping[str, jax.Array], dtype: jnp.dtype) -> Params:
    """What the computation sees of float32 masters; ids stay ids."""
    return {
        name: value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value
        for name, value in params.items()
    }


def over_chunks(function: Callable[..., Any], *arrays_BT: jax.Array) -> Any:
    """The sum of ``function`` over chunks of tokens of arrays [B, T, ..]; it returns a tree of sums.

    Logits over the vocabulary exist for one chunk at a time, in the backward pass, too.
    """
    T = arrays_BT[0].shape[1]
    size = min(CHUNK, T)
    if T % size:
        raise ValueError(f"expected rows of a multiple of {size} tokens, got {T}")

    def split(array: jax.Array) -> jax.Array:
        parts = array.reshape(array.shape[0], T // size, size, *array.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    parts = tuple(split(array) for array in arrays_BT)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: function(*(part[0] for part in parts)))
    )

    def add(total: Any, chunk: tuple[jax.Array, ...]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(*chunk)), None

    return jax.lax.scan(jax.checkpoint(add), zeros, parts)[0]
