"""Opens mutants in a process of its own, under limits of memory and time: readers, plan, tokenizer, every tensor.

``python -m tests.fuzz.worker FORMAT FIRST COUNT HOME`` prints one JSON report; ``--show`` says what each mutant was and
what became of it; ``--break NAME`` makes a reader wrong on purpose (see ``broken.py``). No jax: that alone would take
more memory than the readers may.
"""

import argparse
import dataclasses
import json
import os
import sys
import types
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
from tests.fuzz.bases import bases  # noqa: E402
from tests.fuzz.judging import Report, clear, judge, limit_memory, place, watch_time  # noqa: E402
from tests.fuzz.mutations import mutant  # noqa: E402


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
    arguments.home = arguments.home.resolve()
    attempt, home = open_heads if arguments.format == "heads" else open_model, arguments.home / "case"
    made = bases(arguments.format, arguments.shared)
    watch_time()
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
        report.add(seed, case, outcome, why)
        if arguments.show:
            print(f"{seed}: {ascii(case.what)[:300]}\n    {outcome} {why or ascii(findings)[:400]}", file=sys.stderr)
    clear(home)
    json.dump(dataclasses.asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
