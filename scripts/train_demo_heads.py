"""``make demo-heads``: the heads and the draft of assets/smollm2-135m, trained from the answers beside them.

Each kind goes through its stages of ``jaxspec-train`` (a killed stage goes on where it was), is packed into one file in
bfloat16, and is measured by the serving engine on questions of Spec-Bench (Xia et al. 2024), which no training saw. The
card beside the weights is written from what was run and measured. Hours on a CPU; everything is kept below ``--work``.
"""

import argparse
import gzip
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from checkpoints_convert.pack import pack
from jaxspec import SpeculationConfig
from jaxspec.checkpoint import open_any
from jaxspec.engine.engine import Engine
from scripts.bench.drafters import LENGTH, Sample, measure, read_sample
from scripts.shipped import ASSETS, TREE
from train_heads import logs
from train_heads.cli import main as train

ROOT: Final = Path(__file__).resolve().parent.parent
TARGET: Final = "models/smollm2-135m"
COMMON: Final = "--mesh 1 --dtype bfloat16 --draft-vocab-size 8192 --row 384"
TOKENS: Final = 40  # of each answer that is measured
LIMIT: Final = 24_000_000  # bytes of a packed folder


@dataclass(frozen=True)
class Recipe:
    """How one kind is made. A stage: on how many answers (None: all), and the flags of its run; each goes on from the
    one before. ``ways``: speculation options that are measured, the best of a chain and of a tree."""

    title: str
    stages: tuple[tuple[int | None, str], ...]
    ways: dict[str, dict[str, Any]]


RECIPES: Final = {
    "eagle3": Recipe(
        "EAGLE-3 head (Li et al. 2025)",
        (
            (2624, "--unroll 3 --rows 5 --steps 300 --warmup 20 --learning-rate 1e-3 --final 0.5"),
            (3745, "--unroll 3 --rows 5 --steps 700 --warmup 10 --learning-rate 8e-4 --final 0.05"),
            (None, "--unroll 3 --rows 5 --steps 2000 --warmup 20 --learning-rate 8e-4 --final 0.05"),
        ),
        {
            "chain of 4": {"method": "eagle3", "tree_topk": 1, "num_speculative_tokens": 4},
            "tree of 8": {"method": "eagle3", **TREE},
        },
    ),
    "medusa": Recipe(
        "Medusa heads (Medusa-1, Cai et al. 2024)",
        (
            (
                None,
                "--heads 4 --layers 2 --learn-law --rows 5 --steps 900 --warmup 20 --learning-rate 1e-3 --final 0.05",
            ),
        ),
        {
            "chain of 4": {"method": "medusa", "tree_choices": "1,1,1,1"},
            "default tree": {"method": "medusa"},
        },
    ),
    "draft": Recipe(
        "Draft model, distilled (Hinton et al. 2015)",
        ((None, "--layers 3 --rows 10 --steps 600 --warmup 20 --learning-rate 1e-3"),),
        {
            "chain of 4, greedy drafts": {
                "method": "draft_model",
                "num_speculative_tokens": 4,
                "draft_sample_method": "greedy",
            },
            "chain of 4, drawn drafts": {"method": "draft_model", "num_speculative_tokens": 4},
        },
    ),
}


def commands(kind: str, work: Path) -> list[list[str]]:
    """The runs of one kind, as arguments of ``jaxspec-train``."""
    found: list[list[str]] = []
    for number, (answers, flags) in enumerate(RECIPES[kind].stages):
        data = ASSETS / "answers.jsonl.gz" if answers is None else _first(answers, work)
        files = ["--target", TARGET, "--data", _shown(data), "--out", _shown(work / f"{kind}-{number}")]
        before = ["--start-from", _shown(work / f"{kind}-{number - 1}" / "heads")] if number else []
        found.append([kind, *files, *before, *COMMON.split(), *flags.split()])
    return found


def _first(answers: int, work: Path) -> Path:
    """The first answers in a file of their own, made if need be."""
    path = work / f"first-{answers}.jsonl"
    if not path.is_file():
        with gzip.open(ASSETS / "answers.jsonl.gz", "rt", encoding="utf-8") as file:
            lines = [line for line, _ in zip(file, range(answers), strict=False)]
        work.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines))
    return path


def _shown(path: Path) -> str:
    """As it is typed in the repository's root."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def measured(kind: str, folder: Path, sample: Sample) -> dict[str, Any]:
    """Tokens per target pass and acceptance on the sample, greedy and at temperature 1, for each way."""
    rows: dict[str, Any] = {}
    for way, given in RECIPES[kind].ways.items():
        with Engine.load(
            ROOT / TARGET,
            draft=folder if kind == "draft" else None,
            heads=None if kind == "draft" else folder,
            speculation=SpeculationConfig(**given),
            mesh="1",
            dtype="bfloat16",
            max_slots=1,
            max_len=LENGTH,
            compilation_cache=ROOT / ".cache" / "xla",
        ) as engine:
            measure(engine, sample, 0.0, TOKENS)  # compiles what these questions need, much less than everything
            for name, temperature in (("greedy", 0.0), ("T = 1", 1.0)):
                rows[f"{way}, {name}"] = measure(engine, sample, temperature, TOKENS)
                print(json.dumps({kind: {f"{way}, {name}": rows[f"{way}, {name}"]}}), flush=True)
    return rows


def card(kind: str, runs: list[list[str]], work: Path, folder: Path, rows: dict[str, Any], questions: int) -> str:
    """README.md of a shipped folder, without the figures that nobody ran."""
    checkpoint = open_any(folder)
    held_out = [line for line in logs.read(work / f"{kind}-{len(runs) - 1}" / logs.LOG) if line["kind"] == "held_out"]
    tops = ", ".join(f"{name[:-5]} {value:.3f}" for name, value in held_out[-1].items() if name.endswith("/top1"))
    lines = [
        f"# {RECIPES[kind].title} for SmolLM2-135M-Instruct",
        "",
        f"{checkpoint.manifest.parameter_count:,} parameters, bfloat16. Made by `scripts/train_demo_heads.py`:",
        "",
        "```",
        *(f"jaxspec-train {' '.join(run)}" for run in runs),
        "```",
        "",
        "Data: [answers of the target itself](../README.md), 5 % kept out. There the likeliest guess is the target's",
        f"likeliest token: {tops}.",
        "",
        f"Measured by the serving engine, bfloat16, batch 1, {questions} questions of Spec-Bench that no training saw,",
        f"{TOKENS} tokens each; T = 1 under the block law:",
        "",
        "| | tokens per target pass | acceptance | speed over plain, CPU |",
        "|---|---|---|---|",
    ]
    for name, figures in rows.items():
        speed = figures["speed over plain"]
        lines.append(
            f"| {name} | {figures['tau']:.2f} | {figures['acceptance']:.3f} | {speed['median']:.2f} "
            f"({speed['min']:.2f} to {speed['max']:.2f}) |"
        )
    tensors = checkpoint.manifest.tensors.items()
    lines += ["", "| tensor | sha256 |", "|---|---|", *(f"| {name} | `{record.sha256}` |" for name, record in tensors)]
    return "\n".join(lines) + "\n"


def make(kind: str, work: Path, sample: Sample) -> None:
    """Trains, packs, measures, writes the card. SystemExit where a run failed or the result is too large to ship."""
    runs = commands(kind, work)
    for run in runs:
        print(f"$ jaxspec-train {' '.join(run)}", flush=True)
        if train(run):
            raise SystemExit(f"{kind}: training failed")
    folder = ASSETS / kind
    beside = ROOT / TARGET if kind == "draft" else None
    pack(work / f"{kind}-{len(runs) - 1}" / "heads", folder, dtype="bfloat16", beside=beside, force=folder.exists())
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > LIMIT:
        raise SystemExit(f"{folder}: expected at most {LIMIT:,} bytes to ship, got {size:,}")
    rows = measured(kind, folder, sample)
    (folder / "README.md").write_text(card(kind, runs, work, folder, rows, len(sample.questions)))


def main() -> int:
    """Exit status 0 when every kind asked for was made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "demo-heads", help="runs and their checkpoints")
    parser.add_argument("--questions", type=Path, default=Sample.DEFAULT, help="Spec-Bench's question.jsonl")
    parser.add_argument("--per-category", type=int, default=1, help="questions of each category that are measured")
    options = parser.parse_args()
    sample = read_sample(options.questions, options.per_category)
    for kind in options.only:
        make(kind, options.work, sample)
    return 0


if __name__ == "__main__":
    sys.exit(main())
