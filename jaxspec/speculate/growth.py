"""Draft trees that follow the draft's confidence (Li et al. 2024, EAGLE-2): inside the jit, every shape static.

Level by level the best K nodes are expanded into their k best children each (k = K = ``topk``); of all nodes made, the
best by the product of their draft probabilities form the tree. The children are the likeliest, not drawn: a tree pruned
by confidence after its children were drawn would bias the laws.
"""

import dataclasses
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.errors import UserError
from jaxspec.shapes import GAMMA_MAX, NODES_MAX, sizes
from jaxspec.speculate.sampling import largest
from jaxspec.speculate.topology import Topology

# Depth of a place in a tree that no node fills: below every level, so it is never live.
NOWHERE: Final = GAMMA_MAX + 1


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """The options of a dynamic tree.

    ``nodes`` counts the root, as EAGLE's total_tokens does; ``depth`` is the level of the deepest nodes, so EAGLE's
    depth d is d + 1 here. UserError lists what is out of range.
    """

    topk: int  # children per node, and nodes expanded per level
    depth: int
    nodes: int

    def __post_init__(self) -> None:
        limits = {"topk": (1, NODES_MAX - 1), "depth": (1, GAMMA_MAX), "nodes": (2, NODES_MAX)}
        findings = []
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                findings.append(f"tree_{name}: expected {low} to {high}, got {value!r}")
        if findings:
            raise UserError("; ".join(findings))

    def levels(self, gamma: int) -> int:
        """How deep the tree of a round of at most ``gamma`` levels is."""
        return min(gamma, self.depth)

    def drafts(self, gamma: int) -> int:
        """J of such a tree: fewer than ``nodes`` - 1 where so many cannot be made."""
        levels = self.levels(gamma)
        return min(self.nodes - 1, self.topk + (levels - 1) * self.topk**2) if levels else 0


class Frontier(NamedTuple):
    """The nodes of the last level that are expanded next, best first. A candidate's node is 1 + its number; 0: root."""

    token_BK: jax.Array  # int32, draft ids
    score_BK: jax.Array  # float32, sum of log-probabilities from the root; -inf: no node
    node_BK: jax.Array  # int32
    source_BK: (
        jax.Array
    )  # int32, its parent's place in the frontier before this one, whose hidden state it goes on from


class Growth(NamedTuple):
    """A tree while it grows. Candidates c lie by level, then by their parent's place in the frontier, then by rank."""

    token_BC: jax.Array  # int32, draft ids
    score_BC: jax.Array  # float32
    parent_BC: jax.Array  # int32, node
    depth_BC: jax.Array  # int32
    frontier: Frontier
    # The nodes of all frontiers, this one's last, as a tree: what the drafter's own passes feed, in their order.
    expanded: Topology


def start(rows: int) -> Growth:
    """Only the root, which is what the first :func:`grow_level` expands."""

    def none(dtype: type = jnp.int32) -> jax.Array:
        return jnp.zeros((rows, 0), dtype)

    root_B1 = jnp.zeros((rows, 1), jnp.int32)
    frontier = Frontier(root_B1, root_B1.astype(jnp.float32), root_B1, root_B1)
    return Growth(none(), none(jnp.float32), none(), none(), frontier, Topology(none(), none()))


def grow_level(growth: Growth, logits_BKV: jax.Array, topk: int) -> Growth:
    """One level more: the ``topk`` best children of every frontier node, the best ``topk`` of all of them in front.

    ``logits_BKV``: what the draft says after each frontier node, over its own vocabulary; log-probabilities will do.
    A token at -inf, or after a law that is not finite, makes no node. Exact ties go to the earlier candidate.
    """
    frontier = growth.frontier
    size = sizes(logits_BKV=logits_BKV, score_BK=frontier.score_BK)
    if topk > size["V"]:
        raise ValueError(f"topk: expected at most {size['V']}, the draft's vocabulary, got {topk}")
    rows, width = size["B"], size["K"]
    best_BKC, ids_BKC = largest(logits_BKV.astype(jnp.float32), topk)
    peak_BK1 = best_BKC[..., :1]
    mass_BK1 = jnp.sum(jnp.exp(logits_BKV.astype(jnp.float32) - peak_BK1), axis=-1, keepdims=True)
    # However exp and log round, no child may be lifted above its parent: see `select`.
    log_p_BKC = jnp.minimum(best_BKC - peak_BK1 - jnp.log(mass_BK1), 0)
    score_BKC = frontier.score_BK[:, :, None] + log_p_BKC
    score_BKC = jnp.where(score_BKC > -jnp.inf, score_BKC, -jnp.inf)  # NaN becomes -inf too

    made = growth.token_BC.shape[1]
    token_BX, score_BX = (array.reshape(rows, width * topk) for array in (ids_BKC, score_BKC))
    next_BK, index_BK = lax.top_k(score_BX, topk)
    index_BK = index_BK.astype(jnp.int32)
    level_B1 = growth.depth_BC[:, -1:] + 1 if made else jnp.ones((rows, 1), jnp.int32)
    # Node of a frontier place among the expanded ones: the place itself, after the root and all earlier frontiers.
    earlier = growth.expanded.parent_BJ.shape[1] - (width if made else 0)
    source_BK = index_BK // topk
    above_BK = 1 + earlier + source_BK if made else jnp.zeros_like(source_BK)

    def after(old_BC: jax.Array, new_BX: jax.Array) -> jax.Array:
        return jnp.concatenate([old_BC, new_BX], axis=1)

    return Growth(
        token_BC=after(growth.token_BC, token_BX),
        score_BC=after(growth.score_BC, score_BX),
        parent_BC=after(growth.parent_BC, jnp.repeat(frontier.node_BK, topk, axis=1)),
        depth_BC=after(growth.depth_BC, jnp.broadcast_to(level_B1, token_BX.shape)),
        frontier=Frontier(
            token_BK=jnp.take_along_axis(token_BX, index_BK, axis=1),
            score_BK=next_BK,
            node_BK=1 + made + index_BK,
            source_BK=source_BK,
        ),
        expanded=Topology(
            after(growth.expanded.parent_BJ, above_BK),
            after(growth.expanded.depth_BJ, jnp.broadcast_to(level_B1, above_BK.shape)),
        ),
    )


class Selected(NamedTuple):
    """The tree that was grown. Places that no node fills are last: not live, depth NOWHERE, below the root."""

    tokens_BJ: jax.Array  # int32, draft ids
    topology: Topology
    live_BJ: jax.Array  # bool: depth <= GAMMA_MAX
    score_BJ: jax.Array  # float32
    candidate_BJ: jax.Array  # int32, number of the candidate in the Growth; 0 where not live


def select(growth: Growth, drafts: int, levels_B: jax.Array | None = None) -> Selected:
    """The best ``drafts`` candidates by score, in the order in which they were made.

    Whoever is chosen, so is its parent: a log-probability is at most 0 and float addition is monotone, so a child
    scores at most as its parent; where they tie, the earlier candidate is taken first, and parents come earlier.

    ``levels_B``: candidates deeper than a row's own levels are left out *before* the best are taken, so that a row's
    tree depends on its own levels alone, not on how deep the batch went.
    """
    candidates = growth.score_BC.shape[1]
    if not 1 <= drafts <= candidates:
        raise ValueError(f"drafts: expected 1 to {candidates}, the candidates there are, got {drafts}")
    score_BC = growth.score_BC
    if levels_B is not None:
        score_BC = jnp.where(growth.depth_BC <= levels_B[:, None], score_BC, -jnp.inf)
    best_BJ, index_BJ = lax.top_k(score_BC, drafts)
    # Candidates in the order they were made, then the empty places.
    index_BJ = jnp.sort(jnp.where(best_BJ > -jnp.inf, index_BJ.astype(jnp.int32), candidates), axis=1)
    live_BJ = index_BJ < candidates
    candidate_BJ = jnp.where(live_BJ, index_BJ, 0)

    def chosen(array_BC: jax.Array) -> jax.Array:
        return jnp.take_along_axis(array_BC, candidate_BJ, axis=1)

    # A chosen node's new number: the root and the chosen ones up to it.
    above_BJJ = (1 + index_BJ)[:, None, :] <= chosen(growth.parent_BC)[:, :, None]
    parent_BJ = jnp.where(live_BJ, jnp.sum(above_BJJ, axis=2, dtype=jnp.int32), 0)
    depth_BJ = jnp.where(live_BJ, chosen(growth.depth_BC), NOWHERE)
    score_BJ = jnp.where(live_BJ, chosen(score_BC), -jnp.inf)
    return Selected(chosen(growth.token_BC), Topology(parent_BJ, depth_BJ), live_BJ, score_BJ, candidate_BJ)
