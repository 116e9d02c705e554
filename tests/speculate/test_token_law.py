"""The token law is lossless: by enumeration, not by sampling alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate import sampling, verify
from jaxspec.speculate.sampling import RowSampling
from tests.speculate import oracle

final_law, round_uniforms = jax.jit(sampling.final_law), jax.jit(sampling.round_uniforms)
draw, draw_positions = jax.jit(sampling.draw), jax.jit(jax.vmap(sampling.draw, 1, 1))
mask_logits = jax.jit(sampling.mask_logits, static_argnums=3)
token_law, greedy_law = jax.jit(verify.token_law), jax.jit(verify.greedy_law)

PRECISIONS = [("float64", 1e-6), ("float32", 1e-5)]


def filtered(rng, vocab):
    """A law with the zeros that filters leave."""
    return oracle.sorted_law(rng.normal(size=vocab) * 2, 1.0, top_k=vocab // 2 + 1, top_p=0.9)


PAIRS = {
    "random": (oracle.uneven, oracle.uneven),
    "filtered": (filtered, filtered),
    "disjoint": (oracle.on_ids((0, 2)), oracle.on_ids((1, 3))),
    "overlapping": (oracle.on_ids((0, 1, 2)), oracle.on_ids((1, 2, 3))),
    "target one-hot": (oracle.one_hot, oracle.uneven),
    "draft one-hot": (oracle.uneven, oracle.one_hot),
    "both one-hot": (oracle.one_hot, oracle.one_hot),
}


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize(("vocab", "gammas"), [(8, (0, 1, 2)), (4, (3, 0, 2, 1))])
@pytest.mark.parametrize("pair", PAIRS)
def test_committed_tokens_follow_the_target(pair, vocab, gammas, dtype, tolerance):
    rng = np.random.default_rng(11)
    p = oracle.table(rng, vocab, max(gammas) + 1, PAIRS[pair][0])
    q = oracle.table(rng, vocab, max(gammas), PAIRS[pair][1])
    with jax.enable_x64(dtype == "float64"):
        laws, accepted = oracle.committed_law(p, q, None, gammas, vocab, 3, dtype)
    for gamma in gammas:
        assert oracle.distance(laws[gamma], oracle.plain_law(p, vocab, gamma + 1)) < tolerance
    # A law that rejects everything would be lossless too: the first draft must stand as often as it can.
    assert accepted[1] == pytest.approx(np.minimum(p[()], q[()]).sum(), abs=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("vocab", [3, 8])
def test_undrawn_drafts_are_judged_by_p_alone(vocab, dtype, tolerance):
    """A10: a deterministic proposer has a one-hot q."""
    rng = np.random.default_rng(12)
    p = oracle.table(rng, vocab, 4, oracle.uneven)
    drafter = oracle.table(rng, vocab, 3, oracle.uneven)
    with jax.enable_x64(dtype == "float64"):
        laws, accepted = oracle.committed_law(p, None, drafter, (1, 2, 3), vocab, 3, dtype)
    for gamma in (1, 2, 3):
        assert oracle.distance(laws[gamma], oracle.plain_law(p, vocab, gamma + 1)) < tolerance
    assert accepted[1] == pytest.approx(p[()][np.argmax(drafter[()])], abs=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("ulps", [0, 1])
def test_a_draft_that_equals_the_target_is_accepted_whole(ulps, dtype, tolerance):
    """A04: p == q, and p one ulp beside q."""
    vocab, rng = 7, np.random.default_rng(13)
    p = {prefix: law.astype(dtype) for prefix, law in oracle.table(rng, vocab, 4, oracle.uneven).items()}
    q = p
    if ulps:
        q = {prefix: np.nextafter(law, rng.integers(0, 2, vocab).astype(dtype)) for prefix, law in p.items()}
    with jax.enable_x64(dtype == "float64"):
        laws, accepted = oracle.committed_law(p, q, None, (3,), vocab, 3, dtype)
    assert oracle.distance(laws[3], oracle.plain_law(p, vocab, 4)) < tolerance
    assert accepted[3] == pytest.approx(3, abs=1e-5)


def test_the_oracle_sees_a_draft_law_from_before_the_filters():
    """A02: x is drawn from the filtered q but judged with the raw softmax. It accepts more, and it is wrong."""
    vocab, rng = 8, np.random.default_rng(14)
    logits = oracle.table(rng, vocab, 2, lambda rng, vocab: rng.normal(size=vocab) * 2)
    p = {prefix: oracle.sorted_law(rng.normal(size=vocab) * 2, 1.0) for prefix in logits}
    raw = {prefix: oracle.sorted_law(row, 1.0) for prefix, row in logits.items()}
    right = {prefix: oracle.sorted_law(row, 1.0, top_k=3) for prefix, row in logits.items()}
    laws, accepted = oracle.committed_law(p, right, None, (1,), vocab, 1, "float32")
    wrong_laws, wrong_accepted = oracle.committed_law(p, raw, None, (1,), vocab, 1, "float32", drawn_from=right)
    plain = oracle.plain_law(p, vocab, 2)
    assert oracle.distance(laws[1], plain) < 1e-5
    assert oracle.distance(wrong_laws[1], plain) > 1e-2
    assert wrong_accepted[1] > accepted[1]


@pytest.mark.parametrize(
    "filters", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9, "min_p": 0.05}]
)
def test_filtered_laws_of_the_engine_are_lossless_against_the_sorted_reference(filters):
    """A02, G11: the filters apply to every position, p and q alike; what they remove never appears."""
    vocab, rng = 8, np.random.default_rng(15)
    logits = {name: oracle.table(rng, vocab, 3, lambda rng, vocab: rng.normal(size=vocab) * 2) for name in "pq"}
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    rows = RowSampling(*(jnp.asarray([x]) for x in (0.8, options["top_k"], options["top_p"], options["min_p"])))

    def laws(logits):
        laws_1JV = final_law(jnp.asarray(np.stack(list(logits.values())), jnp.float32)[None], rows)
        return dict(zip(logits, np.asarray(laws_1JV[0]), strict=True))

    p, q = laws(logits["p"]), laws(logits["q"])
    committed, _ = oracle.committed_law(p, q, None, (2,), vocab, 2, "float32")
    plain = oracle.plain_law({k: oracle.sorted_law(v, 0.8, **filters) for k, v in logits["p"].items()}, vocab, 3)
    assert oracle.distance(committed[2], plain) < 1e-5
    assert committed[2][plain == 0].max() == 0


def test_the_correction_is_the_clipped_difference_divided_by_its_sum():
    """A03: no softmax of the residual, and nothing past gamma in it."""
    p_BJV = jnp.tile(jnp.asarray([0.5, 0.3, 0.2, 0.0])[None, None, :], (2, 2, 1))
    q_BJV = jnp.asarray([0.2, 0.5, 0.2, 0.1])[None, None, :].repeat(2, 0)
    verdict = token_law(p_BJV, q_BJV, jnp.asarray([[1], [1]]), jnp.asarray([1, 0]), jnp.asarray([[0.99], [0.99]]))
    assert verdict.n_accepted_B.tolist() == [0, 0]
    assert verdict.accept_prob_BJ[:, 0] == pytest.approx(jnp.asarray([0.6, 0.0]))
    residual_V, beyond_V = np.asarray(verdict.last_BV)
    np.testing.assert_array_equal(residual_V / residual_V.sum(), [1, 0, 0, 0])
    np.testing.assert_array_equal(beyond_V, p_BJV[1, 0])  # gamma 0 is plain decoding, whatever q says
    u_B = jnp.arange(4096) / 4096
    assert set(draw(jnp.tile(verdict.last_BV[:1], (4096, 1)), u_B).tolist()) == {0}


@pytest.mark.parametrize("q_given", [True, False])
def test_an_id_that_p_excludes_never_stands(q_given):
    """Not even against the smallest coin, 0."""
    p_BJV = jnp.tile(jnp.asarray([0.0, 0.25, 0.75])[None, None, :], (1, 2, 1))
    q_BJV = jnp.full((1, 1, 3), 1 / 3) if q_given else None
    verdict = token_law(p_BJV, q_BJV, jnp.asarray([[0]]), jnp.asarray([1]), jnp.zeros((1, 1)))
    assert verdict.n_accepted_B.tolist() == [0]


@pytest.mark.parametrize("q_given", [True, False])
def test_what_cannot_happen_makes_no_nan(q_given):
    """A04: padding drafts with q = 0, ids that p excludes, an empty residual met by a coin of 1."""
    p_V = jnp.asarray([0.0, 0.25, 0.75, 0.0])
    laws_BJV = jnp.tile(p_V[None, None, :], (4, 3, 1))
    draft_BJ = jnp.asarray([[0, 3], [1, 2], [2, 0], [3, 1]])
    verdict = token_law(
        laws_BJV, laws_BJV[:, :2] if q_given else None, draft_BJ, jnp.asarray([2, 2, 2, 0]), jnp.ones((4, 2))
    )
    for array in verdict:
        assert jnp.isfinite(array).all()
    assert (verdict.accept_prob_BJ[[0, 2], [0, 1]] == 0).all()  # p(x) = 0 never stands
    assert (verdict.last_BV[:, [0, 3]] == 0).all()
    assert (verdict.last_BV.sum(-1) > 0).all()
    if q_given:
        np.testing.assert_array_equal(verdict.last_BV, np.tile(p_V, (4, 1)))  # p itself, not a uniform law


def test_an_undrawn_draft_that_is_all_of_p_leaves_p():
    p_BJV = jnp.tile(jnp.eye(5)[2][None, None, :], (1, 2, 1))
    verdict = token_law(p_BJV, None, jnp.asarray([[2]]), jnp.asarray([1]), jnp.ones((1, 1)))
    np.testing.assert_array_equal(verdict.last_BV[0], np.eye(5)[2])


def test_self_draft_in_bfloat16_stands_and_never_leaves_the_support():
    """A04: same weights as draft and target, T = 1, logits rounded to bfloat16: 102,400 drafts."""
    vocab, rows = 11, 12_800
    logits_BJV = jax.random.normal(jax.random.key(3), (rows, GAMMA_MAX + 1, vocab), jnp.bfloat16).astype(jnp.float32)
    logits_BJV = logits_BJV.at[:, :, 4].set(-jnp.inf)
    p_BJV = final_law(logits_BJV, _rows(rows, 1.0))
    u = round_uniforms(_seeds(rows), jnp.full(rows, 5))
    draft_BJ = draw_positions(p_BJV[:, :-1], u.draft_BJ)
    verdict = token_law(p_BJV, p_BJV[:, :-1], draft_BJ, jnp.full(rows, GAMMA_MAX), u.coin_BJ)
    assert (verdict.n_accepted_B == GAMMA_MAX).all()
    last_B = draw(verdict.last_BV, u.last_B)
    oracle.assert_follows(np.bincount(draft_BJ.ravel(), minlength=vocab), np.mean(p_BJV[:, :-1], (0, 1)))
    oracle.assert_follows(np.bincount(last_B, minlength=vocab), np.mean(p_BJV[:, -1], 0))


@pytest.mark.parametrize("drafter", ["self", "other", "undrawn"])
def test_every_position_has_the_law_of_the_target_wherever_it_came_from(drafter):
    """A14: T = 1.5 at drafted, corrected and bonus positions alike (chi-square per position)."""
    vocab, gamma, rows = 13, 4, 30_000
    keys = jax.random.split(jax.random.key(8), 2)
    logits_1JV = 2 * jax.random.normal(keys[0], (1, gamma + 1, vocab))
    other_1JV = logits_1JV + jax.random.normal(keys[1], logits_1JV.shape)
    # Positions are independent here, so each has its own law, whichever tokens precede it.
    p_BJV = jnp.tile(final_law(logits_1JV, _rows(1, 1.5)), (rows, 1, 1))
    q_BJV = jnp.tile(final_law(other_1JV if drafter == "other" else logits_1JV, _rows(1, 1.5))[:, :-1], (rows, 1, 1))
    u = round_uniforms(_seeds(rows), jnp.full(rows, 21))
    if drafter == "undrawn":
        draft_BJ, q_BJV = jnp.argmax(q_BJV, -1), None
    else:
        draft_BJ = draw_positions(q_BJV, u.draft_BJ[:, :gamma])
    verdict = token_law(p_BJV, q_BJV, draft_BJ, jnp.full(rows, gamma), u.coin_BJ[:, :gamma])
    last_B = draw(verdict.last_BV, u.last_B)
    n_B = np.asarray(verdict.n_accepted_B)
    tokens_BJ = np.where(np.arange(gamma) < n_B[:, None], draft_BJ, np.asarray(last_B)[:, None])
    for i in range(gamma):
        # Whether position i is committed at all depends only on what precedes it.
        tokens = tokens_BJ[n_B >= i, i]
        oracle.assert_follows(np.bincount(tokens, minlength=vocab), p_BJV[0, i])
    oracle.assert_follows(np.bincount(last_B[n_B == gamma], minlength=vocab), p_BJV[0, gamma])
    if drafter == "self":
        assert (n_B == gamma).all()


def test_six_tokens_over_several_rounds_follow_the_target():
    """Rounds keyed as in decoding: noise that one round shares with another, or one stream with another, shows here.

    vocabulary 3, gamma 3, laws that depend on the whole prefix; chi-square over the 729 chains of six tokens.
    """
    vocab, gamma, length, rows = 3, 3, 6, 60_000
    rng = np.random.default_rng(16)
    offsets = np.cumsum([0] + [vocab**n for n in range(length + gamma + 1)])

    def laws(least):
        weights = rng.random((offsets[-1], vocab)) ** 2 + least
        return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)

    p_table, q_table = laws(0.25), laws(0.1)
    tokens = np.zeros((rows, length + gamma), np.int64)
    n_B, rounds = np.zeros(rows, np.int64), 0
    while (n_B < length).any():
        rounds += 1
        live = n_B < length
        code_B = (tokens * vocab ** np.arange(length + gamma) * (np.arange(length + gamma) < n_B[:, None])).sum(1)
        u = round_uniforms(_seeds(rows), jnp.asarray(n_B, jnp.int32))
        p, q, draft = [], [], []
        for i in range(gamma + 1):
            # Prefixes are coded by length, then little-endian; finished rows read some law and drop the outcome.
            at_B = np.where(live, offsets[np.minimum(n_B + i, length + gamma)] + code_B, 0)
            p.append(p_table[at_B])
            if i < gamma:
                q.append(q_table[at_B])
                draft.append(np.asarray(draw(jnp.asarray(q[-1]), u.draft_BJ[:, i])))
                code_B = code_B + draft[-1] * vocab ** np.where(live, n_B + i, 0)
        draft_BJ = np.stack(draft, 1)
        verdict = token_law(
            jnp.asarray(np.stack(p, 1)),
            jnp.asarray(np.stack(q, 1)),
            jnp.asarray(draft_BJ, jnp.int32),
            jnp.full(rows, gamma),
            u.coin_BJ[:, :gamma],
        )
        last_B = np.asarray(draw(verdict.last_BV, u.last_B))
        accepted_B = np.asarray(verdict.n_accepted_B)
        for i in range(gamma + 1):
            write_B = live & (i <= accepted_B) & (n_B + i < length + gamma)
            token_B = np.where(i < accepted_B, draft_BJ[:, min(i, gamma - 1)], last_B)
            tokens[write_B, (n_B + i)[write_B]] = token_B[write_B]
        n_B = np.where(live, n_B + accepted_B + 1, n_B)
    assert rounds == length  # some row met a rejection at once in every round

    code_B = (tokens[:, :length] * vocab ** np.arange(length)).sum(1)
    law = np.zeros(vocab**length)
    for chain in oracle.prefixes(vocab, length):
        codes = [sum(x * vocab**i for i, x in enumerate(chain[:n])) for n in range(length + 1)]
        law[codes[-1]] = np.prod([p_table[offsets[n] + codes[n]][chain[n]] for n in range(length)], dtype=np.float64)
    oracle.assert_follows(np.bincount(code_B, minlength=law.size), law / law.sum())


def test_greedy_law_is_the_token_law_at_temperature_zero():
    """A21: also for drafts of another model, any gamma, and the sampled law a hair above zero."""
    vocab, gamma, rows = 7, 3, 64
    keys = jax.random.split(jax.random.key(17), 3)
    logits_BJV = 3 * jax.random.normal(keys[0], (rows, gamma + 1, vocab))
    argmax_BJ = jnp.argmax(logits_BJV, -1)
    noise_BJ = jax.random.randint(keys[1], (rows, gamma), 0, vocab)
    draft_BJ = jnp.where(jax.random.bernoulli(keys[2], 0.7, (rows, gamma)), argmax_BJ[:, :gamma], noise_BJ)
    gamma_B = jnp.arange(rows) % (gamma + 1)
    greedy = greedy_law(argmax_BJ, draft_BJ, gamma_B)
    assert set(greedy.n_accepted_B.tolist()) == {0, 1, 2, 3}
    u = round_uniforms(_seeds(rows), jnp.full(rows, 2))
    for temperature in (0.0, 1e-6):
        p_BJV = final_law(logits_BJV, _rows(rows, temperature))
        q_BJV = jax.nn.one_hot(draft_BJ, vocab)
        for q in (q_BJV, None):
            verdict = token_law(p_BJV, q, draft_BJ, gamma_B, u.coin_BJ[:, :gamma])
            np.testing.assert_array_equal(verdict.n_accepted_B, greedy.n_accepted_B)
            np.testing.assert_array_equal(draw(verdict.last_BV, u.last_B), greedy.last_token_B)
        whole = token_law(p_BJV, p_BJV[:, :gamma], argmax_BJ[:, :gamma], gamma_B, u.coin_BJ[:, :gamma])
        np.testing.assert_array_equal(whole.n_accepted_B, gamma_B)


def test_banned_stop_ids_appear_at_no_position():
    """G11: a ban reaches drafts, corrections and the bonus, because it precedes the laws."""
    vocab, gamma, rows = 7, 3, 4096
    logits_BJV = jnp.tile(jax.random.normal(jax.random.key(18), (1, gamma + 1, vocab)), (rows, 1, 1))
    logits_BJV = logits_BJV.at[:, :, 2].set(9.0)
    stops_BE = jnp.tile(jnp.asarray([[2, -1]]), (rows, 1))
    masked_BJV = mask_logits(logits_BJV, stops_BE, jnp.ones((rows, gamma + 1), bool), vocab)
    p_BJV = final_law(masked_BJV, _rows(rows, 1.0))
    q_BJV = final_law(logits_BJV, _rows(rows, 1.0))[:, :gamma]  # even where the draft knows no ban
    u = round_uniforms(_seeds(rows), jnp.full(rows, 4))
    draft_BJ = draw_positions(q_BJV, u.draft_BJ[:, :gamma])
    verdict = token_law(p_BJV, q_BJV, draft_BJ, jnp.full(rows, gamma), u.coin_BJ[:, :gamma])
    stands_BJ = np.arange(gamma) < np.asarray(verdict.n_accepted_B)[:, None]
    assert stands_BJ.any()
    assert 2 not in np.asarray(draft_BJ)[stands_BJ]
    assert 2 not in draw(verdict.last_BV, u.last_B)


@pytest.mark.parametrize("q_given", [True, False])
def test_gamma_zero_bucket_draws_from_p(q_given):
    p_BJV = final_law(jax.random.normal(jax.random.key(19), (3, 1, 7)), _rows(3, 1.0))
    empty = jnp.zeros((3, 0))
    verdict = token_law(p_BJV, jnp.zeros((3, 0, 7)) if q_given else None, empty.astype(int), jnp.zeros(3, int), empty)
    assert verdict.n_accepted_B.tolist() == [0, 0, 0]
    assert verdict.accept_prob_BJ.shape == (3, 0)
    np.testing.assert_array_equal(verdict.last_BV, p_BJV[:, 0])


def test_a_missing_bonus_position_is_refused():
    with pytest.raises(ValueError, match="p_BJV: expected 3 positions of 1 rows"):
        token_law(jnp.ones((1, 2, 5)), None, jnp.zeros((1, 2), int), jnp.ones(1, int), jnp.ones((1, 2)))


def _rows(rows, temperature):
    return RowSampling(jnp.full(rows, temperature), jnp.zeros(rows, jnp.int32), jnp.ones(rows), jnp.zeros(rows))


def _seeds(rows):
    return jnp.stack([jnp.arange(rows, dtype=jnp.uint32), jnp.full(rows, 77, jnp.uint32)], 1)
