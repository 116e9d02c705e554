"""Draft trees whose shape is fixed before anything is drafted: Medusa's choices, products of top-k, a default.

A path of child ranks names a node: ``(0, 2)`` is the third best candidate below the best candidate of the first level
(Cai et al. 2024, section 3.3). ``growth.py`` has the trees whose shape follows the draft's confidence.
"""

import dataclasses
import heapq
import json
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import UserError
from jaxspec.shapes import GAMMA_MAX, NODES_MAX
from jaxspec.speculate.topology import Topology

Path = tuple[int, ...]

# Drafts of the default tree. A CPU checks 16 tokens for little more than 8, and 32 tokens for clearly more.
DEFAULT_DRAFTS: Final = 15
# What the default tree assumes: how often the best candidate of the first level is right, how that fades per level
# (a head that guesses further ahead sees less), and with which power of its rank a candidate is right less often.
FIRST_HIT: Final = 0.6
FADE: Final = 0.8
RANK_POWER: Final = 2
DEFAULT_RANKS: Final = 10

_SHOWN: Final = 8  # findings told in full


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A tree of child ranks; draft j is ``choices[j]``, node 1 + j.

    ``choices`` may come in any order and with repetitions; they are kept once each, level by level, and by path within
    a level: parents before children, siblings by rank, and every upper part of the tree is a prefix of it. UserError
    lists all paths that are wrong: without their prefix, too deep, ranks out of range, too many.
    """

    choices: tuple[Path, ...]

    def __post_init__(self) -> None:
        findings = list(_findings(self.choices))
        if findings:
            more = f"; and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
            raise UserError("tree_choices: " + "; ".join(findings[:_SHOWN]) + more)
        object.__setattr__(self, "choices", tuple(sorted(set(self.choices), key=lambda path: (len(path), path))))

    @property
    def drafts(self) -> int:
        """J."""
        return len(self.choices)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self.choices[-1])

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The node of each draft's parent; 0 is the root."""
        nodes = {path: node for node, path in enumerate(((), *self.choices))}
        return tuple(nodes[path[:-1]] for path in self.choices)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """1 for children of the root."""
        return tuple(len(path) for path in self.choices)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Which of its parent's candidates, best first, each draft is."""
        return tuple(path[-1] for path in self.choices)

    @cached_property
    def orders(self) -> tuple[int, ...]:
        """How many siblings lie before each draft: which of the parent's draws it is, where children are drawn.

        The rank itself will not do there: a draw that is passed over would bias the law.
        """
        return tuple(self.parents[:j].count(parent) for j, parent in enumerate(self.parents))

    def level(self, depth: int) -> range:
        """The drafts (not nodes) at ``depth``."""
        return range(self.depths.index(depth), self.depths.index(depth) + self.depths.count(depth))

    def topk(self, depth: int) -> int:
        """How many candidates, best first, a parent needs for its children at ``depth``."""
        return 1 + max(self.ranks[j] for j in self.level(depth))

    def restricted(self, depth: int) -> "StaticTree":
        """The first ``depth`` levels (at least 1): the same nodes with the same numbers."""
        return StaticTree(tuple(path for path in self.choices if len(path) <= depth))

    def topology(self, rows: int) -> Topology:
        """The same for every row."""

        def of_rows(values: tuple[int, ...]) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(values, jnp.int32)[None, :], (rows, len(values)))

        return Topology(of_rows(self.parents), of_rows(self.depths))

    def tokens(self, ranked_BDC: jax.Array) -> jax.Array:
        """tokens_BJ where the candidates depend on the depth alone (Medusa): ``ranked_BDC[b, d - 1, r]`` has rank r."""
        return ranked_BDC[:, np.asarray(self.depths) - 1, np.asarray(self.ranks)]


def _findings(choices: Sequence[Path]) -> Iterable[str]:
    known = set(choices)
    if not known:
        yield "expected at least one path, got none"
    if len(known) > NODES_MAX - 1:
        yield f"expected at most {NODES_MAX - 1} nodes below the root, got {len(known)}"
    for path in dict.fromkeys(choices):
        shown = _shown(path)
        if not 1 <= len(path) <= GAMMA_MAX:
            yield f"path {shown}: expected 1 to {GAMMA_MAX} levels, got {len(path)}"
        elif not all(0 <= rank < NODES_MAX for rank in path):
            yield f"path {shown}: expected ranks from 0 to {NODES_MAX - 1}"
        elif len(path) > 1 and path[:-1] not in known:
            yield f"path {shown}: its parent {_shown(path[:-1])} is missing"


def _shown(value: Any) -> str:
    text = str(list(value)) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def cartesian(widths: Sequence[int]) -> tuple[Path, ...]:
    """Every path of a tree in which each node of level d has ``widths[d]`` children. UserError if that is too many."""
    text = ",".join(str(width) for width in widths)
    if not widths or min(widths) < 1 or len(widths) > GAMMA_MAX:
        raise UserError(f"tree_choices: expected 1 to {GAMMA_MAX} counts of at least 1, got {text or 'none'}")
    nodes = sum(math.prod(widths[: depth + 1]) for depth in range(len(widths)))
    if nodes > NODES_MAX - 1:
        raise UserError(f"tree_choices: expected at most {NODES_MAX - 1} nodes below the root, {text} has {nodes}")
    level: list[Path] = [()]
    found: list[Path] = []
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        found += level
    return tuple(found)


def parse_tree_choices(value: Any) -> StaticTree:
    """The tree that the option ``tree_choices`` describes: the union of its parts, common prefixes shared.

    A part is a product of top-k per level (``"4,2,1"``, or the list ``[4, 2, 1]``) or a list of paths
    (``[[0], [1], [0, 0]]``, or that as JSON text). Several parts come as one text with semicolons between them, or as a
    list of texts. UserError tells what is wrong.
    """
    if isinstance(value, str):
        parts = [_parse_text(text) for text in value.split(";")]
    elif isinstance(value, Sequence) and value and all(isinstance(part, str) for part in value):
        return parse_tree_choices(";".join(value))
    else:
        parts = [_parse_list(value)]
    return StaticTree(tuple(path for part in parts for path in part))


def _parse_text(text: str) -> tuple[Path, ...]:
    try:
        if text.lstrip().startswith("["):
            return _parse_list(json.loads(text))
        return cartesian([int(width) for width in text.split(",")])
    except UserError:
        raise
    except (ValueError, RecursionError):
        raise _malformed(text) from None


def _parse_list(value: Any) -> tuple[Path, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if value and all(_is_rank(width) for width in value):
            return cartesian(value)
        paths = [path for path in value if isinstance(path, Sequence) and not isinstance(path, str)]
        if len(paths) == len(value) and all(_is_rank(rank) for path in paths for rank in path):
            return tuple(tuple(path) for path in paths)
    raise _malformed(value)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _malformed(value: Any) -> UserError:
    expected = 'expected paths like [[0], [1], [0, 0]] or counts like "4,2,1"'
    return UserError(f"tree_choices: {expected}, got {_shown(value)}")


def assumed_hits(levels: int) -> list[list[float]]:
    """``[depth - 1][rank]``: the chance, before anything is measured, that a candidate is right if its parent is."""
    return [
        [FIRST_HIT * FADE**depth / (rank + 1) ** RANK_POWER for rank in range(DEFAULT_RANKS)] for depth in range(levels)
    ]


def best_tree(hits: Sequence[Sequence[float]], drafts: int) -> StaticTree:
    """The tree of at most ``drafts`` nodes with the largest expected number of accepted ones.

    ``hits[depth - 1][rank]``: the chance that a candidate is right if its parent is; of no rank larger than of the one
    before it. A node is accepted with the product along its path, so the best nodes, taken one by one, are the answer:
    a node never has a larger product than its parent or an earlier sibling. Ties go to the shallower, then the earlier.
    """
    chosen: list[Path] = []
    waiting: list[tuple[float, int, Path]] = [(-hits[0][0], 1, (0,))]
    while waiting and len(chosen) < drafts:
        product, depth, path = heapq.heappop(waiting)
        chosen.append(path)
        if depth < len(hits):
            heapq.heappush(waiting, (product * hits[depth][0], depth + 1, (*path, 0)))
        rank = path[-1] + 1
        if rank < len(hits[depth - 1]):
            above = math.prod(hits[d][r] for d, r in enumerate(path[:-1]))
            heapq.heappush(waiting, (-above * hits[depth - 1][rank], depth, (*path[:-1], rank)))
    return StaticTree(tuple(chosen))


def default_tree(levels: int, drafts: int = DEFAULT_DRAFTS) -> StaticTree:
    """The tree for ``levels`` levels when the user names none: :func:`best_tree` of :func:`assumed_hits`."""
    return best_tree(assumed_hits(min(levels, GAMMA_MAX)), drafts)


def paths(topology: Topology, row: int = 0, live: np.ndarray | None = None) -> np.ndarray:
    """int32 [P, D + 1], on the host: every path of a row from the root to a leaf, by node, in the order of the leaves.

    Short paths end in -1, which is no node. (Padding with a token that a target can say lets a path be accepted past
    its end.) ``live``: bool [J], drafts that count; all by default.
    """
    parent, depth = (np.asarray(array)[row] for array in topology)
    live = np.ones(parent.shape, bool) if live is None else np.asarray(live)
    nodes = 1 + np.flatnonzero(live)
    leaves = [node for node in nodes if node not in parent[live]] or [0]
    found = np.full((len(leaves), 1 + max(depth[live], default=0)), -1, np.int32)
    for path, leaf in zip(found, leaves, strict=True):
        node = leaf
        while node:
            path[depth[node - 1]] = node
            node = parent[node - 1]
        path[0] = 0
    return found
