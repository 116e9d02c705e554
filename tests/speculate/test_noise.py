"""Noise that belongs to a token: its law, what it may depend on, and what is chosen and drawn with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.speculate import noise, sampling
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.sampling import CANDIDATES, round_uniforms
from tests.speculate import oracle

GUMBEL, CHOOSE = jax.jit(noise.gumbel), jax.jit(noise.coupled_choice)
SEED_12 = jnp.asarray([[11, 12]], jnp.uint32)


def laws(rng, rows, nodes, vocab, survivors):
    """[rows, nodes, vocab] random laws of so many ids, at random places."""
    p_BTV = rng.dirichlet(np.ones(vocab), (rows, nodes)).astype(np.float32)
    rank_BTV = np.argsort(np.argsort(rng.random(p_BTV.shape), -1), -1)
    p_BTV = np.where(rank_BTV < survivors, p_BTV, 0)
    return p_BTV / p_BTV.sum(-1, keepdims=True)


def places(rng, rows, nodes):
    seeds_B2 = jnp.asarray(rng.integers(2**32, size=(rows, 2), dtype=np.uint32))
    return seeds_B2, jnp.asarray(rng.integers(1, 100_000, size=(rows, nodes)), jnp.int32)


def everywhere(rows, nodes, vocab):
    return jnp.broadcast_to(jnp.arange(vocab)[None, None, :], (rows, nodes, vocab))


def test_noise_is_standard_gumbel():
    """Chi-square over 1,024 equally likely cells of 2 million values, and of neighbours by id and by position."""
    g_BTV = np.asarray(GUMBEL(SEED_12, jnp.arange(16)[None, :], everywhere(1, 16, 131_072)))
    assert g_BTV.dtype == np.float32
    u_TV = np.exp(-np.exp(-g_BTV[0].astype(np.float64)))
    oracle.assert_follows(np.bincount((u_TV * 1024).astype(int).ravel(), minlength=1024), np.full(1024, 1 / 1024))
    cells_TV = (u_TV * 16).astype(int)
    for left, right in ((cells_TV[:, :-1], cells_TV[:, 1:]), (cells_TV[:-1], cells_TV[1:])):
        oracle.assert_follows(np.bincount((left * 16 + right).ravel(), minlength=256), np.full(256, 1 / 256))


def test_the_tail_of_the_noise_is_fine_grained():
    """What decides a draw among many light tokens: the 2,000 largest of 2 million values, all distinct and in law.

    24-bit uniforms would leave the largest hundreds on a lattice of a few values.
    """
    count, top = 2**21, 2000
    g_V = np.asarray(GUMBEL(SEED_12 + 1, jnp.arange(16)[None, :], everywhere(1, 16, 131_072))).ravel()
    largest = np.sort(g_V)[-top:].astype(np.float64)
    assert np.unique(largest).size > 0.99 * top
    # -log(1 - v) is exponential, so beyond its own largest value the tail is uniform.
    exponential = np.exp(-largest)
    assert stats.kstest(exponential[1:] / exponential[0], "uniform").pvalue > oracle.FALSE_ALARM
    assert exponential[0] * count == pytest.approx(top, rel=6 / np.sqrt(top))


def test_noise_is_finite_at_every_word():
    """The smallest and the largest words that threefry can give, and those that round to 1."""
    words = np.array([0, 1, 255, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 2, 2**32 - 1], np.uint32)

    def fixed(key, first, second):
        return jnp.asarray(words)[None, None, :], second

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "threefry", fixed)
        g = np.asarray(noise.gumbel(SEED_12, jnp.zeros((1, 1), jnp.int32), everywhere(1, 1, words.size)))[0, 0]
    assert np.isfinite(g).all()
    assert (np.diff(g) <= 0).all()
    assert g.max() < 23
    assert g.min() > -2.9


def test_noise_depends_on_seed_position_and_id_alone():
    """A15: one value bit for bit in any shape, order, batch, set of ids, compiled or not."""
    rng = np.random.default_rng(41)
    rows, nodes, vocab = 3, 5, 1031
    seeds_B2, position_BT = places(rng, rows, nodes)
    whole_BTV = np.asarray(GUMBEL(seeds_B2, position_BT, everywhere(rows, nodes, vocab)))
    for width in (1, 7, 64, 257):
        ids_BTC = rng.integers(vocab, size=(rows, nodes, width))
        some_BTC = GUMBEL(seeds_B2, position_BT, jnp.asarray(ids_BTC))
        np.testing.assert_array_equal(some_BTC, np.take_along_axis(whole_BTV, ids_BTC, -1))
    for b in range(rows):
        alone = GUMBEL(seeds_B2[b : b + 1], position_BT[b : b + 1, ::-1], everywhere(1, nodes, vocab))
        np.testing.assert_array_equal(alone[0, ::-1], whole_BTV[b])
    step_by_step = noise.gumbel(seeds_B2[:1], position_BT[:1, :1], everywhere(1, 1, 11))
    np.testing.assert_array_equal(step_by_step[0, 0], whole_BTV[0, 0, :11])


def test_noise_of_a_seed_does_not_change_between_releases():
    """A seeded request is repeatable across upgrades: these values are a promise."""
    g = GUMBEL(jnp.asarray([[7, 2**32 - 1]], jnp.uint32), jnp.asarray([[41]]), jnp.asarray([[[0, 1, 128_255]]]))
    np.testing.assert_allclose(g[0, 0], [-0.88855016, -0.34677017, 1.014658451], rtol=1e-6)


def test_no_two_kinds_of_random_numbers_share_a_counter():
    """Uniforms of a round, coupled noise and noise of draws without replacement: same numbers, other streams."""
    seen = []

    def spy(key, first, second):
        seen.append(np.unique(np.broadcast_arrays(np.asarray(first), np.asarray(second))[1]))
        return sampling_threefry(key, first, second)

    sampling_threefry = sampling.threefry
    vocab = 61  # few enough for one path without branches
    q_BV = jnp.full((1, vocab), 1 / vocab)
    length_B = jnp.asarray([5], jnp.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "threefry", spy)
        patch.setattr(sampling, "threefry", spy)
        round_uniforms(SEED_12, length_B, 63)
        Draws(SEED_12, length_B, coupled=False).pick(q_BV, 62)
        uniforms, seen = np.concatenate(seen), []
        noise.gumbel(SEED_12, length_B[:, None], jnp.arange(2**24 - vocab, 2**24)[None, None, :])
        noise.gumbel(SEED_12, length_B[:, None], everywhere(1, 1, vocab))
        coupled, seen = np.concatenate(seen), []
        for node in (0, 63):
            Draws(SEED_12, length_B, coupled=False).pick_distinct(q_BV, 2, 0, node)
        distinct = np.concatenate(seen)
    assert coupled.size == 2 * vocab
    assert distinct.size == 2 * vocab
    for one, other in ((uniforms, coupled), (uniforms, distinct), (coupled, distinct)):
        assert np.intersect1d(one, other).size == 0


@pytest.mark.parametrize("survivors", [1, 5, CANDIDATES, CANDIDATES + 1, 1500])
def test_the_choice_is_the_argmax_of_log_p_plus_g(survivors):
    """At vocabulary sizes on both sides of the candidates; tokens that p excludes never win."""
    rng = np.random.default_rng(42)
    for vocab in (11, 101, 1501):
        p_BTV = laws(rng, 4, 3, vocab, survivors)
        seeds_B2, position_BT = places(rng, 4, 3)
        g_BTV = np.asarray(GUMBEL(seeds_B2, position_BT, everywhere(4, 3, vocab)))
        choice_BT = np.asarray(CHOOSE(jnp.asarray(p_BTV), seeds_B2, position_BT))
        with np.errstate(divide="ignore"):
            scores_BTV = np.log(p_BTV.astype(np.float64)) + g_BTV
        np.testing.assert_array_equal(choice_BT, scores_BTV.argmax(-1))
        assert choice_BT.dtype == np.int32
        assert (np.take_along_axis(p_BTV, choice_BT[..., None], -1) > 0).all()


def test_few_candidates_and_the_whole_vocabulary_choose_alike():
    """One wide row makes the whole batch look everywhere; nothing changes for the narrow and the greedy ones."""
    rng = np.random.default_rng(43)
    vocab = 1501
    narrow_BTV = laws(rng, 7, 2, vocab, CANDIDATES)
    narrow_BTV[3] = np.eye(vocab, dtype=np.float32)[[5, 1500]]
    wide_BTV = np.concatenate([narrow_BTV, laws(rng, 1, 2, vocab, vocab)])
    seeds_B2, position_BT = places(rng, 8, 2)
    alone = CHOOSE(jnp.asarray(narrow_BTV), seeds_B2[:7], position_BT[:7])
    np.testing.assert_array_equal(CHOOSE(jnp.asarray(wide_BTV), seeds_B2, position_BT)[:7], alone)
    assert alone[3].tolist() == [5, 1500]


def test_the_lower_id_wins_an_exact_tie():
    """With noise of one value everywhere, among equal weights: from candidates and from the whole vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "_standard", lambda bits: jnp.ones(bits.shape))
        for survivors in (40, 400):
            p_V = np.zeros(1501, np.float32)
            p_V[np.random.default_rng(44).permutation(1501)[:survivors]] = 1 / survivors
            choice = noise.coupled_choice(jnp.asarray(p_V)[None, None], SEED_12, jnp.ones((1, 1), jnp.int32))
            assert choice[0, 0] == np.flatnonzero(p_V)[0]


@pytest.mark.parametrize("vocab", [7, 101])
def test_coupled_choices_follow_the_law(vocab):
    """Chi-square over 60,000 positions of one request."""
    rows = 60_000
    p_V = oracle.sorted_law(np.random.default_rng(45).normal(size=vocab) * 2, 1.0, top_p=0.99).astype(np.float32)
    counts = np.zeros(vocab)
    for part in np.split(np.arange(rows), 4):
        p_BTV = jnp.broadcast_to(jnp.asarray(p_V)[None, None, :], (1, part.size, vocab))
        counts += np.bincount(np.ravel(CHOOSE(p_BTV, SEED_12, jnp.asarray(part)[None, :])), minlength=vocab)
    oracle.assert_follows(counts, p_V / p_V.sum(dtype=np.float64))


def test_draws_of_one_token_are_the_rounds_own_or_the_coupled_choice():
    rng = np.random.default_rng(46)
    rows, vocab = 9, 301
    q_BV = jnp.asarray(laws(rng, rows, 1, vocab, 50)[:, 0])
    seeds_B2, length_B1 = places(rng, rows, 1)
    length_B = length_B1[:, 0]
    u = round_uniforms(seeds_B2, length_B, 8)
    for offset in (0, 3, 7):
        own = jax.jit(Draws(seeds_B2, length_B, coupled=False).pick)(q_BV, jnp.int32(offset))
        np.testing.assert_array_equal(own, sampling.draw(q_BV, u.draft_BJ[:, offset]))
        coupled = Draws(seeds_B2, length_B, coupled=True).pick(q_BV, offset)
        np.testing.assert_array_equal(coupled, CHOOSE(q_BV[:, None], seeds_B2, length_B1 + offset)[:, 0])


@pytest.mark.parametrize("coupled", [True, False])
def test_distinct_draws_are_draws_without_replacement_in_order(coupled):
    """Chi-square of all ordered triples of 4 ids over 40,000 seeds."""
    vocab, rows, count = 4, 40_000, 3
    q_V = np.array([0.5, 0.3, 0.15, 0.05])
    seeds_B2 = jnp.stack([jnp.arange(rows, dtype=jnp.uint32), jnp.full(rows, 3, jnp.uint32)], 1)
    draws = Draws(seeds_B2, jnp.full(rows, 17, jnp.int32), coupled)
    q_BV = jnp.broadcast_to(jnp.asarray(q_V, jnp.float32)[None, :], (rows, vocab))
    ids_BC = np.asarray(jax.jit(lambda q_BV: draws.pick_distinct(q_BV, count, 2))(q_BV))
    law = np.zeros((vocab,) * count)
    for ids in np.ndindex(*law.shape):
        if len(set(ids)) == count:
            law[ids] = np.prod([q_V[x] / (1 - q_V[list(ids[:i])].sum()) for i, x in enumerate(ids)])
    oracle.assert_follows(np.bincount(np.ravel_multi_index(tuple(ids_BC.T), law.shape), minlength=law.size), law)
    if coupled:
        np.testing.assert_array_equal(ids_BC[:, 0], draws.pick(q_BV, 2))


@pytest.mark.parametrize("coupled", [True, False])
def test_distinct_draws_from_few_candidates_equal_those_from_the_whole_vocabulary(coupled):
    """And where a law has fewer ids than are asked for, the rest are distinct ids of weight zero."""
    rng = np.random.default_rng(47)
    vocab, count = 1501, 6
    narrow_BV = laws(rng, 5, 1, vocab, 40)[:, 0]
    narrow_BV[2] = laws(rng, 1, 1, vocab, 4)[0, 0]
    wide_BV = np.concatenate([narrow_BV, laws(rng, 1, 1, vocab, vocab)[0]])
    seeds_B2, length_B1 = places(rng, 6, 1)

    def pick(q_BV):
        rows = len(q_BV)
        draws = Draws(seeds_B2[:rows], length_B1[:rows, 0], coupled)
        return np.asarray(draws.pick_distinct(jnp.asarray(q_BV), count, 1, node=jnp.arange(rows) + 3))

    alone, together = pick(narrow_BV), pick(wide_BV)[:5]
    for b in range(5):
        said = 4 if b == 2 else count
        np.testing.assert_array_equal(alone[b, :said], together[b, :said])
        assert len(set(alone[b].tolist())) == count
        assert (narrow_BV[b][alone[b]] > 0).sum() == said


def test_uncoupled_draws_below_two_nodes_are_independent_and_coupled_ones_are_not():
    """Chi-square of the pairs of first children over 20,000 seeds."""
    vocab, rows = 3, 20_000
    q_V = np.array([0.5, 0.3, 0.2])
    seeds_B2 = jnp.stack([jnp.arange(rows, dtype=jnp.uint32), jnp.full(rows, 4, jnp.uint32)], 1)
    q_BV = jnp.broadcast_to(jnp.asarray(q_V, jnp.float32)[None, :], (rows, vocab))
    own, coupled = (
        [
            np.asarray(Draws(seeds_B2, jnp.full(rows, 17, jnp.int32), kind).pick_distinct(q_BV, 1, 1, n))[:, 0]
            for n in (1, 2)
        ]
        for kind in (False, True)
    )
    oracle.assert_follows(np.bincount(own[0] * vocab + own[1], minlength=9), np.outer(q_V, q_V))
    np.testing.assert_array_equal(*coupled)


def test_more_ids_or_nodes_than_a_counter_holds_are_refused():
    with pytest.raises(ValueError, match="and 63 draws, got 5 and 64"):
        Draws(SEED_12, jnp.ones(1, jnp.int32), coupled=False).pick_distinct(jnp.ones((1, 5)), 64, 0)
