"""Several rounds, not one: noise that a round shares with the next passes every test of one round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.speculate import noise, sampling, verify
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.topology import Drafts, Topology, chain
from tests.speculate import enumeration, oracle
from tests.speculate.enumeration import SHAPES, Case

VOCAB, GAMMA, LENGTH = 3, 3, 6
LAWS = {
    "token": jax.jit(verify.token_law, static_argnums=3),
    "block": jax.jit(verify.block_law, static_argnums=3),
}
ROWS = 40_000
round_uniforms = jax.jit(sampling.round_uniforms, static_argnums=2)
draw = oracle.inverse


def markov(rng, least):
    """[V, V] laws of the next token by the last one, none without some ids."""
    weights = rng.random((VOCAB, VOCAB)) ** 2 + least
    return weights / weights.sum(-1, keepdims=True)


def plain_chains(p_VV):
    """[V] * LENGTH: the law of the tokens that follow token 0."""
    law = p_VV[0]
    for _ in range(LENGTH - 1):
        law = law[..., None] * p_VV
    return law


@pytest.mark.parametrize("shape", ["chain of 3", "2x2 level by level"])
@pytest.mark.parametrize("law", LAWS)
def test_six_tokens_over_rounds_follow_the_target_exactly(law, shape):
    """Rounds with independent numbers, composed: the sum over all ways to commit six tokens of a Markov law."""
    rng = np.random.default_rng(15)
    p_VV, q_VV = markov(rng, 0.25), markov(rng, 0.1)
    cases = []
    for last in range(VOCAB):
        p, q = ([x_VV[last]] for x_VV in (p_VV, q_VV))
        for n in range(1, GAMMA + 1):
            p.append(np.broadcast_to(p_VV, (VOCAB,) * (n - 1) + p_VV.shape))
            q.append(np.broadcast_to(q_VV, (VOCAB,) * (n - 1) + q_VV.shape))
        cases.append(Case(SHAPES[shape], p, q, q))
    batch, owner = enumeration.plan(cases, VOCAB, 7, rng)
    with jax.enable_x64(True):
        verdict = enumeration.evaluate(LAWS[law], batch, drawn=True, dtype="float64", depth=GAMMA)
    rounds = enumeration.committed(cases, batch, owner, verdict, VOCAB, whole_path=law == "token")

    # reached[n]: the law of the first n tokens times the chance that a round ends there.
    reached = [np.zeros((VOCAB,) * n) for n in range(LENGTH + 1)]
    reached[0] = np.ones(())
    for n in range(LENGTH):
        for chain_ in np.ndindex(*reached[n].shape):
            for part in rounds[chain_[-1] if chain_ else 0].parts:
                kept = min(part.ndim, LENGTH - n)
                part = part.sum(axis=tuple(range(kept, part.ndim)))
                reached[n + kept][chain_] += reached[n][chain_] * part
    assert oracle.distance(reached[LENGTH], plain_chains(p_VV)) < 1e-9


def simulate(law, uniforms, p_VV, q_VV):
    """Counts of the chains of six tokens after token 0, over ROWS seeds; ``uniforms(n_B)`` gives a round's numbers."""
    tokens = np.zeros((ROWS, 1 + LENGTH + GAMMA + 1), np.int64)
    n_B, rounds = np.zeros(ROWS, np.int64), 0
    rows = np.arange(ROWS)
    while (n_B < LENGTH).any():
        rounds += 1
        live_B = n_B < LENGTH
        u = uniforms(n_B)
        last_B, drafts, q, p = tokens[rows, n_B], [], [], []
        for i in range(GAMMA):
            p.append(p_VV[last_B])
            q.append(q_VV[last_B])
            last_B = np.asarray(draw(jnp.asarray(q[-1], jnp.float32), u.draft_BJ[:, i]))
            drafts.append(last_B)
        p.append(p_VV[last_B])
        draft_BJ = np.stack(drafts, 1)
        drafted = Drafts(
            jnp.asarray(draft_BJ),
            jnp.asarray(np.stack(q, 1), jnp.float32),
            chain(ROWS, GAMMA),
            jnp.ones((ROWS, GAMMA), bool),
        )
        verdict = law(jnp.asarray(np.stack(p, 1), jnp.float32), drafted, u.coin_BJ, GAMMA)
        last_B, accepted_B = np.asarray(draw(verdict.last_BV, u.last_B)), np.asarray(verdict.n_accepted_B)
        for i in range(GAMMA + 1):
            write_B = live_B & (i <= accepted_B)
            token_B = np.where(i < accepted_B, draft_BJ[:, min(i, GAMMA - 1)], last_B)
            tokens[rows[write_B], (n_B + i + 1)[write_B]] = token_B[write_B]
        n_B = np.where(live_B, n_B + accepted_B + 1, n_B)
    assert rounds == LENGTH  # some row met a rejection at once in every round
    codes = np.ravel_multi_index(tuple(tokens[:, 1 : LENGTH + 1].T), (VOCAB,) * LENGTH)
    return np.bincount(codes, minlength=VOCAB**LENGTH)


def seeds():
    return jnp.stack([jnp.arange(ROWS, dtype=jnp.uint32), jnp.full(ROWS, 77, jnp.uint32)], 1)


def by_round(n_B):
    """As decoding keys them: by the committed length at the start of the round and the offset in it."""
    return round_uniforms(seeds(), jnp.asarray(n_B, jnp.int32), GAMMA)


def by_position(n_B):
    """Draft and coin by their absolute position alone: what one round has looked at comes again in the next."""
    offsets = [round_uniforms(seeds(), jnp.asarray(n_B + i + 1000, jnp.int32), 1) for i in range(GAMMA)]
    draft_BJ, coin_BJ = (jnp.concatenate(columns, 1) for columns in list(zip(*offsets, strict=True))[:2])
    return by_round(n_B)._replace(draft_BJ=draft_BJ, coin_BJ=coin_BJ)


@pytest.mark.parametrize("law", LAWS)
def test_six_tokens_keyed_as_in_decoding_follow_the_target(law):
    """Chi-square over the 729 chains; noise that one round or stream shares with another would show."""
    rng = np.random.default_rng(22)
    p_VV, q_VV = markov(rng, 0.15), markov(rng, 0.1)
    counts = simulate(LAWS[law], by_round, p_VV, q_VV)
    oracle.assert_follows(counts, plain_chains(p_VV))


def test_numbers_keyed_by_absolute_position_would_bias_block_and_the_test_sees_it():
    """Token looks at nothing past the first rejection, so that it would not mind; block does."""
    rng = np.random.default_rng(22)
    p_VV, q_VV = markov(rng, 0.15), markov(rng, 0.1)
    oracle.assert_follows(simulate(LAWS["token"], by_position, p_VV, q_VV), plain_chains(p_VV))
    counts = simulate(LAWS["block"], by_position, p_VV, q_VV)
    with pytest.raises(AssertionError, match="chi-square"):
        oracle.assert_follows(counts, plain_chains(p_VV))


def drawn_tree(law, p_VV, q_VV, key_of_node):
    """Counts of the first three tokens after token 0 over ROWS seeds: 2x2 children by ``pick_distinct``, then p."""
    rng = np.random.default_rng(24)
    rows = np.arange(ROWS)
    length_B = jnp.full(ROWS, 9, jnp.int32)
    q = jnp.asarray(q_VV, jnp.float32)
    pick = jax.jit(
        lambda q_BV, offset, node: Draws(seeds(), length_B, coupled=False).pick_distinct(q_BV, 2, offset, node)
    )
    first_BC = np.asarray(pick(q[jnp.zeros(ROWS, int)], 0, 0))
    tokens_BJ = np.concatenate([first_BC, *(pick(q[first_BC[:, c]], 1, key_of_node(c + 1)) for c in range(2))], 1)
    parents = np.array(SHAPES["2x2 level by level"].parents)
    depths = np.array([1, 1, 2, 2, 2, 2])
    topology = Topology(*(jnp.tile(jnp.asarray(x, jnp.int32)[None], (ROWS, 1)) for x in (parents, depths)))
    node_BT = np.concatenate([np.zeros((ROWS, 1), int), tokens_BJ], 1)
    q_BJV = q[node_BT[:, parents]]
    drafts = Drafts(jnp.asarray(tokens_BJ, jnp.int32), q_BJV, topology, jnp.ones(tokens_BJ.shape, bool))
    u = round_uniforms(seeds(), length_B, 6)
    verdict = law(jnp.asarray(p_VV, jnp.float32)[node_BT], drafts, u.coin_BJ, 2)
    tokens_BT = np.pad(np.take_along_axis(node_BT, np.asarray(verdict.path_BD), 1), ((0, 0), (0, 1)))
    n_B = np.asarray(verdict.n_accepted_B)
    tokens_BT[rows, n_B] = draw(verdict.last_BV, u.last_B)
    for i in range(1, 3):
        tokens_BT[:, i] = np.where(n_B < i, draw(p_VV[tokens_BT[:, i - 1]], rng.random(ROWS)), tokens_BT[:, i])
    return np.bincount(np.ravel_multi_index(tuple(tokens_BT.T), (VOCAB,) * 3), minlength=27)


@pytest.mark.parametrize("law", LAWS)
def test_a_tree_of_real_draws_follows_the_target(law):
    """Chi-square of three tokens, drafts and coins from the same seeds as in decoding."""
    rng = np.random.default_rng(19)
    p_VV, q_VV = markov(rng, 0.15), markov(rng, 0.1)
    plain = (p_VV[0][:, None] * p_VV)[..., None] * p_VV
    oracle.assert_follows(drawn_tree(LAWS[law], p_VV, q_VV, lambda node: node), plain)


def test_cousins_drawn_with_the_same_noise_would_bias_block():
    """Why a draw below a node has the node in its key, not its depth alone."""
    rng = np.random.default_rng(19)
    p_VV, q_VV = markov(rng, 0.15), markov(rng, 0.1)
    plain = (p_VV[0][:, None] * p_VV)[..., None] * p_VV
    with pytest.raises(AssertionError, match="chi-square"):
        oracle.assert_follows(drawn_tree(LAWS["block"], p_VV, q_VV, lambda node: 1), plain)


def test_coupled_text_is_the_same_in_every_round():
    """Whatever was drafted, at any gamma: the committed tokens are those of plain decoding with the same seed."""
    rng = np.random.default_rng(20)
    vocab, rows = 7, 50
    p_VV = rng.dirichlet(np.ones(vocab), vocab).astype(np.float32)
    q_VV = (0.7 * p_VV + 0.3 * rng.dirichlet(np.ones(vocab), vocab)).astype(np.float32)
    own = np.stack([np.arange(rows, dtype=np.uint32), np.full(rows, 5, np.uint32)], 1)
    choose = jax.jit(noise.coupled_choice)
    match_law = jax.jit(verify.match_law, static_argnums=2)

    def text(gamma, drawn):
        tokens = np.zeros((rows, 40), int)
        n_B, drafted = np.ones(rows, int), 0
        while (n_B < 24).any():
            draws = Draws(jnp.asarray(own), jnp.asarray(n_B, jnp.int32), coupled=True)
            nodes = [tokens[np.arange(rows), n_B - 1]]
            for i in range(gamma):
                law = jnp.asarray(q_VV[nodes[-1]])
                nodes.append(np.asarray(draws.pick(law, i)) if drawn else rng.integers(vocab, size=rows))
            node_BT = np.stack(nodes, 1)
            position_BT = jnp.asarray(n_B[:, None] + np.arange(gamma + 1), jnp.int32)
            choice_BT = choose(jnp.asarray(p_VV[node_BT]), jnp.asarray(own), position_BT)
            drafts = Drafts(
                jnp.asarray(node_BT[:, 1:], jnp.int32), None, chain(rows, gamma), jnp.ones((rows, gamma), bool)
            )
            match = match_law(choice_BT, drafts, gamma)
            accepted_B = np.asarray(match.n_accepted_B)
            for i in range(gamma + 1):
                write_B = (i <= accepted_B) & (n_B < 24)
                token_B = np.where(i < accepted_B, node_BT[:, min(i + 1, gamma)], match.last_token_B)
                tokens[np.arange(rows)[write_B], (n_B + i)[write_B]] = token_B[write_B]
            n_B = np.where(n_B < 24, n_B + accepted_B + 1, n_B)
            drafted += accepted_B.sum()
        return tokens[:, :24], drafted

    plain, _ = text(0, drawn=True)
    accepted = {}
    for gamma, drawn in ((1, True), (3, True), (3, False)):
        tokens, accepted[gamma, drawn] = text(gamma, drawn)
        np.testing.assert_array_equal(tokens, plain)
    assert accepted[3, True] > 2 * accepted[3, False] > 0
