"""A smaller model of the same family drafts one token after the other, from its own cache.

Its cache holds d <= n - 1 valid slots of a row with n committed tokens. Inside a step a row may lag by one token more
than usual (after full acceptance the last draft was never fed back), so the first pass always takes the last two
committed tokens, or as many as ``recent`` says. A row that lags further drafts nothing (``ready`` says 0) until
``prefill`` has caught up.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp

from jaxspec.model.cache import CACHE_AXES, KVCache, LayerCache, empty_cache
from jaxspec.model.layers import product
from jaxspec.model.llama import Llama, ModelDef
from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate.drafters import Blind, Proposal, Seen
from jaxspec.speculate.drafters.chain import NextDraft, Sample, draft_chain, next_draft
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.state import Context, grow_cache

# Parameters of a draft vocabulary, beside the model's own: the head's rows [N, D] of the ids that are drafted, and for
# every id of the target its place among those rows, N for ids that are not drafted.
TRIMMED_HEAD: Final = "trimmed_head"
TRIMMED_PLACE: Final = "trimmed_place"


@dataclasses.dataclass(frozen=True)
class LinearDrafter(Blind):
    """``vocab``: the target's V; ids from ``valid_vocab`` on are never drafted.

    ``recent``: committed tokens that the first pass of a round takes in, at least 2. ``trimmed``: the head has rows for
    some ids alone, the ``first`` ones or those ``listed`` by TRIMMED_PLACE; no other is ever drafted. q is the law over
    those ids, from which the drafts are drawn, so every acceptance law is as exact as with a whole head.
    """

    model: ModelDef
    vocab: int
    valid_vocab: int
    recent: int = 2
    trimmed: Literal["first", "listed"] | None = None
    sample: Sample = "probabilistic"
    has_cache = True

    def init(self, rows: int, slots: int) -> KVCache:
        return empty_cache(self.model.config, self.model.sharding, rows, slots, self.model.cache_dtype)

    def axes(self, state: KVCache) -> KVCache:
        layer: Any = LayerCache(CACHE_AXES, CACHE_AXES)  # pyright: ignore[reportArgumentType]
        return KVCache((layer,) * len(state.layers), ("batch",))  # pyright: ignore[reportArgumentType]

    def prefill(
        self, params: Mapping[str, jax.Array], state: KVCache, context: Context, start: jax.Array, chunk: int
    ) -> KVCache:
        positions_BT = start + jnp.arange(chunk, dtype=jnp.int32)[None, :]
        # All committed tokens but the pending one.
        positions_BT = jnp.where(positions_BT < context.length_B[:, None] - 1, positions_BT, state.window)
        tokens_BT = jnp.take_along_axis(
            context.tokens_BS, jnp.clip(positions_BT, 0, context.tokens_BS.shape[1] - 1), axis=1
        )
        cache = self.model.merge(params)(tokens_BT, positions_BT, state).cache
        return cache._replace(length_B=jnp.minimum(start + chunk, context.length_B - 1).astype(jnp.int32))

    def propose(
        self,
        params: Mapping[str, jax.Array],
        target: Llama,
        state: KVCache,
        context: Context,
        gamma: int,
        draws: Draws,
    ) -> tuple[Proposal, KVCache]:
        model = self.model.merge(params)
        slots = state.window

        def draft(hidden_BTD: jax.Array, offset: jax.Array) -> NextDraft:
            logits_BTV = self._logits(params, model, hidden_BTD)
            return next_draft(logits_BTV, context, offset, draws, self.valid_vocab, self.sample)

        last_B = context.length_B - 1
        positions_BT = last_B[:, None] - jnp.arange(self.recent - 1, -1, -1, dtype=jnp.int32)[None, :]
        tokens_BT = jnp.take_along_axis(context.tokens_BS, jnp.maximum(positions_BT, 0), axis=1)
        # A row that lags too far keeps its hole as it is: prefill will fill it from the start.
        drafting_B = self._drafting(state, context)
        positions_BT = jnp.where(drafting_B[:, None] & (positions_BT >= 0), positions_BT, slots)
        hidden_BTD, cache, _ = model(tokens_BT, positions_BT, state)
        first = draft(hidden_BTD[:, -1:], jnp.int32(0))

        def extend(token_B: jax.Array, cache: KVCache, offset: jax.Array) -> tuple[NextDraft, KVCache]:
            position_B1 = jnp.where(drafting_B, last_B + offset, slots)[:, None]
            hidden_BTD, cache, _ = model(token_B[:, None], position_B1, cache)
            return draft(hidden_BTD, offset), cache

        return draft_chain(first, extend, cache, gamma)

    def _drafting(self, state: KVCache, context: Context) -> jax.Array:
        """Rows whose cache lacks no more than what the first pass takes in."""
        return (context.length_B > 0) & (state.length_B >= context.length_B - self.recent)

    def _logits(self, params: Mapping[str, jax.Array], model: Llama, hidden_BTD: jax.Array) -> jax.Array:
        """Over the target's ids, -inf for those that cannot be drafted."""
        if self.trimmed is None:
            return _fit_vocab(model.logits(hidden_BTD), self.vocab)
        logits_BTN = product(hidden_BTD, params[TRIMMED_HEAD], 1)
        logits_BTN = self.model.sharding.constrain(logits_BTN, None, None, None)
        if self.trimmed == "first":
            return _fit_vocab(logits_BTN, self.vocab)
        beside_BTN = jnp.pad(logits_BTN, ((0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf)
        return jnp.take(beside_BTN, params[TRIMMED_PLACE], axis=2, mode="clip")

    def commit(
        self,
        params: Mapping[str, jax.Array],
        target: Llama,
        state: KVCache,
        before: Context,
        after: Context,
        seen: Seen,
        gamma: int,
    ) -> KVCache:
        if gamma == 0:
            return state
        # Fed back so far: the tokens committed before, and every accepted draft but x_gamma, which closed the round.
        fed_B = before.length_B + jnp.minimum(seen.n_accepted_B, gamma - 1)
        fed_B = jnp.minimum(fed_B, after.length_B - 1)
        return state._replace(length_B=jnp.where(self._drafting(state, before), fed_B, state.length_B))

    def ready(self, state: KVCache, context: Context) -> jax.Array:
        # Past the positions that the draft model was trained for it drafts nothing; the row goes on without it.
        fits_B = context.length_B + GAMMA_MAX <= self.model.config.max_position_embeddings
        return jnp.where(self._drafting(state, context) & fits_B, GAMMA_MAX, 0).astype(jnp.int32)

    def lag(self, state: KVCache, context: Context) -> jax.Array:
        return context.length_B - 1 - state.length_B

    def grow(self, state: KVCache, slots: int) -> KVCache:
        return grow_cache(state, slots)


def _fit_vocab(logits_BTV: jax.Array, vocab: int) -> jax.Array:
    """Draft logits over the target's vocabulary: padding ids beyond the shorter table cannot be drawn."""
    own = logits_BTV.shape[-1]
    if own < vocab:
        return jnp.pad(logits_BTV, ((0, 0), (0, 0), (0, vocab - own)), constant_values=-jnp.inf)
    return logits_BTV[..., :vocab]
