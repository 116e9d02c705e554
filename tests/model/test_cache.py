"""The cache as pictures, and what attention may see of it."""

import re
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.cache import CACHE_AXES, LayerCache, write
from jaxspec.model.layers import attend
from jaxspec.sharding import make_sharding

K, H = 2, 3
DROP = 7  # S of the pictures: the first position past the end


def picture(text: str) -> np.ndarray:
    return np.asarray([[int(mark) for mark in line] for line in text.split()])


def write_ones(rows: int, positions_BT: list[list[int]], dtype: type = jnp.float32) -> np.ndarray:
    """Where writing at positions_BT into seven empty slots of each row left a mark, [B, S]."""
    positions = jnp.asarray(positions_BT, jnp.int32)
    new_BTKH = 1 + jnp.arange(positions.size * K * H, dtype=jnp.float32).reshape(*positions.shape, K, H)
    cache = jax.jit(write)(jnp.zeros((rows, K, 7, H), dtype), new_BTKH, positions)
    marks = np.asarray(cache != 0)
    assert cache.dtype == dtype
    assert (marks == marks[:, :1, :, :1]).all()  # a slot is written whole or not at all
    for row, slots in enumerate(positions_BT):
        for token, slot in enumerate(slots):
            if 0 <= slot < 7:
                np.testing.assert_array_equal(cache[row, :, slot], new_BTKH[row, token].astype(dtype))
    return marks[:, 0, :, 0].astype(int)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_row_writes_at_its_own_length(dtype) -> None:
    written = write_ones(5, [[0, 1, 2], [4, 5, 6], [2, 3, 4], [1, 2, 3], [3, 4, 5]], dtype)
    expected = """
        1110000
        0000111
        0011100
        0111000
        0001110
    """
    np.testing.assert_array_equal(written, picture(expected))


def test_positions_outside_the_row_are_dropped() -> None:
    """Neither wrapped around (-1 is no last slot) nor shifted back over valid slots (as a slice update would)."""
    written = write_ones(5, [[5, 6, 7], [-1, 0, 1], [-7, -3, -8], [6, 7, 1000], [3, DROP, DROP]])
    expected = """
        0000011
        1100000
        0000000
        0000001
        0001000
    """
    np.testing.assert_array_equal(written, picture(expected))


@pytest.mark.parametrize(("position", "expected"), [(0, "1000000"), (6, "0000001"), (7, "0000000"), (-1, "0000000")])
def test_a_single_token_of_a_single_row(position, expected) -> None:
    np.testing.assert_array_equal(write_ones(1, [[position]]), picture(expected))


def cache_ops(write_one: Callable[..., jax.Array], rows: int, tokens: int) -> Counter[str]:
    """What an executable of two layers (write, then attend) does to donated caches, parameters aside."""
    shape = (rows, K, 1021, H)

    def layers(caches, new_BTKH, positions_BT, q_BTKGH):
        out = jnp.zeros_like(q_BTKGH)
        after = []
        for cache in caches:
            new = new_BTKH + out[:, :, :, 0]
            cache = LayerCache(write_one(cache.k, new, positions_BT), write_one(cache.v, new, positions_BT))
            out = attend(q_BTKGH + out, cache, positions_BT)
            after.append(cache)
        return after, out

    layer = LayerCache(*[jax.ShapeDtypeStruct(shape, jnp.float32)] * 2)
    some = jax.ShapeDtypeStruct((rows, tokens, K, H), jnp.float32)
    queries = jax.ShapeDtypeStruct((rows, tokens, K, 5, H), jnp.float32)
    positions = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    lowered = jax.jit(layers, donate_argnums=0).lower([layer, layer], some, positions, queries)
    # As a user's process compiles it, whatever the suite saves elsewhere (tests/conftest.py).
    compiled = lowered.compile(compiler_options={"xla_cpu_use_fusion_emitters": True})
    entry = compiled.as_text().split("ENTRY")[1]
    dims = ",".join(map(str, shape))
    ops = re.findall(rf"%(\S+?)[.\d]* = f32\[{dims}\]\S* (?!parameter)[\w-]+\(", entry)
    return Counter(ops)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 5), (3, 1), (3, 5)])
def test_a_pass_writes_into_its_donated_caches_and_copies_none(rows, tokens) -> None:
    assert cache_ops(write, rows, tokens) == {"wrapped_scatter": 4}


def test_the_added_index_is_still_needed() -> None:
    """Without it XLA's CPU backend makes a scatter of one index a slice update of copied caches."""

    def naive(cache_BKSH, new_BTKH, positions_BT):
        def write_row(row_KSH, new_TKH, positions_T):
            return row_KSH.at[:, positions_T].set(new_TKH.swapaxes(0, 1), mode="drop")

        return jax.vmap(write_row)(cache_BKSH, new_BTKH, positions_BT)

    assert cache_ops(naive, 1, 1)["copy"] >= 4


def test_other_slots_keep_their_bits() -> None:
    cache = jax.random.normal(jax.random.key(0), (3, K, 7, H)).at[0, 0, 0, 0].set(-0.0)
    new = jnp.ones((3, 1, K, H))
    positions = jnp.asarray([[2], [DROP], [6]])
    after = np.asarray(jax.jit(write)(cache, new, positions))
    before = np.array(cache)
    for row, slot in ((0, 2), (2, 6)):
        np.testing.assert_array_equal(after[row, :, slot], 1)
        before[row, :, slot] = after[row, :, slot]
    assert after.tobytes() == before.tobytes()


def attention(slots_BKSH: np.ndarray, positions_BT: list[list[int]], queries_BTKGH: np.ndarray) -> np.ndarray:
    cache = LayerCache(jnp.asarray(slots_BKSH), jnp.asarray(slots_BKSH[..., ::-1]))
    return np.asarray(jax.jit(attend)(jnp.asarray(queries_BTKGH), cache, jnp.asarray(positions_BT, jnp.int32)))


def test_attention_sees_slots_up_to_its_position() -> None:
    """A picture of what each query sees: perturb one slot at a time, and compare bits."""
    B, T, G, S = 2, 3, 5, 7
    rng = np.random.default_rng(3)
    queries = rng.standard_normal((B, T, K, G, H), np.float32)
    slots = rng.standard_normal((B, K, S, H), np.float32)
    positions = [[0, 1, 2], [4, 5, 6]]
    plain = attention(slots, positions, queries)
    seen = np.zeros((B, T, S), int)
    for slot in range(S):
        changed = slots.copy()
        changed[:, :, slot] += 1
        differs = attention(changed, positions, queries) != plain
        seen[:, :, slot] = differs.any(axis=(2, 3, 4))
    np.testing.assert_array_equal(seen[0], picture("1000000 1100000 1110000"))
    np.testing.assert_array_equal(seen[1], picture("1111100 1111110 1111111"))


def test_attention_equals_plain_softmax() -> None:
    B, T, G, S = 2, 3, 5, 7
    rng = np.random.default_rng(5)
    queries = rng.standard_normal((B, T, K, G, H), np.float32)
    slots = rng.standard_normal((B, K, S, H), np.float32)
    positions = np.asarray([[0, 1, 2], [4, 5, 6]])
    expected = np.zeros((B, T, K, G, H))
    for b, t, k, g in np.ndindex(B, T, K, G):
        keys = slots[b, k, : positions[b, t] + 1].astype(np.float64)
        weights = np.exp(keys @ queries[b, t, k, g] / np.sqrt(H))
        expected[b, t, k, g] = weights / weights.sum() @ keys[:, ::-1]
    np.testing.assert_allclose(attention(slots, positions.tolist(), queries), expected, atol=1e-6)


def test_stale_slots_and_padding_change_nothing(running, shared) -> None:
    """A whole pass: what lies past a row's length, and padded queries beside it, leave the bits of its logits alone."""
    model = running("tiny-draft")
    prompt = np.load(shared / "fixtures/tiny-llama3/goldens.npz")["p7__input_ids"]
    prompts = [prompt, prompt[::-1]]
    _, _, clean = model.prefill(prompts)
    stale = clean._replace(
        layers=tuple(LayerCache(*(x.at[:, :, len(prompt) :].set(1e4) for x in layer)) for layer in clean.layers)
    )
    tokens = np.asarray([[3, 5, 7, 11], [13, 17, 19, 23]])
    window = clean.window
    at = np.asarray([[7, 8, window, window], [7, 8, 9, 10]])
    expected, _, _ = model.feed(clean, tokens, at)
    got, _, after = model.feed(stale, tokens, at)
    assert got[0, :2].tobytes() == expected[0, :2].tobytes()
    assert got[1].tobytes() == expected[1].tobytes()
    assert np.isfinite(got).all()  # padded queries included
    written = np.asarray(after.layers[1].k) != np.asarray(stale.layers[1].k)
    np.testing.assert_array_equal(written.any(axis=(1, 3))[:, 6:12], picture("011000 011110"))


def test_cache_is_split_over_rows_and_kv_heads() -> None:
    assert str(make_sharding("data=2,model=2").spec(CACHE_AXES, (4, 2, 7, 3))) == "P('data', 'model', None, None)"
