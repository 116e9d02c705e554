"""The GGUF container: metadata and tensor directory, read with every length checked before it is believed.

Layout: magic, version, tensor count, metadata count, the metadata, the directory, padding, the data. Types, block sizes
and dequantisers are the ``gguf`` library's; its own reader is not used, because it trusts the lengths in the file.
"""

import dataclasses
import functools
import itertools
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType, quants

from checkpoints_convert.findings import Findings
from checkpoints_convert.readers.base import SourceTensor
from checkpoints_convert.readers.files import SourceFile
from jaxspec.errors import UserError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_DIMS: Final = 4
_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
# Smallest possible entries, for judging counts: (name length, type, one byte) and (name length, dims, type, offset).
_MIN_FIELD: Final = 8 + 4 + 1
_MIN_TENSOR: Final = 8 + 4 + 4 + 8
# Far above any checkpoint's, and small in memory: 262,144 tokens with merges are 0.8 million values in 16 MB.
_MAX_COUNT: Final = 65_536  # of fields, and of tensors
_MAX_VALUES: Final = 4 << 20  # in the arrays of all fields together
_MAX_METADATA: Final = 128 << 20  # bytes
_WINDOW_BYTES: Final = 1 << 16  # of metadata that are read at a time
_READ_BYTES: Final = 1 << 20  # of raw blocks that are dequantised at a time
_SCALARS: Final = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """Metadata as Python values, and the tensors by name."""

    file: SourceFile
    fields: dict[str, Any]
    tensors: dict[str, SourceTensor]


@dataclasses.dataclass(frozen=True)
class _Entry:
    name: str
    dims: tuple[int, ...]  # fastest first, as in the file
    type_id: int
    offset: int


def read_gguf(path: Path) -> GgufFile:
    """Reads everything but the tensor data. Raises ConversionError listing what is wrong."""
    findings = Findings()
    file = SourceFile(path)
    cursor = _Cursor(file)
    n_tensors, n_fields = _read_preamble(cursor)
    fields: dict[str, Any] = {}
    for _ in range(n_fields):
        name = cursor.text("a metadata key")
        value = _read_value(cursor, cursor.integer(4), name)
        if name in fields:
            findings.add(f"{path.name}: duplicate metadata key {name}")
        fields[name] = value
    entries = [_read_entry(cursor) for _ in range(n_tensors)]
    alignment = fields.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        findings.add(f"{path.name}: general.alignment: expected a power of two, got {alignment!r}")
        findings.raise_if_any()
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, SourceTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for entry in entries:
        if entry.name in tensors:
            findings.add(f"{path.name}: duplicate tensor {entry.name}")
        with findings.collecting():
            begin = data_start + entry.offset
            tensor, nbytes = _tensor(file, entry, begin)
            if entry.offset % alignment:
                findings.add(f"{path.name}: {entry.name}: offset {entry.offset} is not a multiple of {alignment}")
            if begin + nbytes > cursor.size:
                findings.add(
                    f"{path.name}: truncated: {entry.name} ends at byte {begin + nbytes}, the file has {cursor.size}"
                )
            tensors[entry.name] = tensor
            spans.append((begin, begin + nbytes, entry.name))
    spans.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            findings.add(f"{path.name}: {name} and {other} overlap")
    findings.raise_if_any()
    return GgufFile(file, fields, tensors)


class _Cursor:
    """Reads forward, and never past the end: a length is compared with what is left before anything is allocated."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._window, self._window_start = b"", 0  # small fields are cut from it
        self.size = file.size
        self.where = file.name
        self.position = 0
        self._values = 0

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.position:
            self.fail(f"truncated: {what} needs {count} bytes at byte {self.position}, the file has {self.size}")
        if self.position + count > _MAX_METADATA:
            self.fail(f"{what} ends at byte {self.position + count}: expected at most {_MAX_METADATA} of metadata")
        begin = self.position - self._window_start
        if begin + count > len(self._window):
            length = min(max(count, _WINDOW_BYTES), self.size - self.position)
            self._window, self._window_start = self._file.peek(self.position, length, what).tobytes(), self.position
            begin = 0
        self.position += count
        return self._window[begin : begin + count]

    def integer(self, width: int) -> int:
        return int.from_bytes(self.take(width, "a number"), "little")

    def text(self, what: str) -> str:
        data = self.take(self.integer(8), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8 text: {data[:40]!r}")

    def at_most(self, count: int, smallest: int, what: str) -> int:
        left = self.size - self.position
        if count * smallest > left:
            self.fail(f"truncated: {count} {what} take at least {count * smallest} bytes, {left} are left")
        return count

    def elements(self, count: int, smallest: int, name: str) -> int:
        """As :meth:`at_most`, for the values of an array; each takes some fifty bytes of memory."""
        self.at_most(count, smallest, f"elements of {name}")
        self._values += count
        if self._values > _MAX_VALUES:
            self.fail(f"{name}: more than {_MAX_VALUES} values in the metadata's arrays")
        return count

    def fail(self, message: str) -> NoReturn:
        raise UserError(f"{self.where}: {message}")


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(4, "the magic")
    if magic != _MAGIC:
        cursor.fail(f"expected the magic {_MAGIC!r} of a GGUF file, got {magic!r}")
    version = cursor.integer(4)
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = " (a big-endian file)" if swapped in _VERSIONS else ""
        cursor.fail(f"expected GGUF version 2 or 3, got {version}{kind}")
    n_tensors, n_fields = cursor.integer(8), cursor.integer(8)
    cursor.at_most(n_fields, _MIN_FIELD, "metadata fields")
    cursor.at_most(n_tensors, _MIN_TENSOR, "tensors")
    if max(n_fields, n_tensors) > _MAX_COUNT:
        cursor.fail(f"{n_fields} metadata fields and {n_tensors} tensors: expected at most {_MAX_COUNT} of each")
    return n_tensors, n_fields


def _read_value(cursor: _Cursor, type_id: int, name: str, *, in_array: bool = False) -> Any:
    try:
        kind = GGUFValueType(type_id)
    except ValueError:
        cursor.fail(f"{name}: unknown metadata type {type_id}")
    if kind == GGUFValueType.STRING:
        return cursor.text(name)
    if kind == GGUFValueType.ARRAY:
        if in_array:
            cursor.fail(f"{name}: an array of arrays is not supported")
        return _read_array(cursor, name)
    return _scalars(cursor, kind, 1, name)[0]


def _read_array(cursor: _Cursor, name: str) -> list[Any]:
    type_id, count = cursor.integer(4), cursor.integer(8)
    kind = next((kind for kind in _SCALARS if kind == type_id), None)
    if kind is not None:
        width = np.dtype(_SCALARS[kind]).itemsize
        return _scalars(cursor, kind, cursor.elements(count, width, name), name)
    cursor.elements(count, 8, name)
    return [_read_value(cursor, type_id, name, in_array=True) for _ in range(count)]


def _scalars(cursor: _Cursor, kind: GGUFValueType, count: int, name: str) -> list[Any]:
    dtype = np.dtype(_SCALARS[kind])
    values = np.frombuffer(cursor.take(count * dtype.itemsize, name), dtype)
    if kind == GGUFValueType.FLOAT32:
        # The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06. Nothing is lost.
        return [float(str(value)) for value in values]
    return values.tolist()


def _read_entry(cursor: _Cursor) -> _Entry:
    name = cursor.text("a tensor name")
    n_dims = cursor.integer(4)
    if not 1 <= n_dims <= _MAX_DIMS:
        cursor.fail(f"{name}: expected 1 to {_MAX_DIMS} dimensions, got {n_dims}")
    dims = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims, name))
    return _Entry(name, dims, cursor.integer(4), cursor.integer(8))


def _tensor(file: SourceFile, entry: _Entry, begin: int) -> tuple[SourceTensor, int]:
    """The tensor that begins at byte ``begin`` of the file, and how many bytes it takes."""
    try:
        kind = GGMLQuantizationType(entry.type_id)
    except ValueError:
        raise UserError(f"{file.name}: {entry.name}: unknown tensor type {entry.type_id}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not _can_read(kind):
        raise UserError(f"{file.name}: {entry.name}: tensor type {kind.name} cannot be dequantised")
    if min(entry.dims) < 1 or entry.dims[0] % block:
        raise UserError(
            f"{file.name}: {entry.name}: expected rows of a multiple of {block} elements ({kind.name}), "
            f"got {list(entry.dims)}"
        )
    shape = tuple(reversed(entry.dims))
    row_bytes = entry.dims[0] // block * block_bytes
    rows = math.prod(entry.dims[1:])
    read = _reader(file, entry.name, kind, begin, shape, rows, row_bytes)
    dtype = _BFLOAT16 if kind == GGMLQuantizationType.BF16 else _FLOAT32
    return SourceTensor(kind.name, dtype, shape, file.name, read, (file.name, begin)), rows * row_bytes


def _reader(
    file: SourceFile,
    name: str,
    kind: GGMLQuantizationType,
    begin: int,
    shape: tuple[int, ...],
    rows: int,
    row_bytes: int,
) -> Callable[[], np.ndarray]:
    bfloat16 = kind == GGMLQuantizationType.BF16

    def read() -> np.ndarray:
        # A few rows at a time: the dequantisers make several temporaries of their input's size.
        out = np.empty((rows, shape[-1]), _BFLOAT16 if bfloat16 else _FLOAT32)
        step = max(1, _READ_BYTES // row_bytes)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            blocks = file.read(begin + first * row_bytes, count * row_bytes, name).reshape(count, row_bytes)
            # Scales may be infinite, or no numbers: then the values are.
            with np.errstate(all="ignore"):
                out[first : first + count] = blocks.view(_BFLOAT16) if bfloat16 else quants.dequantize(blocks, kind)
        return out.reshape(shape)

    return read


@functools.cache
def _can_read(kind: GGMLQuantizationType) -> bool:
    """Whether the library has a dequantiser for the type; asked by running it on one block of zeros."""
    if kind == GGMLQuantizationType.BF16:
        return True
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
