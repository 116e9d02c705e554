"""Everything that is wrong with a source, told at once."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from jaxspec.errors import UserError


class ConversionError(UserError):
    """A source or destination that cannot be used; ``findings`` holds one line per reason."""

    def __init__(self, findings: tuple[str, ...]) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


@dataclasses.dataclass
class Findings:
    """Collects one line per thing that is wrong, so that a user mends them in one go."""

    lines: list[str] = dataclasses.field(default_factory=list)

    def add(self, line: str) -> None:
        if line not in self.lines:
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
