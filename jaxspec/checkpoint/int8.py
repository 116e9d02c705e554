"""Weights as int8 with one scale per output channel: w ~ values * scale, symmetric, no zero point.

For each output channel, scale = max |w| / 127 and values = round(w / scale), to nearest even. Storage only: a restored
parameter is a floating-point one again.
"""

from typing import NamedTuple, TypeVar

import numpy as np

ArrayT = TypeVar("ArrayT")  # numpy or jax
_ROWS_BYTES = 16 << 20  # of float32 rows that are worked on at a time


class Quantized(NamedTuple):
    """values int8 [out..., in...], scale float32 [out...], and the errors made."""

    values: np.ndarray
    scale: np.ndarray
    max_abs_error: float
    relative_rms_error: float


def quantize(weight: np.ndarray, n_in: int) -> Quantized:
    """Quantises a weight [out..., in...] with ``n_in`` trailing in axes. Raises ValueError where it is not finite."""
    out_shape = weight.shape[: weight.ndim - n_in]
    rows = weight.reshape(int(np.prod(out_shape)), -1)
    values, scale = np.empty(rows.shape, np.int8), np.empty(rows.shape[0], np.float32)
    worst, squares, square_errors = 0.0, 0.0, 0.0
    step = max(1, _ROWS_BYTES // (4 * rows.shape[1]))
    for first in range(0, rows.shape[0], step):
        part = slice(first, first + step)
        w = rows[part].astype(np.float32)
        if not np.isfinite(w).all():
            raise ValueError("expected finite values, found NaN or infinity")
        scale[part] = np.abs(w).max(axis=1) / np.float32(127)
        # A row of zeros has scale 0; a tiny scale may underflow to it: such rows are stored as zeros.
        divisor = np.where(scale[part] > 0, scale[part], np.float32(1))[:, None]
        values[part] = np.clip(np.rint(w / divisor), -127, 127)
        error = np.abs(dequantize(values[part], scale[part]) - w)
        worst = max(worst, float(error.max()))
        squares += float(np.square(w, dtype=np.float64).sum())
        square_errors += float(np.square(error, dtype=np.float64).sum())
    relative = (square_errors / squares) ** 0.5 if squares else 0.0
    return Quantized(values.reshape(weight.shape), scale.reshape(out_shape), worst, relative)


def dequantize(values: ArrayT, scale: ArrayT) -> ArrayT:
    """float32 values * scale, of numpy or of jax arrays."""
    v, s = values, scale
    return v.astype(np.float32) * s.reshape(s.shape + (1,) * (v.ndim - s.ndim))  # pyright: ignore[reportAttributeAccessIssue]
