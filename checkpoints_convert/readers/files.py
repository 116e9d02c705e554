"""A source file, read forward and hashed on the way: large or remote files are gone through once."""

import hashlib
import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from jaxspec.errors import UserError

_BLOCK: Final = 4 << 20


class SourceFile:
    """One file of a source; all its tensors share the object.

    Reads that follow each other are hashed as they pass. A read that jumps ahead hashes the gap first, one that goes
    back is just read again; :meth:`sha256` reads what is left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Opening a pipe waits for its other end, and a device may do anything: only files are opened.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise UserError(f"{path}: expected a file, found a folder, a device or a pipe")
            # Kept open, so that the system goes on reading ahead; closed with the last tensor that refers to it.
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        self.size, self.modified = status.st_size, status.st_mtime_ns
        self._digest = hashlib.sha256()
        self._hashed = 0

    @property
    def name(self) -> str:
        return self.path.name

    def read(self, offset: int, count: int, what: str) -> np.ndarray:
        """Exactly ``count`` bytes from byte ``offset`` on, as uint8. ``what`` names them when the file ends before."""
        if offset > self._hashed:
            self._hash_up_to(offset, lambda done: None)
        data = self._take(offset, count, what)
        if offset <= self._hashed < offset + count:
            self._digest.update(data[self._hashed - offset :].data)
            self._hashed = offset + count
        return data

    def peek(self, offset: int, count: int, what: str) -> np.ndarray:
        """As :meth:`read`, outside the forward pass: nothing is hashed. For directories and single values."""
        return self._take(offset, count, what)

    def sha256(self, advance: Callable[[int], None] = lambda done: None) -> str:
        """Hex digest of the whole file; ``advance`` is told the bytes that had still to be read."""
        self._hash_up_to(self.size, advance)
        return self._digest.hexdigest()

    @property
    def unread(self) -> int:
        """Bytes that :meth:`sha256` has still to read."""
        return self.size - self._hashed

    def _hash_up_to(self, end: int, advance: Callable[[int], None]) -> None:
        while self._hashed < end:
            block = self._take(self._hashed, min(_BLOCK, end - self._hashed), "the file")
            self._digest.update(block.data)
            self._hashed += block.size
            advance(block.size)

    def _take(self, offset: int, count: int, what: str) -> np.ndarray:
        # A length that a file's directory claims is compared with the file before memory is asked for.
        if offset < 0 or count < 0 or offset + count > self.size:
            raise UserError(
                f"{self.name}: truncated: {what} needs {count} bytes at byte {offset}, the file has {self.size}"
            )
        data = np.empty(count, np.uint8)
        view, got = data.data, 0
        while got < count:
            try:
                done = os.preadv(self._descriptor, [view[got:]], offset + got)
            except OSError as error:
                raise UserError(f"{self.path}: cannot be read ({error.strerror})") from None
            if not done:
                raise UserError(f"{self.name}: {what}: the file shrank while it was read")
            got += done
        return data
