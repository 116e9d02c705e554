"""Nodes that a round feeds to the target beside its drafts: what the target would say after them is wanted.

They share the pass, not the verdict: no draft sees one, the law never meets their logits, none is ever accepted, and
their keys and values are stale when the round is over. Each has a cache slot of its own behind those of the drafts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.speculate.sampling import first_argmax, mask_logits
from jaxspec.speculate.state import RowParams


class Window(NamedTuple):
    """X nodes, the same shape in every row. All see the committed tokens and the root, none sees a draft."""

    tokens_BX: jax.Array  # int32
    offsets_X: np.ndarray  # int32, places after the root, which a draft at depth d has d of
    above_XX: np.ndarray  # bool, [x, y]: node y is x itself or lies above it
    read_C: np.ndarray  # int32, whose next token is wanted: node x, or -1 for the root

    @property
    def nodes(self) -> int:
        """X."""
        return self.tokens_BX.shape[1]

    @property
    def deepest(self) -> int:
        """Of the nodes, as drafts have depths: the most ancestors that one has."""
        return int(self.offsets_X.max())

    def beside(self, above_BTT: jax.Array) -> jax.Array:
        """bool [B, T + X, T + X]: the ancestors of root, drafts and window; ``above_BTT``: those of the first two."""
        rows, T, _ = above_BTT.shape
        sees_root_XT = np.zeros((self.nodes, T), bool)
        sees_root_XT[:, 0] = True
        below_XU = np.concatenate([sees_root_XT, self.above_XX], axis=1)
        above_BTU = jnp.pad(above_BTT, ((0, 0), (0, 0), (0, self.nodes)))
        return jnp.concatenate([above_BTU, jnp.broadcast_to(below_XU[None], (rows, *below_XU.shape))], axis=1)

    def feed(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, root_B: jax.Array, fed_B: jax.Array, slots: int
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens and positions of a pass with the window behind the T others; rows that do not feed it pad."""
        positions_BX = jnp.where(fed_B[:, None], root_B[:, None] + jnp.asarray(self.offsets_X)[None, :], slots)
        return (
            jnp.concatenate([tokens_BT, self.tokens_BX], axis=1),
            jnp.concatenate([positions_BT, positions_BX], axis=1),
        )

    def keep(self, hidden_BUD: jax.Array, judged: int) -> jax.Array:
        """Of a pass's hidden states those of the first ``judged`` nodes, then those that are read: [B, T + C, D]."""
        nodes_C = np.where(self.read_C < 0, 0, judged + self.read_C)
        return jnp.concatenate([hidden_BUD[:, :judged], hidden_BUD[:, nodes_C]], axis=1)

    def choices(self, logits_BCV: jax.Array, length_B: jax.Array, rows: RowParams, valid_vocab: int) -> jax.Array:
        """int32 [B, C]: the likeliest token after each node that is read, under the bans of its place."""
        offsets_C = np.where(self.read_C < 0, 0, self.offsets_X[self.read_C])
        ban_BC = length_B[:, None] + jnp.asarray(offsets_C)[None, :] < rows.min_length_B[:, None]
        return first_argmax(mask_logits(logits_BCV, rows.stop_ids_BE, ban_BC, valid_vocab))


class Shown(NamedTuple):
    """What a round showed of its window: choices that mean something in the rows that fed it."""

    choices_BC: jax.Array  # int32
    fed_B: jax.Array  # bool
