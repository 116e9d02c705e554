"""What rejected drafts leave of the laws at a node: of the target's p, and of the q of the siblings still to be tried.

The acceptance laws (``verify``) walk a round of drafts and reject some. What is left after each is two numbers and a
share instead of a law, so that their loops carry no vocabularies.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import sizes
from jaxspec.speculate.topology import Drafts


class Round(NamedTuple):
    """The drafts as the laws look at them."""

    p_BTV: jax.Array
    q_BXV: jax.Array | None
    law_BJ: jax.Array  # which of q_BXV
    tokens_BJ: jax.Array
    parent_BJ: jax.Array
    live_BJ: jax.Array
    followed_BJ: jax.Array  # whether a later sibling is live
    p_BJ: jax.Array  # p and q at the drafted tokens
    q_BJ: jax.Array

    @classmethod
    def of(cls, p_BTV: jax.Array, drafts: Drafts, coin_BJ: jax.Array) -> "Round":
        """ValueError where the shapes do not belong together. A draft that q cannot say is not live."""
        tokens_BJ, parent_BJ = drafts.tokens_BJ, drafts.topology.parent_BJ
        size = sizes(tokens_BJ=tokens_BJ, parent_BJ=parent_BJ, live_BJ=drafts.live_BJ, coin_BJ=coin_BJ)
        rows, drafted = size["B"], size["J"]
        if p_BTV.shape[:2] != (rows, drafted + 1):
            raise ValueError(f"p_BTV: expected {drafted + 1} nodes of {rows} rows, got shape {p_BTV.shape}")
        p_BJ = jax.vmap(lambda p_TV, parent_J, tokens_J: p_TV[parent_J, tokens_J])(p_BTV, parent_BJ, tokens_BJ)
        q_BXV, law_BJ, live_BJ = drafts.q_BJV, drafts.law_BJ, drafts.live_BJ
        order_J = jnp.arange(drafted)
        if law_BJ is None:
            law_BJ = jnp.broadcast_to(order_J[None, :], tokens_BJ.shape)
        if q_BXV is None:
            q_BJ = jnp.ones_like(p_BJ)
        else:
            if drafts.law_BJ is None:
                sizes(tokens_BJ=tokens_BJ, q_BJV=q_BXV)
            sizes(p_BTV=p_BTV, q_BXV=q_BXV, law_BJ=law_BJ)
            weight_at = jax.vmap(lambda q_XV, law_J, tokens_J: q_XV[law_J, tokens_J])
            q_BJ = weight_at(q_BXV, law_BJ, tokens_BJ).astype(p_BJ.dtype)
            live_BJ = live_BJ & (q_BJ > 0)
        later_JJ = order_J[None, :] > order_J[:, None]
        is_sibling_BJJ = parent_BJ[:, :, None] == parent_BJ[:, None, :]
        followed_BJ = jnp.any(is_sibling_BJJ & later_JJ[None] & live_BJ[:, None, :], axis=-1)
        return cls(p_BTV, q_BXV, law_BJ, tokens_BJ, parent_BJ, live_BJ, followed_BJ, p_BJ, q_BJ)


class Left(NamedTuple):
    """What rejected children leave of the laws at a node. One value per row, or per row and node.

    p is norm(max(p - q, 0)) over and over, with a smaller q every time. A rejected token has no p left, and for all
    others that is max(a p - b q, 0) with the p and q of the beginning: two numbers instead of a law.
    """

    a: jax.Array
    b: jax.Array
    share: jax.Array  # of q, that the rejected children leave: the next is drawn from q / share

    def weight(self, p: jax.Array, q: jax.Array) -> jax.Array:
        """What is left of p at a token, in units in which the token was drawn with chance q."""
        return jnp.maximum(self.a * p - self.b * q, 0) * self.share

    @classmethod
    def whole(cls, like: jax.Array) -> "Left":
        """Nothing rejected yet."""
        one = jnp.ones_like(like)
        return cls(one, jnp.zeros_like(one), one)


def choose(is_first_B: jax.Array, first: Left, second: Left) -> Left:
    """Row by row."""
    return jax.tree.map(lambda x_B, y_B: jnp.where(is_first_B, x_B, y_B), first, second)


def at_most_one(weight_B: jax.Array, q_B: jax.Array) -> jax.Array:
    """min(1, weight / q) without 0 / 0: what the target cannot say never stands."""
    is_less_B = weight_B < q_B
    return jnp.where(is_less_B, weight_B / jnp.where(is_less_B, q_B, 1), (weight_B > 0).astype(weight_B.dtype))


def reject(
    round_: Round, node_B: jax.Array, j_B: jax.Array, alpha_B: jax.Array, left: Left, weighed_B: jax.Array
) -> tuple[jax.Array, Left]:
    """The mass of r = max(alpha p - q, 0) at a node whose child j was rejected, and what that leaves of its laws.

    Rows that are not to be weighed get mass 1 and laws that are not normalised, which will do for a last draw.
    """
    if round_.q_BXV is None:
        # q is one-hot: x leaves p. No other token matters.
        kept_B = jnp.maximum(1 - left.a * at(round_.p_BJ, j_B), 0)
        a_B = jnp.where(kept_B > 0, left.a / jnp.where(kept_B > 0, kept_B, 1), 0)
        return alpha_B * kept_B, left._replace(a=a_B)
    q_BXV = round_.q_BXV
    a_B = alpha_B * left.a
    b_B = alpha_B * left.b + 1 / jnp.where(left.share > 0, left.share, 1)

    def weigh() -> tuple[jax.Array, jax.Array]:
        p_BV, q_BV = row(round_.p_BTV, node_B), row(q_BXV, at(round_.law_BJ, j_B))
        mass_B = jnp.sum(jnp.maximum(a_B[:, None] * p_BV - b_B[:, None] * q_BV, 0), axis=-1)
        # Summed anew: 1 - q(x) would lose what a peaked q leaves.
        tried_BJ = (round_.parent_BJ == node_B[:, None]) & (
            jnp.arange(round_.live_BJ.shape[1])[None, :] <= j_B[:, None]
        )
        return mass_B, jnp.sum(without(q_BV, round_.tokens_BJ, tried_BJ & round_.live_BJ), axis=-1)

    one_B = jnp.ones_like(alpha_B)
    mass_B, share_B = lax.cond(jnp.any(weighed_B), weigh, lambda: (one_B, one_B))
    # A row must not feel that a neighbour was weighed.
    mass_B, share_B = (jnp.where(weighed_B, x_B, 1) for x_B in (mass_B, share_B))
    by_B = jnp.where(mass_B > 0, 1 / jnp.where(mass_B > 0, mass_B, 1), 0)
    return mass_B, Left(a_B * by_B, b_B * by_B, share_B)


def last_weights(round_: Round, node_B: jax.Array, left: Left) -> jax.Array:
    """The weights of the token after a node, all of whose live children were rejected."""
    p_BV = row(round_.p_BTV, node_B)
    gone_BJ = round_.live_BJ & (round_.parent_BJ == node_B[:, None])
    left_BV = p_BV
    if round_.q_BXV is not None:
        q_BV = row(round_.q_BXV, at(round_.law_BJ, jnp.argmax(gone_BJ, axis=1)))
        left_BV = jnp.maximum(left.a[:, None] * p_BV - left.b[:, None] * q_BV, 0)
    left_BV = without(left_BV, round_.tokens_BJ, gone_BJ)
    # Empty means p = q: only rounding can reject there, and p itself is the law.
    return jnp.where(jnp.any(left_BV > 0, axis=-1, keepdims=True), left_BV, p_BV)


def at(x_BX: jax.Array, index_B: jax.Array) -> jax.Array:
    """One value per row."""
    return jnp.take_along_axis(x_BX, index_B[:, None], axis=1)[:, 0]


def row(laws_BXV: jax.Array, index_B: jax.Array) -> jax.Array:
    """One law per row."""
    return jax.vmap(lambda laws_XV, index: laws_XV[index])(laws_BXV, index_B)


def without(law_BV: jax.Array, tokens_BJ: jax.Array, gone_BJ: jax.Array) -> jax.Array:
    """``law_BV`` with 0 at some tokens."""
    # An index past the end drops the write.
    ids_BJ = jnp.where(gone_BJ, tokens_BJ, law_BV.shape[-1])
    return jax.vmap(lambda law_V, ids_J: law_V.at[ids_J].set(0, mode="drop"))(law_BV, ids_BJ)
