"""Rotary tables: bit-equal to the reference's where the config says how they are scaled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import open_checkpoint
from jaxspec.model.config import LlamaConfig, RopeScaling
from jaxspec.model.rope import inverse_frequencies, rotate, rotation

TABLES = [
    "llama31_8b_hd128_theta5e5_f8_o8192",
    "llama32_1b_hd64_theta5e5_f32_o8192",
    "llama3_8b_hd128_theta5e5_noscale",
    "llama2_7b_hd128_theta1e4_noscale",
    "tiny_hd8_theta5e5_f8_o64",
    "tiny_hd16_theta5e5_f8_o64",
    "tiny_hd32_theta5e5_f8_o64",
    "linear_hd16_theta1e4_f4",
]


def config(head_dim: int, theta: float, scaling: RopeScaling | None) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=13,
        hidden_size=7,
        intermediate_size=11,
        num_layers=1,
        num_heads=3,
        num_kv_heads=3,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_scaling=scaling,
    )


def ulps(got: np.ndarray, expected: np.ndarray) -> int:
    """The largest distance, counted in float32 numbers."""
    assert got.dtype == expected.dtype == np.float32
    assert got.shape == expected.shape
    return int(np.max(np.abs(got.view(np.int32).astype(np.int64) - expected.view(np.int32))))


def test_every_table_of_the_fixture_is_named_here(shared) -> None:
    assert sorted(np.load(shared / "fixtures/rope/inv_freq.npz")) == sorted(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_table(shared, name) -> None:
    """0 ulp: the reference rounds to float32 at every operation, and so do we."""
    match = re.fullmatch(r"(linear)?.*hd(\d+)_theta(\d)e(\d)_(?:noscale|f(\d+)(?:_o(\d+))?)", name)
    assert match
    linear, head_dim, digit, exponent, factor, original = match.groups()
    scaling = None
    if linear:
        scaling = RopeScaling("linear", factor=float(factor))
    elif factor:
        scaling = RopeScaling("llama3", float(factor), 1.0, 4.0, int(original))
    got = inverse_frequencies(config(int(head_dim), int(digit) * 10.0 ** int(exponent), scaling))
    assert ulps(got, np.load(shared / "fixtures/rope/inv_freq.npz")[name]) == 0


@pytest.mark.parametrize(
    ("model", "table", "allowed"),
    [
        ("tiny-llama3-gguf-f32", "tiny_hd8_theta5e5_f8_o64", 0),  # divisors 1 and 8: exact
        ("tiny-llama3-256-q4_k_m", "tiny_hd32_theta5e5_f8_o64", 1),  # one divisor in the smooth band, itself rounded
    ],
)
def test_divisors_of_a_gguf_file_are_llama3_scaling(tiny_models, shared, model, table, allowed) -> None:
    found = open_checkpoint(tiny_models(model)).config
    assert found.rope_scaling is not None
    assert found.rope_scaling.kind == "divisors"
    assert ulps(inverse_frequencies(found), np.load(shared / "fixtures/rope/inv_freq.npz")[table]) <= allowed


def test_rotation_turns_the_pair_i_and_i_plus_half() -> None:
    """Position 0 changes nothing; a quarter turn sends (first, second) to (-second, first)."""
    inv_freq = np.asarray([np.pi / 2, 0.0, np.pi], np.float32)
    cos, sin = rotation(inv_freq, jnp.asarray([[0, 1]], jnp.int32))
    x = jnp.asarray([1.0, 2.0, 3.0, 5.0, 7.0, 11.0]).reshape(1, 1, 1, 1, 6)
    turned = rotate(jnp.broadcast_to(x, (1, 2, 1, 1, 6)), cos, sin)[0, :, 0, 0]
    np.testing.assert_array_equal(turned[0], [1, 2, 3, 5, 7, 11])
    np.testing.assert_allclose(turned[1], [-5, 2, -3, 1, 7, -11], atol=1e-5)


@pytest.mark.parametrize("position", [8191, 131_071])
def test_angles_stay_exact_far_out(position) -> None:
    """Angles are float32 products of exact integers: as the reference computes them, cosine and sine to 1e-6."""
    inv_freq = inverse_frequencies(config(128, 5e5, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)))
    cos, sin = jax.jit(lambda positions: rotation(inv_freq, positions))(jnp.full((1, 1), position, jnp.int32))
    angles = np.float64(np.float32(position) * inv_freq)
    np.testing.assert_allclose(cos[0, 0], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin[0, 0], np.sin(angles), atol=1e-6)
