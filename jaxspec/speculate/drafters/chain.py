"""Drafting one token after the other: what every drafter of chains does with its logits."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.speculate.drafters import Proposal
from jaxspec.speculate.noise import Draws
from jaxspec.speculate.sampling import final_law, first_argmax, mask_logits
from jaxspec.speculate.state import Context

# How drafts are chosen: the likeliest, whose law is one-hot whatever the temperature, or drawn from the draft's law.
Sample = Literal["greedy", "probabilistic"]


class NextDraft(NamedTuple):
    """One draft per row, and the final law that it was drawn from; None for one that was not drawn."""

    token_B: jax.Array
    q_BV: jax.Array | None


def next_draft(
    logits_BTV: jax.Array, context: Context, offset: jax.Array, draws: Draws, valid_vocab: int, sample: Sample
) -> NextDraft:
    """The draft of every row at ``offset`` (0: the first).

    ``logits_BTV``: T = 1, over the target's vocabulary. A greedy round never reads the laws: zeros.
    """
    rows = context.rows
    ban_BT = (context.length_B + offset < rows.min_length_B)[:, None]
    logits_BTV = mask_logits(logits_BTV, rows.stop_ids_BE, ban_BT, valid_vocab)
    if sample == "greedy":
        return NextDraft(first_argmax(logits_BTV)[:, 0], None)

    def greedy() -> NextDraft:
        return NextDraft(first_argmax(logits_BTV)[:, 0], jnp.zeros_like(logits_BTV[:, 0]))

    def drawn() -> NextDraft:
        q_BV = final_law(sound(logits_BTV), rows.sampling)[:, 0]
        return NextDraft(draws.pick(q_BV, offset), q_BV)

    return jax.lax.cond(jnp.all(rows.sampling.temperature_B <= 0), greedy, drawn)


def sound(logits_BTV: jax.Array) -> jax.Array:
    """Logits from which a law follows: the uniform one where none does (all ids masked, or no numbers).

    The acceptance laws are exact for whatever a draft is drawn from, as long as it is a law.
    """
    is_sound_BT1 = jnp.isfinite(jnp.max(logits_BTV, axis=-1, keepdims=True))
    return jnp.where(is_sound_BT1, logits_BTV, 0)


def draft_chain(
    first: NextDraft,
    extend: Callable[[jax.Array, Any, jax.Array], tuple[NextDraft, Any]],
    carry: Any,
    gamma: int,
) -> tuple[Proposal, Any]:
    """The chain of ``gamma`` drafts that begins with ``first``: ``extend(token_B, carry, offset)`` gives the next."""

    def step(carry: tuple[jax.Array, Any], offset: jax.Array) -> tuple[tuple[jax.Array, Any], NextDraft]:
        draft, rest = extend(*carry, offset)
        return (draft.token_B, rest), draft

    chain = jax.tree.map(lambda x_BX: x_BX[:, None], first)
    if gamma > 1:
        offsets = jnp.arange(1, gamma, dtype=jnp.int32)
        (_, carry), others = jax.lax.scan(step, (first.token_B, carry), offsets)
        chain = jax.tree.map(
            lambda one_BJX, more_JBX: jnp.concatenate([one_BJX, jnp.swapaxes(more_JBX, 0, 1)], axis=1), chain, others
        )
    return Proposal(*chain), carry
