"""No drafter: plain decoding through the same step."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.model.llama import Llama
from jaxspec.speculate.drafters import Blind, Proposal, Seen
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.state import Context


class NoDrafter(Blind):
    """Never ready. A step that is compiled for drafts has as many places, none of them live."""

    def init(self, rows: int, slots: int) -> Any:
        return ()

    def axes(self, state: Any) -> Any:
        return ()

    def propose(
        self, params: Any, target: Llama, state: Any, context: Context, gamma: int, draws: Draws
    ) -> tuple[Proposal, Any]:
        rows = context.length_B.shape[0]
        return Proposal(jnp.zeros((rows, gamma), jnp.int32), levels_B=jnp.zeros((rows,), jnp.int32)), state

    def commit(
        self, params: Any, target: Llama, state: Any, before: Context, after: Context, seen: Seen, gamma: int
    ) -> Any:
        return state

    def ready(self, state: Any, context: Context) -> jax.Array:
        return jnp.zeros_like(context.length_B)
