"""A folder that appears complete or not at all: written beside its destination, synced, then renamed."""

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OLD: Final = "old-"
_KEY: Final = "resume-key"


class StagedFolder:
    """Collects files in a hidden sibling of ``dst`` and renames it to ``dst`` at the end.

    A process that dies leaves only the hidden sibling, which no reader opens. The lock on that folder dies with it, and
    that is how the next writer to the same destination knows that it may clear it away. The folder itself is locked,
    not a file in it, which a kill could leave unmade or already removed.

    ``key``: says what the folder is being made from. What a dead process left under the same key is taken up instead of
    cleared, so that the writer can go on from there.
    """

    def __init__(self, dst: Path, key: str | None = None) -> None:
        self._key = key
        # Absolute, and with the symlinks of the parents followed: both names must lie on one file system.
        self._dst = dst.parent.resolve() / dst.name
        self._made_parents: list[Path] = []
        self._path: Path | None = None
        self._lock: int | None = None

    @property
    def path(self) -> Path:
        """Where the files are collected."""
        if self._path is None:
            raise ValueError("staged folder: not created yet")
        return self._path

    def create(self) -> None:
        """Makes the hidden sibling, and the parents of ``dst`` where they are missing."""
        missing = [parent for parent in self._dst.parents if not parent.exists()]
        try:
            for parent in reversed(missing):
                parent.mkdir(exist_ok=True)
                self._made_parents.insert(0, parent)
            self._take_up_or_clear_abandoned()
            if self._path is None:
                self._path = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._dst.parent))
                self._lock = os.open(self._path, os.O_RDONLY)
                _try_lock(self._lock)
                self._path.chmod(0o755)  # fails, rather than later, if another writer took it before the lock
                if self._key is not None:
                    self.write_text(_KEY, self._key)
        except BaseException:
            self.discard()
            raise

    def write_text(self, name: str, text: str) -> None:
        (self.path / name).write_text(text, encoding="utf-8")

    def copy_files(self, source: Path, name: str) -> None:
        """Copies the plain files of ``source`` into the folder ``name``; permissions are the process's own."""
        (self.path / name).mkdir()
        for file in sorted(source.iterdir()):
            if file.is_file():
                shutil.copyfile(file, self.path / name / file.name)

    def publish(self) -> None:
        """Syncs everything to disk and renames the folder to ``dst``, in place of what was there."""
        staged = self.path
        (staged / _KEY).unlink(missing_ok=True)
        sync_tree(staged)
        replaced = None
        if self._dst.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f"{self._prefix}{_OLD}", dir=self._dst.parent))
            self._dst.rename(replaced / self._dst.name)
        try:
            staged.rename(self._dst)
        except OSError:
            if replaced is not None:
                (replaced / self._dst.name).rename(self._dst)
                replaced.rmdir()
            raise
        self._path = None
        self._made_parents = []
        _sync(self._dst.parent)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self._unlock()

    def leave(self) -> None:
        """Leaves what is there to the next writer with the same key."""
        self._path = None
        self._made_parents = []
        self._unlock()

    def discard(self) -> None:
        """Removes whatever was not published."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None
        self._unlock()
        for parent in self._made_parents:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        self._made_parents = []

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def _prefix(self) -> str:
        return _prefix(self._dst)

    def _take_up_or_clear_abandoned(self) -> None:
        for sibling, lock in _abandoned(self._dst):
            if self._path is None and self._key is not None and _read(sibling / _KEY) == self._key:
                self._path, self._lock = sibling, lock
            else:
                shutil.rmtree(sibling, ignore_errors=True)
                os.close(lock)


def reclaimable_bytes(dst: Path) -> int:
    """Bytes of what dead processes left beside ``dst``: the next writer to it takes that up or clears it."""
    total = 0
    for sibling, lock in _abandoned(dst.parent.resolve() / dst.name):
        total += sum(path.lstat().st_blocks * 512 for path in sibling.rglob("*"))
        os.close(lock)
    return total


def _prefix(dst: Path) -> str:
    return f".{dst.name}.partial-"


def _abandoned(dst: Path) -> Iterator[tuple[Path, int]]:
    """Stages of dead processes, each locked; the descriptor that holds the lock is the caller's to close."""
    for sibling in sorted(dst.parent.glob(f"{glob.escape(_prefix(dst))}*")):
        if sibling.name.startswith(f"{_prefix(dst)}{_OLD}") and not dst.exists():
            continue  # killed between two renames: the only copy of what was there
        try:
            lock = os.open(sibling, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        if _try_lock(lock):
            yield sibling, lock
        else:
            os.close(lock)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _try_lock(folder: int) -> bool:
    """Whether the lock is ours now. Where the file system has no locks nobody has, and nothing is cleared."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sync_tree(root: Path) -> None:
    """Forces every file and folder under ``root`` to disk."""
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
