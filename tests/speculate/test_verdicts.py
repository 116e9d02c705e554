"""Single verdicts: edges, mixed batches, filters before laws, and the law that compares tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate import sampling, verify
from jaxspec.speculate.sampling import RowSampling
from jaxspec.speculate.topology import Drafts, Topology, chain
from tests.speculate import oracle

final_law, round_uniforms = jax.jit(sampling.final_law), jax.jit(sampling.round_uniforms, static_argnums=2)
draw = jax.jit(sampling.draw)
mask_logits = jax.jit(sampling.mask_logits, static_argnums=3)
match_law = jax.jit(verify.match_law, static_argnums=2)
LAWS = {
    "token": jax.jit(verify.token_law, static_argnums=3),
    "block": jax.jit(verify.block_law, static_argnums=3),
}
both_laws = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
both_kinds = pytest.mark.parametrize("q_given", [True, False], ids=["drawn", "undrawn"])

TREE = (0, 0, 1, 1, 2, 2, 3)


def on_chain(draft_BJ, q_BJV, gamma_B):
    rows, drafted = draft_BJ.shape
    live_BJ = jnp.arange(drafted)[None, :] < jnp.asarray(gamma_B)[:, None]
    return Drafts(jnp.asarray(draft_BJ, jnp.int32), q_BJV, chain(rows, drafted), live_BJ)


def on_tree(rows, parents=TREE):
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    return Topology(*(jnp.tile(jnp.asarray(x, jnp.int32)[None, :], (rows, 1)) for x in (parents, depth[1:])))


@both_laws
def test_the_correction_is_the_clipped_difference_divided_by_its_sum(law):
    """A03: no softmax of the residual, and nothing past gamma in it."""
    p_BTV = jnp.tile(jnp.asarray([0.5, 0.3, 0.2, 0.0])[None, None, :], (2, 2, 1))
    q_BJV = jnp.asarray([0.2, 0.5, 0.2, 0.1])[None, None, :].repeat(2, 0)
    verdict = law(p_BTV, on_chain(np.array([[1], [1]]), q_BJV, [1, 0]), jnp.asarray([[0.99], [0.99]]), 1)
    assert verdict.n_accepted_B.tolist() == [0, 0]
    assert verdict.accept_prob_BJ[:, 0] == pytest.approx(jnp.asarray([0.6, 0.0]))
    residual_V, beyond_V = np.asarray(verdict.last_BV)
    np.testing.assert_array_equal(residual_V / residual_V.sum(), [1, 0, 0, 0])
    np.testing.assert_array_equal(beyond_V, p_BTV[1, 0])  # gamma 0 is plain decoding, whatever q says
    u_B = jnp.arange(4096) / 4096
    assert set(draw(jnp.tile(verdict.last_BV[:1], (4096, 1)), u_B).tolist()) == {0}


@both_laws
def test_a_sibling_is_judged_by_what_the_one_before_it_left(law):
    """Numbers by hand: p = (.5, .3, .2), q = (.2, .6, .2), children 1 then 2.

    Child 1 stands with .5. It leaves p - q = (.3, 0, 0) of mass .3, so p = (1, 0, 0), and q = (.5, 0, .5): child 2
    never stands, and 0 is certain. Of children 1 then 0, the second always stands.
    """
    p_BTV = jnp.tile(jnp.asarray([0.5, 0.3, 0.2])[None, None, :], (2, 3, 1))
    q_BJV = jnp.tile(jnp.asarray([0.2, 0.6, 0.2])[None, None, :], (2, 2, 1))
    drafts = Drafts(jnp.asarray([[1, 2], [1, 0]]), q_BJV, on_tree(2, (0, 0)), jnp.ones((2, 2), bool))
    verdict = law(p_BTV, drafts, jnp.asarray([[0.6, 0.0], [0.6, 0.99]]), 1)
    np.testing.assert_allclose(verdict.accept_prob_BJ, [[0.5, 0], [0.5, 1]], atol=1e-6)
    assert verdict.path_BD.tolist() == [[0], [2]]
    last_BV = verdict.last_BV / verdict.last_BV.sum(-1, keepdims=True)
    np.testing.assert_allclose(last_BV, [[1, 0, 0], [0.5, 0.3, 0.2]], atol=1e-6)


@both_laws
def test_a_peaked_draft_leaves_its_tail_to_the_next_sibling_exactly(law):
    """q says one token with 1 - 3e-7: 1 - q(x) in float32 would miss what is left by half, and the chance with it."""
    q_V = np.array([1.0, 1e-7, 2e-7], np.float32)
    p_V = np.array([0.5, 0.45, 0.05], np.float32)
    drafts = Drafts(
        jnp.asarray([[0, 2]]), jnp.tile(q_V[None, None], (1, 2, 1)), on_tree(1, (0, 0)), jnp.ones((1, 2), bool)
    )
    verdict = law(jnp.tile(p_V[None, None], (1, 3, 1)), drafts, jnp.asarray([[0.9, 0.9]]), 1)
    # Left of p: (0, .9, .1); of q: (0, 1/3, 2/3).
    assert verdict.accept_prob_BJ[0, 1] == pytest.approx(0.15, rel=1e-4)


@both_laws
@both_kinds
def test_an_id_that_p_excludes_never_stands(q_given, law):
    """Not even against the smallest coin, 0."""
    p_BTV = jnp.tile(jnp.asarray([0.0, 0.25, 0.75])[None, None, :], (1, 2, 1))
    q_BJV = jnp.full((1, 1, 3), 1 / 3) if q_given else None
    verdict = law(p_BTV, on_chain(np.array([[0]]), q_BJV, [1]), jnp.zeros((1, 1)), 1)
    assert verdict.n_accepted_B.tolist() == [0]


@both_laws
def test_an_id_that_q_cannot_say_is_padding(law):
    """More children than q has tokens: those beyond never stand, nothing below them does, and p stays whole."""
    p_BTV = jnp.full((1, 5, 4), 0.25)
    q_BJV = jnp.tile(jnp.asarray([1.0, 0, 0, 0])[None, None, :], (1, 4, 1))
    # Node 1 says 0, node 2 says 1 (q = 0), nodes 3 and 4 hang below node 2.
    drafts = Drafts(jnp.asarray([[0, 1, 0, 0]]), q_BJV, on_tree(1, (0, 0, 2, 3)), jnp.ones((1, 4), bool))
    verdict = law(p_BTV, drafts, jnp.asarray([[0.9, 0.0, 0.0, 0.0]]), 3)
    np.testing.assert_allclose(verdict.accept_prob_BJ[0], [0.25, 0, 0, 0])
    assert verdict.n_accepted_B.tolist() == [0]
    np.testing.assert_allclose(verdict.last_BV[0] / verdict.last_BV[0].sum(), [0, 1 / 3, 1 / 3, 1 / 3], rtol=1e-6)
    alone = law(p_BTV[:, :2], on_chain(np.array([[1]]), q_BJV[:, :1], [1]), jnp.zeros((1, 1)), 1)
    np.testing.assert_array_equal(alone.last_BV, p_BTV[:, 0])


@both_laws
@both_kinds
def test_what_cannot_happen_makes_no_nan(q_given, law):
    """A04: padding drafts with q = 0, ids that p excludes, an empty residual met by a coin of 1."""
    p_V = jnp.asarray([0.0, 0.25, 0.75, 0.0])
    laws_BTV = jnp.tile(p_V[None, None, :], (4, 3, 1))
    draft_BJ = np.array([[0, 3], [1, 2], [2, 0], [3, 1]])
    drafts = on_chain(draft_BJ, laws_BTV[:, :2] if q_given else None, [2, 2, 2, 0])
    verdict = law(laws_BTV, drafts, jnp.ones((4, 2)), 2)
    for array in verdict:
        assert jnp.isfinite(array).all()
    assert (verdict.accept_prob_BJ[[0, 2], [0, 1]] == 0).all()  # p(x) = 0 never stands
    assert (verdict.last_BV[:, [0, 3]] == 0).all()
    assert (verdict.last_BV.sum(-1) > 0).all()
    if q_given:
        np.testing.assert_array_equal(verdict.last_BV, np.tile(p_V, (4, 1)))  # p itself, not a uniform law


@both_laws
def test_an_undrawn_draft_that_is_all_of_p_leaves_p(law):
    p_BTV = jnp.tile(jnp.eye(5)[2][None, None, :], (1, 2, 1))
    verdict = law(p_BTV, on_chain(np.array([[2]]), None, [1]), jnp.ones((1, 1)), 1)
    np.testing.assert_array_equal(verdict.last_BV[0], np.eye(5)[2])


@both_laws
@both_kinds
def test_a_row_does_not_feel_its_neighbours(q_given, law):
    """Bit for bit, whatever topology, temperature or number of live drafts the rows beside it have."""
    rows, vocab, drafted = 12, 11, len(TREE)
    rng = np.random.default_rng(2)
    p_BTV = rng.dirichlet(np.ones(vocab), (rows, drafted + 1)).astype(np.float32)
    p_BTV[::3] = np.eye(vocab, dtype=np.float32)[rng.integers(vocab, size=(len(p_BTV[::3]), drafted + 1))]
    parent_BJ = np.tile(np.array(TREE), (rows, 1))
    parent_BJ[1::2] = np.arange(drafted)
    depth_BT = np.zeros((rows, drafted + 1), int)
    for j in range(drafted):
        depth_BT[:, j + 1] = depth_BT[np.arange(rows), parent_BJ[:, j]] + 1
    q_BJV = rng.dirichlet(np.ones(vocab), (rows, drafted)).astype(np.float32)
    first_BJ = np.array([[row.tolist().index(parent) for parent in row] for row in parent_BJ])
    q_BJV = q_BJV[np.arange(rows)[:, None], first_BJ]
    tokens_BJ = np.argsort(rng.random((rows, vocab)), 1)[:, :drafted]
    live_BJ = np.arange(drafted)[None, :] < np.array([7, 7, 5, 3, 0, 7, 4, 6, 7, 1, 2, 7])[:, None]
    coin_BJ = rng.random((rows, drafted)).astype(np.float32)

    def judge(rows):
        topology = Topology(jnp.asarray(parent_BJ[rows], jnp.int32), jnp.asarray(depth_BT[rows, 1:], jnp.int32))
        q = jnp.asarray(q_BJV[rows]) if q_given else None
        drafts = Drafts(jnp.asarray(tokens_BJ[rows], jnp.int32), q, topology, jnp.asarray(live_BJ[rows]))
        return law(jnp.asarray(p_BTV[rows]), drafts, jnp.asarray(coin_BJ[rows]), drafted)

    together = judge(np.arange(rows))
    assert len(set(together.n_accepted_B.tolist())) > 1
    for b in range(rows):
        for all_rows, alone in zip(together, judge(np.array([b])), strict=True):
            np.testing.assert_array_equal(all_rows[b], alone[0])
    np.testing.assert_array_equal(together.last_BV[4], p_BTV[4, 0])  # no live draft: plain decoding


@both_laws
def test_self_draft_in_bfloat16_stands_and_never_leaves_the_support(law):
    """A04: same weights as draft and target, T = 1, logits rounded to bfloat16: 102,400 drafts."""
    vocab, rows = 11, 12_800
    logits_BTV = jax.random.normal(jax.random.key(3), (rows, GAMMA_MAX + 1, vocab), jnp.bfloat16).astype(jnp.float32)
    logits_BTV = logits_BTV.at[:, :, 4].set(-jnp.inf)
    p_BTV = final_law(logits_BTV, _rows(rows, 1.0))
    u = round_uniforms(_seeds(rows), jnp.full(rows, 5), GAMMA_MAX)
    draft_BJ = positions(p_BTV[:, :-1], u.draft_BJ)
    verdict = law(p_BTV, on_chain(draft_BJ, p_BTV[:, :-1], np.full(rows, GAMMA_MAX)), u.coin_BJ, GAMMA_MAX)
    assert (verdict.n_accepted_B == GAMMA_MAX).all()
    last_B = oracle.inverse(verdict.last_BV, u.last_B)
    oracle.assert_follows(np.bincount(draft_BJ.ravel(), minlength=vocab), np.mean(p_BTV[:, :-1], (0, 1)))
    oracle.assert_follows(np.bincount(last_B, minlength=vocab), np.mean(p_BTV[:, -1], 0))


@both_laws
@pytest.mark.parametrize("drafter", ["self", "other", "undrawn"])
def test_every_position_has_the_law_of_the_target_wherever_it_came_from(drafter, law):
    """A14: T = 1.5, drafted, corrected and bonus positions together (chi-square per position).

    What the round leaves open is drawn from p, as in the next one.
    """
    vocab, gamma, rows = 13, 4, 20_000
    keys = jax.random.split(jax.random.key(8), 2)
    logits_1TV = 2 * jax.random.normal(keys[0], (1, gamma + 1, vocab))
    other_1TV = logits_1TV + jax.random.normal(keys[1], logits_1TV.shape)
    # Positions are independent here, so each has its own law, whichever tokens precede it.
    p_BTV = jnp.tile(final_law(logits_1TV, _rows(1, 1.5)), (rows, 1, 1))
    q_BJV = jnp.tile(final_law(other_1TV if drafter == "other" else logits_1TV, _rows(1, 1.5))[:, :-1], (rows, 1, 1))
    u = round_uniforms(_seeds(rows), jnp.full(rows, 21), gamma)
    if drafter == "undrawn":
        draft_BJ, q_BJV = jnp.argmax(q_BJV, -1), None
    else:
        draft_BJ = positions(q_BJV, u.draft_BJ)
    verdict = law(p_BTV, on_chain(draft_BJ, q_BJV, np.full(rows, gamma)), u.coin_BJ, gamma)
    n_B = np.asarray(verdict.n_accepted_B)
    tokens_BT = positions(p_BTV, round_uniforms(_seeds(rows), jnp.full(rows, 22), gamma + 1).draft_BJ)
    drafts_BT = np.pad(draft_BJ, ((0, 0), (0, 1)))
    tokens_BT = np.where(np.arange(gamma + 1) < n_B[:, None], drafts_BT, tokens_BT)
    tokens_BT[np.arange(rows), n_B] = oracle.inverse(verdict.last_BV, u.last_B)
    for i in range(gamma + 1):
        oracle.assert_follows(np.bincount(tokens_BT[:, i], minlength=vocab), p_BTV[0, i])
    if drafter == "self":
        assert (n_B == gamma).all()


def test_match_law_descends_by_the_chosen_tokens():
    """Random trees and choices over 3 ids against a walk in plain Python; dead drafts and dead ends among them."""
    rows, drafted, depth = 200, 9, 4
    rng = np.random.default_rng(4)
    parent_BJ, depth_BT = np.zeros((rows, drafted), int), np.zeros((rows, drafted + 1), int)
    tokens_BJ, live_BT = np.full((rows, drafted), -1), np.ones((rows, drafted + 1), bool)
    for b in range(rows):
        for j in range(drafted):
            siblings_T = np.bincount(parent_BJ[b, :j], minlength=j + 1)
            parent = rng.choice(np.flatnonzero((siblings_T < 3) & (depth_BT[b, : j + 1] < depth)))
            used = tokens_BJ[b, :j][parent_BJ[b, :j] == parent]
            parent_BJ[b, j], depth_BT[b, j + 1] = parent, depth_BT[b, parent] + 1
            tokens_BJ[b, j] = rng.choice(np.setdiff1d(np.arange(3), used))
            live_BT[b, j + 1] = live_BT[b, parent] and rng.random() < 0.9
    choice_BT = rng.integers(3, size=(rows, drafted + 1))
    topology = Topology(jnp.asarray(parent_BJ, jnp.int32), jnp.asarray(depth_BT[:, 1:], jnp.int32))
    drafts = Drafts(jnp.asarray(tokens_BJ, jnp.int32), None, topology, jnp.asarray(live_BT[:, 1:]))
    match = match_law(jnp.asarray(choice_BT, jnp.int32), drafts, depth)
    for b in range(rows):
        node, path = 0, []
        while True:
            below = [
                j + 1
                for j in range(drafted)
                if live_BT[b, j + 1] and parent_BJ[b, j] == node and tokens_BJ[b, j] == choice_BT[b, node]
            ]
            if not below:
                break
            (node,) = below
            path.append(node)
        assert match.path_BD[b].tolist() == path + [0] * (depth - len(path))
        assert match.n_accepted_B[b] == len(path)
        assert match.last_token_B[b] == choice_BT[b, node]
    assert set(match.n_accepted_B.tolist()) == {0, 1, 2, 3, 4}


@both_laws
def test_match_law_is_every_law_at_temperature_zero(law):
    """A21: for drafts of another model, any number of live ones, chain and tree, and the laws a hair above zero."""
    vocab, drafted, rows = 7, len(TREE), 64
    rng = np.random.default_rng(17)
    logits_BTV = jnp.asarray(3 * rng.normal(size=(rows, drafted + 1, vocab)), jnp.float32)
    argmax_BT = np.argmax(logits_BTV, -1)
    for topology in (on_tree(rows), on_tree(rows, tuple(range(drafted)))):
        # Siblings: the argmax at the parent and a neighbour of it, either first.
        parent_BJ = np.asarray(topology.parent_BJ)
        is_second_BJ = np.array([[parent in row[:j] for j, parent in enumerate(row)] for row in parent_BJ.tolist()])
        other = rng.random((rows, 1)) < 0.3
        shift_BJ = np.where(other, 1 - is_second_BJ, is_second_BJ)
        tokens_BJ = (np.take_along_axis(argmax_BT, parent_BJ, 1) + shift_BJ) % vocab
        live_BJ = jnp.asarray(np.arange(drafted)[None, :] < rng.integers(0, drafted + 1, (rows, 1)))
        drafts = Drafts(jnp.asarray(tokens_BJ, jnp.int32), None, topology, live_BJ)
        match = match_law(jnp.asarray(argmax_BT, jnp.int32), drafts, drafted)
        assert len(set(match.n_accepted_B.tolist())) >= 3
        u = round_uniforms(_seeds(rows), jnp.full(rows, 2), drafted)
        for temperature in (0.0, 1e-6):
            p_BTV = final_law(logits_BTV, _rows(rows, temperature))
            verdict = law(p_BTV, drafts, u.coin_BJ, drafted)
            np.testing.assert_array_equal(verdict.path_BD, match.path_BD)
            np.testing.assert_array_equal(draw(verdict.last_BV, u.last_B), match.last_token_B)
            if topology.depth_BJ[0, -1] == drafted:
                # On a chain a one-hot q is an undrawn draft.
                same = law(p_BTV, drafts._replace(q_BJV=jax.nn.one_hot(drafts.tokens_BJ, vocab)), u.coin_BJ, drafted)
                np.testing.assert_array_equal(same.path_BD, match.path_BD)
                np.testing.assert_array_equal(draw(same.last_BV, u.last_B), match.last_token_B)


@both_laws
def test_greedy_rows_beside_sampled_rows_keep_their_text(law):
    """A14: temperature zero is a one-hot p; such a row takes its argmax at every node, whatever its neighbours do."""
    vocab, rows, drafted = 7, 40, 3
    logits_BTV = 2 * jax.random.normal(jax.random.key(9), (rows, drafted + 1, vocab))
    temperature_B = jnp.where(jnp.arange(rows) % 2 == 0, 0.0, 1.0)
    sampling_B = _rows(rows, 0.0)._replace(temperature_B=temperature_B)
    p_BTV = final_law(logits_BTV, sampling_B)
    q_BJV = final_law(logits_BTV + 0.5 * jax.random.normal(jax.random.key(10), logits_BTV.shape), sampling_B)[:, :-1]
    u = round_uniforms(_seeds(rows), jnp.full(rows, 6), drafted)
    drafts = on_chain(positions(q_BJV, u.draft_BJ), q_BJV, np.arange(rows) % 4)
    verdict = law(p_BTV, drafts, u.coin_BJ, drafted)
    match = match_law(jnp.argmax(logits_BTV, -1).astype(jnp.int32), drafts, drafted)
    np.testing.assert_array_equal(verdict.n_accepted_B[::2], match.n_accepted_B[::2])
    np.testing.assert_array_equal(draw(verdict.last_BV, u.last_B)[::2], match.last_token_B[::2])
    assert set(verdict.n_accepted_B[::2].tolist()) >= {0, 1, 2}


@both_laws
def test_banned_stop_ids_appear_at_no_position(law):
    """G11: a ban reaches drafts, corrections and the bonus, because it precedes the laws."""
    vocab, gamma, rows = 7, 3, 512
    logits_BTV = jnp.tile(jax.random.normal(jax.random.key(18), (1, gamma + 1, vocab)), (rows, 1, 1))
    logits_BTV = logits_BTV.at[:, :, 2].set(9.0)
    stops_BE = jnp.tile(jnp.asarray([[2, -1]]), (rows, 1))
    masked_BTV = mask_logits(logits_BTV, stops_BE, jnp.ones((rows, gamma + 1), bool), vocab)
    p_BTV = final_law(masked_BTV, _rows(rows, 1.0))
    q_BJV = final_law(logits_BTV, _rows(rows, 1.0))[:, :gamma]  # even where the draft knows no ban
    u = round_uniforms(_seeds(rows), jnp.full(rows, 4), gamma)
    draft_BJ = positions(q_BJV, u.draft_BJ)
    verdict = law(p_BTV, on_chain(draft_BJ, q_BJV, np.full(rows, gamma)), u.coin_BJ, gamma)
    stands_BJ = np.arange(gamma) < np.asarray(verdict.n_accepted_B)[:, None]
    assert stands_BJ.any()
    assert 2 not in np.asarray(draft_BJ)[stands_BJ]
    assert 2 not in draw(verdict.last_BV, u.last_B)


@both_laws
@both_kinds
def test_a_bucket_without_drafts_draws_from_p(q_given, law):
    p_BTV = final_law(jax.random.normal(jax.random.key(19), (3, 1, 7)), _rows(3, 1.0))
    drafts = on_chain(np.zeros((3, 0)), jnp.zeros((3, 0, 7)) if q_given else None, np.zeros(3))
    verdict = law(p_BTV, drafts, jnp.zeros((3, 0)), 0)
    assert verdict.n_accepted_B.tolist() == [0, 0, 0]
    assert verdict.accept_prob_BJ.shape == verdict.path_BD.shape == (3, 0)
    np.testing.assert_array_equal(verdict.last_BV, p_BTV[:, 0])
    match = match_law(jnp.argmax(p_BTV, -1).astype(jnp.int32), drafts, 0)
    np.testing.assert_array_equal(match.last_token_B, jnp.argmax(p_BTV[:, 0], -1))


@both_laws
def test_a_missing_bonus_position_is_refused(law):
    drafts = on_chain(np.zeros((1, 2)), None, [1])
    with pytest.raises(ValueError, match="p_BTV: expected 3 nodes of 1 rows"):
        law(jnp.ones((1, 2, 5)), drafts, jnp.ones((1, 2)), 2)
    with pytest.raises(ValueError, match="choice_BT: expected 3 nodes of 1 rows"):
        match_law(jnp.ones((1, 2), jnp.int32), drafts, 2)


def positions(laws_BJV, u_BJ):
    return np.stack([oracle.inverse(laws_BJV[:, j], u_BJ[:, j]) for j in range(u_BJ.shape[1])], 1)


def _rows(rows, temperature):
    return RowSampling(jnp.full(rows, temperature), jnp.zeros(rows, jnp.int32), jnp.ones(rows), jnp.zeros(rows))


def _seeds(rows):
    return jnp.stack([jnp.arange(rows, dtype=jnp.uint32), jnp.full(rows, 77, jnp.uint32)], 1)
