"""Writes a safetensors file from tensors that come one at a time.

Layout: the length of the header (eight bytes, little-endian), the header (a JSON object, padded with spaces so that the
data begins at a multiple of eight), the data without gaps.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import ml_dtypes
import numpy as np

Directory = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]

ENCODINGS: Final[Mapping[np.dtype[Any], str]] = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.bool_): "BOOL",
}
_ALIGNMENT: Final = 8
_METADATA: Final = "__metadata__"
_PIECE_BYTES: Final = 16 << 20


def write_safetensors(
    path: Path, directory: Directory, fill: Callable[[str], np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes the tensors that ``directory`` announces by dtype and shape to the new or emptied file ``path``.

    ``fill`` is asked for each by its name, once, in the order of the directory; what it gave is dropped before the next
    is asked for, so it may be a view of something larger, contiguous or not. ``metadata`` goes into the header as it is
    (transformers wants ``{"format": "pt"}``). Raises ValueError for a dtype without an encoding here, and when ``fill``
    gives something else than was announced. Nothing is synced.
    """
    begins, header = _header(directory, metadata)
    with path.open("wb") as file:
        file.write(header)
        for name, (dtype, shape) in directory.items():
            array = fill(name)
            if (array.dtype, array.shape) != (dtype, shape):
                raise ValueError(f"{name}: announced as {dtype} {shape}, filled with {array.dtype} {array.shape}")
            file.seek(len(header) + begins[name])
            _write(file, array)
            del array


def _header(directory: Directory, metadata: Mapping[str, str]) -> tuple[dict[str, int], bytes]:
    """Where each tensor begins in the data, and everything that comes before the data."""
    for name, (dtype, _) in directory.items():
        if dtype not in ENCODINGS:
            raise ValueError(f"{name}: expected a dtype among {', '.join(ENCODINGS.values())}, got {dtype}")
        if name == _METADATA:
            raise ValueError(f"{name} is no name for a tensor")
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    begins: dict[str, int] = {}
    end = 0
    # Wide types first: then every tensor begins at a multiple of its own item size, which readers that map the file
    # and look at it in place rely on. The order is kept otherwise, so that a file of one type is written straight on.
    for name in sorted(directory, key=lambda name: -directory[name][0].itemsize):
        dtype, shape = directory[name]
        begins[name], end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": ENCODINGS[dtype], "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return begins, len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, array: np.ndarray) -> None:
    """The bytes of an array in C order; what does not lie so in memory is copied some rows at a time."""
    if array.flags.c_contiguous:
        file.write(array.reshape(-1).view(np.uint8).data)
        return
    step = max(1, _PIECE_BYTES * len(array) // array.nbytes)
    for first in range(0, len(array), step):
        file.write(np.ascontiguousarray(array[first : first + step]).reshape(-1).view(np.uint8).data)
