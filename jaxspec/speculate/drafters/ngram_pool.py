"""N-grams of a row that were seen before, and the tree of those that begin with its pending token.

A pool is an array of n-grams, newest first, each once. It forgets the oldest ones.
"""

from typing import Final

import jax
import jax.numpy as jnp

from jaxspec.speculate.growth import NOWHERE
from jaxspec.speculate.topology import Topology

EMPTY: Final = -1  # all tokens of a place that no n-gram fills; such places come last


def empty_pool(rows: int, places: int, size: int) -> jax.Array:
    """int32 [B, P, N]."""
    return jnp.full((rows, places, size), EMPTY, jnp.int32)


def insert(pool_BPN: jax.Array, new_BXN: jax.Array, valid_B: jax.Array) -> jax.Array:
    """The pool with the n-grams of ``new_BXN`` in front, the first one newest; rows that are not valid keep theirs."""
    places = pool_BPN.shape[1]
    new_BXN = jnp.where(valid_B[:, None, None], new_BXN, EMPTY)
    all_BYN = jnp.concatenate([new_BXN, pool_BPN], axis=1)
    same_BXY = jnp.all(new_BXN[:, :, None] == all_BYN[:, None, :], axis=-1)
    earlier_XY = jnp.arange(new_BXN.shape[1])[:, None] < jnp.arange(all_BYN.shape[1])[None, :]
    repeated_BY = jnp.any(same_BXY & earlier_XY[None], axis=1)
    index_BP, found_BP = first(~repeated_BY & (all_BYN[:, :, 0] != EMPTY), places)
    return jnp.where(found_BP[:, :, None], jnp.take_along_axis(all_BYN, index_BP[:, :, None], axis=1), EMPTY)


def continuations(
    pool_BPN: jax.Array, tokens_BS: jax.Array, length_B: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Up to ``count`` different runs of N - 1 tokens that followed the last of ``length_B`` tokens before.

    Returns int32 [B, G, N - 1] and bool [B, G], whether there are so many. They come from the pool and from the row
    itself, newest first, in turn.
    """
    slots, size = tokens_BS.shape[1], pool_BPN.shape[2]
    last_B1 = jnp.take_along_axis(tokens_BS, jnp.maximum(length_B - 1, 0)[:, None], axis=1)
    place_BG, pooled_BG = first(pool_BPN[:, :, 0] == last_B1, count)
    pooled_BGD = jnp.take_along_axis(pool_BPN, place_BG[:, :, None], axis=1)[:, :, 1:]

    slots_S = jnp.arange(slots, dtype=jnp.int32)
    whole_BS = slots_S[None, :] <= (length_B - size)[:, None]
    back_BG, copied_BG = first(jnp.flip((tokens_BS == last_B1) & whole_BS, axis=1), count)
    after_BGD = (slots - back_BG)[:, :, None] + jnp.arange(size - 1, dtype=jnp.int32)[None, None, :]
    after_BGD = jnp.clip(after_BGD, 0, slots - 1)
    copied_BGD = jax.vmap(lambda row_S, at_GD: row_S[at_GD])(tokens_BS, after_BGD)

    def in_turn(pooled: jax.Array, copied: jax.Array) -> jax.Array:
        return jnp.stack([pooled, copied], axis=2).reshape(pooled.shape[0], 2 * count, *pooled.shape[2:])

    runs_BCD, found_BC = in_turn(pooled_BGD, copied_BGD), in_turn(pooled_BG, copied_BG)
    same_BCC = jnp.all(runs_BCD[:, :, None] == runs_BCD[:, None, :], axis=-1) & found_BC[:, :, None]
    earlier_CC = jnp.arange(2 * count)[:, None] < jnp.arange(2 * count)[None, :]
    repeated_BC = jnp.any(same_BCC & earlier_CC[None], axis=1)
    index_BG, found_BG = first(found_BC & ~repeated_BC, count)
    return jnp.take_along_axis(runs_BCD, index_BG[:, :, None], axis=1), found_BG


def merge(runs_BGD: jax.Array, found_BG: jax.Array) -> tuple[jax.Array, Topology]:
    """tokens_BJ and the shape of the tree of some runs, J = G D: each run goes on where it leaves the earlier ones.

    Siblings differ, as the laws need of undrawn drafts. Draft g D + d is token d of run g; the place of a token that an
    earlier run has, or that is not found, lies NOWHERE, below the root.
    """
    rows, G, D = runs_BGD.shape
    equal_BGGD = runs_BGD[:, :, None] == runs_BGD[:, None, :]
    shared_BGGD = jnp.cumprod(equal_BGGD.astype(jnp.int32), axis=-1) > 0
    shared_BGGD = shared_BGGD & found_BG[:, None, :, None]
    # The first run with the same beginning: at the latest the run itself.
    owner_BGD = jnp.argmax(shared_BGGD, axis=2).astype(jnp.int32)
    own_BGD = (owner_BGD == jnp.arange(G, dtype=jnp.int32)[None, :, None]) & found_BG[:, :, None]
    depth_D = jnp.arange(1, D + 1, dtype=jnp.int32)
    node_BGD = owner_BGD * D + depth_D[None, None, :]
    parent_BGD = jnp.pad(node_BGD[:, :, :-1], ((0, 0), (0, 0), (1, 0)))
    parent_BJ = jnp.where(own_BGD, parent_BGD, 0).reshape(rows, G * D)
    depth_BJ = jnp.where(own_BGD, depth_D[None, None, :], NOWHERE).reshape(rows, G * D)
    return runs_BGD.reshape(rows, G * D), Topology(parent_BJ, depth_BJ)


def first(is_BX: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Where the first ``count`` true values of a row are, int32 [B, C], and whether there are so many, bool [B, C]."""
    rank_BX = jnp.cumsum(is_BX, axis=1, dtype=jnp.int32) - 1
    # An index past the end drops the write.
    rank_BX = jnp.where(is_BX, rank_BX, count)
    index_X = jnp.arange(is_BX.shape[1], dtype=jnp.int32)
    none_C = jnp.zeros((count,), jnp.int32)
    index_BC = jax.vmap(lambda rank_X: none_C.at[rank_X].set(index_X, mode="drop"))(rank_BX)
    return index_BC, jnp.arange(count)[None, :] < jnp.sum(is_BX, axis=1)[:, None]
