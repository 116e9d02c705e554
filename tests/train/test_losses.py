"""Losses against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from train_heads.losses import Summed, cross_entropy, divergence, likelier, smooth_l1, soft_cross_entropy, summed
from train_heads.objective import CHUNK, over_chunks


@pytest.fixture
def logits():
    return np.random.default_rng(1).normal(0, 3, (2, 2, 5, 7))


def test_cross_entropies_are_their_formulas(logits):
    mine, teacher = (jnp.asarray(x, jnp.float32) for x in logits)
    ids = np.random.default_rng(2).integers(0, 7, (2, 5))
    log_q = log_softmax(logits[0], axis=-1)
    np.testing.assert_allclose(
        cross_entropy(mine, jnp.asarray(ids)), -np.take_along_axis(log_q, ids[..., None], -1)[..., 0], atol=1e-5
    )
    expected = -(softmax(logits[1], axis=-1) * log_q).sum(-1)
    np.testing.assert_allclose(soft_cross_entropy(mine, teacher), expected, atol=1e-5)
    np.testing.assert_allclose(divergence(teacher, teacher), 0, atol=1e-6)
    assert (np.asarray(divergence(mine, teacher)) > 0).all()


def test_what_the_teacher_cannot_say_costs_nothing():
    teacher = jnp.asarray([[[0.0, 0.0, -jnp.inf]]])
    np.testing.assert_allclose(soft_cross_entropy(jnp.asarray([[[0.0, 0.0, -jnp.inf]]]), teacher), np.log(2), rtol=1e-6)


def test_smooth_l1_bends_at_one():
    np.testing.assert_allclose(smooth_l1(jnp.asarray([[[0.5, 3.0]]]), jnp.zeros((1, 1, 2))), (0.125 + 2.5) / 2)


def test_ids_that_are_likelier_are_counted():
    logits = jnp.asarray([[[3.0, 1.0, 2.0, 2.0]]])
    assert [int(likelier(logits, jnp.asarray([[word]]))[0, 0]) for word in range(4)] == [0, 3, 1, 1]


def test_a_mean_is_over_tokens_not_over_means():
    """I17: a batch with many tokens and one with few weigh by their tokens; what has no weight may be anything."""
    one = summed(jnp.asarray([[1.0, 1.0, 1.0]]), jnp.asarray([[1, 1, 1]]))
    other = summed(jnp.asarray([[5.0, jnp.nan, jnp.inf]]), jnp.asarray([[1, 0, 0]]))
    assert float((one + other).mean()) == 2.0
    assert float(Summed(jnp.float32(0), jnp.float32(0)).mean()) == 0.0


def test_sums_over_chunks_have_the_gradients_of_the_whole():
    """Values and gradients, of what is given and of what the function holds on to, weighed by the caller's own."""
    rng = np.random.default_rng(0)
    hidden_BTD = jnp.asarray(rng.normal(size=(2, 2 * CHUNK, 4)), jnp.float32)
    head_VD = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
    ids_BT = jnp.asarray(rng.integers(0, 6, (2, 2 * CHUNK)))

    def sums(head_VD, hidden_BTD, ids_BT):
        loss = summed(cross_entropy(hidden_BTD @ head_VD.T, ids_BT), ids_BT > 1)
        return loss.total, {"loss": loss}

    def chunked(head_VD, hidden_BTD):
        total, shown = over_chunks(lambda hidden, ids: sums(head_VD, hidden, ids), hidden_BTD, ids_BT)
        return 3 * total, shown

    def whole(head_VD, hidden_BTD):
        total, shown = sums(head_VD, hidden_BTD, ids_BT)
        return 3 * total, shown

    found, expected = (
        jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))(head_VD, hidden_BTD)
        for function in (chunked, whole)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5), found, expected)
    without = jax.jit(chunked)(head_VD, hidden_BTD)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5), without, expected[0])
