"""Medusa: residual heads on the target's last hidden state guess the tokens of several places ahead at once.

Head i at position t guesses token t + 2 + i (Cai et al. 2024, Medusa-1): seen from the last hidden state, which stands
one place before the pending token, that is depth i + 1. A head does not know what the heads before it guessed, so all
nodes of a level share its candidates; which of them a node takes is fixed by a static tree.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.model.heads.definition import HeadsDef
from jaxspec.model.heads.medusa import MedusaHeads
from jaxspec.model.heads.parts import TargetTables
from jaxspec.model.llama import Llama
from jaxspec.speculate.drafters import Blind, Features, Proposal, Seen
from jaxspec.speculate.noise import Draws, gumbel
from jaxspec.speculate.sampling import CANDIDATES, final_law, largest, mask_logits
from jaxspec.speculate.state import Context, RowParams
from jaxspec.speculate.tree import StaticTree


class MedusaState(NamedTuple):
    """``hidden_BD``: the target's, at the last committed token but the pending one; known where ``known_B``."""

    hidden_BD: jax.Array
    known_B: jax.Array  # bool


@dataclasses.dataclass(frozen=True)
class MedusaDrafter(Blind):
    """The candidates are each head's likeliest tokens, undrawn. Ids from ``valid_vocab`` on are not among them.

    Under the coupled law they are the likeliest to be the target's choice: those with the largest log q + g, with the
    noise g of their position. Any draft is exact there, for the law only asks whether it is that choice.
    """

    heads: HeadsDef
    tree: StaticTree
    valid_vocab: int

    @property
    def features(self) -> Features:
        return "hidden"

    def drafts(self, gamma: int) -> int:
        return self._tree(gamma).drafts if gamma else 0

    def _tree(self, gamma: int) -> StaticTree:
        return self.tree if gamma >= self.tree.depth else self.tree.restricted(gamma)

    def init(self, rows: int, slots: int) -> MedusaState:
        return MedusaState(jnp.zeros((rows, self.heads.config.hidden_size), jnp.float32), jnp.zeros((rows,), bool))

    def axes(self, state: MedusaState) -> MedusaState:
        return MedusaState(("batch", "embed"), ("batch",))  # pyright: ignore[reportArgumentType]

    def propose(
        self,
        params: Mapping[str, jax.Array],
        target: Llama,
        state: MedusaState,
        context: Context,
        gamma: int,
        draws: Draws,
    ) -> tuple[Proposal, MedusaState]:
        tree = self._tree(gamma)
        rows = context.rows
        module: MedusaHeads = self.heads.merge(params)
        tables = TargetTables(target.embed, target.logits)
        hidden_BTD = state.hidden_BD[:, None, :]
        logits_BDV = jnp.concatenate([head(hidden_BTD, tables) for head in list(module.heads)[: tree.depth]], axis=1)
        offsets_D = jnp.arange(tree.depth, dtype=jnp.int32)
        positions_BD = context.length_B[:, None] + offsets_D[None, :]
        ban_BD = positions_BD < rows.min_length_B[:, None]
        logits_BDV = mask_logits(logits_BDV, rows.stop_ids_BE, ban_BD, self.valid_vocab)
        width = max(tree.ranks) + 1
        ranked_BDC = _ranked(logits_BDV, positions_BD, rows, width, draws)
        return Proposal(tree.tokens(ranked_BDC), None, tree.topology(context.length_B.shape[0])), state

    def commit(
        self,
        params: Mapping[str, jax.Array],
        target: Llama,
        state: MedusaState,
        before: Context,
        after: Context,
        seen: Seen,
        gamma: int,
    ) -> MedusaState:
        assert seen.features_BTX is not None
        # Row i stands for the committed token before.length - 1 + i; the pending one has no hidden state yet.
        new_B = after.length_B - before.length_B
        last_B11 = jnp.clip(new_B - 1, 0, seen.features_BTX.shape[1] - 1)[:, None, None]
        hidden_BD = jnp.take_along_axis(seen.features_BTX, last_B11, axis=1)[:, 0]
        return MedusaState(jnp.where((new_B > 0)[:, None], hidden_BD, state.hidden_BD), state.known_B | (new_B > 0))

    def ready(self, state: MedusaState, context: Context) -> jax.Array:
        return jnp.where(state.known_B, self.tree.depth, 0).astype(jnp.int32)


def _ranked(logits_BDV: jax.Array, positions_BD: jax.Array, rows: RowParams, width: int, draws: Draws) -> jax.Array:
    """The ``width`` best candidates for each depth, best first, int32 [B, D, C]."""
    _, likeliest_BDC = largest(logits_BDV, width)
    if not draws.coupled:
        return likeliest_BDC

    def noisy() -> jax.Array:
        q_BDX, ids_BDX = largest(final_law(logits_BDV, rows.sampling), min(CANDIDATES, logits_BDV.shape[-1]))
        score_BDX = jnp.log(q_BDX) + gumbel(rows.seed_B2, positions_BD, ids_BDX)
        _, place_BDC = largest(score_BDX, width)
        noisy_BDC = jnp.take_along_axis(ids_BDX, place_BDC, axis=2)
        return jnp.where((rows.sampling.temperature_B > 0)[:, None, None], noisy_BDC, likeliest_BDC)

    return jax.lax.cond(jnp.any(rows.sampling.temperature_B > 0), noisy, lambda: likeliest_BDC)
