"""Rotary position embedding, with Llama-3's frequency scaling (the half-split order of Hugging Face checkpoints)."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.config import LlamaConfig, RopeScaling


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """float32 [H/2]: the angle per position of every rotary pair, scaled as the config says."""
    # Exponents, powers and divisions are rounded to float32 one by one, as the reference does, so that the table is
    # bit-equal. The power itself is taken in float64: numpy's float32 power may be off by an ulp, and differs per CPU.
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.power(np.float64(config.rope_theta), exponents.astype(np.float64))
    base = np.float32(1.0) / powers.astype(np.float32)
    if config.rope_scaling is None:
        return base
    return _scaled(base, config.rope_scaling)


def _scaled(base: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "linear":
        return (base / np.float32(scaling.factor)).astype(np.float32)
    if scaling.kind == "divisors":
        return (base / np.asarray(scaling.divisors, np.float32)).astype(np.float32)
    # llama3: long wavelengths are stretched, short ones kept, the band between interpolated
    # (Llama 3.1 release notes; "low" and "high" are counts of turns within the original context).
    wavelength = 2 * np.pi / base
    turns = scaling.original_max_position / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * base / scaling.factor + blend * base).astype(np.float32)


def rotation(inv_freq: np.ndarray, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, H/2] in float32 for integer positions."""
    angles = positions_BT[..., None].astype(jnp.float32) * inv_freq[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [B, T, K, heads, H]; element i pairs with element i + H/2. Computes and returns in x's dtype."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None, None, :].astype(x.dtype), sin[:, :, None, None, :].astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
