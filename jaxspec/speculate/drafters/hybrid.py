"""Prompt lookup first, a model where nothing matches: per row, in one step.

A row whose last tokens occurred before drafts what followed them; the others draft with the model. Both kinds share one
verification pass. Which kind a row is follows from its committed tokens alone, as does what it copies: a copied draft
is a draw from a one-hot law that was fixed before the round, so every acceptance law is as exact for it as for a draft
that the model drew from its own q. What the model draws for a row that copies is thrown away unread.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.model.llama import Llama
from jaxspec.speculate.drafters import Blind, Drafter, Features, Proposal, Seen
from jaxspec.speculate.drafters.ngram import Lookup, NgramDrafter
from jaxspec.speculate.growth import NOWHERE
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.state import Context
from jaxspec.speculate.topology import Topology, chain


class HybridState(NamedTuple):
    """The states of both. ``ran_B``: whether the model drafted in this round; the same for all rows."""

    lookup: Lookup
    model: Any
    ran_B: jax.Array  # bool


@dataclasses.dataclass(frozen=True)
class HybridDrafter(Blind):
    """``model`` is any drafter that is no lookup itself.

    A model with a cache of its own is not fed the copied tokens it did not draft: it lags behind a row that copies, and
    catches up when the row first needs it (in its own first pass if that is wide enough, else by ``prefill``).
    """

    lookup: NgramDrafter
    model: Drafter

    @property
    def has_cache(self) -> bool:
        return self.model.has_cache

    @property
    def features(self) -> Features:
        return self.model.features

    def drafts(self, gamma: int) -> int:
        return max(gamma, self.model.drafts(gamma))

    # ---- state ---------------------------------------------------------------------------------------------------

    def init(self, rows: int, slots: int) -> HybridState:
        return HybridState(self.lookup.init(rows, slots), self.model.init(rows, slots), jnp.zeros((rows,), bool))

    def axes(self, state: HybridState) -> HybridState:
        return HybridState(self.lookup.axes(state.lookup), self.model.axes(state.model), ("batch",))  # pyright: ignore[reportArgumentType]

    def grow(self, state: HybridState, slots: int) -> HybridState:
        return state._replace(model=self.model.grow(state.model, slots))

    def ready(self, state: HybridState, context: Context) -> jax.Array:
        found_B = state.lookup.found_B
        return jnp.where(found_B > 0, found_B, self.model.ready(state.model, context))

    def lag(self, state: HybridState, context: Context) -> jax.Array:
        return self.model.lag(state.model, context)

    # ---- following the target ------------------------------------------------------------------------------------

    def prefill(self, params: Any, state: HybridState, context: Context, start: jax.Array, chunk: int) -> HybridState:
        return state._replace(model=self.model.prefill(params, state.model, context, start, chunk))

    def observe(
        self,
        params: Any,
        target: Llama,
        state: HybridState,
        context: Context,
        features_BTX: jax.Array,
        start: jax.Array,
        chunk: int,
    ) -> HybridState:
        return state._replace(
            model=self.model.observe(params, target, state.model, context, features_BTX, start, chunk)
        )

    def commit(
        self, params: Any, target: Llama, state: HybridState, before: Context, after: Context, seen: Seen, gamma: int
    ) -> HybridState:
        drafted = before
        if self.has_cache and gamma > 0:
            # The model fed its own drafts back, not the copies that were accepted, and nothing where it did not run:
            # to it such a row is an empty one.
            seen = seen._replace(n_accepted_B=jnp.where(state.lookup.found_B > 0, 0, seen.n_accepted_B))
            drafted = before._replace(length_B=jnp.where(state.ran_B, before.length_B, 0))
        model = self.model.commit(params, target, state.model, drafted, after, seen, gamma)
        lookup = self.lookup.commit({}, target, state.lookup, before, after, seen, gamma)
        return HybridState(lookup, model, jnp.zeros_like(state.ran_B))

    # ---- drafting ------------------------------------------------------------------------------------------------

    def propose(
        self, params: Any, target: Llama, state: HybridState, context: Context, gamma: int, draws: Draws
    ) -> tuple[Proposal, HybridState]:
        copies_B = state.lookup.found_B > 0
        asked_B = context.length_B if context.asked_B is None else context.asked_B
        needed = jnp.any((asked_B > 0) & ~copies_B)

        def run(drafter_state: Any) -> tuple[Proposal, Any]:
            return self.model.propose(params, target, drafter_state, context, gamma, draws)

        blank = jax.eval_shape(run, state.model)[0]

        def skip(drafter_state: Any) -> tuple[Proposal, Any]:
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blank)
            if nothing.topology is not None:
                # Depth 0 would be live even in a row that asked for no drafts.
                nowhere_BJ = jnp.full_like(nothing.topology.depth_BJ, NOWHERE)
                nothing = nothing._replace(topology=nothing.topology._replace(depth_BJ=nowhere_BJ))
            return nothing, drafter_state

        # A round of copies alone costs no pass of the model.
        drafted, model = jax.lax.cond(needed, run, skip, state.model)
        copied = Proposal(state.lookup.tokens_BJ[:, :gamma])
        proposal = _merge(copies_B, copied, drafted, gamma)
        return proposal, HybridState(state.lookup, model, jnp.broadcast_to(needed, copies_B.shape))


def _merge(copies_B: jax.Array, copied: Proposal, drafted: Proposal, gamma: int) -> Proposal:
    """Row by row the copied chain or what the model drafted, in as many places as the larger of them has."""
    rows, own = drafted.tokens_BJ.shape
    places = max(gamma, own)
    copies_B1 = copies_B[:, None]
    tokens_BJ = jnp.where(copies_B1, _pad(copied.tokens_BJ, places, 0), _pad(drafted.tokens_BJ, places, 0))
    q_BXV, law_BJ = drafted.q_BJV, drafted.law_BJ
    if q_BXV is not None:
        laws = max(gamma, q_BXV.shape[1])
        q_BXV = jnp.pad(q_BXV, ((0, 0), (0, laws - q_BXV.shape[1]), (0, 0)))
        ids_V = jnp.arange(q_BXV.shape[2], dtype=jnp.int32)
        one_hot_BXV = (ids_V[None, None, :] == _pad(copied.tokens_BJ, laws, 0)[:, :, None]).astype(q_BXV.dtype)
        q_BXV = jnp.where(copies_B1[:, :, None], one_hot_BXV, q_BXV)
        if law_BJ is not None:
            # Each copied draft has a law of its own, the drafts of a tree share one per level.
            own_J = jnp.minimum(jnp.arange(places, dtype=jnp.int32), laws - 1)
            law_BJ = jnp.where(copies_B1, own_J[None, :], _pad(law_BJ, places, 0))
    topology = drafted.topology
    if topology is not None:
        line = chain(rows, gamma)
        topology = Topology(
            jnp.where(copies_B1, _pad(line.parent_BJ, places, 0), _pad(topology.parent_BJ, places, 0)),
            # A place that no node fills lies below every level, and so is never live.
            jnp.where(copies_B1, _pad(line.depth_BJ, places, NOWHERE), _pad(topology.depth_BJ, places, NOWHERE)),
        )
    levels_B = drafted.levels_B
    if levels_B is not None:
        levels_B = jnp.where(copies_B, gamma, levels_B)
    return Proposal(tokens_BJ, q_BXV, topology, levels_B, law_BJ)


def _pad(values_BJ: jax.Array, places: int, value: int) -> jax.Array:
    return jnp.pad(values_BJ, ((0, 0), (0, places - values_BJ.shape[1])), constant_values=value)
