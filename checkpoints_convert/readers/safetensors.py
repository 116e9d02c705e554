"""The safetensors container: eight bytes of header length, a JSON directory, then the data."""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints_convert.findings import Findings
from checkpoints_convert.readers.base import SourceTensor
from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.jsonfile import MAX_JSON, parse_object
from jaxspec.errors import UserError

_MAX_DIMS: Final = 8
_LITTLE: Final[Mapping[str, np.dtype]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    # Index tensors of draft heads: token maps and masks.
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "BOOL": np.dtype(np.bool_),
}


class _Entry(NamedTuple):
    name: str
    encoding: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_directory(file: SourceFile) -> dict[str, SourceTensor]:
    """The tensors of one file, by name. Raises ConversionError listing everything wrong with it."""
    findings = Findings()
    header, data_start = _read_header(file)
    data_size = file.size - data_start
    entries: list[_Entry] = []
    for name, value in header.items():
        if name != "__metadata__":
            with findings.collecting():
                entries.append(_entry(name, value, file.name))
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position and not findings.lines:
            findings.add(f"{file.name}: {entry.name} begins at byte {entry.begin} of the data, expected {position}")
        position = entry.end
    if position > data_size:
        findings.add(f"{file.name}: truncated: the header describes {position} bytes of data, the file has {data_size}")
    elif position < data_size and not findings.lines:
        findings.add(f"{file.name}: the header describes {position} bytes of data, the file has {data_size}")
    findings.raise_if_any()
    return {entry.name: _tensor(file, entry, data_start) for entry in entries}


def _read_header(file: SourceFile) -> tuple[dict[str, object], int]:
    length = int.from_bytes(file.peek(0, min(8, file.size), "the header").tobytes(), "little")
    if file.size < 8 or length > file.size - 8:
        raise UserError(
            f"{file.name}: truncated, or not safetensors: header of {length} bytes in a file of {file.size}"
        )
    if length > MAX_JSON:
        raise UserError(f"{file.name}: header of {length} bytes: expected at most {MAX_JSON}")
    raw = file.peek(8, length, "the header").tobytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file.name}: not safetensors: the header is not UTF-8 text") from None
    return parse_object(text, f"{file.name} header"), 8 + length


def _entry(name: str, value: object, where: str) -> _Entry:
    match value:
        case {"dtype": str(encoding), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise UserError(f"{where}: {name}: expected dtype, shape and data_offsets, got {str(value)[:80]}")
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape):
        raise UserError(f"{where}: {name}: expected a shape of sizes, got {str(shape)[:80]}")
    if len(shape) > _MAX_DIMS:
        raise UserError(f"{where}: {name}: expected at most {_MAX_DIMS} dimensions, got {len(shape)}")
    if encoding not in _LITTLE:
        raise UserError(f"{where}: {name}: expected dtype {', '.join(_LITTLE)}, got {encoding}")
    nbytes = math.prod(shape) * _LITTLE[encoding].itemsize
    if begin < 0 or end - begin != nbytes:
        raise UserError(f"{where}: {name}: {encoding} {shape} takes {nbytes} bytes, data_offsets are [{begin}, {end}]")
    return _Entry(name, encoding, tuple(shape), begin, end)


def _tensor(file: SourceFile, entry: _Entry, data_start: int) -> SourceTensor:
    stored = _LITTLE[entry.encoding]
    begin = data_start + entry.begin

    def read() -> np.ndarray:
        # bfloat16 is only a view of the raw bytes: no detour through a type with another range.
        array = file.read(begin, math.prod(entry.shape) * stored.itemsize, entry.name).view(stored)
        array = array.reshape(entry.shape)
        return array.astype(np.float32) if entry.encoding == "F16" else array

    dtype = np.dtype(np.float32) if entry.encoding == "F16" else stored
    return SourceTensor(entry.encoding, dtype, entry.shape, file.name, read, (file.name, begin))
