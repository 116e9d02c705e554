"""The shape of a round of drafts: a tree below the pending token. A chain is the tree with one path.

Node 0 is the root, the pending token; node 1 + j is draft j. A node's parent comes before it, and siblings lie in the
order in which they were drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.shapes import sizes


class Topology(NamedTuple):
    """Where each draft hangs, row by row."""

    parent_BJ: jax.Array  # int32, node of the parent: 0 .. j for draft j
    depth_BJ: jax.Array  # int32, 1 for a child of the root


class Drafts(NamedTuple):
    """The drafts of one round. Those that are not live are padding: any id, any parent that comes before them."""

    tokens_BJ: jax.Array  # i32; live siblings never repeat a token
    # The law that draft j was drawn from, before its siblings were taken out of it: equal for siblings. None: the
    # drafts were not drawn at all (a one-hot law each).
    q_BJV: jax.Array | None
    topology: Topology
    live_BJ: jax.Array  # bool; the parent of a live draft is live
    # i32, which of the laws draft j was drawn from, where many drafts share few; None: ``q_BJV`` has one per draft.
    law_BJ: jax.Array | None = None


def chain(rows: int, drafted: int) -> Topology:
    """Each draft below the one before it."""
    parent_J = jnp.arange(drafted, dtype=jnp.int32)
    parent_BJ = jnp.broadcast_to(parent_J[None, :], (rows, drafted))
    return Topology(parent_BJ, parent_BJ + 1)


def ancestors(topology: Topology) -> jax.Array:
    """bool [B, T, T] over T = J + 1 nodes: whether node u (last axis) is node t itself or lies above it."""
    size = sizes(parent_BJ=topology.parent_BJ)
    rows, drafted = size["B"], size["J"]
    root_B1T = jnp.zeros((rows, 1, drafted + 1), bool).at[:, :, 0].set(True)
    own_JT = jnp.arange(drafted + 1)[None, :] == jnp.arange(1, drafted + 1)[:, None]

    def add(above_BTT: jax.Array, j: jax.Array) -> tuple[jax.Array, None]:
        parents_BT = jnp.take_along_axis(above_BTT, topology.parent_BJ[:, j, None, None], axis=1)[:, 0]
        return above_BTT.at[:, j + 1].set(parents_BT | own_JT[j][None, :]), None

    above_BTT = jnp.concatenate([root_B1T, jnp.zeros((rows, drafted, drafted + 1), bool)], axis=1)
    if drafted == 0:
        return above_BTT
    return jax.lax.scan(add, above_BTT, jnp.arange(drafted))[0]
