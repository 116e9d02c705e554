"""Gumbel noise that belongs to a token, and how drafters draw.

argmax(log p + g) with independent standard Gumbel noise g is a draw from p, and the k best are k draws without
replacement, in draw order. Noise keyed by (seed, absolute position, token id) makes target and drafter draw the same
token wherever they can (coupling, Daliri et al. 2024).

One seed keys three kinds of random numbers, told apart by the top bits of the second counter word: 00 the uniforms of a
round (length, offset), 10 the coupled noise (position, id), 01 the noise of draws without replacement (length, node,
id). No two of them ever encrypt the same counter. A counter's two words serve two ids, LANES apart, so that noise over
a vocabulary costs half the encryptions.
"""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import NODES_MAX, sizes
from jaxspec.speculate.sampling import CANDIDATES, blocks, draw, largest, round_uniforms, threefry

COUPLED: Final = 1 << 31
DISTINCT: Final = 1 << 30
# Bits of a token id in a counter; those of a node follow.
ID_BITS: Final = 24
# Ids v and v + LANES share a counter; both words of one counter fill a block of 2 LANES ids.
LANES: Final = 128


def gumbel(seed_B2: jax.Array, position_BT: jax.Array, ids_BTC: jax.Array) -> jax.Array:
    """Standard Gumbel noise f32 [B, T, C] of tokens at absolute positions, from -2.9 to 23, never infinite.

    A value depends on (seed, position, id) alone, whatever it is computed beside.
    """
    sizes(seed_B2=seed_B2, position_BT=position_BT, ids_BTC=ids_BTC)
    return _gumbel(seed_B2, position_BT, jnp.uint32(COUPLED) | ids_BTC.astype(jnp.uint32))


def coupled_choice(p_BTV: jax.Array, seed_B2: jax.Array, position_BT: jax.Array) -> jax.Array:
    """argmax(log p + g) at absolute positions, i32, the lower id of exact ties. A token with p = 0 never wins.

    Found as argmin(e / p), where e = exp(-g) is standard exponential: one logarithm per token instead of three. Noise
    is computed for the tokens of positive weight alone where every law has few, else for the whole vocabulary; the
    result is the same.
    """
    sizes(p_BTV=p_BTV, seed_B2=seed_B2, position_BT=position_BT)
    vocab = p_BTV.shape[-1]

    def first_of(p_BTC: jax.Array, ids_BTC: jax.Array) -> jax.Array:
        times_BTC = _exponential(seed_B2, position_BT, jnp.uint32(COUPLED) | ids_BTC.astype(jnp.uint32)) / p_BTC
        soonest_BT1 = jnp.min(times_BTC, axis=-1, keepdims=True)
        return jnp.min(jnp.where((times_BTC == soonest_BT1) & (p_BTC > 0), ids_BTC, vocab), axis=-1)

    def few() -> jax.Array:
        return first_of(*largest(p_BTV, CANDIDATES))

    def whole() -> jax.Array:
        # The minimum of every block is one fused pass over the vocabulary; only the best block is looked into.
        p_BTRC = blocks(p_BTV, 0, 2 * LANES)
        soonest_BTR = _soonest_by_block(p_BTRC, seed_B2, position_BT)
        block_BT1 = jnp.argmin(soonest_BTR, axis=-1, keepdims=True).astype(jnp.int32)
        p_BTC = jnp.take_along_axis(p_BTRC, block_BT1[..., None], axis=2)[:, :, 0]
        return first_of(p_BTC, block_BT1 * 2 * LANES + lax.iota(jnp.int32, 2 * LANES)[None, None, :])

    if vocab <= CANDIDATES:
        return first_of(p_BTV, jnp.broadcast_to(lax.iota(jnp.int32, vocab)[None, None, :], p_BTV.shape))
    return lax.cond(_all_few(p_BTV), few, whole)


def _soonest_by_block(p_BTRC: jax.Array, seed_B2: jax.Array, position_BT: jax.Array) -> jax.Array:
    """min(e / p) of every block of 2 LANES ids, from one encryption per two ids."""
    R = p_BTRC.shape[2]
    block_R, lane_C = (jnp.arange(n, dtype=jnp.uint32) for n in (R, LANES))
    second_RC = jnp.uint32(COUPLED) | (block_R[:, None] * (2 * LANES) + lane_C[None, :])
    first_BT11 = position_BT.astype(jnp.uint32)[:, :, None, None]
    key = (seed_B2[:, 0, None, None, None], seed_B2[:, 1, None, None, None])
    low, high = threefry(key, first_BT11, second_RC[None, None])
    low_BTRC, high_BTRC = p_BTRC[..., :LANES], p_BTRC[..., LANES:]
    return jnp.min(jnp.minimum(_standard(low) / low_BTRC, _standard(high) / high_BTRC), axis=-1)


@dataclasses.dataclass(frozen=True)
class Draws:
    """How a drafter draws in the round that starts at committed lengths ``length_B``.

    Draws are coupled with the target's own choices, or they are independent of all else. ``offset`` is 0 for a token
    at depth 1, which lies at absolute position ``length_B``.
    """

    seed_B2: jax.Array
    length_B: jax.Array
    coupled: bool

    def pick(self, q_BV: jax.Array, offset: jax.Array | int) -> jax.Array:
        """One token per row from q, i32. Uncoupled, the offset's uniform of the round inverts the cumulative sum."""
        if self.coupled:
            return coupled_choice(q_BV[:, None], self.seed_B2, (self.length_B + offset)[:, None])[:, 0]
        return draw(q_BV, lax.dynamic_index_in_dim(self.uniforms(), offset, axis=1, keepdims=False))

    def uniforms(self, drafts: int = NODES_MAX - 1) -> jax.Array:
        """f32 [B, drafts], the round's own numbers for drawing, one per draft, independent of each other."""
        return round_uniforms(self.seed_B2, self.length_B, drafts).draft_BJ

    def pick_distinct(
        self, q_BV: jax.Array, count: int, offset: jax.Array | int, node: jax.Array | int = 0
    ) -> jax.Array:
        """``count`` tokens per row from q without replacement, i32 in draw order: the Gumbel top-k.

        Args:
            node: the parent in the tree (a scalar or one per row). Uncoupled draws below different nodes must be
                independent, and depth alone does not tell cousins apart; coupled ones at one depth share their noise.

        Where q says fewer than ``count`` tokens, the rest are ids with q = 0, which no law lets stand.
        """
        rows, vocab = q_BV.shape
        if vocab > 1 << ID_BITS or count >= NODES_MAX:
            raise ValueError(f"expected at most {1 << ID_BITS} ids and {NODES_MAX - 1} draws, got {vocab} and {count}")
        node_B = jnp.broadcast_to(jnp.asarray(node, jnp.uint32), (rows,))

        def noise(ids_BC: jax.Array) -> jax.Array:
            if self.coupled:
                return gumbel(self.seed_B2, (self.length_B + offset)[:, None], ids_BC[:, None])[:, 0]
            place_B = jnp.uint32(DISTINCT) | (node_B << ID_BITS)
            counter_BC = place_B[:, None] | ids_BC.astype(jnp.uint32)
            return _gumbel(self.seed_B2, self.length_B[:, None], counter_BC[:, None])[:, 0]

        def few(width: int) -> jax.Array:
            top_BC, ids_BC = largest(q_BV, width)
            _, places_BC = lax.top_k(jnp.log(top_BC) + noise(ids_BC), count)
            return jnp.take_along_axis(ids_BC, places_BC, axis=1)

        def whole() -> jax.Array:
            ids_BV = jnp.broadcast_to(lax.iota(jnp.int32, vocab)[None, :], q_BV.shape)
            return largest(jnp.log(q_BV) + noise(ids_BV), count)[1]

        if vocab <= CANDIDATES:
            return whole()
        return lax.cond(_all_few(q_BV), lambda: few(CANDIDATES), whole)


def _all_few(law_XV: jax.Array) -> jax.Array:
    return jnp.all(jnp.sum(law_XV > 0, axis=-1) <= CANDIDATES)


def _gumbel(seed_B2: jax.Array, first_BT: jax.Array, second_BTC: jax.Array) -> jax.Array:
    return -jnp.log(_exponential(seed_B2, first_BT, second_BTC))


def _exponential(seed_B2: jax.Array, first_BT: jax.Array, second_BTC: jax.Array) -> jax.Array:
    """Standard exponential noise; the lowest bits of the second counter word are the token's id."""
    key = (seed_B2[:, 0, None, None], seed_B2[:, 1, None, None])
    low, high = threefry(key, first_BT.astype(jnp.uint32)[:, :, None], second_BTC & jnp.uint32(~LANES & 0xFFFFFFFF))
    return _standard(jnp.where(second_BTC & LANES > 0, high, low))


def _standard(bits: jax.Array) -> jax.Array:
    # 32 bits, kept where they matter: small values of -log(1 - v), which are those that win. The largest v is the last
    # float below 1.
    v = jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32), jnp.float32(1 - 2**-24))
    return -jnp.log1p(-v)
