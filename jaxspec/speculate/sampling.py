"""From logits to final laws, and from laws to tokens.

A final law is what a token is drawn from: logits masked by vocabulary and stop bans, then temperature, top-k, top-p
and min-p in that order, renormalised. Target and draft go through the same functions, so that q is exactly the law
its token was drawn from. Sorting the vocabulary costs more than the target pass, so filters are thresholds: read from
the ``CANDIDATES`` largest logits where these reach far enough, else found exactly by bisection over the floats.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import NODES_MAX, sizes

# The largest logits that are looked at first; one partial sort serves top-k and top-p.
CANDIDATES: Final = 64
# Logits that share one maximum in the search for them.
GROUP: Final = 16
# Width of the inner level of a draw and of an argmax.
BLOCK: Final = 256


class RowSampling(NamedTuple):
    """Sampling parameters, one value per row. Empty slots carry NEUTRAL."""

    temperature_B: jax.Array  # f32, 0 is greedy
    top_k_B: jax.Array  # i32, 0 is off
    top_p_B: jax.Array  # f32, 1 is off
    min_p_B: jax.Array  # f32, 0 is off


# What an empty slot carries.
NEUTRAL: Final = (1, 0, 1, 0)


class Uniforms(NamedTuple):
    """The random numbers of one round, in [0, 1). Streams and offsets are independent of each other."""

    draft_BJ: jax.Array  # draws x_1 .. x_J from q
    coin_BJ: jax.Array  # judges x_1 .. x_J
    last_B: jax.Array  # draws the correction or the bonus


def mask_logits(logits_BJV: jax.Array, stop_ids_BE: jax.Array, ban_BJ: jax.Array, valid_vocab: int) -> jax.Array:
    """Logits with -inf at ids from ``valid_vocab`` on and, where ``ban_BJ``, at the row's stop ids (-1 pads them)."""
    size = sizes(logits_BJV=logits_BJV, stop_ids_BE=stop_ids_BE, ban_BJ=ban_BJ)
    if valid_vocab < size["V"]:
        padding_V = jnp.arange(size["V"]) >= valid_vocab
        logits_BJV = jnp.where(padding_V[None, None, :], -jnp.inf, logits_BJV)

    def banned(logits_BJV: jax.Array) -> jax.Array:
        # An index past the end drops the write; a negative one would wrap.
        ids_BJE = jnp.where(ban_BJ[:, :, None] & (stop_ids_BE >= 0)[:, None, :], stop_ids_BE[:, None, :], size["V"])
        set_row = jax.vmap(jax.vmap(lambda row_V, ids_E: row_V.at[ids_E].set(-jnp.inf, mode="drop")))
        return set_row(logits_BJV, ids_BJE)

    return lax.cond(jnp.any(ban_BJ), banned, lambda logits_BJV: logits_BJV, logits_BJV)


def final_law(logits_BJV: jax.Array, rows: RowSampling) -> jax.Array:
    """The final laws p_BJV of every position: temperature, top-k, top-p, min-p, renormalised.

    Every filter keeps ties. A temperature of zero gives the one-hot of the argmax (the first of exact ties). Every row
    needs a finite largest logit.
    """
    sizes(logits_BJV=logits_BJV, temperature_B=rows.temperature_B)
    greedy_B = rows.temperature_B <= 0
    return lax.cond(jnp.all(greedy_B), lambda: _one_hot_of_argmax(logits_BJV), lambda: _mixed_law(logits_BJV, rows))


def first_argmax(logits_BJV: jax.Array) -> jax.Array:
    """Index of the largest logit, i32, the first of exact ties.

    Blocks first, then the ids of one block: XLA on CPU vectorises a maximum, but not an argmax over the vocabulary.
    """
    logits_BJRC = blocks(logits_BJV, -jnp.inf)
    block_BJ = jnp.argmax(jnp.max(logits_BJRC, axis=-1), axis=-1).astype(jnp.int32)
    inner_BJC = jnp.take_along_axis(logits_BJRC, block_BJ[:, :, None, None], axis=2)[:, :, 0]
    return block_BJ * BLOCK + jnp.argmax(inner_BJC, axis=-1).astype(jnp.int32)


def blocks(x: jax.Array, fill: float, width: int = BLOCK) -> jax.Array:
    """[.., V] as [.., R, width], the last block filled up."""
    short = -x.shape[-1] % width
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)], constant_values=fill).reshape(*x.shape[:-1], -1, width)


def _one_hot_of_argmax(logits_BJV: jax.Array) -> jax.Array:
    return jax.nn.one_hot(first_argmax(logits_BJV), logits_BJV.shape[-1], dtype=logits_BJV.dtype)


def _mixed_law(logits_BJV: jax.Array, rows: RowSampling) -> jax.Array:
    dtype = logits_BJV.dtype
    greedy_B = rows.temperature_B <= 0
    # What greedy rows carry is replaced at the end; neutral values cost no search for it.
    rows = RowSampling(*(jnp.where(greedy_B, value, own_B) for value, own_B in zip(NEUTRAL, rows, strict=True)))
    peak_BJ1 = jnp.max(logits_BJV, axis=-1, keepdims=True)
    weights_BJV = _weights(logits_BJV, peak_BJ1, rows)

    cuts_B = (rows.top_k_B > 0) | (rows.top_p_B < 1)
    none_BJ = jnp.full(logits_BJV.shape[:-1], -jnp.inf, dtype)
    floors = lax.cond(
        jnp.any(cuts_B),
        lambda: _floors(logits_BJV, weights_BJV, peak_BJ1, rows),
        lambda: _Floors(none_BJ, none_BJ),
    )
    # The largest weight is exactly 1, so min-p needs no other number.
    weight_BJ = jnp.maximum(floors.weight_BJ, rows.min_p_B.astype(dtype)[:, None])
    keep_BJV = (logits_BJV >= floors.logit_BJ[:, :, None]) & (weights_BJV >= weight_BJ[:, :, None])
    weights_BJV = jnp.where(keep_BJV, weights_BJV, 0)
    p_BJV = weights_BJV / jnp.sum(weights_BJV, axis=-1, keepdims=True)
    return lax.cond(
        jnp.any(greedy_B),
        lambda: jnp.where(greedy_B[:, None, None], _one_hot_of_argmax(logits_BJV), p_BJV),
        lambda: p_BJV,
    )


def _weights(logits_BJX: jax.Array, peak_BJ1: jax.Array, rows: RowSampling) -> jax.Array:
    return jnp.exp((logits_BJX - peak_BJ1) / rows.temperature_B.astype(logits_BJX.dtype)[:, None, None])


class _Floors(NamedTuple):
    """What the logit and the weight of a token must reach for it to stay."""

    logit_BJ: jax.Array
    weight_BJ: jax.Array


def _floors(logits_BJV: jax.Array, weights_BJV: jax.Array, peak_BJ1: jax.Array, rows: RowSampling) -> _Floors:
    vocab = logits_BJV.shape[-1]
    dtype = logits_BJV.dtype
    top_BJC, _ = largest(logits_BJV, min(CANDIDATES, vocab))
    shape_BJ, width = top_BJC.shape[:-1], top_BJC.shape[-1]
    none_BJ = jnp.full(shape_BJ, -jnp.inf, dtype)

    # top-k: the k-th largest logit.
    uses_k_B = (rows.top_k_B > 0) & (rows.top_k_B < vocab)
    far_BJ = jnp.broadcast_to((uses_k_B & (rows.top_k_B > width))[:, None], shape_BJ)
    kth_BJ = jnp.broadcast_to(jnp.clip(rows.top_k_B - 1, 0, width - 1)[:, None], shape_BJ)
    near_BJ = jnp.where(uses_k_B[:, None], _pick(top_BJC, kth_BJ), -jnp.inf)

    def far_k() -> jax.Array:
        count_BJ = jnp.broadcast_to(rows.top_k_B.astype(dtype)[:, None], shape_BJ)
        floor_BJ = _largest_floor(logits_BJV, jnp.ones_like, count_BJ, none_BJ, top_BJC[..., -1], far_BJ)
        return jnp.where(far_BJ, floor_BJ, near_BJ)

    kth_logit_BJ = lax.cond(jnp.any(far_BJ), far_k, lambda: near_BJ)

    # top-p: the largest floor that leaves the wanted share of what top-k left.
    uses_p_B1 = (rows.top_p_B < 1)[:, None]
    kept_BJV = jnp.where(logits_BJV >= kth_logit_BJ[:, :, None], weights_BJV, 0)
    mass_BJ = jnp.sum(kept_BJV, axis=-1)
    wanted_BJ = rows.top_p_B.astype(dtype)[:, None] * mass_BJ
    top_weights_BJC = _weights(top_BJC, peak_BJ1, rows)
    reached_BJC = jnp.cumsum(top_weights_BJC, axis=-1) >= wanted_BJ[:, :, None]
    inside_BJ = uses_p_B1 & jnp.any(reached_BJC, axis=-1)
    logit_BJ = jnp.where(inside_BJ, _pick(top_BJC, jnp.argmax(reached_BJC, axis=-1)), -jnp.inf)
    outside_BJ = uses_p_B1 & ~inside_BJ & (top_BJC[..., -1] >= kth_logit_BJ)

    def far_p() -> jax.Array:
        # Weights below this floor add up to at most half of what may be dropped, were they V in number.
        lowest_BJ = (1 - rows.top_p_B.astype(dtype))[:, None] * mass_BJ / (2 * vocab)
        floor_BJ = _largest_floor(kept_BJV, lambda x: x, wanted_BJ, lowest_BJ, top_weights_BJC[..., -1], outside_BJ)
        return jnp.where(outside_BJ, floor_BJ, -jnp.inf)

    return _Floors(jnp.maximum(kth_logit_BJ, logit_BJ), lax.cond(jnp.any(outside_BJ), far_p, lambda: none_BJ))


def _pick(x_BJC: jax.Array, index_BJ: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BJC, index_BJ[:, :, None], axis=-1)[..., 0]


def largest(x_BJV: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """The ``width`` largest values in descending order, and their ids (i32; any order among exact ties).

    They lie in the ``width`` groups with the largest maxima, so two small partial sorts do. At rank two, because XLA on
    CPU has a partial sort for that rank alone: at rank three it sorts everything, which takes 200 times longer.
    """
    vocab = x_BJV.shape[-1]
    shape = (*x_BJV.shape[:-1], width)
    x_RV = x_BJV.reshape(-1, vocab)
    if vocab <= GROUP * width:
        values_RC, ids_RC = lax.top_k(x_RV, width)
        return values_RC.reshape(shape), ids_RC.reshape(shape)
    x_RGC = jnp.pad(x_RV, ((0, 0), (0, -vocab % GROUP)), constant_values=-jnp.inf).reshape(x_RV.shape[0], GROUP, -1)
    _, best_RC = lax.top_k(jnp.max(x_RGC, axis=1), width)
    members_RX = jnp.take_along_axis(x_RGC, best_RC[:, None, :], axis=2).reshape(x_RV.shape[0], -1)
    values_RC, places_RC = lax.top_k(members_RX, width)
    # Id v lies in row v // groups of its group v % groups; its place is (row, group's rank).
    ids_RC = places_RC // width * x_RGC.shape[-1] + jnp.take_along_axis(best_RC, places_RC % width, axis=1)
    return values_RC.reshape(shape), ids_RC.reshape(shape)


def _largest_floor(
    x_BJV: jax.Array,
    weigh: Callable[[jax.Array], jax.Array],
    wanted_BJ: jax.Array,
    low_BJ: jax.Array,
    high_BJ: jax.Array,
    search_BJ: jax.Array,
) -> jax.Array:
    """A float f in [low, high] such that sum(weigh(x) where x >= f) >= wanted, and no larger f keeps fewer x.

    Meaningful where ``search_BJ``. Bisection over the floats themselves, so the answer is exact: it ends when the range
    holds one float, or sooner, when what it holds weighs less than two.
    """

    class Range(NamedTuple):
        below_BJ: jax.Array  # keeps enough
        above_BJ: jax.Array  # keeps too little
        mass_below_BJ: jax.Array
        mass_above_BJ: jax.Array

    def is_open(r: Range) -> jax.Array:
        one_BJ = weigh(_float_of(r.below_BJ, x_BJV.dtype))
        return (r.above_BJ - r.below_BJ > 1) & (r.mass_below_BJ - r.mass_above_BJ > 1.5 * one_BJ)

    def halve(r: Range) -> Range:
        middle_BJ = r.below_BJ + (r.above_BJ - r.below_BJ) // 2
        kept_BJV = jnp.where(x_BJV >= _float_of(middle_BJ, x_BJV.dtype)[:, :, None], weigh(x_BJV), 0)
        mass_BJ = jnp.sum(kept_BJV, axis=-1)
        lower = Range(r.below_BJ, middle_BJ, r.mass_below_BJ, mass_BJ)
        upper = Range(middle_BJ, r.above_BJ, mass_BJ, r.mass_above_BJ)
        enough_BJ = mass_BJ >= wanted_BJ
        return Range(*(jnp.where(enough_BJ, high, low) for high, low in zip(upper, lower, strict=True)))

    below_BJ = _order_of(low_BJ)
    above_BJ = jnp.where(search_BJ, jnp.maximum(_order_of(high_BJ), below_BJ) + 1, below_BJ)
    start = Range(below_BJ, above_BJ, jnp.full_like(wanted_BJ, jnp.inf), jnp.zeros_like(wanted_BJ))
    found = lax.while_loop(lambda r: jnp.any(is_open(r)), halve, start)
    return _float_of(found.below_BJ, x_BJV.dtype)


def _order_of(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the floats."""
    unsigned = jnp.dtype(f"uint{x.dtype.itemsize * 8}")
    sign = jnp.asarray(1 << (x.dtype.itemsize * 8 - 1), unsigned)
    bits = lax.bitcast_convert_type(x, unsigned)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _float_of(order: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Inverse of ``_order_of``."""
    sign = jnp.asarray(1 << (order.dtype.itemsize * 8 - 1), order.dtype)
    return lax.bitcast_convert_type(jnp.where(order >= sign, order ^ sign, ~order), dtype)


def draw(weights_BV: jax.Array, u_B: jax.Array) -> jax.Array:
    """Ids i32 drawn with chances proportional to ``weights_BV`` by inverting the cumulative sum at ``u_B`` in [0, 1).

    Two levels, blocks and then ids, so that no scan is long. Never an id of weight zero: rounding may place u * mass
    past a cumulative sum, and sums of prefixes need not grow in step with the weights, so only positive weights count.
    With float32 uniforms (24 bits) a chance is exact to about 1e-7 of the mass. Every row needs a positive mass.
    """
    weights_BRC = blocks(weights_BV, 0)
    mass_BR = jnp.sum(weights_BRC, axis=-1)
    upto_BR = jnp.cumsum(mass_BR, axis=-1)
    point_B = u_B.astype(weights_BV.dtype) * upto_BR[:, -1]
    block_B = first_past(mass_BR, upto_BR, point_B)
    before_BR = upto_BR - mass_BR
    rest_B = point_B - jnp.take_along_axis(before_BR, block_B[:, None], axis=-1)[:, 0]
    inner_BC = jax.vmap(lambda weights_RC, block: weights_RC[block])(weights_BRC, block_B)
    return block_B * BLOCK + first_past(inner_BC, jnp.cumsum(inner_BC, axis=-1), rest_B)


def first_past(weights_XC: jax.Array, upto_XC: jax.Array, point_X: jax.Array) -> jax.Array:
    """The first positive weight whose cumulative sum exceeds the point, else the last positive weight, else 0.

    Over the last axis, whatever the axes before it.
    """
    width = weights_XC.shape[-1]
    ids_XC = lax.broadcasted_iota(jnp.int32, weights_XC.shape, weights_XC.ndim - 1)
    positive_XC = weights_XC > 0
    first_X = jnp.min(jnp.where(positive_XC & (upto_XC > point_X[..., None]), ids_XC, width), axis=-1)
    last_X = jnp.max(jnp.where(positive_XC, ids_XC, 0), axis=-1)
    return jnp.minimum(first_X, last_X)


def round_uniforms(seed_B2: jax.Array, length_B: jax.Array, drafts: int) -> Uniforms:
    """The random numbers of the round that starts at committed length ``length_B``, for both words of the seed.

    A value depends on (seed, length, offset, stream) alone: not on the slot, the batch, the step or the bucket, nor on
    ``drafts`` (static), which says how many offsets are wanted. Two rounds of a request never start at the same length.
    """
    sizes(seed_B2=seed_B2, length_B=length_B)
    if not 0 <= drafts < NODES_MAX:
        raise ValueError(f"drafts: expected 0..{NODES_MAX - 1}, got {drafts}")
    # One block per offset, whose words are the two streams; the offset that no draft has draws the last token.
    offsets_J = jnp.append(jnp.arange(drafts, dtype=jnp.uint32), jnp.uint32(NODES_MAX))
    key = (seed_B2[:, :1], seed_B2[:, 1:])
    first_BJ, second_BJ = threefry(key, length_B.astype(jnp.uint32)[:, None], offsets_J[None, :])
    return Uniforms(unit(first_BJ[:, :-1]), unit(second_BJ[:, :-1]), unit(first_BJ[:, -1]))


def unit(bits: jax.Array) -> jax.Array:
    """Random words as f32 in [0, 1): 24 bits fit exactly, and the largest value stays below 1."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def threefry(key: tuple[jax.Array, jax.Array], first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds in counter mode (Salmon et al. 2011), element by element; all uint32.

    The same numbers as JAX's, but as one chain of elementwise operations, which XLA on CPU fuses with what uses them:
    5 times as fast over a vocabulary.
    """
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    first, second = first + words[0], second + words[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            first = first + second
            second = first ^ ((second << rotation) | (second >> (32 - rotation)))
        first = first + words[(group + 1) % 3]
        second = second + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return first, second
