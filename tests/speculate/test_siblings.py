"""Trees drawn from laws that know their depth alone: the procedure and the laws together, summed over all outcomes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.speculate import verify
from jaxspec.speculate.siblings import draw_siblings
from jaxspec.speculate.topology import Drafts
from jaxspec.speculate.tree import StaticTree
from tests.speculate import enumeration, oracle
from tests.speculate.enumeration import Case, Shape

LAWS = {
    "token": jax.jit(verify.token_law, static_argnums=3),
    "block": jax.jit(verify.block_law, static_argnums=3),
}
VOCAB, DRAFTED, DEPTH = 4, 7, 3
IDS = (3, 255, 256, 599)  # of the laws that are drawn from: several blocks of the vocabulary
TREES = {
    "2x2": ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)),
    "uneven": ((0,), (1,), (2,), (0, 0), (0, 2), (1, 0)),  # a rank that is passed over is no draw
    "deep": ((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)),
}
DRAW = jax.jit(draw_siblings, static_argnums=(1, 2))


def of(name: str) -> tuple[StaticTree, Shape]:
    tree = StaticTree(TREES[name])
    return tree, Shape(tree.parents, (True,) * tree.drafts)


def by_depth(q_DV: np.ndarray) -> list[np.ndarray]:
    """As tables by prefix; the last, below the leaves, is never drawn from."""
    vocab = q_DV.shape[1]
    return [np.broadcast_to(q_V, (vocab,) * (n + 1)) for n, q_V in enumerate((*q_DV, q_DV[-1]))]


def boxes(q_DV: np.ndarray, tree: StaticTree, tokens_NJ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the uniforms of each filling must lie: [N, J] lower ends and widths.

    The j-th interval is that of the token in the law of its depth without the earlier siblings, ids in order.
    """
    low_NJ, width_NJ = np.zeros(tokens_NJ.shape), np.zeros(tokens_NJ.shape)
    rows = np.arange(len(tokens_NJ))
    for j, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
        left_NV = np.repeat(q_DV[None, depth - 1], len(rows), 0)
        for i in range(j):
            if tree.parents[i] == parent:
                left_NV[rows, tokens_NJ[:, i]] = 0
        upto_NV = np.cumsum(left_NV, 1) / left_NV.sum(1, keepdims=True)
        width_NJ[:, j] = left_NV[rows, tokens_NJ[:, j]] / left_NV.sum(1)
        low_NJ[:, j] = upto_NV[rows, tokens_NJ[:, j]] - width_NJ[:, j]
    return low_NJ, width_NJ


@pytest.mark.parametrize("name", TREES)
def test_every_outcome_has_its_box_of_uniforms(name):
    """The boxes tile the cube, so the chance of an outcome is the volume of its box: the draws are without
    replacement below a node, from the law of its depth, and independent below different nodes."""
    tree, shape = of(name)
    rng = np.random.default_rng(61)
    q_DV = np.array([enumeration.uneven(rng, VOCAB) + 0.02 for _ in range(tree.depth)])
    q_DV /= q_DV.sum(1, keepdims=True)
    fillings_NJ = enumeration.drawable(shape, VOCAB)
    low_NJ, width_NJ = boxes(q_DV, tree, fillings_NJ)
    assert width_NJ.prod(1).sum() == pytest.approx(1)
    np.testing.assert_allclose(width_NJ.prod(1), enumeration.drawing_chance(by_depth(q_DV), shape, fillings_NJ))
    wide_DV = np.zeros((tree.depth, 600), np.float32)
    wide_DV[:, IDS] = q_DV
    for _ in range(4):
        inside_NJ = rng.choice([1e-3, 0.5, 1 - 1e-3], size=fillings_NJ.shape)
        uniform_NJ = jnp.asarray(low_NJ + inside_NJ * width_NJ, jnp.float32)
        q_NDV = jnp.broadcast_to(jnp.asarray(wide_DV)[None], (len(fillings_NJ), *wide_DV.shape))
        drawn_NJ = np.asarray(DRAW(q_NDV, tree.parents, tree.depths, uniform_NJ))
        np.testing.assert_array_equal(drawn_NJ, np.array(IDS)[fillings_NJ])


def judged(law: str, cases: list[Case], dtype: str) -> list[float]:
    """How far the joint law of all that a round can commit is from the target's, for every case."""
    batch, owner = enumeration.plan(cases, VOCAB, DRAFTED, np.random.default_rng(5))
    with jax.enable_x64(dtype == "float64"):
        verdict = enumeration.evaluate(LAWS[law], batch, drawn=True, dtype=dtype, depth=DEPTH)
    results = enumeration.committed(cases, batch, owner, verdict, VOCAB, whole_path=law == "token")
    assert max(result.accepted for result in results) > 0.5
    pairs = zip(cases, results, strict=True)
    return [oracle.distance(result.joint(case.p), oracle.plain_law(case.p)) for case, result in pairs]


@pytest.mark.parametrize("law", LAWS)
def test_drawn_trees_are_lossless_with_independent_cousins(law):
    """Float32, on laws that know their depth alone, also with the zeros that filters leave."""
    rng = np.random.default_rng(62)
    cases = []
    for name in TREES:
        tree, shape = of(name)
        for kind in (enumeration.uneven, enumeration.on_ids((0, 2, 3))):
            p = enumeration.tables(rng, VOCAB, tree.depth + 1, enumeration.uneven)
            q = by_depth(np.array([kind(rng, VOCAB) for _ in range(tree.depth)]))
            cases.append(Case(shape, p, q, q))
    assert max(judged(law, cases, "float32")) < 1e-5


def shared_fillings(q_DV: np.ndarray, tree: StaticTree) -> tuple[np.ndarray, np.ndarray]:
    """One list of draws per depth, from which all nodes of the depth take their children; [N, J] and chances [N]."""
    widths = [1 + max(tree.orders[j] for j in tree.level(depth)) for depth in range(1, tree.depth + 1)]
    lists = [list(itertools.permutations(range(q_DV.shape[1]), width)) for width in widths]
    tokens, chances = [], []
    for chosen in itertools.product(*lists):
        chance = 1.0
        for q_V, ids in zip(q_DV, chosen, strict=True):
            left = 1.0
            for x in ids:
                chance *= q_V[x] / left
                left -= q_V[x]
        tokens.append([chosen[depth - 1][order] for depth, order in zip(tree.depths, tree.orders, strict=True)])
        chances.append(chance)
    return np.array(tokens), np.array(chances)


def test_cousins_that_share_their_draws_bias_the_block_law_and_not_the_token_law():
    """Why every node has draws of its own: block looks below several nodes of one depth, token follows one path."""
    rng = np.random.default_rng(63)
    cases = []
    for name in TREES:
        tree, shape = of(name)
        for _ in range(4):
            p = enumeration.tables(rng, VOCAB, tree.depth + 1, enumeration.uneven)
            q_DV = np.array([enumeration.uneven(rng, VOCAB) for _ in range(tree.depth)])
            fillings = shared_fillings(q_DV, tree)
            assert fillings[1].sum() == pytest.approx(1)
            cases.append(Case(shape, p, by_depth(q_DV), by_depth(q_DV), fillings))
    assert max(judged("token", cases, "float64")) < 1e-6
    assert max(judged("block", cases, "float64")) > 1e-3


@pytest.mark.parametrize("law", LAWS)
def test_a_law_that_many_drafts_share_counts_as_a_law_each(law):
    """Bit for bit: ``law_BJ`` against one q per draft."""
    tree, _ = of("uneven")
    rng = np.random.default_rng(64)
    rows = 300
    p_BTV = rng.dirichlet(np.ones(VOCAB) / 2, (rows, tree.drafts + 1)).astype(np.float32)
    q_BDV = jnp.asarray(rng.dirichlet(np.ones(VOCAB), (rows, tree.depth)), jnp.float32)
    coin_BJ, uniform_BJ = (jnp.asarray(rng.random((rows, tree.drafts)), jnp.float32) for _ in "cu")
    tokens_BJ = DRAW(q_BDV, tree.parents, tree.depths, uniform_BJ)
    topology, live_BJ = tree.topology(rows), jnp.ones((rows, tree.drafts), bool)
    law_BJ = topology.depth_BJ - 1
    each_BJV = jnp.take_along_axis(q_BDV, law_BJ[:, :, None], axis=1)
    one, other = (
        LAWS[law](jnp.asarray(p_BTV), drafts, coin_BJ, tree.depth)
        for drafts in (
            Drafts(tokens_BJ, q_BDV, topology, live_BJ, law_BJ),
            Drafts(tokens_BJ, each_BJV, topology, live_BJ),
        )
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert len(set(np.asarray(one.n_accepted_B).tolist())) == tree.depth + 1


def test_a_law_that_runs_out_gives_ids_that_it_cannot_say():
    tree = StaticTree(((0,), (1,), (2,), (3,), (0, 0)))
    q_BDV = jnp.zeros((2, 2, 300)).at[:, :, 0].set(0.5).at[:, :, 280].set(0.5).at[1, 0, 280].set(0.0)
    rng = np.random.default_rng(65)
    for _ in range(5):
        uniform_BJ = jnp.asarray(rng.random((2, 5)), jnp.float32)
        tokens_BJ = np.asarray(DRAW(q_BDV, tree.parents, tree.depths, uniform_BJ))
        assert set(tokens_BJ[0, :2]) == {0, 280}
        assert tokens_BJ[1, 0] == 0
        for row, children in ((0, (2, 3)), (1, (1, 2, 3))):
            assert (np.asarray(q_BDV)[row, 0, tokens_BJ[row, list(children)]] == 0).all()
