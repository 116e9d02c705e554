"""Dynamic trees against a plain search over paths, and what must hold for every one of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.errors import UserError
from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate import growth, sampling
from jaxspec.speculate.growth import NOWHERE, DynamicTree, Selected, start
from jaxspec.speculate.topology import ancestors
from jaxspec.speculate.tree import paths

grow_level = jax.jit(growth.grow_level, static_argnames="topk")
select = jax.jit(growth.select, static_argnames="drafts")
largest = jax.jit(sampling.largest, static_argnames="width")

VOCAB = 13


def random_law(seed):
    """Logits of a draft that depend on the path so far; distinct for all paths."""

    def logits(path):
        return np.random.default_rng([seed, len(path), *path]).normal(size=VOCAB).astype(np.float32) * 2

    return logits


def from_table(table):
    """Probabilities written out by path; every other token has none."""

    def logits(path):
        p_V = np.zeros(VOCAB)
        for token, p in table.get(path, {}).items():
            p_V[token] = p
        with np.errstate(divide="ignore"):
            return np.log(p_V).astype(np.float32)

    return logits


def grown(laws, topk, levels):
    """Grows one tree per law side by side, as a drafter would: what each frontier node's path says of its next token.

    Returns the growth and, per row, the paths of all nodes made.
    """
    tree = start(len(laws))
    made = [[()] for _ in laws]  # by node
    for _ in range(levels):
        nodes = np.asarray(tree.frontier.node_BK)
        logits = np.asarray([[law(made[b][node]) for node in nodes[b]] for b, law in enumerate(laws)])
        before = tree.token_BC.shape[1]
        tree = grow_level(tree, logits, topk=topk)
        for b in range(len(laws)):
            pairs = zip(tree.parent_BC[b, before:].tolist(), tree.token_BC[b, before:].tolist(), strict=True)
            made[b] += [(*made[b][parent], token) for parent, token in pairs]
    return tree, made


def searched(law, topk, levels, drafts):
    """EAGLE-2 as a search over paths, in float64: {path: score}, the frontiers' paths, and the ``drafts`` best."""
    scores, frontier, frontiers = {(): 0.0}, [()], []
    for _ in range(levels):
        level = {}
        for path in frontier:
            x_V = law(path).astype(np.float64)
            log_p_V = x_V - np.log(np.sum(np.exp(x_V)))
            for token in np.argsort(-log_p_V, kind="stable")[:topk]:
                level[(*path, int(token))] = scores[path] + log_p_V[token]
        scores |= level
        frontier = sorted(level, key=lambda path: -level[path])[:topk]
        frontiers.append(frontier)
    del scores[()]
    return scores, frontiers, set(sorted(scores, key=lambda path: -scores[path])[:drafts])


def tree_paths(found: Selected, row=0):
    """The token path of every live node."""
    parents, tokens, live = (np.asarray(x)[row] for x in (found.topology.parent_BJ, found.tokens_BJ, found.live_BJ))
    known = [()]
    for parent, token in zip(parents[live], tokens[live], strict=True):
        known.append((*known[parent], int(token)))
    return known[1:]


@pytest.mark.parametrize(("topk", "levels", "drafts"), [(1, 4, 3), (2, 3, 7), (3, 4, 11), (4, 2, 20), (4, 5, 17)])
def test_the_nodes_of_a_search_over_paths(topk, levels, drafts) -> None:
    """Three rows at once, each with a law of its own."""
    laws = [random_law(seed) for seed in (5, 6, 7)]
    tree, made = grown(laws, topk, levels)
    found = select(tree, drafts=drafts)
    for row, law in enumerate(laws):
        scores, frontiers, best = searched(law, topk, levels, drafts)
        assert set(made[row][1:]) == scores.keys()
        assert [made[row][node] for node in tree.frontier.node_BK[row].tolist()] == frontiers[-1]
        np.testing.assert_allclose(tree.score_BC[row], [scores[path] for path in made[row][1:]], atol=1e-5)
        own = tree_paths(found, row)
        assert set(own) == best
        assert len(own) == drafts
        assert [made[row][1 + candidate] for candidate in found.candidate_BJ[row].tolist()] == own
        np.testing.assert_allclose(found.score_BJ[row], [scores[path] for path in own], atol=1e-5)


def test_a_small_tree_as_a_picture() -> None:
    """topk 2, three levels, of 2 + 4 + 4 nodes the best 6. Token 7 after 1 is likelier than 2 at once."""
    law = from_table(
        {
            (): {1: 0.7, 2: 0.3},
            (1,): {7: 0.6, 8: 0.4},  # 0.42, 0.28
            (2,): {7: 0.9, 9: 0.1},  # 0.27, 0.03
            (1, 7): {3: 0.5, 4: 0.5},  # 0.21 each; frontier: (1, 7) and (1, 8)
            (1, 8): {5: 0.8, 6: 0.2},  # 0.224, 0.056
        }
    )
    tree, _ = grown([law], 2, 3)
    assert tree.token_BC[0].tolist() == [1, 2, 7, 8, 7, 9, 3, 4, 5, 6]
    assert tree.parent_BC[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert tree.depth_BC[0].tolist() == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    found = select(tree, drafts=6)
    assert found.tokens_BJ[0].tolist() == [1, 2, 7, 8, 7, 5]
    assert found.topology.parent_BJ[0].tolist() == [0, 0, 1, 1, 2, 4]
    assert found.topology.depth_BJ[0].tolist() == [1, 1, 2, 2, 2, 3]
    assert found.live_BJ.all()
    assert np.asarray(ancestors(found.topology)[0]).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 0, 1],
    ]
    assert paths(found.topology).tolist() == [[0, 1, 3, -1], [0, 2, 5, -1], [0, 1, 4, 6]]


def test_what_the_drafter_feeds_is_a_tree_of_its_own() -> None:
    """The frontiers one after another: each node below the place of its parent in the frontier before."""
    law = from_table(
        {
            (): {1: 0.7, 2: 0.3},
            (1,): {7: 0.4, 8: 0.6},
            (2,): {7: 0.9, 9: 0.1},
            (1, 8): {3: 0.2, 4: 0.8},
            (1, 7): {5: 0.9, 6: 0.1},
        }
    )
    tree, made = grown([law], 2, 3)
    assert made[0][1:3] == [(1,), (2,)]
    # Frontiers: (1) (2); (1 8) (1 7); (1 8 4) (1 7 5).
    assert tree.expanded.parent_BJ[0].tolist() == [0, 0, 1, 1, 3, 4]
    assert tree.expanded.depth_BJ[0].tolist() == [1, 1, 2, 2, 3, 3]
    assert tree.frontier.token_BK[0].tolist() == [4, 5]
    assert tree.frontier.source_BK[0].tolist() == [0, 1]
    np.testing.assert_allclose(np.exp(tree.frontier.score_BK[0]), [0.7 * 0.6 * 0.8, 0.7 * 0.4 * 0.9], rtol=1e-5)


def test_ties_go_to_the_shallower_and_the_earlier() -> None:
    """A draft that is certain, token after token: children tie with their parents exactly, at log-probability 0."""
    certain = from_table({(3,) * n: {3: 1.0} for n in range(8)})
    tree, _ = grown([certain], 2, 5)
    for drafts in range(1, 6):
        found = select(tree, drafts=drafts)
        assert found.topology.parent_BJ[0].tolist() == list(range(drafts))
        assert found.tokens_BJ[0].tolist() == [3] * drafts
    even = from_table({(): {1: 0.5, 2: 0.5}, (1,): {3: 1.0}, (2,): {4: 1.0}, (1, 3): {5: 1.0}, (2, 4): {6: 1.0}})
    tree, _ = grown([even], 2, 3)
    assert tree_paths(select(tree, drafts=3)) == [(1,), (2,), (1, 3)]
    assert tree_paths(select(tree, drafts=5)) == [(1,), (2,), (1, 3), (2, 4), (1, 3, 5)]


def test_places_that_nothing_fills_are_last_and_dead() -> None:
    """A draft that knows three tokens in all: of 10 places 3 are taken."""
    law = from_table({(): {1: 0.7, 2: 0.3}, (1,): {7: 1.0}})
    tree, _ = grown([law, random_law(1)], 2, 3)
    found = select(tree, drafts=10)
    assert found.live_BJ.tolist() == [[True] * 3 + [False] * 7, [True] * 10]
    assert found.tokens_BJ[0, :3].tolist() == [1, 2, 7]
    assert found.topology.parent_BJ[0].tolist() == [0, 0, 1] + [0] * 7
    assert found.topology.depth_BJ[0].tolist() == [1, 1, 2] + [NOWHERE] * 7
    assert NOWHERE > GAMMA_MAX  # so that no bound on levels makes such a place live
    assert found.candidate_BJ[0, 3:].tolist() == [0] * 7
    assert jnp.isneginf(found.score_BJ[0, 3:]).all()
    assert ((found.tokens_BJ >= 0) & (found.tokens_BJ < VOCAB)).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_draft_that_is_not_finite_makes_no_node_and_hurts_no_other(poison) -> None:
    """The whole of it: no live node. After one path: no live node below that path. Never a token outside."""
    healthy = random_law(2)

    def broken_below(path):
        def law(other):
            x_V = healthy(other)
            return np.full_like(x_V, poison) if other[: len(path)] == path else x_V

        return law

    best = int(np.argmax(healthy(())))
    tree, _ = grown([healthy, broken_below(()), broken_below((best,))], 3, 3)
    found = select(tree, drafts=9)
    alone, _ = grown([healthy], 3, 3)
    assert tree_paths(found, 0) == tree_paths(select(alone, drafts=9))
    assert not found.live_BJ[1].any()
    third = tree_paths(found, 2)
    assert (best,) in third
    assert all(len(path) == 1 for path in third if path[0] == best)
    assert ((found.tokens_BJ >= 0) & (found.tokens_BJ < VOCAB)).all()


def test_a_row_s_tree_depends_on_its_own_levels_alone() -> None:
    """Grown 2 levels deep, or 5 because of a neighbour: the same tree, in the same places."""
    laws = [random_law(seed) for seed in (8, 9, 10)]
    options = DynamicTree(topk=3, depth=8, nodes=16)
    deep, _ = grown(laws, 3, 5)
    levels = [2, 5, 1]
    together = select(deep, drafts=options.drafts(5), levels_B=jnp.asarray(levels))
    for row, own_levels in enumerate(levels):
        own, _ = grown([laws[row]], 3, own_levels)
        alone = select(own, drafts=options.drafts(own_levels))
        assert alone.live_BJ.all()
        filled = alone.live_BJ.shape[1]
        assert int(together.live_BJ[row].sum()) == filled
        assert together.topology.depth_BJ[row, :filled].max() <= own_levels
        for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(one[row, :filled], other[0])


def test_no_levels_no_live_node() -> None:
    tree, _ = grown([random_law(3)] * 2, 2, 2)
    found = select(tree, drafts=4, levels_B=jnp.asarray([0, 2]))
    assert found.live_BJ.tolist() == [[False] * 4, [True] * 4]


@st.composite
def growths(draw):
    """Levels of logits for two rows. Coarse values, so that ties, certainty and impossible tokens are common."""
    # A few shapes, since each is compiled.
    topk, levels, drafts = draw(st.sampled_from([(1, 3, 2), (2, 1, 2), (2, 3, 7), (3, 4, 9), (4, 2, 5)]))
    values = draw(st.sampled_from([[0.0], [0.0, 1.0], [-np.inf, 0.0, 40.0], [-1e30, 0.0, 1e30], [-3.0, 0.5, np.nan]]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shapes = [(2, topk if level else 1, VOCAB) for level in range(levels)]
    return topk, [rng.choice(np.asarray(values, np.float32), shape) for shape in shapes], drafts


@settings(max_examples=80, deadline=None)
@given(growths())
def test_properties_of_random_growths(case) -> None:
    topk, levels, drafts = case
    tree = start(2)
    for logits in levels:
        tree = grow_level(tree, logits, topk=topk)
    found = select(tree, drafts=drafts)
    parents, depths, tokens, live, scores, candidates = (
        np.asarray(x) for x in (*found.topology, found.tokens_BJ, found.live_BJ, found.score_BJ, found.candidate_BJ)
    )
    above = np.asarray(ancestors(found.topology))
    for row in range(2):
        count = int(live[row].sum())
        assert live[row, :count].all()  # the empty places are last
        assert count == min(drafts, int((np.asarray(tree.score_BC[row]) > -np.inf).sum()))
        for j in range(count):
            parent = parents[row, j]
            assert 0 <= parent <= j  # parents first
            assert depths[row, j] == (1 if parent == 0 else depths[row, parent - 1] + 1)
            # Closed upwards: the parent in the growth is the parent in the tree.
            own = np.asarray(tree.parent_BC)[row, candidates[row, j]]
            assert own == (0 if parent == 0 else 1 + candidates[row, parent - 1])
            assert scores[row, j] <= (0 if parent == 0 else scores[row, parent - 1])
            siblings = [i for i in range(count) if parents[row, i] == parent]
            assert len({tokens[row, i] for i in siblings}) == len(siblings)
            assert list(scores[row, siblings]) == sorted(scores[row, siblings], reverse=True)
            assert above[row, j + 1].tolist() == (above[row, parent] | (np.arange(drafts + 1) == j + 1)).tolist()
        worst = scores[row, :count].min(initial=np.inf)
        rest = np.delete(np.asarray(tree.score_BC[row]), candidates[row, :count])
        assert (rest <= worst).all()


@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 3, 64), (2, 3, 65), (1, 2, 1009), (3, 1, 4096)])
@pytest.mark.parametrize("width", [1, 4])
def test_the_largest_and_where_they_are(shape, width) -> None:
    x = np.random.default_rng(4).permutation(np.prod(shape)).reshape(shape).astype(np.float32)
    values, ids = largest(x, width=width)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, np.argsort(-x, axis=-1)[..., :width])
    np.testing.assert_array_equal(values, np.take_along_axis(x, np.asarray(ids), axis=-1))


@pytest.mark.parametrize("finite", [0, 1, 3])
def test_the_largest_where_there_are_too_few(finite) -> None:
    """The padding of the groups never comes out as an id."""
    x = np.full((2, 1009), -np.inf, np.float32)
    x[:, 1009 - finite :] = 1.0
    values, ids = largest(x, width=5)
    assert np.isfinite(values).sum() == 2 * finite
    assert (ids < 1009).all()
    for row in range(2):
        assert sorted(ids[row, :finite].tolist()) == list(range(1009 - finite, 1009))


def test_sizes_of_rounds() -> None:
    """EAGLE's top_k 4, depth 3, total_tokens 12 is topk 4, depth 4, nodes 12 here."""
    options = DynamicTree(topk=4, depth=4, nodes=12)
    assert [options.drafts(gamma) for gamma in (0, 1, 2, 4, 8)] == [0, 4, 11, 11, 11]
    assert [options.levels(gamma) for gamma in (0, 2, 4, 8)] == [0, 2, 4, 4]
    assert DynamicTree(topk=1, depth=5, nodes=60).drafts(8) == 5  # a chain


def test_options_out_of_range_are_all_told() -> None:
    with pytest.raises(UserError) as caught:
        DynamicTree(topk=0, depth=9, nodes=65)
    assert str(caught.value) == (
        "tree_topk: expected 1 to 63, got 0; tree_depth: expected 1 to 8, got 9; tree_nodes: expected 2 to 64, got 65"
    )
    with pytest.raises(UserError, match="tree_depth: expected 1 to 8, got True"):
        DynamicTree(topk=2, depth=True, nodes=4)


def test_more_children_than_tokens_or_drafts_than_candidates_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at most 3, the draft's vocabulary, got 4"):
        growth.grow_level(start(1), jnp.zeros((1, 1, 3)), 4)
    with pytest.raises(ValueError, match="expected 1 to 2, the candidates there are, got 3"):
        growth.select(growth.grow_level(start(1), jnp.zeros((1, 1, 3)), 2), 3)
