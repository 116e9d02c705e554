"""``make bench``: what speculation gains, and what the machinery around the model costs, on the demo model.

Every figure is a ratio of things measured in turn within this run, as medians with their spread, so that it stands on a
noisy machine. The last line is one JSON object with the figures and where they came from.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxspec import Prompt
from jaxspec.engine.engine import Engine
from scripts.bench.drafters import DRAFTERS, LAWS, Sample, drafter_table, read_sample
from scripts.bench.laws import law_costs
from scripts.bench.passes import draft_step_overhead, step_overhead
from scripts.bench.serving import LENGTH, ROOT, SLOTS, first_token, host_share, ready, speed
from scripts.bench.shipped import shipped_speed
from scripts.bench.timing import provenance, table
from scripts.bench.training import training_share
from scripts.demo_prompts import DemoPrompt, demo_prompts
from train_heads.config import KINDS

PARTS = ("ready", "speed", "step", "first_token", "host", "laws", "drafters", "shipped", "training")
PROSE = Prompt(text="The morning after the storm, the harbour was quieter than anyone could remember.")


def main() -> int:
    """Runs everything; ``--only`` picks parts."""
    options = _parser().parse_args()
    console = Console()
    cache = ROOT / ".cache" / "xla"
    figures: dict[str, Any] = {}
    if "ready" in options.only:
        figures["ready"] = ready(options.model)
        table(console, "Seconds to ready", {"server of the demo": figures["ready"]}, "60 cold, 15 warm")
    with Engine.load(
        options.model, max_slots=SLOTS, max_len=LENGTH, dtype=options.dtype, compilation_cache=cache
    ) as engine:
        figures["provenance"] = provenance(engine)
        if set(options.only) & {"speed", "step", "first_token", "host"}:
            _serving(engine, options, console, figures)
        if "laws" in options.only:
            figures["laws"] = law_costs(engine, options.model, 4 * options.repeats + 1)
            for vocab, rows in figures["laws"].items():
                table(
                    console, f"Filters, law and commit over a pass of width 8, {vocab} ids", rows, "0.10, greedy 0.03"
                )
    if "drafters" in options.only:
        sample = read_sample(options.prompts, options.sample)
        figures["drafters"] = drafter_table(options.model, sample, options, console)
    if "shipped" in options.only:
        sample = read_sample(options.prompts, options.sample)
        figures["shipped"] = shipped_speed(options.model, sample, options.dtype, options.tokens, 0.0)
        table(console, "The shipped head, lookup and their hybrid", figures["shipped"], "1.3; hybrid 1.0 over each")
    if "training" in options.only:
        figures["training"] = {
            kind: training_share(options.model, kind, options.dtype, options.repeats) for kind in KINDS
        }
        table(console, "Training runs over forward and backward alone", figures["training"], "0.70")
    print(json.dumps(figures))
    return 0


def _serving(engine: Engine, options: argparse.Namespace, console: Console, figures: dict[str, Any]) -> None:
    engine.warmup()
    programs = engine.programs
    if "speed" in options.only:
        prompts = [*demo_prompts(), DemoPrompt("prose", "", PROSE, max_tokens=192)]
        figures["speed"] = {prompt.name: speed(engine, prompt, options.repeats) for prompt in prompts}
        table(console, "n-gram speculation over plain", figures["speed"], "edit 2.5, chat and prose 0.95")
    if "step" in options.only:
        figures["step"] = step_overhead(programs, 2 * options.repeats + 1)
        figures["step"]["draft_model"] = draft_step_overhead(programs, 2 * options.repeats + 1)["gamma_4"]
        table(console, "Step over bare forward", figures["step"], "1.10")
    if "first_token" in options.only:
        figures["first_token"] = first_token(engine, programs, 2 * options.repeats + 1)
        table(console, "TTFT over bare prefill", figures["first_token"], "1.15")
    if "host" in options.only:
        figures["host"] = {"plain": host_share(engine, programs, options.repeats)}
        table(console, "Engine's time per token over the step's", figures["host"], "none stated")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of every comparison (medians)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    group = parser.add_argument_group("drafters")
    group.add_argument("--prompts", type=Path, default=Sample.DEFAULT, help="Spec-Bench questions, JSONL")
    group.add_argument("--sample", type=int, default=1, metavar="N", help="questions per category")
    group.add_argument("--tokens", type=int, default=48, metavar="N", help="tokens per question")
    group.add_argument("--drafters", nargs="*", choices=DRAFTERS, default=tuple(DRAFTERS))
    group.add_argument("--laws", nargs="*", choices=LAWS, default=LAWS)
    group.add_argument(
        "--heads", nargs="*", type=Path, default=(), metavar="DIR", help="trained heads, instead of untrained ones"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
