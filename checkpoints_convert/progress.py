"""Progress of long work: a bar with rate and time left on a terminal, one line per stage elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

Advance = Callable[[int], None]


class Reporter(Protocol):
    """Told about every stage of a conversion."""

    def stage(self, name: str, total_bytes: int) -> contextlib.AbstractContextManager[Advance]:
        """A stage of ``total_bytes``; the block calls what it is given with the bytes done since the last call."""
        ...


class Silent:
    """Says nothing; what library callers get."""

    @contextlib.contextmanager
    def stage(self, name: str, total_bytes: int) -> Iterator[Advance]:
        yield lambda done: None


class Lines:
    """For logs and pipes: one line per finished stage, and one every ten seconds within a long one."""

    def __init__(self, out: TextIO, every: float = 10.0) -> None:
        self._out = out
        self._every = every

    @contextlib.contextmanager
    def stage(self, name: str, total_bytes: int) -> Iterator[Advance]:
        start = last = time.monotonic()
        done = 0

        def advance(more: int) -> None:
            nonlocal done, last
            done += more
            now = time.monotonic()
            if now - last >= self._every and 0 < done < total_bytes:
                last = now
                rate = done / (now - start)
                self._say(
                    f"{name}: {done / total_bytes:.0%} of {total_bytes / 1e6:,.0f} MB, {rate / 1e6:,.0f} MB/s, "
                    f"{(total_bytes - done) / rate:.0f} s left"
                )

        yield advance
        self._say(f"{name}: {total_bytes / 1e6:.1f} MB in {time.monotonic() - start:.1f} s")

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


class Bars:
    """A bar per stage on a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out)

    @contextlib.contextmanager
    def stage(self, name: str, total_bytes: int) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description:<18}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=self._console) as bars:
            task = bars.add_task(name, total=total_bytes)
            yield lambda done: bars.advance(task, done)


def reporter() -> Reporter:
    """To stderr: bars on a terminal, lines elsewhere."""
    out = sys.stderr
    return Bars(out) if out.isatty() else Lines(out)
