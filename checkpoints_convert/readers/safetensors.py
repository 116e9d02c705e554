"""The safetensors container: eight bytes of header length, a JSON directory, then the data."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints_convert.findings import Findings
from checkpoints_convert.readers.base import SourceTensor
from checkpoints_convert.readers.jsonfile import parse_object
from jaxspec.errors import UserError

# The library's own bound; a larger length is a file of another kind.
_MAX_HEADER: Final = 100_000_000
_LITTLE: Final[Mapping[str, np.dtype]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class _Entry(NamedTuple):
    name: str
    encoding: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_directory(path: Path) -> dict[str, SourceTensor]:
    """The tensors of one file, by name. Raises ConversionError listing everything wrong with it."""
    findings = Findings()
    header, data_start, size = _read_header(path)
    data_size = size - data_start
    entries: list[_Entry] = []
    for name, value in header.items():
        if name != "__metadata__":
            with findings.collecting():
                entries.append(_entry(name, value, path.name))
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position and not findings.lines:
            findings.add(f"{path.name}: {entry.name} begins at byte {entry.begin} of the data, expected {position}")
        position = entry.end
    if position > data_size:
        findings.add(f"{path.name}: truncated: the header describes {position} bytes of data, the file has {data_size}")
    elif position < data_size and not findings.lines:
        findings.add(f"{path.name}: the header describes {position} bytes of data, the file has {data_size}")
    findings.raise_if_any()
    return {entry.name: _tensor(path, entry, data_start) for entry in entries}


def _read_header(path: Path) -> tuple[dict[str, object], int, int]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise UserError(
                    f"{path.name}: truncated, or not safetensors: header of {length} bytes in a file of {size}"
                )
            if length > _MAX_HEADER:
                raise UserError(f"{path.name}: header of {length} bytes: expected at most {_MAX_HEADER}")
            raw = file.read(length)
    except OSError as error:
        raise UserError(f"{path.name}: cannot be read ({error.strerror})") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path.name}: not safetensors: the header is not UTF-8 text") from None
    return parse_object(text, f"{path.name} header"), 8 + length, size


def _entry(name: str, value: object, where: str) -> _Entry:
    match value:
        case {"dtype": str(encoding), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise UserError(f"{where}: {name}: expected dtype, shape and data_offsets, got {str(value)[:80]}")
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape):
        raise UserError(f"{where}: {name}: expected a shape of sizes, got {shape}")
    if encoding not in _LITTLE:
        raise UserError(f"{where}: {name}: expected dtype F32, F16 or BF16, got {encoding}")
    nbytes = math.prod(shape) * _LITTLE[encoding].itemsize
    if begin < 0 or end - begin != nbytes:
        raise UserError(f"{where}: {name}: {encoding} {shape} takes {nbytes} bytes, data_offsets are [{begin}, {end}]")
    return _Entry(name, encoding, tuple(shape), begin, end)


def _tensor(path: Path, entry: _Entry, data_start: int) -> SourceTensor:
    dtype = _LITTLE[entry.encoding]

    def read() -> np.ndarray:
        # Read, not mapped: the pages of a mapping would count as ours for as long as it lives.
        count = math.prod(entry.shape)
        # bfloat16 is only a view of the raw bytes: no detour through a type with another range.
        raw = np.fromfile(path, np.uint8, count * dtype.itemsize, offset=data_start + entry.begin)
        if raw.size != count * dtype.itemsize:
            raise UserError(f"{path.name}: {entry.name}: the file shrank while it was read")
        array = raw.view(dtype).reshape(entry.shape)
        return array.astype(np.float32) if entry.encoding == "F16" else array

    return SourceTensor(entry.encoding, entry.encoding == "BF16", entry.shape, path.name, read)
