"""No drafter: plain decoding through the same step."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.speculate.drafters import Proposal
from jaxspec.speculate.state import Context


class NoDrafter:
    """Never ready, so a step with drafts is never asked for."""

    has_cache = False

    def init(self, rows: int, slots: int) -> Any:
        return ()

    def axes(self, state: Any) -> Any:
        return ()

    def prefill(self, params: Any, state: Any, context: Context, start: jax.Array, chunk: int) -> Any:
        return state

    def propose(
        self, params: Any, state: Any, context: Context, gamma: int, draft_uniforms_BJ: jax.Array
    ) -> tuple[Proposal, Any]:
        raise ValueError("method none drafts nothing: a step with gamma > 0 was asked for")

    def commit(self, state: Any, before: Context, after: Context, n_accepted_B: jax.Array, gamma: int) -> Any:
        return state

    def ready(self, state: Any, context: Context) -> jax.Array:
        return jnp.zeros_like(context.length_B)

    def lag(self, state: Any, context: Context) -> jax.Array:
        return jnp.zeros_like(context.length_B)

    def grow(self, state: Any, slots: int) -> Any:
        return state
