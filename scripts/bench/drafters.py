"""Every drafter under every law on a fixed sample of Spec-Bench (Xia et al. 2024): acceptance, tau, speed over plain.

Plain and speculative runs of one question take turns on one engine, one request at a time. Greedy decoding is the same
under every law, so it is measured once per drafter; sampling is at temperature 1.
"""

import dataclasses
import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, cast

from rich.console import Console

from jaxspec import Completion, Prompt, SamplingParams, SpeculationConfig, SpeculationParams
from jaxspec.checkpoint import open_heads
from jaxspec.engine.engine import Engine
from jaxspec.errors import UserError
from jaxspec.model.heads.config import Method
from scripts.bench.serving import ROOT
from scripts.bench.timing import table
from scripts.bench.untrained import untrained_heads
from scripts.shipped import shipped_heads

LAWS: Final = ("greedy", "token", "block", "coupled")
LENGTH: Final = 1024


class Drafter(NamedTuple):
    """``needs``: the heads or the draft that it runs with."""

    options: dict[str, Any]
    needs: str | None = None


# A chain of heads draws its drafts when sampling, a tree takes the likeliest.
DRAFTERS: Final = {
    "ngram": Drafter({"method": "ngram"}),
    "lookahead": Drafter({"method": "lookahead"}),
    "draft_model": Drafter({"method": "draft_model", "num_speculative_tokens": 4}, "self"),
    "medusa": Drafter({"method": "medusa"}, "medusa"),
    "eagle_chain": Drafter({"method": "eagle", "tree_topk": 1, "num_speculative_tokens": 4}, "eagle"),
    "eagle_tree": Drafter({"method": "eagle"}, "eagle"),
    "eagle3_chain": Drafter({"method": "eagle3", "tree_topk": 1, "num_speculative_tokens": 4}, "eagle3"),
    "eagle3_tree": Drafter({"method": "eagle3"}, "eagle3"),
    "hybrid": Drafter({"method": "hybrid"}, "eagle3"),
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """Questions, each with its category."""

    DEFAULT: ClassVar[Path] = ROOT.parent / "shared" / "data" / "spec_bench_question.jsonl"

    questions: tuple[tuple[str, str], ...]


def read_sample(path: Path, per_category: int) -> Sample:
    """The first questions of every category. UserError when the file is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"prompts: expected the questions of Spec-Bench as JSONL in {path} ({error})") from None
    found: dict[str, list[str]] = {}
    for line in lines:
        question = json.loads(line)
        found.setdefault(question["category"], []).append(question["turns"][0])
    return Sample(tuple((category, text) for category, texts in found.items() for text in texts[:per_category]))


def drafter_table(target: Path, sample: Sample, options: Namespace, console: Console) -> dict[str, Any]:
    """One row per drafter and law."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        folders = shipped_heads(target)
        folders |= {open_heads(path).config.method: path for path in options.heads}
        for name in options.drafters:
            drafter = DRAFTERS[name]
            if drafter.needs not in (None, "self", *folders):
                folders[drafter.needs] = untrained_heads(cast(Method, drafter.needs), target, Path(folder))
            kind = "untrained" if str(folders.get(drafter.needs or "", "")).startswith(folder) else ""
            for law, figures in _laws(target, drafter, folders, sample, options):
                row = f"{name}, {law}" + (f" ({kind})" if kind else "")
                rows[row] = figures
                print(json.dumps({row: figures}), flush=True)
    table(console, f"Drafters on {len(sample.questions)} questions of Spec-Bench", rows, "none stated")
    return rows


def _laws(
    target: Path, drafter: Drafter, folders: dict[str, Path], sample: Sample, options: Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    laws = list(options.laws)
    # Greedy decoding does not look at the law: it shares the engine of another.
    for law in [law for law in laws if law != "greedy"] or ["block"]:
        config = SpeculationConfig(rejection_sample_method=law, **drafter.options)
        with Engine.load(
            target,
            draft=target if drafter.needs == "self" else None,
            heads=folders.get(drafter.needs or ""),
            speculation=config,
            dtype=options.dtype,
            max_slots=1,
            max_len=LENGTH,
            compilation_cache=ROOT / ".cache" / "xla",
        ) as engine:
            # Compiles what these questions need, which is much less than everything.
            temperatures = [0.0] * ("greedy" in laws) + [1.0] * (law in laws)
            for temperature in temperatures:
                measure(engine, sample, temperature, options.tokens)
            if "greedy" in laws:
                laws.remove("greedy")
                yield "greedy", measure(engine, sample, 0.0, options.tokens)
            if law in laws:
                yield law, measure(engine, sample, 1.0, options.tokens)


def measure(engine: Engine, sample: Sample, temperature: float, tokens: int) -> dict[str, Any]:
    drafted = accepted = passes = made = equal = 0
    seconds = {0: 0.0, None: 0.0}
    counted = {0: 0, None: 0}
    ratios = []
    for index, (_, text) in enumerate(sample.questions):
        prompt = Prompt(chat=(("user", text),))
        sampling = SamplingParams(max_tokens=tokens, temperature=temperature, seed=index, ignore_eos=True)
        ids = {}
        speeds = {}
        for gamma in (0, None):
            done = Completion.of(engine.generate(prompt, sampling, SpeculationParams(gamma)))
            ids[gamma] = done.token_ids
            speeds[gamma] = done.summary.timing.tpot_ms or 0.0
            seconds[gamma] += speeds[gamma] * (len(done.token_ids) - 1)
            counted[gamma] += len(done.token_ids) - 1
        spoken = done.summary.speculation
        drafted += spoken.num_draft_tokens
        accepted += spoken.num_accepted_draft_tokens
        passes += round((len(ids[None]) - 1) / spoken.tokens_per_target_pass) if spoken.tokens_per_target_pass else 0
        made += len(ids[None]) - 1
        equal += ids[0] == ids[None]
        ratios.append(speeds[0] / speeds[None])
    ratios.sort()
    plain, speculative = (counted[gamma] / seconds[gamma] for gamma in (0, None))
    figures: dict[str, Any] = {
        "acceptance": round(accepted / drafted, 3) if drafted else 0.0,
        "tau": round(made / passes, 3),
        "speed over plain": {
            "median": round(speculative / plain, 3),
            "min": round(ratios[0], 3),
            "max": round(ratios[-1], 3),
        },
    }
    if temperature == 0 or engine.server_info().rejection_sample_method == "coupled":
        figures["texts as plain"] = f"{equal} of {len(sample.questions)}"
    return figures
