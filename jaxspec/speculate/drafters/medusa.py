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
from jaxspec.speculate.drafters.chain import Sample, sound
from jaxspec.speculate.drafters.draft_ids import mask_draft_logits
from jaxspec.speculate.noise import Draws, gumbel
from jaxspec.speculate.sampling import CANDIDATES, final_law, largest
from jaxspec.speculate.siblings import draw_siblings
from jaxspec.speculate.state import Context, RowParams
from jaxspec.speculate.tree import StaticTree


class MedusaState(NamedTuple):
    """``hidden_BD``: the target's, at the last committed token but the pending one; known where ``known_B``."""

    hidden_BD: jax.Array
    known_B: jax.Array  # bool


@dataclasses.dataclass(frozen=True)
class MedusaDrafter(Blind):
    """Children of a node are the likeliest tokens of its depth's head, undrawn (``sample`` greedy), or drawn from it.

    Drawn children are drawn without replacement below a node, and anew for every node: docs/decisions/medusa-draws.md
    says why. Under the coupled law, drawn ones are those with the largest log q + g, with the noise g of their
    position, the likeliest to be the target's choice; any draft is exact there. Ids from ``valid_vocab`` on are never
    drafted, nor is an id outside the heads' draft vocabulary.
    """

    heads: HeadsDef
    tree: StaticTree
    valid_vocab: int
    sample: Sample

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
        tree, rows = self._tree(gamma), context.rows
        module: MedusaHeads = self.heads.merge(params)
        tables = TargetTables(target.embed, target.logits)
        # N draft ids.
        logits_BDN = jnp.concatenate(module.first(tree.depth, state.hidden_BD[:, None, :], tables), axis=1)
        positions_BD = context.length_B[:, None] + jnp.arange(tree.depth, dtype=jnp.int32)[None, :]
        ban_BD = positions_BD < rows.min_length_B[:, None]
        logits_BDN = mask_draft_logits(logits_BDN, module.target_ids, rows, ban_BD, self.valid_vocab)
        topology = tree.topology(context.length_B.shape[0])
        _, likeliest_BDC = largest(logits_BDN, max(tree.ranks) + 1)
        if self.sample == "greedy" or draws.coupled:
            ranked_BDC = likeliest_BDC
            if self.sample != "greedy":
                ranked_BDC = _noisy(logits_BDN, likeliest_BDC, module, positions_BD, rows)
            return Proposal(module.to_target(tree.tokens(ranked_BDC)), None, topology), state
        drawn = _drawn(logits_BDN, tree.tokens(likeliest_BDC), tree, context, draws)
        q_BDV = module.over_target_vocab(drawn.q_BDN)
        law_BJ = topology.depth_BJ - 1
        return Proposal(module.to_target(drawn.tokens_BJ), q_BDV, topology, law_BJ=law_BJ), state

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


def _noisy(
    logits_BDN: jax.Array, likeliest_BDC: jax.Array, module: MedusaHeads, positions_BD: jax.Array, rows: RowParams
) -> jax.Array:
    """For each depth the candidates with the largest log q + g, best first, int32 [B, D, C] draft ids."""
    width = likeliest_BDC.shape[2]

    def noisy() -> jax.Array:
        q_BDX, ids_BDX = largest(final_law(logits_BDN, rows.sampling), min(CANDIDATES, logits_BDN.shape[-1]))
        score_BDX = jnp.log(q_BDX) + gumbel(rows.seed_B2, positions_BD, module.to_target(ids_BDX))
        _, place_BDC = largest(score_BDX, width)
        noisy_BDC = jnp.take_along_axis(ids_BDX, place_BDC, axis=2)
        return jnp.where((rows.sampling.temperature_B > 0)[:, None, None], noisy_BDC, likeliest_BDC)

    return jax.lax.cond(jnp.any(rows.sampling.temperature_B > 0), noisy, lambda: likeliest_BDC)


class _Drawn(NamedTuple):
    tokens_BJ: jax.Array
    q_BDN: jax.Array


def _drawn(logits_BDN: jax.Array, likeliest_BJ: jax.Array, tree: StaticTree, context: Context, draws: Draws) -> _Drawn:
    """A drawn tree, in draft ids. A greedy round never reads the laws: zeros."""
    sampling = context.rows.sampling

    def greedy() -> _Drawn:
        return _Drawn(likeliest_BJ, jnp.zeros_like(logits_BDN))

    def sampled() -> _Drawn:
        q_BDN = final_law(sound(logits_BDN), sampling)
        tokens_BJ = draw_siblings(q_BDN, tree.parents, tree.depths, draws.uniforms(tree.drafts))
        # A greedy row beside sampled ones keeps the tree that it has alone. Its p is one-hot, so that any law which
        # can say all of its drafts lets the right one stand.
        greedy_B1 = sampling.temperature_B[:, None] <= 0
        q_BDN = jnp.where(greedy_B1[:, :, None], 1 / q_BDN.shape[2], q_BDN)
        return _Drawn(jnp.where(greedy_B1, likeliest_BJ, tokens_BJ), q_BDN)

    return jax.lax.cond(jnp.all(sampling.temperature_B <= 0), greedy, sampled)
