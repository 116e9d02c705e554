"""The exact law of what a round commits, summed over all draft and acceptance outcomes of a law."""

import functools
import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxspec.speculate.topology import Drafts, Topology
from jaxspec.speculate.verify import Verdict


def prefixes(vocab, length):
    """Every tuple of ids of exactly this length, in order."""
    return itertools.product(range(vocab), repeat=length)


def tables(rng, vocab, depth, law):
    """Laws after every prefix of fewer than ``depth`` ids: by length n, an array [V] * n + [V]."""
    return [np.array([law(rng, vocab) for _ in prefixes(vocab, n)]).reshape((vocab,) * (n + 1)) for n in range(depth)]


def uneven(rng, vocab):
    """A random law with both heavy and light ids."""
    weights = rng.exponential(size=vocab) ** 2
    return weights / weights.sum()


def one_hot(rng, vocab):
    return np.eye(vocab)[rng.integers(vocab)]


def on_ids(ids):
    """Random laws whose support is ``ids`` alone."""

    def law(rng, vocab):
        weights = np.zeros(vocab)
        weights[list(ids)] = rng.exponential(size=len(ids)) + 0.05
        return weights / weights.sum()

    return law


class Shape(NamedTuple):
    """The drafts of a row: where each hangs, and whether it is live. Siblings lie in draw order."""

    parents: tuple[int, ...]
    live: tuple[bool, ...]

    @property
    def above(self):
        """Per node, the nodes of its path from depth 1 on, itself the last."""
        paths = [()]
        for j, parent in enumerate(self.parents):
            paths.append((*paths[parent], j + 1))
        return paths

    @property
    def depth(self):
        return max((len(path) for path, live in zip(self.above[1:], self.live, strict=True) if live), default=0)

    def children(self, node):
        return [j + 1 for j, parent in enumerate(self.parents) if parent == node and self.live[j]]


def shape(*parents):
    return Shape(parents, (True,) * len(parents))


SHAPES = {
    "chain of 1": shape(0),
    "chain of 2": shape(0, 1),
    "chain of 3": shape(0, 1, 2),
    "2x2 level by level": shape(0, 0, 1, 1, 2, 2),
    "2x2 branch by branch": shape(0, 1, 1, 0, 4, 4),
    "uneven": shape(0, 0, 1, 1, 2, 3),
    "pruned before drawing": Shape((0, 0, 0, 1, 3, 5), (True, False, True, True, True, False)),
    "nothing": Shape((), ()),
}


@functools.cache
def drawable(shape, vocab):
    """[N, J] every way to fill the drafts with ids, live siblings distinct; dead drafts hold garbage."""
    fillings = [()]
    for j, parent in enumerate(shape.parents):
        if not shape.live[j]:
            fillings = [(*filling, j % vocab) for filling in fillings]
            continue
        siblings = [node - 1 for node in shape.children(parent) if node - 1 < j]
        fillings = [
            (*filling, token)
            for filling in fillings
            for token in range(vocab)
            if token not in [filling[i] for i in siblings]
        ]
    return np.array(fillings, np.int64).reshape(len(fillings), len(shape.parents))


def law_of_prefix(table, shape, tokens_NJ, node):
    """[N, V] the law after a node."""
    dense = table[len(shape.above[node])]
    return dense[tuple(tokens_NJ[:, above - 1] for above in shape.above[node])] + np.zeros((len(tokens_NJ), 1))


def drawing_chance(table, shape, tokens_NJ):
    """[N] the chance of drawing each filling from the laws of ``table``, without replacement among siblings.

    Once a law has nothing left to draw, the next child is the smallest unused id, of q = 0.
    """
    rows = np.arange(len(tokens_NJ))
    chance_N = np.ones(len(tokens_NJ))
    for node in range(len(shape.parents) + 1):
        left_NV = law_of_prefix(table, shape, tokens_NJ, node).copy()
        unused_NV = np.ones_like(left_NV)
        for child in shape.children(node):
            token_N = tokens_NJ[:, child - 1]
            mass_N = left_NV.sum(1)
            drawn_N = left_NV[rows, token_N] / np.where(mass_N > 0, mass_N, 1)
            chance_N *= np.where(mass_N > 0, drawn_N, token_N == unused_NV.argmax(1))
            left_NV[rows, token_N] = unused_NV[rows, token_N] = 0
    return chance_N


def most_likely(table, shape, vocab):
    """[1, J] the filling that gives every node's children its most likely ids, in order."""
    tokens = np.zeros((1, len(shape.parents)), np.int64)
    for node in range(len(shape.parents) + 1):
        order = np.argsort(-law_of_prefix(table, shape, tokens, node)[0], kind="stable")
        for child, token in zip(shape.children(node), order, strict=False):
            tokens[0, child - 1] = token
    return tokens


class Case(NamedTuple):
    """One shape with its laws. ``q`` None: undrawn drafts, the most likely ids of ``drawn_from``.

    ``fillings``: ids [N, J] and their chances [N], where they are not drawn from ``drawn_from`` node by node.
    """

    shape: Shape
    p: list  # dense tables by prefix length
    q: list | None
    drawn_from: list
    fillings: tuple | None = None


def plan(cases, vocab, drafted, rng):
    """One batch over all cases, all fillings and all nodes that may be the last accepted, for ``evaluate``.

    The drafts of a case lie at random places of the row, in order; what is between them is dead garbage. The rows are
    shuffled, so that neighbours have other shapes.
    """
    parts, owners = [], []
    for number, case in enumerate(cases):
        shape = case.shape
        places = np.sort(rng.permutation(drafted)[: len(shape.parents)])
        node_at = np.concatenate([[0], places + 1]).astype(np.int64)
        if case.fillings is not None:
            fillings_NJ, chance_N = case.fillings
        elif case.q is None:
            fillings_NJ = most_likely(case.drawn_from, shape, vocab)
            chance_N = np.ones(1)
        else:
            fillings_NJ = drawable(shape, vocab)
            chance_N = drawing_chance(case.drawn_from, shape, fillings_NJ)
        fillings_NJ, chance_N = fillings_NJ[chance_N > 0], chance_N[chance_N > 0]
        ends = [0, *(j + 1 for j, live in enumerate(shape.live) if live)]
        count = len(fillings_NJ) * len(ends)
        dead = np.eye(vocab)[rng.integers(vocab, size=(2, count, drafted + 1))]
        batch = {
            "p": dead[0],
            "q": dead[1][:, :drafted],
            "tokens": rng.integers(vocab, size=(count, drafted)),
            "parent": (rng.random((count, drafted)) * np.arange(1, drafted + 1)).astype(np.int64),
            "live": np.zeros((count, drafted), bool),
            "coin": np.ones((count, drafted)),  # 1 accepts nothing, 0 whatever may be accepted
            "end": np.repeat(node_at[ends], len(fillings_NJ)),
            "chance": np.tile(chance_N, len(ends)),
        }
        every = np.tile(fillings_NJ, (len(ends), 1))
        for node in range(len(shape.parents) + 1):
            if node == 0 or shape.live[node - 1]:
                batch["p"][:, node_at[node]] = law_of_prefix(case.p, shape, every, node)
        for j, place in enumerate(places):
            batch["parent"][:, place] = node_at[shape.parents[j]]
            if shape.live[j]:
                if case.q is not None:
                    batch["q"][:, place] = law_of_prefix(case.q, shape, every, shape.parents[j])
                batch["live"][:, place] = True
            batch["tokens"][:, place] = every[:, j]
        for i, end in enumerate(ends):
            for node in shape.above[end]:
                batch["coin"][i * len(fillings_NJ) : (i + 1) * len(fillings_NJ), places[node - 1]] = 0
        depth = np.zeros((count, drafted), np.int64)
        for j in range(drafted):
            above = np.concatenate([np.zeros((count, 1), np.int64), depth], 1)
            depth[:, j] = 1 + above[np.arange(count), batch["parent"][:, j]]
        batch["depth"] = depth
        parts.append(batch)
        owners.append(np.full(count, number))
    batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    owner = np.concatenate(owners)
    order = rng.permutation(len(owner))
    return {name: array[order] for name, array in batch.items()}, owner[order]


def evaluate(law, batch, *, drawn, dtype, depth, width=None):
    """The verdicts of ``law`` on a planned batch, as NumPy; ``width`` fills it up to a shape already compiled."""
    count = len(batch["chance"])
    if width is not None:
        assert count <= width
        batch = {name: np.resize(array, (width, *array.shape[1:])) for name, array in batch.items()}
    topology = Topology(jnp.asarray(batch["parent"], jnp.int32), jnp.asarray(batch["depth"], jnp.int32))
    drafts = Drafts(
        jnp.asarray(batch["tokens"], jnp.int32),
        jnp.asarray(batch["q"], dtype) if drawn else None,
        topology,
        jnp.asarray(batch["live"]),
    )
    verdict = law(jnp.asarray(batch["p"], dtype), drafts, jnp.asarray(batch["coin"], dtype), depth)
    for array in verdict:
        assert np.isfinite(array).all()
    return Verdict(*(np.asarray(array)[:count] for array in verdict))


class Committed(NamedTuple):
    """What one round commits, exactly."""

    parts: list  # parts[n][x_1, .., x_n, y]: chance that x_1 .. x_n stand and y follows
    accepted: float  # expected number of accepted drafts

    def joint(self, p):
        """The law of the first len(parts) tokens, p completing what the round leaves open."""
        law = self.parts[0]
        for n in range(1, len(self.parts)):
            law = law[..., None] * p[n] + self.parts[n]
        return law


def committed(cases, batch, owner, verdict, vocab, *, whole_path):
    """``Committed`` of every case, each number taken from the law itself.

    ``whole_path``: whether every draft of the accepted path was tested (token), or its last alone (block).
    """
    rows = np.arange(len(owner))
    nodes_J = np.arange(1, batch["live"].shape[1] + 1)
    path_BD = verdict.path_BD
    depth_BT = np.concatenate([np.zeros((len(rows), 1), np.int64), batch["depth"]], 1)
    wanted_B = depth_BT[rows, batch["end"]]
    on_path_BJ = (nodes_J[None, :, None] == path_BD[:, None, :]).any(-1)
    accept_BJ = verdict.accept_prob_BJ.astype(np.float64)
    passed_BJ = on_path_BJ if whole_path else nodes_J[None, :] == batch["end"][:, None]
    chance_BJ = np.where(passed_BJ, accept_BJ, 1 - accept_BJ)
    # Ends that the law cannot reach: it stopped elsewhere, for want of any chance.
    arrived_B = np.where(verdict.n_accepted_B > 0, path_BD.max(1, initial=0), 0) == batch["end"]
    possible_B = np.where(batch["end"] > 0, accept_BJ[rows, np.maximum(batch["end"], 1) - 1] > 0, True)
    assert (arrived_B | ~possible_B).all(), "the probabilities returned are not those that decide"
    weight_B = np.where(arrived_B, batch["chance"] * chance_BJ.prod(1), 0)
    assert (verdict.n_accepted_B == wanted_B)[arrived_B].all()
    assert (accept_BJ[on_path_BJ & ~passed_BJ & arrived_B[:, None]] == 0).all()
    last_BV = verdict.last_BV.astype(np.float64)
    last_BV = weight_B[:, None] * last_BV / last_BV.sum(1, keepdims=True)

    results = []
    for number, case in enumerate(cases):
        of_case = owner == number
        parts = []
        for n in range(case.shape.depth + 1):
            here = of_case & (wanted_B == n) & (weight_B > 0)
            tokens = [batch["tokens"][here, path_BD[here, i] - 1] for i in range(n)]
            part = np.zeros((vocab,) * (n + 1))
            np.add.at(part, tuple(tokens), last_BV[here]) if n else part.__iadd__(last_BV[here].sum(0))
            parts.append(part)
        results.append(Committed(parts, float((weight_B * wanted_B)[of_case].sum())))
    return results
