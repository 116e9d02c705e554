"""Everything that is wrong with a source, told at once."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from jaxspec.errors import UserError


# Characters of a line that are kept at its two ends. Files put names and values of any length into messages.
_HEAD: Final = 300
_TAIL: Final = 150


def one_line(text: str) -> str:
    """``text`` as one printable line of bounded length: newlines and control characters escaped, the middle left out.

    >>> one_line("a\\nb"), len(one_line("x" * 5000))
    ('a\\\\nb', 455)
    """
    text = _cut(text)
    return text if text.isprintable() else _cut("".join(map(_escaped, text)))


def _cut(text: str) -> str:
    return text if len(text) <= _HEAD + _TAIL + 5 else f"{text[:_HEAD]} ... {text[-_TAIL:]}"


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")


class ConversionError(UserError):
    """A source or destination that cannot be used; ``findings`` holds one line per reason."""

    def __init__(self, findings: tuple[str, ...]) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


@dataclasses.dataclass
class Findings:
    """Collects one line per thing that is wrong, so that a user mends them in one go."""

    lines: list[str] = dataclasses.field(default_factory=list)
    _told: set[str] = dataclasses.field(default_factory=set, repr=False)  # a list alone is slow when much is wrong

    def add(self, line: str) -> None:
        """Adds a finding, as :func:`one_line` has it, unless it was told before."""
        line = one_line(line)
        if line not in self._told:
            self._told.add(line)
            self.lines.append(line)

    def raise_if_any(self) -> None:
        """Raises ConversionError when something was found."""
        if self.lines:
            raise ConversionError(tuple(self.lines))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Turns a UserError raised inside the block into findings and goes on after it."""
        try:
            yield
        except ConversionError as error:
            for line in error.findings:
                self.add(line)
        except UserError as error:
            self.add(str(error))
