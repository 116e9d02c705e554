"""The speculate-verify step and the prefill: pure functions from one DecodeState to the next.

One step: the drafter proposes a chain or a tree of drafts, the target runs once over the pending token and all of
them, the law decides which path stands and what follows it, and its a+1 tokens are committed. gamma is the static depth
that a step is compiled for; each row drafts its own gamma_i <= gamma levels, which is a mask. A drafter may have a
window of further nodes fed in the same pass, to see what the target says there.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.model.cache import CACHE_AXES, KVCache, LayerCache, Tree, compact, empty_cache
from jaxspec.model.llama import Llama, ModelDef, Output
from jaxspec.speculate.append import append
from jaxspec.speculate.drafters import Drafter, Seen
from jaxspec.speculate.judge import Judged, Law, Round, judge, node_depths, nodes_fed
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.sampling import (
    NEUTRAL,
    RowSampling,
    round_uniforms,
)
from jaxspec.speculate.state import (
    RUNNING,
    STOP_IDS,
    Context,
    DecodeState,
    RowParams,
    StepReport,
    grow_cache,
    pack,
)
from jaxspec.speculate.topology import Drafts, ancestors, chain
from jaxspec.speculate.window import Shown


class Params(NamedTuple):
    """Flat parameter dicts of the target and of the drafter."""

    target: dict[str, jax.Array]
    drafter: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The static half of decoding. ``valid_vocab``: ids from it on (vocabulary padding) are never sampled.

    ``by_position``: a token's logits must not depend on the place in a tree that it was drafted at, to the last bit.
    """

    target: ModelDef
    drafter: Drafter
    valid_vocab: int
    law: Law
    by_position: bool = False

    def empty(self, rows: int, slots: int) -> DecodeState:
        """A state of empty rows (inside a jit)."""
        temperature, top_k, top_p, min_p = NEUTRAL
        sampling = RowSampling(
            jnp.full((rows,), temperature, jnp.float32),
            jnp.full((rows,), top_k, jnp.int32),
            jnp.full((rows,), top_p, jnp.float32),
            jnp.full((rows,), min_p, jnp.float32),
        )
        params = RowParams(
            sampling=sampling,
            seed_B2=jnp.zeros((rows, 2), jnp.uint32),
            stop_ids_BE=jnp.full((rows, STOP_IDS), -1, jnp.int32),
            min_length_B=jnp.zeros((rows,), jnp.int32),
            max_length_B=jnp.zeros((rows,), jnp.int32),
            wants_logprobs_B=jnp.zeros((rows,), bool),
            lookup_min_B=jnp.ones((rows,), jnp.int32),
            lookup_max_B=jnp.zeros((rows,), jnp.int32),
        )
        return DecodeState(
            tokens_BS=jnp.zeros((rows, slots), jnp.int32),
            length_B=jnp.zeros((rows,), jnp.int32),
            finished_B=jnp.ones((rows,), bool),
            rows=params,
            target=empty_cache(self.target.config, self.target.sharding, rows, slots, self.target.cache_dtype),
            drafter=self.drafter.init(rows, slots),
        )

    def start(self, tokens_BS: jax.Array, length_B: jax.Array, rows: RowParams) -> DecodeState:
        """A state whose rows hold these committed tokens and nothing in their caches yet."""
        empty = self.empty(*tokens_BS.shape)
        return empty._replace(
            tokens_BS=tokens_BS, length_B=length_B, finished_B=jnp.zeros_like(empty.finished_B), rows=rows
        )

    def prefill(
        self, params: Params, state: DecodeState, start: jax.Array, chunk: int
    ) -> tuple[DecodeState, StepReport]:
        """Runs the target over committed tokens start..start+chunk-1; the chunk that reaches the end commits a token.

        After it the row is ready to decode: n grew by one and the cache holds the n - 1 others.
        """
        context = _context(state)
        slots = state.target.window
        positions_BT = start + jnp.arange(chunk, dtype=jnp.int32)[None, :]
        positions_BT = jnp.where(positions_BT < state.length_B[:, None], positions_BT, slots)
        tokens_BT = jnp.take_along_axis(state.tokens_BS, jnp.clip(positions_BT, 0, slots - 1), axis=1)
        model = self.target.merge(params.target)
        output = model(tokens_BT, positions_BT, state.target, taps=self._taps)
        drafter = state.drafter
        features_BTX = self._features(output)
        if features_BTX is not None:
            drafter = self.drafter.observe(params.drafter, model, drafter, context, features_BTX, start, chunk)
        cached_B = jnp.minimum(start + chunk, state.length_B).astype(jnp.int32)
        cache = output.cache._replace(length_B=cached_B)

        last_B1 = jnp.clip(state.length_B - 1 - start, 0, chunk - 1)[:, None]
        if features_BTX is not None:
            features_BTX = jnp.take_along_axis(features_BTX, last_B1[:, :, None], axis=1)
        rows = state.tokens_BS.shape[0]
        hidden_BTD = jnp.take_along_axis(output.hidden_BTD, last_B1[:, :, None], axis=1)
        round_ = Round(
            drafts=_no_drafts(rows),
            active_B=~state.finished_B & (cached_B == state.length_B),
            uniforms=round_uniforms(state.rows.seed_B2, state.length_B, 0),
            # The rule for the cache before a round, which here holds one token more: the pending one was just fed.
            desync_B=jnp.zeros((rows,), bool),
            logits_BTV=model.logits(hidden_BTD),
        )
        judged = judge(context, round_, self.law, self.valid_vocab, 0)
        state = state._replace(target=cache, drafter=drafter)
        return self._commit(params, model, state, context, round_, judged, features_BTX)

    def prefill_drafter(self, params: Params, state: DecodeState, start: jax.Array, chunk: int) -> DecodeState:
        """Runs the drafter over committed tokens start..start+chunk-1, to catch up."""
        return state._replace(
            drafter=self.drafter.prefill(params.drafter, state.drafter, _context(state), start, chunk)
        )

    def step(
        self, params: Params, state: DecodeState, gamma_B: jax.Array, gamma: int
    ) -> tuple[DecodeState, StepReport]:
        """One round of the rows with ``gamma_B`` >= 0; a row with -1 is left alone for good (cancelled or empty).

        Args:
            gamma_B: int32, levels of drafts asked for per row, at most the static bucket ``gamma``. Bounded here by
                the room that is left and by what the drafter has.
        """
        context = _context(state)
        slots = state.target.window
        n_B = state.length_B
        finished_B = state.finished_B | (gamma_B < 0)
        active_B = ~finished_B
        # A row at rest must not make a greedy batch take the slow path.
        sampling = state.rows.sampling
        sampling = sampling._replace(temperature_B=jnp.where(active_B, sampling.temperature_B, 0))
        context = context._replace(rows=state.rows._replace(sampling=sampling))
        drafted = self.drafter.drafts(gamma)
        uniforms = round_uniforms(state.rows.seed_B2, n_B, drafted)

        model = self.target.merge(params.target)
        drafter_state, proposal = state.drafter, None
        room_B = jnp.minimum(state.rows.max_length_B - n_B - 1, self.drafter.ready(state.drafter, context))
        gamma_B = jnp.where(active_B, jnp.clip(jnp.minimum(gamma_B, room_B), 0, gamma), 0)
        drafts, tree, window, shown = _no_drafts(n_B.shape[0]), None, None, None
        if gamma > 0:
            draws = Draws(state.rows.seed_B2, n_B, coupled=self.law == "coupled")
            asked = context._replace(asked_B=gamma_B)
            proposal, drafter_state = self.drafter.propose(params.drafter, model, state.drafter, asked, gamma, draws)
            if proposal.levels_B is not None:
                gamma_B = jnp.minimum(gamma_B, proposal.levels_B)
            topology = proposal.topology
            if topology is None:
                topology = chain(n_B.shape[0], gamma)
            else:
                tree, window = Tree(n_B - 1, jnp.int32(0), ancestors(topology)), proposal.window
                if window is not None:
                    tree = tree._replace(ancestors_BTU=window.beside(tree.ancestors_BTU))
                if self.by_position:
                    tree = tree.by_position(1 + max(gamma, 0 if window is None else window.deepest))
                # Every node needs a slot of its own, also those beside the path that is accepted.
                gamma_B = jnp.where(n_B + (drafted + self.drafter.window(gamma)) <= slots, gamma_B, 0)
            live_BJ = topology.depth_BJ <= gamma_B[:, None]
            drafts = Drafts(proposal.tokens_BJ, proposal.q_BJV, topology, live_BJ, proposal.law_BJ)

        pending_B1 = jnp.take_along_axis(state.tokens_BS, jnp.maximum(n_B - 1, 0)[:, None], axis=1)
        tokens_BT = jnp.concatenate([pending_B1, drafts.tokens_BJ], axis=1)
        positions_BT = n_B[:, None] - 1 + node_depths(drafts)
        positions_BT = jnp.where(active_B[:, None] & nodes_fed(drafts), positions_BT, slots)
        if window is not None:
            tokens_BT, positions_BT = window.feed(tokens_BT, positions_BT, n_B - 1, gamma_B > 0, slots)
        output = model(tokens_BT, positions_BT, state.target, tree, self._taps)

        desync_B = state.target.length_B != n_B - 1
        hidden_BTD = output.hidden_BTD if window is None else window.keep(output.hidden_BTD, 1 + drafted)
        logits_BTV = model.logits(hidden_BTD)  # one product for both: its weights are a large part of a small model
        if window is not None:
            logits_BTV, logits_BCV = logits_BTV[:, : 1 + drafted], logits_BTV[:, 1 + drafted :]
            shown = Shown(window.choices(logits_BCV, n_B, state.rows, self.valid_vocab), gamma_B > 0)
        round_ = Round(logits_BTV, drafts, active_B, uniforms, desync_B, shown)
        judged = judge(context, round_, self.law, self.valid_vocab, gamma)
        cache = output.cache
        if tree is not None:
            cache = compact(cache, n_B - 1, judged.path_BD, judged.n_accepted_B)
        state = state._replace(target=cache, drafter=drafter_state, finished_B=finished_B)
        features_BTX = self._features(output)
        if features_BTX is not None and gamma > 0:
            nodes_BE1 = jnp.pad(judged.path_BD, ((0, 0), (1, 0)))[:, :, None]
            features_BTX = jnp.take_along_axis(features_BTX, nodes_BE1, axis=1)
        return self._commit(params, model, state, context, round_, judged, features_BTX)

    @property
    def _taps(self) -> tuple[int, ...]:
        return self.drafter.features if isinstance(self.drafter.features, tuple) else ()

    def _features(self, output: Output) -> jax.Array | None:
        """What the drafter wants of a pass, [B, T, X]."""
        return output.hidden_BTD if self.drafter.features == "hidden" else output.taps_BTX

    def _commit(
        self,
        params: Params,
        model: Llama,
        state: DecodeState,
        before: Context,
        round_: Round,
        judged: Judged,
        features_BTX: jax.Array | None,
    ) -> tuple[DecodeState, StepReport]:
        """Appends the accepted run, cut at the first stop; rows with a fault commit nothing."""
        depth = judged.path_BD.shape[1]
        appended = append(before, judged, round_.active_B)
        length_B, committing_B = appended.length_B, appended.committing_B
        cached_B = jnp.where(committing_B, length_B - 1, state.target.length_B)
        after = before._replace(tokens_BS=appended.tokens_BS, length_B=length_B)
        seen = Seen(judged.n_accepted_B, features_BTX, round_.shown)
        drafter = self.drafter.commit(params.drafter, model, state.drafter, before, after, seen, depth)
        state = state._replace(
            tokens_BS=appended.tokens_BS,
            length_B=length_B,
            finished_B=state.finished_B | (appended.finish_B != RUNNING),
            target=state.target._replace(length_B=cached_B),
            drafter=drafter,
        )
        packed = pack(
            n_new=appended.n_new_B,
            n_drafted=jnp.where(committing_B, jnp.sum(round_.drafts.live_BJ, axis=1), 0),
            n_accepted=jnp.where(committing_B, judged.n_accepted_B, 0),
            bonus=committing_B & ~_has_live_child(round_.drafts, judged),
            finish=appended.finish_B,
            fault=judged.fault_B,
            length=length_B,
            ready=self.drafter.ready(drafter, after),
            lag=self.drafter.lag(drafter, after),
            tokens=judged.tokens_BE,
        )
        replicated = self.target.sharding.replicated
        report = StepReport(packed, judged.logprobs)
        return state, jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, replicated), report)

    def grow(self, state: DecodeState, slots: int) -> DecodeState:
        """The same rows with ``slots`` slots each: one copy."""
        grown = slots - state.tokens_BS.shape[1]
        return state._replace(
            tokens_BS=jnp.pad(state.tokens_BS, ((0, 0), (0, grown))),
            target=grow_cache(state.target, slots),
            drafter=self.drafter.grow(state.drafter, slots),
        )


def insert(state: DecodeState, row: DecodeState, slot: jax.Array) -> DecodeState:
    """``state`` with its row ``slot`` replaced by the only row of ``row``."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, slot, axis=0), state, row)


def extract(state: DecodeState, slot: jax.Array) -> DecodeState:
    """A state of one row, a copy of row ``slot``."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=0), state)


def _has_live_child(drafts: Drafts, judged: Judged) -> jax.Array:
    """bool [B]: whether a draft hung below the end of the accepted path, and so was rejected."""
    ends_BE = jnp.pad(judged.path_BD, ((0, 0), (1, 0)))
    end_B1 = jnp.take_along_axis(ends_BE, judged.n_accepted_B[:, None], axis=1)
    return jnp.any(drafts.live_BJ & (drafts.topology.parent_BJ == end_B1), axis=1)


def _no_drafts(rows: int) -> Drafts:
    nothing_BJ = jnp.zeros((rows, 0), jnp.int32)
    return Drafts(nothing_BJ, None, chain(rows, 0), jnp.zeros((rows, 0), bool))


def _context(state: DecodeState) -> Context:
    return Context(state.tokens_BS, state.length_B, state.rows)


def state_axes(decoder: Decoder, state: DecodeState) -> Any:
    """Logical axes of every array of a state, in its structure."""
    layer: Any = LayerCache(CACHE_AXES, CACHE_AXES)  # pyright: ignore[reportArgumentType]
    axes = jax.tree.map(lambda x: ("batch",) + (None,) * (x.ndim - 1), state._replace(target=None, drafter=None))
    return axes._replace(
        target=KVCache((layer,) * len(state.target.layers), ("batch",)),  # pyright: ignore[reportArgumentType]
        drafter=decoder.drafter.axes(state.drafter),
    )
