"""Lookahead decoding: the target guesses ahead of itself, in the same pass that checks what it guessed before.

Beside the drafts every round feeds a window of W columns and N - 1 levels (Fu et al. 2024, section 3): column c of
level l is a guess of the token c + l places after the pending one, which itself is the first of level 0. A node of
level 0 sees those of level 0 up to its column; one of a higher level sees its column below it, and what that column's
first node sees. What the target says after the top level is the next top level, the lowest falls out, and every column
with its new top is an n-gram that the target said itself, but for its first token: Jacobi iteration, whose trajectories
are kept. N-grams go to a pool; those that begin with the pending token are drafted, as are runs that followed it in the
row.

Drafts are undrawn and follow from the committed tokens and the rounds before, so every law is exact for them.
"""

import dataclasses
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.llama import Llama
from jaxspec.speculate.drafters import Blind, Proposal, Seen
from jaxspec.speculate.drafters.ngram_pool import continuations, empty_pool, insert, merge
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.state import Context
from jaxspec.speculate.window import Window

POOL: Final = 512  # n-grams of a row that are kept


class LookaheadState(NamedTuple):
    """``window_BLW``: level by level, the oldest guesses first; the very first place is the pending token's.

    ``passes_B``: rounds that have fed it, up to N. Levels that no round has filled hold tokens of the row at random.
    """

    window_BLW: jax.Array  # int32
    passes_B: jax.Array  # int32
    pool_BPN: jax.Array  # int32


@dataclasses.dataclass(frozen=True)
class LookaheadDrafter(Blind):
    """``columns`` W, ``size`` N, at least 2, and ``candidates`` G: n-grams that are tried in a round."""

    columns: int
    size: int
    candidates: int

    @property
    def levels(self) -> int:
        """Of the window, and of the drafts: an n-gram's tokens after its first."""
        return self.size - 1

    def drafts(self, gamma: int) -> int:
        return self.candidates * min(gamma, self.levels)

    def window(self, gamma: int) -> int:
        return self.columns * self.levels - 1 if gamma else 0

    def init(self, rows: int, slots: int) -> LookaheadState:
        window_BLW = jnp.zeros((rows, self.levels, self.columns), jnp.int32)
        return LookaheadState(window_BLW, jnp.zeros((rows,), jnp.int32), empty_pool(rows, POOL, self.size))

    def axes(self, state: Any) -> LookaheadState:
        return LookaheadState(("batch", None, None), ("batch",), ("batch", None, None))  # pyright: ignore[reportArgumentType]

    def propose(
        self, params: Any, target: Llama, state: LookaheadState, context: Context, gamma: int, draws: Draws
    ) -> tuple[Proposal, LookaheadState]:
        starts_B = state.passes_B == 0
        if context.asked_B is not None:
            starts_B = starts_B & (context.asked_B > 0)
        window_BLW = jnp.where(starts_B[:, None, None], self._first_guesses(context), state.window_BLW)
        runs_BGD, found_BG = continuations(state.pool_BPN, context.tokens_BS, context.length_B, self.candidates)
        tokens_BJ, topology = merge(runs_BGD[:, :, :gamma], found_BG)
        tokens_BX = window_BLW.reshape(window_BLW.shape[0], -1)[:, 1:]
        window = Window(tokens_BX, *window_shape(self.columns, self.levels))
        return Proposal(tokens_BJ, None, topology, window=window), state._replace(window_BLW=window_BLW)

    def _first_guesses(self, context: Context) -> jax.Array:
        """Tokens of the row, at random, as the authors begin; of the row alone, so that its text is, too."""
        places_X = np.arange(self.levels * self.columns, dtype=np.uint64)
        random_X = (places_X * 2654435761 % 2**32 >> 8).astype(np.int32)  # Knuth's multiplicative hash
        from_BX = jnp.asarray(random_X)[None, :] % jnp.maximum(context.length_B, 1)[:, None]
        return jnp.take_along_axis(context.tokens_BS, from_BX, axis=1).reshape(-1, self.levels, self.columns)

    def commit(
        self,
        params: Any,
        target: Llama,
        state: LookaheadState,
        before: Context,
        after: Context,
        seen: Seen,
        gamma: int,
    ) -> LookaheadState:
        if seen.window is None:
            return state
        moves_B = seen.window.fed_B & (after.length_B > before.length_B)
        new_BW = seen.window.choices_BC
        pending_B1 = jnp.take_along_axis(before.tokens_BS, jnp.maximum(before.length_B - 1, 0)[:, None], axis=1)
        window_BLW = state.window_BLW.at[:, 0, 0].set(pending_B1[:, 0])
        grown_BNW = jnp.concatenate([window_BLW, new_BW[:, None, :]], axis=1)
        # Before that some level above the first is made of tokens that nobody guessed.
        is_guessed_B = moves_B & (state.passes_B >= self.size - 2)
        return LookaheadState(
            jnp.where(moves_B[:, None, None], grown_BNW[:, 1:], state.window_BLW),
            jnp.minimum(state.passes_B + moves_B, self.size),
            insert(state.pool_BPN, grown_BNW.swapaxes(1, 2), is_guessed_B),
        )

    def ready(self, state: LookaheadState, context: Context) -> jax.Array:
        # Also without an n-gram to try: the window moves on in rounds that draft alone.
        return jnp.full_like(context.length_B, self.levels)


def window_shape(columns: int, levels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets, ancestors and what is read of the window's nodes, which lie level by level without the very first."""
    level_X, column_X = (index.ravel()[1:] for index in np.indices((levels, columns)))
    is_lowest_X = level_X == 0
    along_XX = is_lowest_X[None, :] & (column_X[None, :] <= column_X[:, None])
    up_XX = (column_X[None, :] == column_X[:, None]) & (level_X[None, :] <= level_X[:, None])
    read_W = (levels - 1) * columns + np.arange(columns) - 1
    return (level_X + column_X).astype(np.int32), along_XX | up_XX, read_W.astype(np.int32)
