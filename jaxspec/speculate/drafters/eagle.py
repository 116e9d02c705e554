"""EAGLE: one decoder layer over the target's features drafts a chain, or a tree that follows its own confidence.

Row t of the head's cache joins the feature of token t with token t + 1 and guesses token t + 2 (EAGLE, Li et al. 2024;
EAGLE-3, 2025). With n committed tokens the target has shown the features of n - 1 (all but the pending one), so rows
0 .. n - 2 can be taken in, and the last one's output is what drafting starts from. Drafted rows have no feature of the
target: they go on from the head's own outputs. They are written behind the committed rows and are stale afterwards.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.model.cache import CACHE_AXES, LayerCache, Tree
from jaxspec.model.heads.config import EagleConfig
from jaxspec.model.heads.definition import HeadsDef
from jaxspec.model.heads.eagle import EagleHead
from jaxspec.model.heads.parts import TargetTables
from jaxspec.model.llama import Llama
from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate.drafters import Blind, Features, Proposal, Seen
from jaxspec.speculate.drafters.chain import NextDraft, Sample, draft_chain, next_draft
from jaxspec.speculate.drafters.draft_ids import mask_draft_logits
from jaxspec.speculate.growth import DynamicTree, grow_level, select, start
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.state import Context
from jaxspec.speculate.topology import ancestors


class EagleState(NamedTuple):
    """``length_B``: rows taken in. ``hidden_BD``: the head's output for the last of them, before any norm."""

    cache: LayerCache
    length_B: jax.Array
    hidden_BD: jax.Array


@dataclasses.dataclass(frozen=True)
class EagleDrafter(Blind):
    """``tree``: None for a chain, ``sample`` says how; the children in a tree are the likeliest ones, undrawn.

    ``levels``: the target layers that an EAGLE-3 head sees; none for EAGLE-1. Ids from ``valid_vocab`` on are never
    drafted.
    """

    heads: HeadsDef
    tree: DynamicTree | None
    levels: tuple[int, ...]
    valid_vocab: int
    sample: Sample

    @property
    def config(self) -> EagleConfig:
        assert isinstance(self.heads.config, EagleConfig)
        return self.heads.config

    @property
    def features(self) -> Features:
        return self.levels or "hidden"

    def drafts(self, gamma: int) -> int:
        return gamma if self.tree is None else self.tree.drafts(gamma)

    # ---- state ---------------------------------------------------------------------------------------------------

    def init(self, rows: int, slots: int) -> EagleState:
        cache = self.heads.empty_cache(rows, slots + self._scratch)
        hidden_BD = jnp.zeros((rows, self.config.hidden_size), jnp.float32)
        return EagleState(cache.layers[0], cache.length_B, hidden_BD)

    def axes(self, state: EagleState) -> EagleState:
        return EagleState(LayerCache(CACHE_AXES, CACHE_AXES), ("batch",), ("batch", "embed"))  # pyright: ignore[reportArgumentType]

    def grow(self, state: EagleState, slots: int) -> EagleState:
        more = slots + self._scratch - state.cache.k.shape[2]
        grown = (jnp.pad(array_BKSH, ((0, 0), (0, 0), (0, more), (0, 0))) for array_BKSH in state.cache)
        return state._replace(cache=LayerCache(*grown))

    @property
    def _scratch(self) -> int:
        """Slots for the nodes that a tree expands, beyond the row's own: a tree is the same in every window."""
        return 0 if self.tree is None else self.tree.topk * (self.tree.depth - 1)

    def ready(self, state: EagleState, context: Context) -> jax.Array:
        # Past the positions that the head was trained for it drafts nothing; the row goes on without it.
        fits_B = context.length_B + GAMMA_MAX <= self.config.max_position_embeddings
        levels = GAMMA_MAX if self.tree is None else self.tree.depth
        return jnp.where(_complete(state, context) & fits_B, levels, 0).astype(jnp.int32)

    # ---- following the target ------------------------------------------------------------------------------------

    def observe(
        self,
        params: Mapping[str, jax.Array],
        target: Llama,
        state: EagleState,
        context: Context,
        features_BTX: jax.Array,
        start: jax.Array,
        chunk: int,
    ) -> EagleState:
        first_B = jnp.broadcast_to(start, context.length_B.shape)
        return self._take_in(params, target, state, context, features_BTX, first_B)

    def commit(
        self,
        params: Mapping[str, jax.Array],
        target: Llama,
        state: EagleState,
        before: Context,
        after: Context,
        seen: Seen,
        gamma: int,
    ) -> EagleState:
        assert seen.features_BTX is not None
        return self._take_in(params, target, state, after, seen.features_BTX, before.length_B - 1)

    def _take_in(
        self,
        params: Mapping[str, jax.Array],
        target: Llama,
        state: EagleState,
        context: Context,
        features_BTX: jax.Array,
        first_B: jax.Array,
    ) -> EagleState:
        """Takes in rows ``first_B`` + i with their features, as far as the token after each is committed.

        A row whose cache ends elsewhere is left as it is: a hole would never be filled.
        """
        T = features_BTX.shape[1]
        slots = context.tokens_BS.shape[1]
        rows_B = jnp.clip(context.length_B - 1 - first_B, 0, T)
        rows_B = jnp.where(state.length_B == first_B, rows_B, 0)
        offsets_T = jnp.arange(T, dtype=jnp.int32)
        positions_BT = first_B[:, None] + offsets_T[None, :]
        tokens_BT = jnp.take_along_axis(context.tokens_BS, jnp.clip(positions_BT + 1, 0, slots - 1), axis=1)
        positions_BT = jnp.where(offsets_T[None, :] < rows_B[:, None], positions_BT, state.cache.k.shape[2])
        head, tables = self._module(params, target)
        hidden_BTD, cache = head(tokens_BT, features_BTX, positions_BT, state.cache, tables)
        last_B11 = jnp.maximum(rows_B - 1, 0)[:, None, None]
        hidden_BD = jnp.take_along_axis(hidden_BTD, last_B11, axis=1)[:, 0]
        return EagleState(cache, state.length_B + rows_B, jnp.where((rows_B > 0)[:, None], hidden_BD, state.hidden_BD))

    def _module(self, params: Mapping[str, jax.Array], target: Llama) -> tuple[EagleHead, TargetTables]:
        return self.heads.merge(params), TargetTables(target.embed, target.logits)

    # ---- drafting ------------------------------------------------------------------------------------------------

    def propose(
        self,
        params: Mapping[str, jax.Array],
        target: Llama,
        state: EagleState,
        context: Context,
        gamma: int,
        draws: Draws,
    ) -> tuple[Proposal, EagleState]:
        head, tables = self._module(params, target)
        # A row that lacks some drafts nothing and keeps its cache: positions outside the cache write nothing.
        outside = state.cache.k.shape[2]
        first_B = jnp.where(_complete(state, context), state.length_B, outside)
        if self.tree is None:
            proposal, cache = self._chain(head, tables, state, context, gamma, draws, first_B)
        else:
            proposal, cache = self._tree(head, tables, state, context, self.tree, gamma, first_B)
        return proposal, state._replace(cache=cache)

    def _chain(
        self,
        head: EagleHead,
        tables: TargetTables,
        state: EagleState,
        context: Context,
        gamma: int,
        draws: Draws,
        first_B: jax.Array,
    ) -> tuple[Proposal, LayerCache]:

        def draft(hidden_BTD: jax.Array, offset: jax.Array) -> NextDraft:
            logits_BTV = head.over_target_vocab(head.logits(hidden_BTD, tables))
            return next_draft(logits_BTV, context, offset, draws, self.valid_vocab, self.sample)

        def extend(
            token_B: jax.Array, carry: tuple[jax.Array, LayerCache], offset: jax.Array
        ) -> tuple[NextDraft, tuple[jax.Array, LayerCache]]:
            hidden_BTD, cache = carry
            positions_BT = (first_B + offset - 1)[:, None]
            hidden_BTD, cache = head(token_B[:, None], hidden_BTD, positions_BT, cache, tables)
            return draft(hidden_BTD, offset), (hidden_BTD, cache)

        hidden_BTD = state.hidden_BD[:, None, :]
        first = draft(hidden_BTD, jnp.int32(0))
        proposal, (_, cache) = draft_chain(first, extend, (hidden_BTD, state.cache), gamma)
        return proposal, cache

    def _tree(
        self,
        head: EagleHead,
        tables: TargetTables,
        state: EagleState,
        context: Context,
        tree: DynamicTree,
        gamma: int,
        first_B: jax.Array,
    ) -> tuple[Proposal, LayerCache]:
        """EAGLE-2: the head expands the best nodes of each level; of all nodes made the best are drafts."""
        cache = state.cache
        growth = start(context.length_B.shape[0])
        hidden_BKD = state.hidden_BD[:, None, :]
        levels = tree.levels(gamma)
        for level in range(levels):
            logits_BKV = head.logits(hidden_BKD, tables)
            ban_B1 = (context.length_B + level < context.rows.min_length_B)[:, None]
            ban_BK = jnp.broadcast_to(ban_B1, logits_BKV.shape[:2])
            logits_BKV = mask_draft_logits(logits_BKV, head.target_ids, context.rows, ban_BK, self.valid_vocab)
            growth = grow_level(growth, logits_BKV, tree.topk)
            if level == levels - 1:
                break
            frontier = growth.frontier
            features_BKD = jnp.take_along_axis(hidden_BKD, frontier.source_BK[:, :, None], axis=1)
            positions_BK = jnp.broadcast_to((first_B + level)[:, None], frontier.token_BK.shape)
            # The root's row is committed: the nodes of this tree are the expanded drafts alone.
            node = level * tree.topk
            above_BKU = ancestors(growth.expanded)[:, 1 + node :, 1:]
            inside = Tree(state.length_B, jnp.int32(node), above_BKU)
            tokens_BK = head.to_target(frontier.token_BK)
            hidden_BKD, cache = head(tokens_BK, features_BKD, positions_BK, cache, tables, inside)
        selected = select(growth, tree.drafts(gamma))
        return Proposal(head.to_target(selected.tokens_BJ), None, selected.topology), cache


def _complete(state: EagleState, context: Context) -> jax.Array:
    """Rows whose cache holds all that could be taken in."""
    return (context.length_B > 0) & (state.length_B == context.length_B - 1)
