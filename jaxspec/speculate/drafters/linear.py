"""A smaller model of the same family drafts one token after the other, from its own cache.

Its cache holds d <= n - 1 valid slots of a row with n committed tokens. Inside a step a row may lag by one token more
than usual (after full acceptance the last draft was never fed back), so the first pass always takes the last two
committed tokens. A row that lags further drafts nothing (``ready`` says 0) until ``prefill`` has caught up.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.model.cache import CACHE_AXES, KVCache, LayerCache, empty_cache
from jaxspec.model.llama import Llama, ModelDef
from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate.drafters import Blind, Proposal, Seen
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.sampling import final_law, first_argmax, mask_logits
from jaxspec.speculate.state import Context, grow_cache


@dataclasses.dataclass(frozen=True)
class LinearDrafter(Blind):
    """``vocab``: the target's V; ids from ``valid_vocab`` on are never drafted."""

    model: ModelDef
    vocab: int
    valid_vocab: int
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
        rows = context.rows
        greedy = jnp.all(rows.sampling.temperature_B <= 0)

        def pick(hidden_BTD: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
            """The next draft of every row and the law it was drawn from."""
            logits_BTV = _fit_vocab(model.logits(hidden_BTD), self.vocab)
            ban_BT = (context.length_B + offset < rows.min_length_B)[:, None]
            logits_BTV = mask_logits(logits_BTV, rows.stop_ids_BE, ban_BT, self.valid_vocab)

            def drawn() -> tuple[jax.Array, jax.Array]:
                q_BV = final_law(logits_BTV, rows.sampling)[:, 0]
                return draws.pick(q_BV, offset), q_BV

            # A greedy round never reads the laws.
            return jax.lax.cond(
                greedy, lambda: (first_argmax(logits_BTV)[:, 0], jnp.zeros_like(logits_BTV[:, 0])), drawn
            )

        last_B = context.length_B - 1
        positions_BT = jnp.stack([last_B - 1, last_B], axis=1)
        tokens_BT = jnp.take_along_axis(context.tokens_BS, jnp.maximum(positions_BT, 0), axis=1)
        # A row that lags too far keeps its hole as it is: prefill will fill it from the start.
        drafting_B = _drafting(state, context)
        positions_BT = jnp.where(drafting_B[:, None] & (positions_BT >= 0), positions_BT, slots)
        hidden_BTD, cache, _ = model(tokens_BT, positions_BT, state)
        first = pick(hidden_BTD[:, 1:], jnp.int32(0))

        def extend(
            carry: tuple[jax.Array, KVCache], offset: jax.Array
        ) -> tuple[tuple[jax.Array, KVCache], tuple[jax.Array, jax.Array]]:
            token_B, cache = carry
            position_B1 = jnp.where(drafting_B, last_B + offset, slots)[:, None]
            hidden_BTD, cache, _ = model(token_B[:, None], position_B1, cache)
            token_B, q_BV = pick(hidden_BTD, offset)
            return (token_B, cache), (token_B, q_BV)

        if gamma == 1:
            return Proposal(first[0][:, None], first[1][:, None]), cache
        offsets = jnp.arange(1, gamma, dtype=jnp.int32)
        (_, cache), (tokens_JB, q_JBV) = jax.lax.scan(extend, (first[0], cache), offsets)
        tokens_BJ = jnp.concatenate([first[0][:, None], tokens_JB.T], axis=1)
        q_BJV = jnp.concatenate([first[1][:, None], jnp.swapaxes(q_JBV, 0, 1)], axis=1)
        return Proposal(tokens_BJ, q_BJV), cache

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
        return state._replace(length_B=jnp.where(_drafting(state, before), fed_B, state.length_B))

    def ready(self, state: KVCache, context: Context) -> jax.Array:
        # Past the positions that the draft model was trained for it drafts nothing; the row goes on without it.
        fits_B = context.length_B + GAMMA_MAX <= self.model.config.max_position_embeddings
        return jnp.where(_drafting(state, context) & fits_B, GAMMA_MAX, 0).astype(jnp.int32)

    def lag(self, state: KVCache, context: Context) -> jax.Array:
        return context.length_B - 1 - state.length_B

    def grow(self, state: KVCache, slots: int) -> KVCache:
        return grow_cache(state, slots)


def _drafting(state: KVCache, context: Context) -> jax.Array:
    """Rows whose cache lacks at most the last two committed tokens."""
    return (context.length_B > 0) & (state.length_B >= context.length_B - 2)


def _fit_vocab(logits_BTV: jax.Array, vocab: int) -> jax.Array:
    """Draft logits over the target's vocabulary: padding ids beyond the shorter table cannot be drawn."""
    own = logits_BTV.shape[-1]
    if own < vocab:
        return jnp.pad(logits_BTV, ((0, 0), (0, 0), (0, vocab - own)), constant_values=-jnp.inf)
    return logits_BTV[..., :vocab]
