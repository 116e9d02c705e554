"""One line about long work: rewritten in place on a terminal, elsewhere a new one every half minute."""

import sys
import time
from typing import TextIO

EVERY_S = 30.0


class Progress:
    """Shows the latest of what it is told."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._last = -EVERY_S
        self._open = False

    def show(self, text: str, *, last: bool = False) -> None:
        """``last``: said whatever the time, and the line is closed."""
        now, terminal = time.monotonic(), self._stream.isatty()
        if not last and now - self._last < (0.2 if terminal else EVERY_S):
            return
        self._last = now
        if terminal:
            self._stream.write(f"\r\x1b[K{text}" + ("\n" if last else ""))
        else:
            self._stream.write(f"{text}\n")
        self._open = terminal and not last
        self._stream.flush()

    def close(self) -> None:
        """Leaves the cursor on a line of its own."""
        if self._open:
            self._stream.write("\n")
            self._open = False
