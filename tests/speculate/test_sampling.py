"""Filters against sorting, draws against their weights, random numbers against what they may depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from jaxspec.shapes import GAMMA_MAX, NODES_MAX
from jaxspec.speculate import sampling
from jaxspec.speculate.sampling import RowSampling, draw, final_law, first_argmax, mask_logits, round_uniforms
from tests.speculate import oracle

LAW = jax.jit(final_law)
DRAW = jax.jit(draw)
UNIFORMS = jax.jit(round_uniforms, static_argnums=2)
LARGEST_U = 1 - 2**-24

FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 64},
    {"top_k": 65},
    {"top_k": 90},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 80, "top_p": 0.95},
    {"top_k": 3, "min_p": 0.3},
    {"top_p": 0.97, "min_p": 0.01},
    {"top_k": 70, "top_p": 0.99, "min_p": 0.001},
]


def packed(rows):
    """RowSampling of a list of option dicts."""
    columns = (("temperature", 1.0, jnp.float32), ("top_k", 0, jnp.int32), ("top_p", 1.0, jnp.float32))
    columns += (("min_p", 0.0, jnp.float32),)
    return RowSampling(*(jnp.asarray([row.get(name, off) for row in rows], kind) for name, off, kind in columns))


def assert_law(law_V, logits_V, options, edge):
    """``law_V`` is the sorted reference, up to ids within ``edge`` of the top-p or min-p boundary."""
    options = {"temperature": 1.0} | {k: v if k == "top_k" else float(np.float32(v)) for k, v in options.items()}
    law_V = np.asarray(law_V, np.float64)

    def kept(sign):
        # Wider for sign 1: a share of 1 or more is no filter.
        top_p, min_p = options.get("top_p", 1), options.get("min_p", 0)
        bounds = {"top_p": top_p + sign * edge if top_p < 1 else 1, "min_p": min(1, min_p * (1 - sign * edge))}
        return oracle.sorted_law(logits_V, **(options | bounds)) > 0

    # Weights below the smallest float are zero; they need not be kept, nor lost.
    plain_V = oracle.sorted_law(logits_V, options["temperature"])
    assert (law_V > 0)[kept(-1) & (plain_V > 1e-30)].all()
    assert not (law_V > 0)[~kept(1)].any()
    expected_V = np.where(law_V > 0, plain_V, 0)
    np.testing.assert_allclose(law_V, expected_V / expected_V.sum(), rtol=200 * edge, atol=1e-30)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["random", "ties", "peaked", "far from zero", "masked"])
@pytest.mark.parametrize("vocab", [7, 11, 101, 1031])  # the last has more than one candidate per group
def test_filters_equal_the_sorted_reference(vocab, kind, dtype):
    """All filters in one batch, at three temperatures: ties, top_k beyond V, tiny top_p, candidates too few."""
    rng = np.random.default_rng(21)
    options = [o | {"temperature": t} for t in (0.3, 1.0, 2.5) for o in FILTERS]
    logits_BJV = rng.normal(size=(len(options), 3, vocab)) * 2
    if kind == "ties":
        logits_BJV = np.round(logits_BJV)
    if kind == "peaked":
        logits_BJV[:, :, 5] += 30
    if kind == "far from zero":
        logits_BJV += 300
    if kind == "masked":
        logits_BJV[rng.random(logits_BJV.shape) < 0.5] = -np.inf
        logits_BJV[:, :, 3] = 1.0
    logits_BJV = logits_BJV.astype(dtype)
    with jax.enable_x64(dtype == "float64"):
        law_BJV = LAW(jnp.asarray(logits_BJV), packed(options))
        assert law_BJV.dtype == dtype
        law_BJV = np.asarray(law_BJV)
    for b, row in enumerate(options):
        for j in range(3):
            assert_law(law_BJV[b, j], logits_BJV[b, j], row, 1e-6 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_filters_at_the_vocabulary_of_a_real_model(spread):
    """V = 49,152, where a nucleus reaches thousands of ids beyond the candidates."""
    rng = np.random.default_rng(22)
    options = [
        {"top_p": 0.9},
        {"top_k": 500, "top_p": 0.95},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
        {"top_k": 3000},
    ]
    logits_BJV = (rng.normal(size=(len(options), 2, 49_152)) * spread).astype(np.float32)
    law_BJV = np.asarray(LAW(jnp.asarray(logits_BJV), packed(options)))
    for b, row in enumerate(options):
        for j in range(2):
            assert_law(law_BJV[b, j], logits_BJV[b, j], row, 1e-5)


def test_filters_keep_every_tie():
    """A cut inside a group of equals keeps the group, also where it is wider than the candidates."""
    logits_V = np.zeros(200, np.float32)
    logits_V[[3, 5, 7]] = 2.0
    options = [{"top_k": 2}, {"top_k": 4}, {"top_k": 100}, {"top_p": 0.01}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5}]
    law_BJV = LAW(jnp.tile(jnp.asarray(logits_V), (len(options), 1, 1)), packed(options))
    assert (law_BJV > 0).sum(-1)[:, 0].tolist() == [3, 200, 200, 3, 200, 3]


def test_a_cut_among_logits_of_both_signs_and_zeros():
    """The order of floats passes through zero: bisection must find floors on both sides of it."""
    logits_V = np.concatenate([np.linspace(1, 1.1, 64), [0.0, -0.0, 1e-40, -1e-40], -np.linspace(0.01, 5, 100)])
    options = [{"top_k": k} for k in (65, 66, 67, 68, 69, 70, 150)]
    law_BJV = np.asarray(LAW(jnp.tile(jnp.asarray(logits_V, jnp.float32), (len(options), 1, 1)), packed(options)))
    kept_B = (law_BJV[:, 0] > 0).sum(-1)
    # Denormals are zeros on this hardware, so the four in the middle are ties.
    assert kept_B.tolist() == [68, 68, 68, 68, 69, 70, 150]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_greedy_rows_are_exactly_one_hot_beside_sampled_rows(dtype):
    """First index on exact ties; filters that a greedy row carries change nothing."""
    rng = np.random.default_rng(23)
    logits_BJV = rng.integers(0, 3, size=(6, 3, 13)).astype(dtype)
    options = [{"temperature": t} | filters for filters in FILTERS[7:9] + FILTERS[-1:] for t in (0.0, 1.0)]
    with jax.enable_x64(dtype == "float64"):
        mixed_BJV = np.asarray(LAW(jnp.asarray(logits_BJV), packed(options)))
        alone_BJV = np.asarray(LAW(jnp.asarray(logits_BJV[::2]), packed(options[::2])))
    expected_BJV = np.eye(13)[np.argmax(logits_BJV[::2], -1)]
    np.testing.assert_array_equal(mixed_BJV[::2], expected_BJV)
    np.testing.assert_array_equal(alone_BJV, expected_BJV)
    assert (mixed_BJV[1::2].max(-1) < 1).all()


def test_the_law_is_continuous_as_the_temperature_falls():
    """A21: no NaN at any temperature from 1e-6 up, and the limit is greedy."""
    logits_BJV = jax.random.normal(jax.random.key(24), (1, 5, 101)) * 5
    temperatures = [0.0, 1e-6, 1e-4, 0.01, 0.1, 1.0, 1e4, 1e30]
    options = [{"temperature": t} for t in temperatures]
    tight = [{"temperature": t, "top_k": 70, "top_p": 0.9, "min_p": 0.01} for t in temperatures]
    for rows in (options, tight):
        law_BJV = np.asarray(LAW(jnp.tile(logits_BJV, (len(rows), 1, 1)), packed(rows)))
        assert np.isfinite(law_BJV).all()
        np.testing.assert_allclose(law_BJV.sum(-1), 1, rtol=1e-5)
        np.testing.assert_array_equal(law_BJV[1], law_BJV[0])
        from_greedy_B = [oracle.distance(law_V, law_BJV[0]) for law_V in law_BJV]
        assert from_greedy_B == sorted(from_greedy_B)
        assert from_greedy_B[3] < 1e-2 * law_BJV.shape[1]


def test_extreme_logits_make_no_nan():
    logits_BJV = jnp.asarray([[[3e38, -3e38, 0.0, -jnp.inf, 1.0]]])
    rows = [{"temperature": t, "top_k": 3, "top_p": p} for t in (1e-6, 1.0, 1e30) for p in (1.0, 0.5)]
    law_BJV = LAW(jnp.tile(logits_BJV, (len(rows), 1, 1)), packed(rows))
    assert jnp.isfinite(law_BJV).all()
    assert (law_BJV[:, 0, 0] > 0).all()
    assert (law_BJV[:, 0, 3] == 0).all()


def test_row_parameters_follow_the_row():
    """A18: any slot, any neighbours, padding rows with neutral values."""
    rng = np.random.default_rng(25)
    options = [o | {"temperature": 0.7} for o in FILTERS] + [{"temperature": 0.0, "top_k": 4}]
    logits_BJV = (rng.normal(size=(len(options), 2, 101)) * 2).astype(np.float32)
    together_BJV = np.asarray(LAW(jnp.asarray(logits_BJV), packed(options)))
    order = rng.permutation(len(options))
    shuffled_BJV = LAW(jnp.asarray(logits_BJV[order]), packed([options[i] for i in order]))
    np.testing.assert_array_equal(shuffled_BJV, together_BJV[order])
    for b, row in enumerate(options):
        slot = b % 4
        padded = [dict(zip(("temperature", "top_k", "top_p", "min_p"), sampling.NEUTRAL, strict=True))] * 4
        padded[slot] = row
        noise_BJV = rng.normal(size=(4, 2, 101)).astype(np.float32)
        noise_BJV[slot] = logits_BJV[b]
        alone_JV = LAW(jnp.asarray(noise_BJV), packed(padded))[slot]
        np.testing.assert_allclose(alone_JV, together_BJV[b], rtol=1e-6)
        np.testing.assert_array_equal(alone_JV > 0, together_BJV[b] > 0)


@pytest.mark.parametrize("vocab", [5, 255, 256, 257, 1000])
def test_first_argmax(vocab):
    rng = np.random.default_rng(26)
    logits_BJV = rng.integers(-9, 3, size=(5, 7, vocab)).astype(np.float32)
    logits_BJV[0, 0] = -7.0
    logits_BJV[0, 1, -1] = 5.0
    argmax_BJ = first_argmax(jnp.asarray(logits_BJV))
    assert argmax_BJ.dtype == jnp.int32
    np.testing.assert_array_equal(argmax_BJ, np.argmax(logits_BJV, -1))


def test_mask_logits_names_exactly_the_banned():
    vocab, valid = 11, 9
    logits_BJV = np.random.default_rng(27).normal(size=(3, 2, vocab)).astype(np.float32)
    stops_BE = np.array([[1, 4, -1], [-1, -1, -1], [0, 8, 8]])
    ban_BJ = np.array([[True, False], [True, True], [False, True]])
    expected_BJV = logits_BJV.copy()
    expected_BJV[:, :, valid:] = -np.inf
    expected_BJV[0, 0, [1, 4]] = -np.inf
    expected_BJV[2, 1, [0, 8]] = -np.inf
    masked = jax.jit(mask_logits, static_argnums=3)
    np.testing.assert_array_equal(masked(logits_BJV, stops_BE, ban_BJ, valid), expected_BJV)
    unbanned_BJV = masked(logits_BJV, stops_BE, np.zeros_like(ban_BJ), vocab)
    np.testing.assert_array_equal(unbanned_BJV, logits_BJV)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("vocab", [3, 7, 256, 300, 1000])
def test_a_dense_grid_of_uniforms_draws_the_law(vocab, dtype):
    rng = np.random.default_rng(28)
    weights_V = rng.exponential(size=vocab) ** 3 * (rng.random(vocab) < 0.7) * 17
    weights_V[vocab // 2] += 1
    points = 2**13
    with jax.enable_x64(dtype == "float64"):
        u_N = (jnp.arange(points) + 0.5).astype(dtype) / points
        weights_NV = jnp.broadcast_to(jnp.asarray(weights_V, dtype)[None, :], (points, vocab))
        ids_N = np.asarray(DRAW(weights_NV, u_N))
    assert ids_N.dtype == np.int32
    counts_V = np.bincount(ids_N, minlength=vocab)
    # A grid meets an interval of length p between p * points - 1 and p * points + 1 times.
    assert np.abs(counts_V - points * weights_V / weights_V.sum()).max() <= 1.02
    assert counts_V[weights_V == 0].sum() == 0
    assert (np.diff(ids_N) >= 0).all()


def test_no_draw_is_an_id_of_weight_zero():
    """Zeros before, between and behind; scales from denormal to huge; uniforms at both ends and on the boundaries."""
    vocab, rng = 2049, np.random.default_rng(29)
    u_U = np.concatenate([[0, 2**-24, 0.5, LARGEST_U, 1 - 2**-23, 1 - 2**-20], rng.random(50)]).astype(np.float32)
    for scale in (1e-39, 1e-30, 1.0, 1e30):
        rows = np.zeros((8, vocab), np.float32)
        rows[0, 0] = rows[1, -1] = rows[2, 255] = rows[3, 256] = 1
        rows[4, 3::97] = rng.random(22)
        rows[5, :700] = 10.0 ** rng.uniform(-12, 0, 700)
        rows[6] = np.where(rng.random(vocab) < 0.02, 10.0 ** rng.uniform(-7, 0, vocab), 0)
        rows[7, [1, 2048]] = [1, 1e-7]
        # Denormals are zeros on this hardware: only rows that keep a mass can be drawn from.
        rows = (
            (rows * np.float32(scale)).astype(np.float32) if scale != 1e-39 else rows + np.float32(scale) * (rows == 0)
        )
        upto = np.cumsum(rows, -1, dtype=np.float64)
        boundaries = (upto / upto[:, -1:])[:, rng.integers(vocab, size=30)].astype(np.float32)
        for row_V, edges in zip(rows, boundaries, strict=True):
            u = np.minimum(np.concatenate([u_U, edges, np.nextafter(edges, np.float32(0))]), np.float32(LARGEST_U))
            ids = DRAW(jnp.broadcast_to(jnp.asarray(row_V)[None, :], (u.size, vocab)), jnp.asarray(u))
            assert (row_V[np.asarray(ids)] > 1e-38).all()


def test_draws_of_a_large_vocabulary_follow_their_weights():
    """Chi-square over 40,000 seeds, the ids of a peaked law over V = 4,099 in 41 groups of 100."""
    vocab, rows = 4099, 40_000
    p_V = np.asarray(LAW(4 * jax.random.normal(jax.random.key(30), (1, 1, vocab)), packed([{}]))[0, 0])
    counts_V = np.zeros(vocab)
    for part in np.split(np.arange(rows), 8):
        u = UNIFORMS(_seeds(part), jnp.full(part.size, 3), 0)
        weights_BV = jnp.broadcast_to(jnp.asarray(p_V)[None, :], (part.size, vocab))
        counts_V += np.bincount(DRAW(weights_BV, u.last_B), minlength=vocab)
    groups = np.arange(vocab) // 100
    oracle.assert_follows(np.bincount(groups, counts_V), np.bincount(groups, p_V) / p_V.sum(dtype=np.float64))


def test_uniforms_depend_on_seed_and_length_alone():
    """A15, A16, A17: not on the slot, the batch, the neighbours or the bucket, bit for bit."""
    rng = np.random.default_rng(31)
    seeds_B2 = rng.integers(2**32, size=(13, 2), dtype=np.uint32)
    lengths_B = rng.integers(1, 9000, size=13).astype(np.int32)
    together = UNIFORMS(seeds_B2, lengths_B, NODES_MAX - 1)
    assert together.draft_BJ.shape == together.coin_BJ.shape == (13, NODES_MAX - 1)
    order = rng.permutation(13)
    shuffled = UNIFORMS(seeds_B2[order], lengths_B[order], NODES_MAX - 1)
    for all_rows, moved in zip(together, shuffled, strict=True):
        np.testing.assert_array_equal(np.asarray(all_rows)[order], moved)
    for drafts in (0, 1, 2, GAMMA_MAX, 26):
        for b in (0, 7):
            alone = UNIFORMS(seeds_B2[b : b + 1], lengths_B[b : b + 1], drafts)
            np.testing.assert_array_equal(together.draft_BJ[b, :drafts], alone.draft_BJ[0])
            np.testing.assert_array_equal(together.coin_BJ[b, :drafts], alone.coin_BJ[0])
            np.testing.assert_array_equal(together.last_B[b], alone.last_B[0])
    with pytest.raises(ValueError, match=r"expected 0\.\.63, got 64"):
        round_uniforms(seeds_B2, lengths_B, NODES_MAX)


def test_uniforms_of_a_seed_do_not_change_between_releases():
    """A seeded request is repeatable across upgrades: these values are a promise."""
    u = round_uniforms(jnp.asarray([[7, 2**32 - 1]], jnp.uint32), jnp.asarray([41]), 8)
    words = [
        int(x * 2**24) for x in (u.draft_BJ[0, 0], u.draft_BJ[0, 7], u.coin_BJ[0, 0], u.coin_BJ[0, 7], u.last_B[0])
    ]
    assert words == [845247, 3555883, 6464257, 8709733, 15819757]


def test_random_words_are_those_of_jax():
    """Threefry as JAX has it, whose known-answer tests are those of its authors."""
    rng = np.random.default_rng(33)
    key_2, counters = (jnp.asarray(rng.integers(2**32, size=n, dtype=np.uint32)) for n in (2, 1000))
    ours = jax.jit(sampling.threefry)((key_2[0], key_2[1]), counters[:500], counters[500:])
    np.testing.assert_array_equal(np.concatenate(ours), threefry_2x32(key_2, counters))


def test_seeds_lengths_streams_and_offsets_all_differ():
    """Both seed words count, and no (length, offset) meets another: 24-bit values of 40 rounds, all distinct."""
    seeds = [(0, 0), (0, 1), (1, 0), (1, 1), (2**32 - 1, 0), (0, 2**32 - 1), (5, 9), (9, 5)]
    seeds_B2 = np.repeat(np.array(seeds, np.uint32), 5, 0)
    lengths_B = np.tile(np.array([1, 2, 3, 4, 4096], np.int32), len(seeds))
    u = UNIFORMS(seeds_B2, lengths_B, GAMMA_MAX)
    values = np.concatenate([np.ravel(x) for x in u])
    # 680 values: a chance of 1.4 % that 24-bit values collide by accident, once and for all.
    assert np.unique(values).size == values.size == 40 * (2 * GAMMA_MAX + 1)


def test_uniforms_are_uniform_and_below_one():
    """Chi-square of each stream over 20,000 rounds of one request, and of neighbouring values in pairs."""
    rounds = 20_000
    u = UNIFORMS(jnp.tile(jnp.asarray([[3, 4]], jnp.uint32), (rounds, 1)), jnp.arange(rounds), GAMMA_MAX)
    columns_BC = np.concatenate([u.draft_BJ, u.coin_BJ, np.asarray(u.last_B)[:, None]], 1)
    assert columns_BC.dtype == np.float32
    assert columns_BC.min() >= 0
    assert columns_BC.max() < 1
    cells_BC = (columns_BC * 16).astype(int)
    for c in range(cells_BC.shape[1]):
        oracle.assert_follows(np.bincount(cells_BC[:, c], minlength=16), np.full(16, 1 / 16))
    pairs = {"offset": (cells_BC[:, :7], cells_BC[:, 1:8]), "stream": (cells_BC[:, :8], cells_BC[:, 8:16])}
    pairs |= {"round": (cells_BC[:-1], cells_BC[1:]), "last": (cells_BC[:, [0, 8]], cells_BC[:, [16, 16]])}
    for left, right in pairs.values():
        oracle.assert_follows(np.bincount((left * 16 + right).ravel(), minlength=256), np.full(256, 1 / 256))


def _seeds(numbers):
    return jnp.stack([jnp.full(numbers.size, 99, jnp.uint32), jnp.asarray(numbers, jnp.uint32)], 1)
