"""Readers made wrong on purpose, one kind of fault each: what the fuzzer must see, or it sees nothing."""

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert import findings
from checkpoints_convert.readers import files, gguf_file, hf, pth, safetensors, torch_pickle
from tests.fuzz import judging


def _believes_entries() -> None:
    """Takes what JSON holds for what it should hold: KeyError, TypeError, ..."""

    def entry(name: str, value: Any, where: str) -> Any:
        begin, end = value["data_offsets"]
        return safetensors._Entry(name, value["dtype"], tuple(value["shape"]), begin, end)

    safetensors._entry = entry


def _believes_lengths() -> None:
    """Asks for memory before it looks at the size of the file."""

    def take(cursor: Any, count: int, what: str) -> bytes:
        data = np.empty(count, np.uint8)
        data[:] = cursor._file.peek(cursor.position, count, what)
        cursor.position += count
        return data.tobytes()

    gguf_file._Cursor.take = take


def _opens_anything() -> None:
    """Waits for the other end of a pipe."""
    files.stat.S_ISREG = lambda mode: True
    judging.SECONDS = 0.5


def _prints_anything() -> None:
    """Puts into a message what was in the file."""
    findings.one_line = lambda text: text


def _follows_paths() -> None:
    """Opens a shard wherever the index says it is."""
    hf._is_file_name = lambda text: True


def _runs_pickles() -> None:
    """Calls whatever a pickle names, as Python's own would."""
    machine: Any = torch_pickle._Machine
    plain = machine._reduce

    def reduce(self: Any) -> None:
        arguments, function = self._stack[-1], self._stack[-2]
        if function not in torch_pickle._FUNCTIONS:
            del self._stack[-2:]
            self._push(getattr(importlib.import_module(function.module), function.name)(*arguments))
        else:
            plain(self)

    machine._global = lambda self, module, name: torch_pickle.Global(module, name)
    machine._reduce = reduce


def _writes_beside() -> None:
    """Leaves something beside the source."""
    plain = pth.read_zip

    def read_zip(file: Any) -> Any:
        Path(f"{file.path}.cache").write_bytes(b"")
        return plain(file)

    pth.read_zip = read_zip


def _crashes() -> None:
    """Takes the process down, as a fault in a compiled library does."""
    gguf_file._can_read = lambda kind: os._exit(139) if kind == 24 else True


BREAKS = {
    "believes entries": _believes_entries,
    "believes lengths": _believes_lengths,
    "opens anything": _opens_anything,
    "prints anything": _prints_anything,
    "follows paths": _follows_paths,
    "runs pickles": _runs_pickles,
    "writes beside": _writes_beside,
    "crashes": _crashes,
}
