"""A file of ``torch.save``: a zip with a pickle that describes tensors, and one stored entry per storage. No torch."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final, NoReturn

import ml_dtypes
import numpy as np

from checkpoints_convert.findings import Findings
from checkpoints_convert.readers.base import SourceTensor
from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.stored_zip import Entry, read_zip, shown
from checkpoints_convert.readers.torch_pickle import MAX_PICKLE, STORAGES, TensorView, read_pickle
from jaxspec.errors import UserError

_LITTLE: Final = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    # Index tensors of draft heads: token maps and masks.
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "BOOL": np.dtype(np.uint8),
}
_PICKLE: Final = "data.pkl"
_MAX_DIMS: Final = 8
_MAX_TENSOR_NAME: Final = 512
_MAX_FINDINGS: Final = 50
# How files begin that carry the name but not the format.
_OTHERS: Final = {
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19": (
        "written by torch before 1.6, or without its zip format; load it with torch and torch.save it again"
    ),
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; fetch it with git lfs pull",
    b"\x80": "a bare pickle, not a file of torch.save",
}


@dataclasses.dataclass(frozen=True)
class PthTensor(SourceTensor):
    """A tensor of the file. ``peek(start, stop)`` reads rows (of axis 0) apart from the forward pass over the file."""

    peek: Callable[[int, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Archive:
    file: SourceFile
    entries: dict[str, Entry]
    folder: str  # "archive/", before every name


def read_pth(file: SourceFile) -> dict[str, PthTensor]:
    """The tensors of a flat state dict, by name. Raises ConversionError listing everything wrong with it.

    Only the zip's directory and the pickle are read. Float16 becomes float32, which holds all its values.
    """
    archive = _archive(file)
    state = read_pickle(_whole(archive, _PICKLE, MAX_PICKLE), file.name)
    if not isinstance(state, dict):
        raise UserError(f"{file.name}: expected a state dict (name -> tensor), found {type(state).__name__}")
    findings = Findings()
    tensors: dict[str, PthTensor] = {}
    for name, view in state.items():
        with findings.collecting():
            tensors[name] = _tensor(archive, name, view)
        if len(findings.lines) == _MAX_FINDINGS:
            findings.add(f"{file.name}: more is wrong; the first {_MAX_FINDINGS} findings are listed")
            break
    findings.raise_if_any()
    return tensors


def _archive(file: SourceFile) -> _Archive:
    head = file.peek(0, min(file.size, 32), "the first bytes").tobytes()
    if not head.startswith(b"PK"):
        what = next((what for start, what in _OTHERS.items() if head.startswith(start)), "no file of torch.save")
        raise UserError(f"{file.name}: {what}")
    entries = read_zip(file)
    folders = [name.removesuffix(_PICKLE) for name in entries if name.rpartition("/")[2] == _PICKLE]
    if len(folders) != 1 or folders[0].count("/") != 1:
        raise UserError(f"{file.name}: a zip file, but no file of torch.save: expected one {_PICKLE} in one folder")
    archive = _Archive(file, entries, folders[0])
    if f"{folders[0]}constants.pkl" in entries:
        raise UserError(f"{file.name}: a TorchScript program; expected a state dict, saved by torch.save")
    if f"{folders[0]}byteorder" in entries and (order := _whole(archive, "byteorder", 16)) != b"little":
        raise UserError(f"{file.name}: byte order {shown(order.decode(errors='replace'))}: expected little")
    return archive


def _whole(archive: _Archive, name: str, limit: int) -> bytes:
    entry = archive.entries[archive.folder + name]
    if entry.size > limit:
        raise UserError(f"{archive.file.name}: {name} has {entry.size} bytes: expected at most {limit}")
    return archive.file.peek(entry.begin, entry.size, name).tobytes()


def _tensor(archive: _Archive, name: Any, view: Any) -> PthTensor:
    file = archive.file

    def fail(what: str) -> NoReturn:
        raise UserError(f"{file.name}: {shown(str(name))}: {what}")

    if not isinstance(name, str) or not name.isprintable() or len(name) > _MAX_TENSOR_NAME:
        fail("expected the name of a tensor")
    if not isinstance(view, TensorView):
        inside = "a dict; expected a flat state dict" if isinstance(view, dict) else type(view).__name__
        fail(f"expected a tensor, found {inside}")
    if view.encoding not in _LITTLE:
        kind = next(kind for kind, encoding in STORAGES.items() if encoding == view.encoding)
        fail(f"a {kind} of torch; expected {', '.join(_LITTLE)}")
    if len(view.size) > _MAX_DIMS:
        fail(f"expected at most {_MAX_DIMS} dimensions, got {len(view.size)}")
    width = _LITTLE[view.encoding].itemsize
    entry = archive.entries.get(f"{archive.folder}data/{view.storage.key}")
    if entry is None:
        fail(f"its storage {shown(view.storage.key)} is not in the file")
    stored = view.storage.length * (1 if view.storage.encoding == "bytes" else width)
    if stored != entry.size:
        fail(f"its storage is said to have {stored} bytes, the file holds {entry.size}")
    order = _dense_order(view)
    if order is None:
        fail(f"size {list(view.size)} with stride {list(view.stride)} leaves gaps or repeats; save a contiguous tensor")
    count = math.prod(view.size)
    if (view.offset + count) * width > entry.size:
        fail(
            f"{count} elements from element {view.offset} on need {(view.offset + count) * width} bytes, "
            f"its storage has {entry.size}"
        )
    begin = entry.begin + view.offset * width
    return _described(file, name, view, begin, order)


def _dense_order(view: TensorView) -> tuple[int, ...] | None:
    """The axes from the slowest to the fastest, if the tensor is a run of elements without gaps or repeats: contiguous,
    or transposed. None for any other view."""
    if 0 in view.size:
        return tuple(range(len(view.size)))
    # An axis of one element may claim any stride. The sort is stable, so a contiguous tensor keeps its order.
    axes = sorted((axis for axis, size in enumerate(view.size) if size > 1), key=lambda axis: -view.stride[axis])
    step = 1
    for axis in reversed(axes):
        if view.stride[axis] != step:
            return None
        step *= view.size[axis]
    if axes == sorted(axes):
        return tuple(range(len(view.size)))
    return tuple(axis for axis, size in enumerate(view.size) if size == 1) + tuple(axes)


def _described(file: SourceFile, name: str, view: TensorView, begin: int, order: tuple[int, ...]) -> PthTensor:
    stored, size = _LITTLE[view.encoding], view.size
    count, contiguous = math.prod(size), order == tuple(range(len(size)))

    def read() -> np.ndarray:
        raw = file.read(begin, count * stored.itemsize, name)
        return _values(raw, view.encoding, size, order)

    def peek(start: int, stop: int) -> np.ndarray:
        if not contiguous or not size:
            whole = _values(file.peek(begin, count * stored.itemsize, name), view.encoding, size, order)
            return whole[start:stop] if size else whole
        start, stop, _ = slice(start, stop).indices(size[0])
        row = math.prod(size[1:]) * stored.itemsize
        raw = file.peek(begin + start * row, (stop - start) * row, name)
        return _values(raw, view.encoding, (stop - start, *size[1:]), order)

    dtypes = {"F16": np.dtype(np.float32), "BOOL": np.dtype(np.bool_)}
    dtype = dtypes.get(view.encoding, stored)
    return PthTensor(view.encoding, dtype, size, file.name, read, (file.name, begin), peek)


def _values(raw: np.ndarray, encoding: str, size: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    # bfloat16 is only a view of the raw bytes: no detour through a type with another range.
    array = raw.view(_LITTLE[encoding]).reshape([size[axis] for axis in order])
    array = np.ascontiguousarray(array.transpose(np.argsort(order))).reshape(size)
    if encoding == "BOOL":
        return array != 0
    return array.astype(np.float32) if encoding == "F16" else array
