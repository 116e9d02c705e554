"""Static trees: from paths and products, merged, checked, as pictures; and their retrieval paths."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.errors import UserError
from jaxspec.shapes import GAMMA_MAX, NODES_MAX
from jaxspec.speculate import tree
from jaxspec.speculate.topology import Topology, ancestors
from jaxspec.speculate.tree import StaticTree, best_tree, cartesian, default_tree, parse_tree_choices, paths

# A tree with one long branch:      root
#                                 0    1    2
#                                0 1   0
#                                0
UNEVEN = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


def picture(mask) -> list[str]:
    return ["".join("01"[int(x)] for x in row) for row in np.asarray(mask)]


def test_an_uneven_tree_as_a_picture() -> None:
    found = StaticTree(tuple(reversed(UNEVEN)) + UNEVEN)  # the order of the user and repetitions do not matter
    assert found.choices == UNEVEN
    assert found.parents == (0, 0, 0, 1, 1, 2, 4)
    assert found.depths == (1, 1, 1, 2, 2, 2, 3)
    assert found.ranks == (0, 1, 2, 0, 1, 0, 0)
    assert found.orders == found.ranks
    assert (found.drafts, found.depth) == (7, 3)
    assert [list(found.level(depth)) for depth in (1, 2, 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [found.topk(depth) for depth in (1, 2, 3)] == [3, 2, 1]
    topology = found.topology(2)
    assert topology.parent_BJ.dtype == topology.depth_BJ.dtype == jnp.int32
    for row in range(2):
        assert picture(ancestors(topology)[row]) == [
            "10000000",
            "11000000",
            "10100000",
            "10010000",
            "11001000",
            "11000100",
            "10100010",
            "11001001",
        ]
        assert paths(topology, row).tolist() == [[0, 3, -1, -1], [0, 1, 5, -1], [0, 2, 6, -1], [0, 1, 4, 7]]


def test_a_product_of_top_k_as_a_picture() -> None:
    found = parse_tree_choices("2,2,1")
    assert picture(ancestors(found.topology(1))[0]) == [
        "10000000000",
        "11000000000",
        "10100000000",
        "11010000000",
        "11001000000",
        "10100100000",
        "10100010000",
        "11010001000",
        "11001000100",
        "10100100010",
        "10100010001",
    ]
    assert paths(found.topology(1)).tolist() == [[0, 1, 3, 7], [0, 1, 4, 8], [0, 2, 5, 9], [0, 2, 6, 10]]


def test_a_chain_is_the_tree_with_one_path() -> None:
    found = parse_tree_choices("1,1,1")
    assert found.parents == (0, 1, 2)
    assert picture(ancestors(found.topology(1))[0]) == ["1000", "1100", "1110", "1111"]
    assert paths(found.topology(1)).tolist() == [[0, 1, 2, 3]]


def test_no_live_draft_leaves_the_root_alone() -> None:
    topology = parse_tree_choices("2,1").topology(1)
    assert paths(topology, live=np.zeros(4, bool)).tolist() == [[0]]
    assert paths(Topology(jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, 0), jnp.int32))).tolist() == [[0]]


def test_paths_of_live_drafts_only() -> None:
    """A row that drafts fewer levels than the batch sees the tree cut off below them."""
    found = StaticTree(UNEVEN)
    live = np.asarray(found.depths) <= 2
    expected = [[0, 3, -1], [0, 1, 4], [0, 1, 5], [0, 2, 6]]
    assert paths(found.topology(1), live=live).tolist() == expected
    assert paths(found.restricted(2).topology(1)).tolist() == expected


def test_an_upper_part_is_a_prefix_with_the_same_numbers() -> None:
    found = parse_tree_choices("3,2,2,1")
    for depth in range(1, 6):
        upper = found.restricted(depth)
        assert upper.choices == found.choices[: upper.drafts]
        assert upper.parents == found.parents[: upper.drafts]
        assert upper.depth == min(depth, 4)


def test_parts_are_merged_into_shared_prefixes() -> None:
    """4 + 8 nodes and a chain of 5 share the first two nodes of the chain: 15, not 17."""
    found = parse_tree_choices("4,2; 1,1,1,1,1 ;[[0], [0, 1], [1], [1, 2]]")
    expected = {(a,) for a in range(4)} | {(a, b) for a in range(4) for b in range(2)}
    expected |= {(0,) * n for n in range(1, 6)} | {(1, 2)}
    assert set(found.choices) == expected
    assert found.drafts == 16
    assert parse_tree_choices(["4,2", "1,1,1,1,1", "[[0],[0,1],[1],[1,2]]"]) == found


@pytest.mark.parametrize("value", ["4,2,1", " 4, 2 ,1", [4, 2, 1], (4, 2, 1), "[4, 2, 1]"])
def test_every_way_to_write_a_product(value) -> None:
    assert parse_tree_choices(value).choices == cartesian([4, 2, 1])


def test_every_way_to_write_paths() -> None:
    lists = [list(path) for path in UNEVEN]
    for value in (lists, json.dumps(lists), UNEVEN):
        assert parse_tree_choices(value).choices == UNEVEN


@pytest.mark.parametrize(
    ("value", "findings"),
    [
        ([[0], [1, 0], [0, 2, 1]], ["path [1, 0]: its parent [1] is missing", "path [0, 2, 1]: its parent [0, 2] is"]),
        ([[0], [-1], [64], [0, 99]], ["path [-1]: expected ranks from 0 to 63", "path [64]: ", "path [0, 99]: "]),
        ([[0] * n for n in range(1, 10)], ["path [0, 0, 0, 0, 0, 0, 0, 0, 0]: expected 1 to 8 levels, got 9"]),
        ([[0], []], ["path []: expected 1 to 8 levels, got 0"]),
        ([], ["expected at least one path, got none"]),
        ([[a] for a in range(40)] + [[0, a] for a in range(24)], ["at most 63 nodes below the root, got 64"]),
        ("8,8", ["at most 63 nodes below the root, 8,8 has 72"]),
        ("32,1", ["at most 63 nodes below the root, 32,1 has 64"]),
        ("9999999,9999999,9999999", ["at most 63 nodes below the root, 9999999,9999999,9999999 has"]),
        ("1,1,1,1,1,1,1,1,1", ["expected 1 to 8 counts of at least 1, got 1,1,1,1,1,1,1,1,1"]),
        ("4,0", ["expected 1 to 8 counts of at least 1, got 4,0"]),
        ("", ["expected paths like", "got ''"]),
        ("4,2;", ["expected paths like", "got ''"]),
        ("4,x", ["got '4,x'"]),
        ("9" * 5000, ["got '999"]),
        ("[" * 100_000, ["expected paths like"]),
        ("[[0], 1]", ["got [[0], 1]"]),
        ([[0], [True]], ["got [[0], [True]]"]),
        ([[0], [1.0]], ["got [[0], [1.0]]"]),
        ([[0], "10"], ["got [[0], '10']"]),
        ({"0": 1}, ["got {'0': 1}"]),
        (None, ["got None"]),
        (7, ["got 7"]),
    ],
)
def test_what_is_wrong_is_told_at_once_in_one_line(value, findings) -> None:
    with pytest.raises(UserError) as caught:
        parse_tree_choices(value)
    text = str(caught.value)
    assert text.startswith("tree_choices: ")
    assert "\n" not in text
    assert len(text) < 1000
    for finding in findings:
        assert finding in text


def test_ranks_may_have_gaps_but_drawn_children_are_counted_in_order() -> None:
    found = StaticTree(((0,), (2,), (5,), (2, 3), (2, 1)))
    assert found.ranks == (0, 2, 5, 1, 3)
    assert found.orders == (0, 1, 2, 0, 1)
    assert found.topk(1) == 6


def test_tokens_by_depth_and_rank() -> None:
    ranked_BDC = jnp.arange(2 * 3 * 5).reshape(2, 3, 5)  # row 30, depth 5, rank 1
    tokens = StaticTree(UNEVEN).tokens(ranked_BDC)
    assert tokens.tolist() == [[0, 1, 2, 5, 6, 5, 10], [15, 16, 17, 20, 21, 20, 25]]
    assert StaticTree(((0,), (3,), (3, 4))).tokens(ranked_BDC).tolist() == [[0, 3, 9], [15, 18, 24]]


def expected_accepted(choices, hits) -> float:
    return sum(np.prod([hits[depth][rank] for depth, rank in enumerate(path)]) for path in choices)


def test_the_best_tree_is_the_best_of_all_trees() -> None:
    """Against every tree of 4 nodes with up to 3 levels of up to 3 children, for several tables of chances."""
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    rng = np.random.default_rng(3)
    for _ in range(5):
        hits = np.sort(rng.dirichlet(np.ones(4), 3)[:, :3], axis=1)[:, ::-1].tolist()
        trees = [
            chosen
            for chosen in itertools.combinations(every, 4)
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
        ]
        best = max(expected_accepted(chosen, hits) for chosen in trees)
        assert expected_accepted(best_tree(hits, 4).choices, hits) == pytest.approx(best, rel=1e-12)


def test_the_best_tree_is_small_where_little_can_be_made() -> None:
    assert best_tree([[0.9], [0.5]], 7).choices == ((0,), (0, 0))
    assert best_tree([[1.0, 1.0], [1.0, 1.0]], 3).choices == ((0,), (1,), (0, 0))  # ties: the shallower first


@pytest.mark.parametrize("levels", range(1, GAMMA_MAX + 1))
def test_the_default_tree(levels) -> None:
    found = default_tree(levels)
    assert found.drafts == (tree.DEFAULT_RANKS if levels == 1 else tree.DEFAULT_DRAFTS)
    assert found.depth <= levels
    assert found.orders == found.ranks  # no gaps
    assert default_tree(levels, 63).drafts == (10 if levels == 1 else 63)


def test_the_default_tree_of_four_levels_as_paths() -> None:
    """Written out once, so that a change of the assumptions is seen."""
    assert default_tree(4).choices == (
        *((0,), (1,), (2,), (3,), (4,)),
        *((0, 0), (0, 1), (0, 2), (1, 0), (2, 0)),
        *((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)),
        (0, 0, 0, 0),
    )


@st.composite
def choice_lists(draw):
    """Random trees as users write them: any order, repetitions."""
    found = [(draw(st.integers(0, 3)),)]
    for _ in range(draw(st.integers(0, 40))):
        parent = draw(st.sampled_from([(), *found]))
        if len(parent) < GAMMA_MAX:
            found.append((*parent, draw(st.integers(0, 3))))
    return draw(st.permutations(found))


@settings(max_examples=60, deadline=None)
@given(choice_lists())
def test_properties_of_random_trees(choices) -> None:
    found = StaticTree(tuple(choices))
    nodes = ((), *found.choices)
    assert set(found.choices) == set(choices)
    for j, path in enumerate(found.choices):
        assert found.parents[j] <= j  # parents first
        assert nodes[found.parents[j]] == path[:-1]
        siblings = [i for i in range(found.drafts) if found.parents[i] == found.parents[j]]
        assert found.orders[j] == siblings.index(j)
        assert [found.ranks[i] for i in siblings] == sorted(found.ranks[i] for i in siblings)
    # Rows are padded to one width, so that the jitted closure is compiled once.
    topology = found.topology(1)
    short = ((0, 0), (0, NODES_MAX - 1 - found.drafts))
    padded = Topology(jnp.pad(topology.parent_BJ, short), jnp.pad(topology.depth_BJ, short, constant_values=1))
    above = np.asarray(ancestors(padded))[0, : len(nodes), : len(nodes)]
    expected = [[path[: len(other)] == other for other in nodes] for path in nodes]
    assert above.tolist() == expected
    retrieved = paths(topology)
    leaves = [path for path in nodes if not any(other[:-1] == path for other in found.choices)]
    assert [tuple(row[row >= 0]) for row in retrieved] == [
        tuple(nodes.index(leaf[:n]) for n in range(len(leaf) + 1)) for leaf in leaves
    ]
    assert (retrieved.max(axis=0) >= 0).all()
