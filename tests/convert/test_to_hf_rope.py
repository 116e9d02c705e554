"""Divisors of rotary frequencies, all that a GGUF keeps, are found again as the scaling that they came from."""

import dataclasses

import numpy as np
import pytest

from checkpoints_convert.export.hf_config import named_scaling
from jaxspec.model.config import LlamaConfig, RopeScaling
from jaxspec.model.rope import inverse_frequencies

# Rope: what only divisors are left of gets its name back.

FREQUENCIES = {
    "llama31_8b_hd128_theta5e5_f8_o8192": (RopeScaling("llama3", 8.0, 1.0, 4.0, 8192), 128, 5e5),
    "llama32_1b_hd64_theta5e5_f32_o8192": (RopeScaling("llama3", 32.0, 1.0, 4.0, 8192), 64, 5e5),
    "tiny_hd16_theta5e5_f8_o64": (RopeScaling("llama3", 8.0, 1.0, 4.0, 64), 16, 5e5),
    "tiny_hd32_theta5e5_f8_o64": (RopeScaling("llama3", 8.0, 1.0, 4.0, 64), 32, 5e5),
    "linear_hd16_theta1e4_f4": (RopeScaling("linear", 4.0), 16, 1e4),
    "llama3_8b_hd128_theta5e5_noscale": (None, 128, 5e5),
}


def config_of(head_dim: int, theta: float, scaling: RopeScaling | None) -> LlamaConfig:
    return LlamaConfig(53, 19, 23, 1, 2, 1, head_dim, 1e-5, theta, 512, False, scaling)


@pytest.mark.parametrize("tag", FREQUENCIES)
def test_divisors_are_recognised(tag, shared) -> None:
    """The reference's own frequencies, kept as a GGUF keeps them: float32 divisors."""
    expected, head_dim, theta = FREQUENCIES[tag]
    golden = np.load(shared / "fixtures" / "rope" / "inv_freq.npz")[tag]
    base = inverse_frequencies(config_of(head_dim, theta, None))
    divisors = tuple(float(divisor) for divisor in (base / golden).astype(np.float32))
    config = config_of(head_dim, theta, RopeScaling("divisors", divisors=divisors))
    found = named_scaling(config)
    assert found == expected
    np.testing.assert_allclose(inverse_frequencies(dataclasses.replace(config, rope_scaling=found)), golden, rtol=1e-6)


@pytest.mark.parametrize("factor", [3.0, 10.0, 64.0])
def test_a_factor_that_nobody_published_is_found_as_well(factor) -> None:
    expected = RopeScaling("llama3", factor, 1.0, 4.0, 4096)
    scaled = config_of(64, 5e5, expected)
    divisors = inverse_frequencies(dataclasses.replace(scaled, rope_scaling=None)) / inverse_frequencies(scaled)
    kept = RopeScaling("divisors", divisors=tuple(map(float, divisors)))
    assert named_scaling(dataclasses.replace(scaled, rope_scaling=kept)) == RopeScaling(
        "llama3", factor, 1.0, 4.0, 4096
    )
