"""What a token's logits owe to the shape of the pass that it is in: rounding between shapes, nothing within one."""

import jax
import numpy as np
import pytest

from tests.model.conftest import SLOTS, Running

TOLERANCE = 5e-5  # float32 logits of one token in passes of different shapes; 1e-5 at most was seen
BFLOAT16_TOLERANCE = 0.05
NEXT = 9


def context(shared) -> tuple[np.ndarray, np.ndarray]:
    """A prompt of 33 tokens, and the 9 that follow it in the reference's greedy text."""
    data = np.load(shared / "fixtures" / "tiny-llama3" / "goldens.npz")
    return data["p33__input_ids"], data["p33__greedy_ids"][:NEXT]


def follow(
    model: Running, prompt: np.ndarray, text: np.ndarray, shape: tuple[int, int], row: int, per_pass: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logits after each token of a text [N, V], and the layers' keys, from passes of ``shape``.

    Each pass feeds ``per_pass`` tokens. The text is in ``row``; the other rows, and the rest of this one, hold random
    tokens, those of other rows alive.
    """
    B, T = shape
    rng = np.random.default_rng(per_pass)
    _, _, filled = model.prefill([prompt])
    cache = jax.tree.map(
        lambda empty, one: jax.device_put(np.repeat(one, B, axis=0), empty.sharding), model.cache(B), filled
    )
    logits = []
    for start in range(0, len(text), per_pass):
        some = text[start : start + per_pass]
        tokens = rng.integers(0, 490, size=(B, T)).astype(np.int32)
        positions = (rng.integers(0, 200, size=(B, 1)) + np.arange(T)).astype(np.int32)
        tokens[row, : len(some)] = some
        positions[row] = np.where(np.arange(T) < len(some), len(prompt) + start + np.arange(T), SLOTS)
        found, _, cache = model.feed(cache, tokens, positions)
        logits.append(found[row, : len(some)])
    return np.concatenate(logits), np.stack([np.asarray(layer.k[row], np.float32) for layer in cache.layers])


SHAPES = [(B, T) for B in (1, 4, 16) for T in (1, 2, 5, 9)]


@pytest.mark.parametrize(
    ("dtype", "tolerance", "shapes"),
    [("float32", TOLERANCE, SHAPES), ("bfloat16", BFLOAT16_TOLERANCE, [(1, 9), (4, 1), (16, 9)])],
)
def test_shapes_differ_by_rounding_alone(dtype, tolerance, shapes, running, shared):
    """A23: 1, 2, 5 and 9 tokens of 1, 4 and 16 rows; the best token changes only where two nearly tie."""
    model = running("tiny-llama3", dtype=dtype)
    prompt, text = context(shared)
    plain, _ = follow(model, prompt, text, (1, 1), 0, 1)
    second, best = np.sort(plain, axis=1)[:, -2:].T
    for shape in shapes:
        logits, _ = follow(model, prompt, text, shape, shape[0] - 1, shape[1])
        assert np.abs(logits - plain).max() < tolerance, shape
        flipped = logits.argmax(1) != plain.argmax(1)
        assert (best - second)[flipped].max(initial=0) < 2 * tolerance, shape


@pytest.mark.parametrize(
    ("dtype", "mesh", "shape"),
    [
        ("float32", "1", (4, 9)),
        ("bfloat16", "1", (4, 9)),
        ("float32", "1", (3, 5)),
        ("float32", "data=2,model=2", (4, 9)),
    ],
)
def test_one_shape_gives_the_same_bits(dtype, mesh, shape, running, shared):
    """A23: a token's logits and its keys are the same one by one as all at once, in any row, beside anything."""
    model = running("tiny-llama3", mesh=mesh, dtype=dtype)
    prompt, text = context(shared)
    logits, keys = follow(model, prompt, text, shape, 0, 1)
    used = len(prompt) + NEXT
    for row in range(shape[0]):
        for per_pass in (2, shape[1]):
            others, other_keys = follow(model, prompt, text, shape, row, per_pass)
            np.testing.assert_array_equal(others, logits)
            np.testing.assert_array_equal(other_keys[..., :used, :], keys[..., :used, :])
