"""What heads are trained on: pure functions of arrays that return sums.

Every loss is a sum over tokens with weights beside it. The caller divides by the weight of the whole batch, over
devices and accumulated parts: a mean of means would weigh a token by its neighbours.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Summed(NamedTuple):
    """A weighted sum over tokens, and the sum of the weights: f32 scalars."""

    total: jax.Array
    weight: jax.Array

    def mean(self) -> jax.Array:
        """0 where nothing had weight."""
        return self.total / jnp.maximum(self.weight, 1)

    def __add__(self, other: object) -> "Summed":
        assert isinstance(other, Summed)
        return Summed(self.total + other.total, self.weight + other.weight)


def summed(values_BT: jax.Array, weights_BT: jax.Array) -> Summed:
    """Values of no weight may be anything, NaN included."""
    weights_BT = weights_BT.astype(jnp.float32)
    values_BT = jnp.where(weights_BT > 0, values_BT.astype(jnp.float32), 0)
    return Summed(jnp.sum(values_BT * weights_BT), jnp.sum(weights_BT))


def cross_entropy(logits_BTV: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """-log of the chance of each id, [B, T]."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    chosen_BT = jnp.take_along_axis(logits_BTV, ids_BT[:, :, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT


def soft_cross_entropy(logits_BTV: jax.Array, teacher_BTV: jax.Array) -> jax.Array:
    """-sum p log q with p the softmax of the teacher's logits, [B, T]. Its least value is p's entropy.

    A teacher's -inf is a token that p cannot say.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    p_BTV = jax.nn.softmax(teacher_BTV.astype(jnp.float32), axis=-1)
    # p sums to 1, so that q's own logarithms, a pass over the vocabulary more, need not exist.
    return jax.nn.logsumexp(logits_BTV, axis=-1) - jnp.sum(p_BTV * jnp.where(p_BTV > 0, logits_BTV, 0), axis=-1)


def divergence(logits_BTV: jax.Array, teacher_BTV: jax.Array) -> jax.Array:
    """KL(p || q) of the two softmaxes, [B, T]; 0 where they agree."""
    entropy_BT = soft_cross_entropy(teacher_BTV, teacher_BTV)
    return soft_cross_entropy(logits_BTV, teacher_BTV) - entropy_BT


def smooth_l1(values_BTD: jax.Array, wanted_BTD: jax.Array) -> jax.Array:
    """The mean over D of the Huber loss with threshold 1, [B, T] (EAGLE's feature regression)."""
    gap_BTD = jnp.abs(values_BTD.astype(jnp.float32) - wanted_BTD.astype(jnp.float32))
    return jnp.mean(jnp.where(gap_BTD < 1, 0.5 * gap_BTD**2, gap_BTD - 0.5), axis=-1)


def likelier(logits_BTV: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """How many ids are likelier than each one given, int32 [B, T]. Exact ties are not."""
    chosen_BT1 = jnp.take_along_axis(logits_BTV, ids_BT[:, :, None], axis=-1)
    return jnp.sum(logits_BTV > chosen_BT1, axis=-1, dtype=jnp.int32)
