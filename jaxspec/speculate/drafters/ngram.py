"""Prompt lookup: the longest suffix of the committed tokens that occurred before predicts what follows it again.

The lookup runs on the device at the end of each step, over prompt and output, so that the host knows before the next
step whether there is anything to verify (Saxena 2023, "prompt lookup decoding").
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.model.llama import Llama
from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate.drafters import Blind, Proposal, Seen
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.state import Context


class Lookup(NamedTuple):
    """What the last lookup found for each row."""

    tokens_BJ: jax.Array  # int32 [B, GAMMA_MAX]
    found_B: jax.Array  # int32, 0 or GAMMA_MAX


def look_up(
    tokens_BS: jax.Array, length_B: jax.Array, shortest_B: jax.Array, longest_B: jax.Array, limit: int
) -> Lookup:
    """Finds the longest earlier occurrence of the last tokens, ``shortest_B`` to ``longest_B`` of them, row by row.

    ``limit`` (static): no row's ``longest_B`` is larger. Of several equally long ones the latest counts. What followed
    it is copied; where the copy would run past the committed tokens it goes on in the copy itself, as the text would if
    it went round in a loop.
    """
    slots = tokens_BS.shape[1]
    ends_S = jnp.arange(slots, dtype=jnp.int32)
    last_B = length_B - 1

    # matched_BS[j]: how many tokens ending at slot j equal the ones that end the row.
    matched_BS = jnp.zeros_like(tokens_BS)
    unbroken_BS = jnp.ones(tokens_BS.shape, bool)
    for back in range(limit):
        suffix_B1 = jnp.take_along_axis(tokens_BS, jnp.maximum(last_B - back, 0)[:, None], axis=1)
        shifted_BS = jnp.pad(tokens_BS, ((0, 0), (back, 0)))[:, :slots]
        inside_S = ends_S >= back
        asked_B1 = longest_B[:, None] > back
        unbroken_BS = unbroken_BS & (shifted_BS == suffix_B1) & inside_S[None, :] & asked_B1
        matched_BS = matched_BS + unbroken_BS.astype(jnp.int32)

    earlier_BS = ends_S[None, :] < last_B[:, None]
    matched_BS = jnp.where(earlier_BS & (matched_BS >= shortest_B[:, None]), matched_BS, 0)
    end_B = jnp.argmax(matched_BS * slots + ends_S[None, :], axis=1).astype(jnp.int32)
    found_B = jnp.take_along_axis(matched_BS, end_B[:, None], axis=1)[:, 0] > 0

    period_B = jnp.maximum(last_B - end_B, 1)
    offsets_J = jnp.arange(GAMMA_MAX, dtype=jnp.int32)
    source_BJ = end_B[:, None] + 1 + offsets_J[None, :] % period_B[:, None]
    tokens_BJ = jnp.take_along_axis(tokens_BS, jnp.clip(source_BJ, 0, slots - 1), axis=1)
    return Lookup(tokens_BJ, jnp.where(found_B, GAMMA_MAX, 0).astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class NgramDrafter(Blind):
    """Drafts are copied, not drawn: their law is one-hot.

    ``longest``: bound on the suffix that any row looks up; each row has its own two lengths in its RowParams.
    """

    longest: int
    is_lookup = True

    def init(self, rows: int, slots: int) -> Lookup:
        return Lookup(jnp.zeros((rows, GAMMA_MAX), jnp.int32), jnp.zeros((rows,), jnp.int32))

    def axes(self, state: Any) -> Lookup:
        return Lookup(("batch", None), ("batch",))  # pyright: ignore[reportArgumentType]

    def propose(
        self, params: Any, target: Llama, state: Lookup, context: Context, gamma: int, draws: Draws
    ) -> tuple[Proposal, Lookup]:
        return Proposal(state.tokens_BJ[:, :gamma]), state

    def commit(
        self, params: Any, target: Llama, state: Lookup, before: Context, after: Context, seen: Seen, gamma: int
    ) -> Lookup:
        rows = after.rows
        return look_up(after.tokens_BS, after.length_B, rows.lookup_min_B, rows.lookup_max_B, self.longest)

    def ready(self, state: Lookup, context: Context) -> jax.Array:
        return state.found_B
