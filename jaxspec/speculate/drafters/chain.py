"""Drafting one token after the other: what every drafter of chains does with its logits."""

import jax
import jax.numpy as jnp

from jaxspec.speculate.noise import Draws
from jaxspec.speculate.sampling import final_law, first_argmax, mask_logits
from jaxspec.speculate.state import Context


def next_draft(
    logits_BTV: jax.Array, context: Context, offset: jax.Array, draws: Draws, valid_vocab: int
) -> tuple[jax.Array, jax.Array]:
    """The draft of every row at ``offset`` (0: the first), and the final law that it was drawn from.

    ``logits_BTV``: T = 1, over the target's vocabulary. A greedy round never reads the laws: zeros.
    """
    rows = context.rows
    ban_BT = (context.length_B + offset < rows.min_length_B)[:, None]
    logits_BTV = mask_logits(logits_BTV, rows.stop_ids_BE, ban_BT, valid_vocab)

    def greedy() -> tuple[jax.Array, jax.Array]:
        return first_argmax(logits_BTV)[:, 0], jnp.zeros_like(logits_BTV[:, 0])

    def drawn() -> tuple[jax.Array, jax.Array]:
        # Where no law follows (all ids masked, or no numbers) the uniform one: the acceptance laws are exact for
        # whatever a draft is drawn from, as long as it is a law.
        is_sound_BT1 = jnp.isfinite(jnp.max(logits_BTV, axis=-1, keepdims=True))
        q_BV = final_law(jnp.where(is_sound_BT1, logits_BTV, 0), rows.sampling)[:, 0]
        return draws.pick(q_BV, offset), q_BV

    return jax.lax.cond(jnp.all(rows.sampling.temperature_B <= 0), greedy, drawn)
