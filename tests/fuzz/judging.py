"""What must be true of every mutant, whoever opens it: one of two ends, in time, in memory, and nothing written."""

import dataclasses
import os
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxspec.errors import UserError
from tests.fuzz.mutations import ELSEWHERE, Mutant
from tests.fuzz.trees import Special, Tree, write_tree

MEMORY = 1 << 30  # bytes of address space beyond what the libraries take
CPU_SECONDS = 2.0  # for one mutant
SECONDS = 20.0  # by the clock, for one that sleeps
LONGEST_LINE = 500


class Overtime(BaseException):
    """Raised into a mutant that takes too long. No handler of the product's catches it."""


@dataclasses.dataclass
class Report:
    """What became of the mutants."""

    harmless: int = 0
    refused: int = 0
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, seed: int, case: Mutant, outcome: str, why: str | None) -> None:
        if outcome == "failed":
            self.failures.append({"seed": seed, "what": ascii(case.what)[:600], "why": ascii(why)[:2000]})
        else:
            setattr(self, outcome, getattr(self, outcome) + 1)


def clear(home: Path) -> None:
    """Removes what the last mutant left; it may be the folder that the process is in."""
    os.chdir(home.parent)
    shutil.rmtree(home, ignore_errors=True)


def place(home: Path, format_name: str, tree: Tree) -> Path:
    """Writes the source, and beside it what a path that leaves it would find. Gives the path to open."""
    clear(home)
    home.mkdir()
    write_tree(home / "src", tree)
    whole = {name: content for name, content in tree.items() if not isinstance(content, Special)}
    if any("index" in name for name in whole):
        write_tree(home / ELSEWHERE, whole)
    (home / "scratch").mkdir()
    (home / "out").mkdir()
    os.chdir(home / "scratch")  # for what a pickle would run
    if format_name == "gguf":
        return home / "src" / next(iter(tree), "missing.gguf")
    return home / "src"


def snapshot(home: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below ``home`` but the scratch folder, with what changes when somebody writes to it."""
    found = {}
    for place, folders, files in os.walk(home):
        for name in [*folders, *files]:
            path = os.path.join(place, name)
            status = os.lstat(path)
            found[path] = (status.st_mode, status.st_size, status.st_mtime_ns)
        if place == str(home):
            folders.remove("scratch")
            # What lies in "out" counts, but not when something was written there and taken away.
            del found[str(home / "scratch")], found[str(home / "out")]
    return found


def complaints(findings: tuple[str, ...]) -> str | None:
    """What is wrong with the lines that a user would get."""
    if not findings:
        return "no finding"
    for line in findings:
        if not line.isprintable():
            return f"a finding that is not one printable line: {line[:200]!r}"
        if not 0 < len(line) < LONGEST_LINE:
            return f"a finding of {len(line)} characters: {line[:200]!r}"
    return None


def judge(
    attempt: Callable[[Path, Path], None], home: Path, path: Path, case: Mutant
) -> tuple[str, str | None, tuple[str, ...]]:
    """("harmless" | "refused" | "failed", why it failed, findings)."""
    before, findings = snapshot(home), ()
    outcome, why = "harmless", None
    try:
        with limited():
            attempt(path, home / "scratch")
    except UserError as error:
        outcome, findings = "refused", getattr(error, "findings", (str(error),))
        why = complaints(findings)
    except BaseException as error:
        why = "".join(traceback.format_exception(error)[-4:])[-1500:]
        if isinstance(error, KeyboardInterrupt):
            raise
    if why is None and outcome == "harmless" and case.must_refuse:
        why = "accepted, but it must be refused"
    if why is None and (changed := {*snapshot(home).items()} ^ {*before.items()}):
        why = f"files changed outside: {sorted(changed)[:3]}"
    return ("failed" if why else outcome), why, findings


@contextmanager
def limited() -> Iterator[None]:
    """Time for one mutant: of the processor, so that a busy machine harms nobody, and by the clock."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _overtime(number: int, frame: object) -> None:
    raise Overtime(f"more than {CPU_SECONDS} s of the processor, or {SECONDS} s by the clock")


def watch_time() -> None:
    """Makes :func:`limited` work in this process."""
    signal.signal(signal.SIGPROF, _overtime)
    signal.signal(signal.SIGALRM, _overtime)


def limit_memory() -> None:
    """Nothing may take more than MEMORY beyond what the process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
