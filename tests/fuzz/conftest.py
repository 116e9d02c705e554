"""Runs the worker, or the command's, and says which mutant went wrong and how to see it again."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

# Mutants are files for a moment: where there is memory for files, they never meet a disk.
_MEMORY = Path("/dev/shm")

Report = dict[str, Any]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder for mutants."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_MEMORY if _MEMORY.is_dir() else tmp_path))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def fuzz(home: Path, shared: Path) -> Callable[..., Report]:
    """``fuzz(format, first, count, *options, module=..., batches=1)``: the summed report of worker processes."""

    def batch(module: str, format_name: str, first: int, count: int, options: tuple[str, ...]) -> Report:
        own = home / f"{module}-{first}"
        own.mkdir()
        arguments = [format_name, str(first), str(count), str(own), "--shared", str(shared), *options]
        command = [sys.executable, "-W", "error", "-m", f"tests.fuzz.{module}", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
        if done.returncode:
            last = (own / "last").read_text() if (own / "last").exists() else "none yet"
            pytest.fail(f"the process ended with {done.returncode} at mutant {last}\n{done.stderr[-3000:]}")
        assert done.stderr == "", done.stderr[-3000:]
        return json.loads(done.stdout)

    def run(
        format_name: str, first: int, count: int, *options: str, module: str = "worker", batches: int = 1
    ) -> Report:
        size = count // batches
        with ThreadPoolExecutor(batches) as pool:
            firsts = range(first, first + count, size)
            reports = list(pool.map(lambda first: batch(module, format_name, first, size, options), firsts))
        return {key: sum((report[key] for report in reports), type(value)()) for key, value in reports[0].items()}

    return run


def told(format_name: str, report: Report) -> str:
    """The failures, for an assertion's message."""
    lines = [f"{failure['seed']}: {failure['what']}\n    {failure['why']}" for failure in report["failures"][:10]]
    again = f"python -m tests.fuzz.worker {format_name} SEED 1 /tmp/fuzz --show"
    return f"{len(report['failures'])} mutants; again with: mkdir /tmp/fuzz; {again}\n" + "\n".join(lines)
