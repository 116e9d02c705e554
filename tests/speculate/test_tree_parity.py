"""Our trees against the buffers and trees of the authors' code (Medusa, EAGLE-1, EAGLE-3).

What the authors number in their own ways (flat candidate indices, orders of retrieval rows) is derived here from our
trees, and lives in no other place.
"""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.cache import Tree
from jaxspec.speculate.growth import DynamicTree, Growth, Selected, grow_level, select, start
from jaxspec.speculate.topology import Topology, ancestors
from jaxspec.speculate.tree import StaticTree, parse_tree_choices, paths
from tests.heads.conftest import heads_folders, running  # noqa: F401 (fixtures)

PROMPTS = ("p7", "p33")
HEADS = ("eagle1", "eagle3")
# The authors' top_k 4, depth 3 and total_tokens 12: their depth leaves out the first level, their total has the root.
OPTIONS = DynamicTree(topk=4, depth=4, nodes=12)
# How far gaps between log-probabilities may lie from the authors'; measured: 9e-6.
ROUNDING = 5e-5


def choices_of(found, key) -> StaticTree:
    return parse_tree_choices([[int(rank) for rank in row if rank >= 0] for row in found[key]])


def sorted_rows(rows: np.ndarray) -> np.ndarray:
    """Lexicographic, what is shorter after what is longer: how EAGLE orders its retrieval rows when it sorts them."""
    return np.asarray(sorted(rows.tolist(), key=lambda row: [node if node >= 0 else 10**6 for node in row]))


def test_medusa_s_63_node_buffers(shared) -> None:
    found = np.load(shared / "fixtures/medusa/goldens.npz")
    tree = choices_of(found, "buffers__choices")
    assert (tree.drafts, tree.depth) == (63, 4)
    topology = tree.topology(1)
    assert np.array_equal(ancestors(topology)[0], found["buffers__medusa_attn_mask"][0, 0])
    assert [0, *tree.depths] == found["buffers__medusa_position_ids"].tolist()
    # Ten candidates per head, one head per level, after the root.
    flat = [1 + 10 * (depth - 1) + rank for depth, rank in zip(tree.depths, tree.ranks, strict=True)]
    assert [0, *flat] == found["buffers__tree_indices"].tolist()
    # Their rows start at the last leaf.
    assert np.array_equal(paths(topology)[::-1], found["buffers__retrieve_indices"])


def test_eagle_s_25_node_buffers(shared) -> None:
    found = np.load(shared / "fixtures/eagle1/goldens.npz")
    tree = choices_of(found, "static_tree__choices")
    assert (tree.drafts, tree.depth) == (25, 5)
    topology = tree.topology(1)
    assert np.array_equal(ancestors(topology)[0], found["static_tree__tree_attn_mask"][0, 0])
    assert [0, *tree.depths] == found["static_tree__tree_position_ids"].tolist()
    # Ten candidates per node that has children, in the order of those nodes.
    expanded = sorted(set(tree.parents))
    flat = [1 + 10 * expanded.index(parent) + rank for parent, rank in zip(tree.parents, tree.ranks, strict=True)]
    assert [0, *flat] == found["static_tree__tree_indices"].tolist()
    assert np.array_equal(sorted_rows(paths(topology)), found["static_tree__retrieve_indices"])


def test_medusa_s_candidates_by_depth_and_rank(shared) -> None:
    """First step of each trace: tree tokens from the heads' ten best, in the authors' cartesian candidates too."""
    found = np.load(shared / "fixtures/medusa/goldens.npz")
    traces = json.loads((shared / "fixtures/medusa/trace.json").read_text())["traces"]
    tree = choices_of(found, "buffers__choices")
    for prompt, key in (("p7", "p7__medusa_logits"), ("p33", "p33__medusa_logits_last8")):
        logits_MV = found[key][:, -1]
        ranked_DC = np.argsort(-logits_MV, axis=-1, kind="stable")[:4, :10]
        drafts = np.asarray(tree.tokens(jnp.asarray(ranked_DC)[None]))[0]
        tokens = np.asarray([traces[prompt]["steps"][0]["tree_candidates"][0], *drafts])
        assert tokens.tolist() == traces[prompt]["steps"][0]["tree_candidates"]
        rows = paths(tree.topology(1))[::-1]
        # The authors' padding reads token 0: the trap that ours, -1, does not have.
        assert np.array_equal(np.where(rows >= 0, tokens[rows], 0), found[f"trace__{prompt}__candidates_step0"])


class Drafted(NamedTuple):
    growth: Growth
    selected: Selected
    tokens_BJ: jax.Array  # target ids
    logits: tuple[jax.Array, ...]  # of every level


@pytest.fixture(scope="module")
def drafted(running, shared):  # noqa: F811
    """``drafted(name)``: both golden prompts as one ragged batch, expanded by the converted head level by level."""
    made = {}

    def run(name: str) -> Drafted:
        if name not in made:
            made[name] = draft(running(name, "1"), np.load(shared / f"fixtures/{name}/goldens.npz"))
        return made[name]

    return run


def draft(head, found) -> Drafted:
    lengths = np.asarray([len(found[f"{prompt}__ids"]) for prompt in PROMPTS])
    features_key = "features" if "p7__features" in found else "aux"
    longest, slots = int(lengths.max()), 59
    tokens = np.zeros((2, longest), np.int32)
    features = np.full((2, longest, found[f"p7__{features_key}"].shape[-1]), 1e3, np.float32)
    positions = np.full((2, longest), slots, np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : lengths[row]] = found[f"{prompt}__ids"]
        features[row, : lengths[row]] = found[f"{prompt}__{features_key}"]
        positions[row, : lengths[row]] = np.arange(lengths[row])

    @jax.jit
    def run(params, target_params, cache) -> Drafted:
        module, tables = head.definition.merge(params), head._tables(target_params)
        hidden_BTD, cache = module(tokens, features, positions, cache, tables)
        # Node 0 is the last row of the prompt: its hidden state is what the first level hangs on.
        hidden_BKD = jnp.take_along_axis(hidden_BTD, (lengths - 1)[:, None, None], axis=1)
        logits = [module.logits(hidden_BKD, tables)]
        growth = grow_level(start(2), logits[0], OPTIONS.topk)
        for level in range(1, OPTIONS.depth):
            frontier = growth.frontier
            fed_from = jnp.take_along_axis(hidden_BKD, frontier.source_BK[:, :, None], axis=1)
            first = 1 + (level - 1) * OPTIONS.topk
            above_BTU = ancestors(growth.expanded)[:, first:]
            tree = Tree(jnp.asarray(lengths - 1), jnp.asarray(first), above_BTU)
            positions_BK = jnp.broadcast_to((lengths + level - 1)[:, None], frontier.token_BK.shape)
            ids_BK = module.to_target(frontier.token_BK)
            hidden_BKD, cache = module(ids_BK, fed_from, positions_BK, cache, tables, tree)
            logits.append(module.logits(hidden_BKD, tables))
            growth = grow_level(growth, logits[-1], OPTIONS.topk)
        selected = select(growth, OPTIONS.drafts(8))
        return Drafted(growth, selected, module.to_target(selected.tokens_BJ), tuple(logits))

    return jax.tree.map(np.asarray, run(head.params, head.target_params, head.cache(2, slots)))


@pytest.mark.parametrize("name", HEADS)
def test_eagle_s_dynamic_trees(drafted, shared, name) -> None:
    """Same tokens, same shape, same order, node for node: the authors too keep nodes in the order they were made."""
    found, ours = np.load(shared / f"fixtures/{name}/goldens.npz"), drafted(name)
    topology = ours.selected.topology
    assert ours.selected.live_BJ.all()
    above = np.asarray(ancestors(jax.tree.map(jnp.asarray, topology)))
    for row, prompt in enumerate(PROMPTS):
        key = f"{prompt}__tree"
        assert [found[f"{prompt}__ids"][-1], *ours.tokens_BJ[row]] == found[f"{key}__draft_tokens"].tolist()
        assert [0, *topology.depth_BJ[row]] == found[f"{key}__tree_position_ids"].tolist()
        assert np.array_equal(above[row], found[f"{key}__tree_mask"])
        rows = paths(topology, row)
        assert np.array_equal(rows, found[f"{key}__retrieve_indices"])
        assert np.array_equal(sorted_rows(rows), found[f"{key}__retrieve_indices_sorted_sampling"])


@pytest.mark.parametrize("name", HEADS)
def test_rounding_does_not_decide_the_golden_trees(drafted, shared, name) -> None:
    """The smallest gap between neighbours in any top-k made is the authors', and far above what rounding moves."""
    found, ours = np.load(shared / f"fixtures/{name}/goldens.npz"), drafted(name)
    for row, prompt in enumerate(PROMPTS):
        gap = smallest_gap(ours, row)
        expected = float(found[f"{prompt}__tree__min_topk_gap"])
        assert gap == pytest.approx(expected, abs=ROUNDING)
        assert gap > 40 * ROUNDING


def smallest_gap(ours: Drafted, row: int) -> float:
    gaps = []

    def look(values: np.ndarray, taken: int) -> None:
        best = np.sort(values.astype(np.float64).ravel())[::-1][: taken + 1]
        gaps.append((best[:-1] - best[1:]).min())

    topk, scores = OPTIONS.topk, ours.growth.score_BC[row]
    for level, logits_BKV in enumerate(ours.logits):
        for logits_V in logits_BKV[row]:
            look(logits_V, topk)
        if level:
            begin = topk + (level - 1) * topk**2
            look(scores[begin : begin + topk**2], topk)
    look(scores, OPTIONS.nodes - 1)
    return min(gaps)


@pytest.mark.parametrize("name", HEADS)
def test_the_shape_of_every_tree_in_the_traces(shared, name) -> None:
    """Positions and retrieval rows follow from the parents alone, in more than a hundred trees."""
    traces = json.loads((shared / f"fixtures/{name}/trace.json").read_text())["traces"]
    steps = [step for trace in traces.values() for step in trace["steps"]]
    assert len(steps) > 50
    parents = np.asarray([step["tree_parent"][1:] for step in steps])
    depths = np.asarray([step["tree_position_ids"][1:] for step in steps])
    for row, step in enumerate(steps):
        assert paths(Topology(parents, depths), row).tolist() == step["retrieve_indices"]
        # As ours: by level, siblings side by side, and no two of them alike.
        assert list(depths[row]) == sorted(depths[row])
        children = list(zip(step["tree_parent"], step["draft_tokens"], strict=True))[1:]
        assert len(set(children)) == len(children)
