"""What the frozen target sees of every row: kept on disk from the first time on, or computed anew.

The target's pass is the larger part of a step and the same in every epoch. What is kept is what is trained on from the
first time on, in the dtype of the computation: a run that was killed, and has half of its features already, sees the
very same numbers as one that was not.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from train_heads.corpus import Batch
from train_heads.objective import Features

DISK_SHARE: Final = 0.5  # of what is free, at most
REUSE: Final = 1.5  # epochs from which keeping pays


@dataclasses.dataclass(frozen=True)
class Size:
    """Of all rows' features."""

    rows: int
    tokens: int  # of a row
    width: int  # hidden state and taps, numbers per token
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return self.rows * self.tokens * self.width * self.dtype.itemsize


def kept(choice: str, size: Size, epochs: float, folder: Path) -> bool:
    """Whether features go to disk: as chosen, or where they are used again and there is room."""
    if choice != "auto":
        return choice == "disk"
    folder.mkdir(parents=True, exist_ok=True)
    return epochs >= REUSE and size.nbytes <= DISK_SHARE * shutil.disk_usage(folder).free


class FeatureFile:
    """Features of numbered rows [T, width] in one file, and a byte per row that says whether they are there."""

    def __init__(self, folder: Path, name: str, size: Size, hidden: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._size, self._hidden = size, hidden
        self._data = _sized(folder / f"{name}.features", size.nbytes)
        self._there = _sized(folder / f"{name}.there", size.rows)

    @property
    def _row_bytes(self) -> int:
        return self._size.nbytes // max(1, self._size.rows)

    def get(self, batch: Batch, rows: int, compute: Callable[[], Features]) -> Features:
        """Features [rows, T, ..] of a batch (padding rows: zeros); computed for all of it where one is missing."""
        if not all(os.pread(self._there, 1, number) == b"\x01" for number in batch.numbers):
            self._keep(batch.numbers, compute())
        whole = np.zeros((rows, self._size.tokens, self._size.width), self._size.dtype)
        for place, number in enumerate(batch.numbers):
            raw = os.pread(self._data, self._row_bytes, number * self._row_bytes)
            whole[place] = np.frombuffer(raw, self._size.dtype).reshape(whole.shape[1:])
        hidden: Any = whole[..., : self._hidden]
        taps: Any = whole[..., self._hidden :]
        return Features(hidden, taps if taps.shape[-1] else None)

    def _keep(self, numbers: Sequence[int], features: Features) -> None:
        parts = [np.asarray(x, self._size.dtype) for x in jax.device_get(features) if x is not None]
        whole = np.concatenate(parts, axis=-1)
        for place, number in enumerate(numbers):
            os.pwrite(self._data, whole[place].tobytes(), number * self._row_bytes)
            os.pwrite(self._there, b"\x01", number)  # after its row: a kill between them loses nothing


def _sized(path: Path, nbytes: int) -> int:
    """An open file of that many bytes; one of another size is begun anew."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    if os.fstat(file).st_size != nbytes:
        os.ftruncate(file, 0)
        os.ftruncate(file, nbytes)
    return file
