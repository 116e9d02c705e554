"""Opens mutants in a process of its own, under limits of memory and time: readers, plan, tokenizer, every tensor.

``python -m tests.fuzz.worker FORMAT FIRST COUNT HOME`` prints one JSON report; ``--show`` says what each mutant was and
what became of it; ``--break NAME`` makes a reader wrong on purpose (see ``broken.py``). No jax: that alone would take
more memory than the readers may.
"""

import argparse
import dataclasses
import json
import os
import resource
import shutil
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its buffers would count as memory


def _without_init(*names: str) -> None:
    """Packages whose ``__init__`` imports jax for the sake of their users, entered without it."""
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
        sys.modules[name] = package


_without_init("checkpoints_convert", "checkpoints_convert.heads", "jaxspec.checkpoint")
from jaxspec.checkpoint import folder, manifest  # noqa: E402

_provided: Any = sys.modules["jaxspec.checkpoint"]
_provided.QuantizationError, _provided.tensor_sha256 = manifest.QuantizationError, manifest.tensor_sha256
_provided.Checkpoint, _provided.read_group = folder.Checkpoint, None  # of our own folders: not opened here

from checkpoints_convert.engine import make_plan  # noqa: E402
from checkpoints_convert.findings import Findings  # noqa: E402
from checkpoints_convert.heads.configs import foreign_config  # noqa: E402
from checkpoints_convert.heads.plan import planned  # noqa: E402
from checkpoints_convert.heads.source import open_foreign  # noqa: E402
from checkpoints_convert.readers import open_source  # noqa: E402
from checkpoints_convert.tokenizer_files import carry_tokenizer  # noqa: E402
from jaxspec.errors import UserError  # noqa: E402
from tests.fuzz.bases import bases  # noqa: E402
from tests.fuzz.mutations import ELSEWHERE, Mutant, mutant  # noqa: E402
from tests.fuzz.trees import Special, Tree, write_tree  # noqa: E402

MEMORY = 1 << 30  # bytes of address space beyond what the libraries take
CPU_SECONDS, SECONDS = 2.0, 20.0  # for one mutant; the second is for one that sleeps
LONGEST_LINE = 500


class Overtime(BaseException):
    """Raised into a mutant that takes too long. No handler of the product's catches it."""


@dataclasses.dataclass
class Report:
    """What became of the mutants."""

    harmless: int = 0
    refused: int = 0
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def open_model(path: Path, scratch: Path) -> None:
    """As ``to-orbax`` does up to the first byte it writes; then every tensor and every hash."""
    findings = Findings()
    with findings.collecting():
        source = open_source(path, "auto")
        with findings.collecting():
            plan = make_plan(source, "keep")
        with findings.collecting():
            carry_tokenizer(source, None, scratch)
    findings.raise_if_any()
    for names in plan.groups().values():
        plan.fill(names)
    for file in source.files.values():
        file.sha256()


def open_heads(path: Path, scratch: Path) -> None:
    """As ``heads`` does up to the first byte it writes; then every tensor and every hash."""
    findings = Findings()
    with findings.collecting():
        foreign = open_foreign(path, None)
        heads = planned(foreign, foreign_config(foreign, None), "keep")
    findings.raise_if_any()
    for names in heads.groups().values():
        heads.fill(names)
    for file in heads.files.values():
        file.sha256()


def place(home: Path, format_name: str, tree: Tree) -> Path:
    """Writes the source, and beside it what a path that leaves it would find. Gives the path to open."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    write_tree(home / "src", tree)
    whole = {name: content for name, content in tree.items() if not isinstance(content, Special)}
    if any("index" in name for name in whole):
        write_tree(home / ELSEWHERE, whole)
    (home / "scratch").mkdir()
    (home / "out").mkdir()
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
            del found[str(home / "scratch")]
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


def limit_memory() -> None:
    """Nothing may take more than MEMORY beyond what the process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("format")
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("home", type=Path)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--break", dest="broken", default="")
    arguments = parser.parse_args()
    attempt, home = open_heads if arguments.format == "heads" else open_model, arguments.home / "case"
    made = bases(arguments.format, arguments.shared)
    signal.signal(signal.SIGPROF, _overtime)
    signal.signal(signal.SIGALRM, _overtime)
    for tree in made:  # every base is right; and what is loaded late is loaded now
        attempt(place(home, arguments.format, tree), home / "scratch")
    assert "jax" not in sys.modules, "the worker must not import jax"
    if arguments.broken:
        from tests.fuzz.broken import BREAKS

        BREAKS[arguments.broken]()
    limit_memory()
    report = Report()
    for seed in range(arguments.first, arguments.first + arguments.count):
        case = mutant(made, arguments.format, seed)
        # A process that dies tells no more than this.
        (arguments.home / "last").write_text(f"{arguments.format} {seed}: {case.what!a}")
        path = place(home, arguments.format, case.tree)
        outcome, why, findings = judge(attempt, home, path, case)
        if outcome == "failed":
            report.failures.append({"seed": seed, "what": ascii(case.what)[:600], "why": ascii(why)[:2000]})
        else:
            setattr(report, outcome, getattr(report, outcome) + 1)
        if arguments.show:
            print(f"{seed}: {ascii(case.what)[:300]}\n    {outcome} {why or ascii(findings)[:400]}", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
    json.dump(dataclasses.asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
