"""Runs mutants through the whole command, in a process of its own: exit status, lines on stderr, what is left.

``python -m tests.fuzz.command FORMAT FIRST COUNT HOME`` prints one JSON report, as ``worker.py`` does.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from checkpoints_convert import ConversionError, convert
from checkpoints_convert.cli import main as convert_command
from checkpoints_convert.heads import convert_heads
from jaxspec.checkpoint import open_any
from tests.fuzz import judging
from tests.fuzz.bases import bases
from tests.fuzz.mutations import mutant

ROOT = Path(__file__).resolve().parents[2]


class Wrong(Exception):
    """Something that the command must not do."""


def attempt(path: Path, scratch: Path, command: str) -> None:
    """Converts to ``out/dst``. Raises ConversionError with the lines of a refusal, Wrong when it is no proper one."""
    dst, out, err = path.parent / "out" / "dst", io.StringIO(), io.StringIO()
    if path.name != "src":  # a file in it
        dst = path.parents[1] / "out" / "dst"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = convert_command([command, str(path), str(dst)])
    lines = err.getvalue().split("\n")
    if left := os.listdir(scratch):
        raise Wrong(f"left in the folder for temporary files: {left}")
    left = os.listdir(dst.parent)
    if status == 0:
        if left != ["dst"]:
            raise Wrong(f"status 0, and beside the destination: {left}")
        open_any(dst)
        shutil.rmtree(dst)
        return
    if status != 2 or out.getvalue() or lines[-1] or any(not line.startswith("error: ") for line in lines[:-1]):
        raise Wrong(f"status {status}, stdout {out.getvalue()[:500]!r}, stderr {err.getvalue()[:1000]!r}")
    if left:
        raise Wrong(f"status 2, and left at the destination: {left}")
    findings = tuple(line.removeprefix("error: ") for line in lines[:-1])
    try:
        (convert_heads if command == "heads" else convert)(path, dst)
    except ConversionError as error:
        if error.findings != findings:
            raise Wrong(f"the command said {findings}, the function {error.findings}") from None
        raise
    raise Wrong("the command refused, the function did not")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("format")
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("home", type=Path)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    arguments = parser.parse_args()
    arguments.home = arguments.home.resolve()
    home = arguments.home / "case"
    command = "heads" if arguments.format == "heads" else "to-orbax"
    made = bases(arguments.format, arguments.shared)
    tempfile.tempdir = str(home / "scratch")
    judging.watch_time()
    # Two processes' worth of compiling may be going on beside this: time is for the readers' own test.
    judging.CPU_SECONDS = judging.SECONDS = 60.0
    for tree in made:  # every base is right; and what is loaded late is loaded now
        attempt(judging.place(home, arguments.format, tree), home / "scratch", command)
    judging.limit_memory()
    report = judging.Report()
    for seed in range(arguments.first, arguments.first + arguments.count):
        case = mutant(made, arguments.format, seed)
        (arguments.home / "last").write_text(f"{arguments.format} {seed}: {case.what!a}")
        path = judging.place(home, arguments.format, case.tree)
        outcome, why, _ = judging.judge(lambda path, scratch: attempt(path, scratch, command), home, path, case)
        report.add(seed, case, outcome, why)
    judging.clear(home)
    json.dump(dataclasses.asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
