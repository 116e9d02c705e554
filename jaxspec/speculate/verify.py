"""The acceptance laws: which drafted tokens stand, and what the last token of a round is drawn from.

p is the final law of the target, q the final law that the draft token was drawn from. Each law is a pure function of
arrays, and the acceptance probabilities it returns are the numbers that decide, so that its output law can be summed
exactly.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.shapes import sizes


class Verdict(NamedTuple):
    """What a law says of a round of drafts."""

    n_accepted_B: jax.Array  # i32, leading drafts that stand, at most gamma
    accept_prob_BJ: jax.Array  # chance that each draft stands once its predecessors do; 0 from gamma on
    last_BV: jax.Array  # unnormalised weights of the token that follows the accepted ones


class GreedyVerdict(NamedTuple):
    """What the greedy law says: nothing is left to draw."""

    n_accepted_B: jax.Array  # i32
    last_token_B: jax.Array  # i32


def token_law(
    p_BJV: jax.Array, q_BJV: jax.Array | None, draft_BJ: jax.Array, gamma_B: jax.Array, coin_BJ: jax.Array
) -> Verdict:
    """Token-wise rejection (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2) on a chain.

    Draft x_i stands if coin_i < min(1, p_i(x_i) / q_i(x_i)) and its predecessors stand. The last token comes from
    max(p - q, 0) at the first rejection, and from p at gamma if all stand. Both are weights, not normalised.

    Args:
        p_BJV: final target laws at positions 0..J, so J+1 of them.
        q_BJV: final draft laws at positions 0..J-1, or None where the drafts were not drawn (a one-hot q): then a
            draft stands with chance p(x), and on rejection x leaves p.
        draft_BJ: drafted ids. Those from ``gamma_B`` on are padding: any id in the vocabulary.
        gamma_B: drafts of each row, 0..J.
        coin_BJ: uniforms in [0, 1), independent of the drafts.
    """
    size = sizes(draft_BJ=draft_BJ, gamma_B=gamma_B, coin_BJ=coin_BJ)
    drafted = size["J"]
    if p_BJV.shape[:2] != (size["B"], drafted + 1):
        raise ValueError(f"p_BJV: expected {drafted + 1} positions of {size['B']} rows, got shape {p_BJV.shape}")
    if drafted == 0:
        return Verdict(jnp.zeros_like(gamma_B), jnp.zeros((size["B"], 0), p_BJV.dtype), p_BJV[:, 0])

    p_draft_BJ = jnp.take_along_axis(p_BJV[:, :drafted], draft_BJ[:, :, None], axis=-1)[..., 0]
    if q_BJV is None:
        accept_BJ = p_draft_BJ
    else:
        q_draft_BJ = jnp.take_along_axis(q_BJV, draft_BJ[:, :, None], axis=-1)[..., 0]
        # min(1, p / q) without 0 / 0: what the target cannot say never stands.
        ratio_BJ = p_draft_BJ / jnp.where(p_draft_BJ < q_draft_BJ, q_draft_BJ, 1)
        accept_BJ = jnp.where(p_draft_BJ < q_draft_BJ, ratio_BJ, (p_draft_BJ > 0).astype(p_BJV.dtype))
    tested_BJ = jnp.arange(drafted)[None, :] < gamma_B[:, None]
    accept_BJ = jnp.where(tested_BJ, accept_BJ, 0)
    n_accepted_B = _leading(coin_BJ < accept_BJ)

    p_last_BV = _position(p_BJV, n_accepted_B)
    rejected_B = jnp.minimum(n_accepted_B, drafted - 1)
    if q_BJV is None:
        rejected_id_B = jnp.take_along_axis(draft_BJ, rejected_B[:, None], axis=-1)
        is_rejected_BV = jnp.arange(p_BJV.shape[-1])[None, :] == rejected_id_B
        residual_BV = jnp.where(is_rejected_BV, 0, p_last_BV)
    else:
        residual_BV = jnp.maximum(p_last_BV - _position(q_BJV, rejected_B), 0)
    # An empty residual means p = q: only rounding can reject there, and p itself is the law.
    use_residual_B = (n_accepted_B < gamma_B) & jnp.any(residual_BV > 0, axis=-1)
    return Verdict(n_accepted_B, accept_BJ, jnp.where(use_residual_B[:, None], residual_BV, p_last_BV))


def greedy_law(argmax_BJ: jax.Array, draft_BJ: jax.Array, gamma_B: jax.Array) -> GreedyVerdict:
    """The token law at temperature zero, from the target's argmax at positions 0..J (J+1 of them) alone."""
    drafted = draft_BJ.shape[1]
    tested_BJ = jnp.arange(drafted)[None, :] < gamma_B[:, None]
    n_accepted_B = _leading((draft_BJ == argmax_BJ[:, :drafted]) & tested_BJ)
    return GreedyVerdict(n_accepted_B, jnp.take_along_axis(argmax_BJ, n_accepted_B[:, None], axis=-1)[:, 0])


def _leading(stands_BJ: jax.Array) -> jax.Array:
    """How many stand before the first that does not."""
    return jnp.sum(jnp.cumprod(stands_BJ.astype(jnp.int32), axis=-1), axis=-1, dtype=jnp.int32)


def _position(laws_BJV: jax.Array, position_B: jax.Array) -> jax.Array:
    """One law per row."""
    return jax.vmap(lambda laws_JV, position: laws_JV[position])(laws_BJV, position_B)
