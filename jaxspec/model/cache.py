"""The key/value cache: an explicit pytree, donated to a pass and returned by it.

Slot s of a row holds the token at position s, so the causal mask is all the masking there is: a rollback lowers a
length, slots past it are stale, never attended, and overwritten later. docs/decisions/cache-layout.md has the reasons.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.model.config import LlamaConfig
from jaxspec.sharding import Sharding

# [B, K, S, H]: batch and head lead, so that attention is a plain batched product without a transposed copy.
CACHE_AXES = ("batch", "kv_heads", "slots", "head_dim")


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [B, K, S, H]."""

    k: jax.Array
    v: jax.Array


class KVCache(NamedTuple):
    """One LayerCache per layer, and how many leading slots of each row are valid."""

    layers: tuple[LayerCache, ...]
    length_B: jax.Array  # int32

    @property
    def window(self) -> int:
        """S, slots per row."""
        return self.layers[0].k.shape[2]


def cache_shape(config: LlamaConfig, rows: int, slots: int) -> tuple[int, int, int, int]:
    """[B, K, S, H] of one key or value array."""
    return rows, config.num_kv_heads, slots, config.head_dim


def empty_cache(config: LlamaConfig, sharding: Sharding, rows: int, slots: int, dtype: jnp.dtype) -> KVCache:
    """A zeroed cache (inside a jit). Zeros matter: masked slots still meet a zero weight, and 0 x NaN is NaN."""
    shape = cache_shape(config, rows, slots)

    def zeros() -> jax.Array:
        return sharding.constrain(jnp.zeros(shape, dtype), *CACHE_AXES)

    layers = tuple(LayerCache(zeros(), zeros()) for _ in range(config.num_layers))
    return KVCache(layers, jnp.zeros((rows,), jnp.int32))


class Tree(NamedTuple):
    """How the tokens of one pass hang together when they are not a chain.

    The U nodes of the tree have the slots from ``base_B`` on, whatever their positions (nodes at one depth share a
    position). Token t of the pass is node ``first`` + t. It sees the slots below ``base_B``, its ancestors and itself.
    """

    base_B: jax.Array  # int32
    first: jax.Array  # int32 scalar; more than 0 where earlier passes fed the upper levels
    ancestors_BTU: jax.Array  # bool, [b, t, u]: node u is token t itself or above it
    recent_BTW: jax.Array | None = None  # int32, see :meth:`by_position`

    def by_position(self, recent: int) -> "Tree":
        """The same tree, whose tokens add up their last ``recent`` positions, their own last, in the order of position.

        The slots of a path's nodes follow from where they hang; sums over slots would round differently than when
        slot = position. ``recent_BTW``: the slots of those positions, negative ones before the row's start. For a pass
        over all nodes, none deeper than ``recent`` - 1.
        """
        depth_BT = jnp.sum(self.ancestors_BTU, axis=2, dtype=jnp.int32) - 1
        below_BTW = depth_BT[:, :, None] + jnp.arange(1 - recent, 1, dtype=jnp.int32)[None, None, :]
        at_BTUW = self.ancestors_BTU[:, :, :, None] & (depth_BT[:, None, :, None] == below_BTW[:, :, None, :])
        node_BTW = jnp.argmax(at_BTUW, axis=2).astype(jnp.int32)
        return self._replace(recent_BTW=self.base_B[:, None, None] + jnp.where(below_BTW < 0, below_BTW, node_BTW))

    def slots(self, positions_BT: jax.Array, window: int) -> jax.Array:
        """Where the tokens go; those at positions outside the row are dropped, as in a chain."""
        T = positions_BT.shape[1]
        slots_BT = self.base_B[:, None] + self.first + jnp.arange(T, dtype=jnp.int32)[None, :]
        return jnp.where((positions_BT >= 0) & (positions_BT < window), slots_BT, window)

    def visible(self, window: int) -> jax.Array:
        """bool [B, T, S]."""
        U = self.ancestors_BTU.shape[2]
        node_BS = jnp.arange(window, dtype=jnp.int32)[None, :] - self.base_B[:, None]
        inside_BS = (node_BS >= 0) & (node_BS < U)
        index_B1S = jnp.clip(node_BS, 0, U - 1)[:, None, :]
        above_BTS = jnp.take_along_axis(self.ancestors_BTU, index_B1S, axis=2)
        return (node_BS < 0)[:, None, :] | (inside_BS[:, None, :] & above_BTS)


def compact(cache: KVCache, base_B: jax.Array, path_BD: jax.Array, n_accepted_B: jax.Array) -> KVCache:
    """Moves keys and values of an accepted path to the slots after the root: then slot = position again.

    ``path_BD``: nodes of a tree at ``base_B``, by depth; past ``n_accepted_B`` nothing moves.
    """
    slots = cache.window
    offsets_D = jnp.arange(1, path_BD.shape[1] + 1, dtype=jnp.int32)
    to_BD = jnp.where(offsets_D[None, :] <= n_accepted_B[:, None], base_B[:, None] + offsets_D[None, :], slots)
    from_BD = jnp.clip(base_B[:, None] + path_BD, 0, slots - 1)

    def move(array_BKSH: jax.Array) -> jax.Array:
        moved_BDKH = jax.vmap(lambda row_KSH, from_D: row_KSH[:, from_D].swapaxes(0, 1))(array_BKSH, from_BD)
        return write(array_BKSH, moved_BDKH, to_BD)

    return cache._replace(layers=tuple(LayerCache(move(layer.k), move(layer.v)) for layer in cache.layers))


def write(cache_BKSH: jax.Array, new_BTKH: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Puts new_BTKH at slots positions_BT of each row. A position outside [0, S) is dropped.

    The rows are a batch dimension of the scatter (vmap), not an iota of indices: over a data axis an indexed row
    dimension costs two all-gathers per write.
    """
    slots = cache_BKSH.shape[2]
    # A negative index would wrap around to the row's end; one past the end is dropped.
    positions_BT = jnp.where(positions_BT < 0, slots, positions_BT)
    if positions_BT.size == 1:
        # XLA's CPU backend turns a scatter of one index into a slice update that copies the cache: add a second,
        # dropped one.
        positions_BT = jnp.concatenate([positions_BT, jnp.full_like(positions_BT, slots)], axis=1)
        new_BTKH = jnp.concatenate([new_BTKH, new_BTKH], axis=1)

    def write_row(row_KSH: jax.Array, new_TKH: jax.Array, positions_T: jax.Array) -> jax.Array:
        return row_KSH.at[:, positions_T].set(new_TKH.swapaxes(0, 1), mode="drop")

    return jax.vmap(write_row)(cache_BKSH, new_BTKH.astype(cache_BKSH.dtype), positions_BT)
