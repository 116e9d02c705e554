"""``make bench-identity``: how often speculative greedy text departs from plain greedy text, and the price of never.

Questions of Spec-Bench, first turns, greedy, on the demo model, four at a time: each without speculation and with it,
alone and in a batch of four, by an engine as it comes and by one in deterministic mode. Heads are those of assets/ with
their small tree, a hybrid is a lookup with the EAGLE-3 head, a draft model is the target itself, so that all its drafts
are accepted.

A flip is a token at which a text departs from the plain text of the same engine, alone, after the same prefix. Alone,
the comparison goes on behind it: plain decoding's token is put into its place, and prompt and text so far become the
prompt. In a batch it ends there. Every flip is reported with how far the plain pass's best token was ahead of its
second best there.

Finished groups of questions are kept in a file, and a run with a larger ``--limit`` goes on where the last one ended.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from jaxspec import Chunk, Completion, Engine, Prompt, SamplingParams, SpeculationConfig, SpeculationParams
from jaxspec.engine.params import HEADS_METHODS, METHODS
from scripts.bench.timing import provenance
from scripts.shipped import ASSETS, TREE, shipped_heads

ROOT: Final = Path(__file__).resolve().parent.parent
BATCH: Final = 4
REHEARSAL: Final = 12  # tokens
MODES: Final = ("default", "deterministic")


@dataclasses.dataclass(frozen=True)
class Text:
    """A greedy completion. ``gaps``: the best token's lead before each, natural logarithm; none if not asked for."""

    ids: list[int]
    gaps: list[float]
    seconds: float  # of decoding, after the first token

    @classmethod
    def of(cls, chunks: Sequence[Chunk], seconds: float) -> "Text":
        done = Completion.of(chunks)
        gaps = [entry.top[0][1] - entry.top[1][1] for entry in done.logprobs or ()]
        return cls(list(done.token_ids), gaps, seconds)


@dataclasses.dataclass
class Tally:
    """What one way of decoding did to the texts."""

    compared: int = 0  # tokens
    departed: int = 0  # texts with a flip
    texts: int = 0
    gaps: list[float] = dataclasses.field(default_factory=list)  # one per flip

    def add(self, compared: int, gaps: Sequence[float]) -> None:
        self.texts += 1
        self.compared += compared
        self.departed += bool(gaps)
        self.gaps += gaps

    def summary(self) -> dict[str, Any]:
        """``flips_per_10k`` tokens, and the leads at the flips."""
        flips = len(self.gaps)
        return {
            "flips_per_10k": round(1e4 * flips / max(1, self.compared), 2),
            "flips": flips,
            "tokens": self.compared,
            "texts_departed": f"{self.departed}/{self.texts}",
            "largest_gap": max(self.gaps, default=0.0),
        }


def decode(
    engine: Engine, prompts: Sequence[Prompt | list[int]], tokens: int, gamma: int, *, gaps: bool = False
) -> list[Text]:
    """All prompts at once. The seconds of each are those of the slowest, prefill aside where there is one prompt."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=2 if gaps else None)
    start = time.perf_counter()
    streams = [engine.generate(prompt, sampling, SpeculationParams(gamma)) for prompt in prompts]
    chunks = [[next(stream)] for stream in streams]
    if len(streams) == 1:
        start = time.perf_counter()
    for received, stream in zip(chunks, streams, strict=True):
        received.extend(stream)
    seconds = time.perf_counter() - start
    return [Text.of(received, seconds) for received in chunks]


def first_flip(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part; None: nowhere."""
    pairs = zip([*plain, None], [*other, None], strict=False)
    return next((place for place, (one, two) in enumerate(pairs) if one != two), None)


def flips(engine: Engine, prompt_ids: list[int], plain: Text, other: Sequence[int]) -> list[float]:
    """Leads at all places where a speculating engine, put back on the plain text after each flip, leaves it."""
    found, done = [], 0
    while (place := first_flip(plain.ids[done:], other)) is not None:
        done += place + 1
        # The texts may part by their length alone: one of them met its end early.
        found.append(plain.gaps[min(done, len(plain.gaps)) - 1])
        if done >= len(plain.ids):
            break
        (text,) = decode(engine, [[*prompt_ids, *plain.ids[:done]]], len(plain.ids) - done, 8)
        other = text.ids
    return found


def measure(engine: Engine, prompts: Sequence[Prompt], ids: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """One group of questions through one engine: a tally per way, and the decoding seconds of each way."""
    tallies = {way: Tally() for way in ("speculative", "plain_in_batch", "speculative_in_batch")}
    plain = [decode(engine, [prompt], tokens, 0, gaps=True)[0] for prompt in prompts]
    alone = [decode(engine, [prompt], tokens, 8)[0] for prompt in prompts]
    for index, (one, two) in enumerate(zip(plain, alone, strict=True)):
        tallies["speculative"].add(len(one.ids), flips(engine, ids[index], one, two.ids))
    seconds = {"plain": sum(text.seconds for text in plain), "speculative": sum(text.seconds for text in alone)}
    for way, gamma in (("plain_in_batch", 0), ("speculative_in_batch", 8)):
        together = decode(engine, prompts, tokens, gamma)
        seconds[way] = together[0].seconds
        for one, two in zip(plain, together, strict=True):
            place = first_flip(one.ids, two.ids)
            gaps = [] if place is None else [one.gaps[min(place, len(one.gaps) - 1)]]
            tallies[way].add(len(one.ids) if place is None else place + 1, gaps)
    return {"tallies": {way: dataclasses.asdict(tally) for way, tally in tallies.items()}, "seconds": seconds}


def groups(path: Path, limit: int) -> list[list[dict[str, Any]]]:
    """The first ``limit`` questions of a fixed shuffle, in groups of four: every prefix has all categories in it."""
    questions = [json.loads(line) for line in path.read_text().splitlines()]
    random.Random(0).shuffle(questions)
    chosen = questions[:limit]
    return [chosen[start : start + BATCH] for start in range(0, len(chosen), BATCH)]


def run_method(options: argparse.Namespace, dtype: str, method: str, kept: dict[str, Any]) -> dict[str, Any]:
    """Both engines over all groups; what is new goes to the file. Returns the provenance."""
    heads = shipped_heads(options.model).get("eagle3" if method == "hybrid" else method)
    tree: dict[str, Any] = TREE if heads and method != "medusa" else {}
    speculation = SpeculationConfig(method=method, **tree)
    engines = {
        mode: Engine.load(
            options.model,
            draft=options.model if method == "draft_model" or (method == "hybrid" and heads is None) else None,
            heads=heads,
            speculation=speculation,
            dtype=dtype,
            mesh="1",
            max_slots=BATCH,
            max_len=options.max_len,
            deterministic=mode == "deterministic",
            compilation_cache=ROOT / ".cache" / "xla",
        )
        for mode in MODES
    }
    try:
        origin = provenance(engines["default"])
        rehearsed = False
        tokenizer = engines["default"].tokenizer
        if tokenizer is None:
            raise SystemExit(f"{options.model}: expected a checkpoint with a tokenizer")
        for group in groups(options.questions, options.limit):
            key = name(options, dtype, method, group)
            if key in kept:
                continue
            chats = [(("user", question["turns"][0]),) for question in group]
            ids = [tokenizer.encode_chat([{"role": role, "content": text} for role, text in chat]) for chat in chats]
            fits = [i for i, prompt in enumerate(ids) if len(prompt) + options.max_tokens < options.max_len]
            prompts, ids = [Prompt(chat=chats[i]) for i in fits], [ids[i] for i in fits]
            if not rehearsed:  # compiles what these questions need, which is much less than everything
                for engine in engines.values():
                    measure(engine, prompts, ids, REHEARSAL)
                rehearsed = True
            figures = {mode: measure(engine, prompts, ids, options.max_tokens) for mode, engine in engines.items()}
            kept[key] = {"left_out": len(group) - len(fits), **figures}
            with options.out.open("a") as file:
                file.write(json.dumps({"key": key, **kept[key]}) + "\n")
            print(f"{key}: done", file=sys.stderr, flush=True)
        return origin
    finally:
        for engine in engines.values():
            engine.close()


def name(options: argparse.Namespace, dtype: str, method: str, group: Sequence[dict[str, Any]]) -> str:
    """What a kept result was measured on."""
    questions = ",".join(str(question["question_id"]) for question in group)
    return f"{dtype} {method} len {options.max_len} tokens {options.max_tokens} questions {questions}"


def summarise(options: argparse.Namespace, dtype: str, method: str, kept: dict[str, Any]) -> dict[str, Any]:
    """Over all groups: flips by mode and way, and the speed of deterministic mode, as the median of their ratios."""
    found = [kept[name(options, dtype, method, group)] for group in groups(options.questions, options.limit)]
    figures: dict[str, Any] = {"left_out": sum(each["left_out"] for each in found)}
    for mode in MODES:
        for way in found[0][mode]["tallies"]:
            total = Tally()
            for each in found:
                part = Tally(**each[mode]["tallies"][way])
                total = Tally(
                    total.compared + part.compared,
                    total.departed + part.departed,
                    total.texts + part.texts,
                    [*total.gaps, *part.gaps],
                )
            figures[f"{mode} {way}"] = total.summary()
    default, sure = ([each[mode]["seconds"] for each in found] for mode in MODES)
    figures["speed_of_deterministic"] = {
        way: round(statistics.median(a[way] / b[way] for a, b in zip(default, sure, strict=True) if b[way]), 2)
        for way in default[0]
    }
    return figures


def show(console: Console, title: str, figures: dict[str, Any]) -> None:
    """One method at one dtype."""
    table = Table(title=title, title_justify="left")
    rows = {way: cells for way, cells in figures.items() if isinstance(cells, dict) and "flips" in cells}
    columns = next(iter(rows.values()))
    for column in ("", *columns):
        table.add_column(column)
    for way, cells in rows.items():
        table.add_row(way, *(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells.values()))
    console.print(table)
    console.print(f"speed, deterministic over default: {figures['speed_of_deterministic']}")


def main() -> int:
    """Exit status 0 when no text of a deterministic engine departed."""
    # Method none has nothing to compare; heads are there for the methods that they were trained for.
    shipped = [path.name for path in ASSETS.iterdir()]
    methods = [method for method in METHODS if method != "none" and (method not in HEADS_METHODS or method in shipped)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m")
    parser.add_argument("--questions", type=Path, default=ROOT.parent / "shared" / "data" / "spec_bench_question.jsonl")
    parser.add_argument("--limit", type=int, default=24, help="questions of a fixed shuffle; 480: all of Spec-Bench")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each completion")
    parser.add_argument(
        "--max-len", type=int, default=2048, help="of the engines; longer prompts are left out, counted"
    )
    parser.add_argument("--methods", nargs="*", choices=methods, default=methods)
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "identity.jsonl", help="where results are kept")
    options = parser.parse_args()
    if not options.questions.is_file():
        parser.error(f"questions: expected Spec-Bench's question.jsonl, got {options.questions}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    kept = {record.pop("key"): record for record in map(json.loads, lines)}
    console = Console(width=140)
    report: dict[str, Any] = {"max_tokens": options.max_tokens, "max_len": options.max_len, "questions": options.limit}
    for dtype in options.dtypes:
        for method in options.methods:
            report["provenance"] = run_method(options, dtype, method, kept)
            report[f"{dtype} {method}"] = figures = summarise(options, dtype, method, kept)
            show(console, f"{dtype}, {method}", figures)
    print(json.dumps(report))
    sure = [
        cells["flips"]
        for figures in report.values()
        if isinstance(figures, dict)
        for way, cells in figures.items()
        if way.startswith("deterministic ")
    ]
    return 1 if any(sure) else 0


if __name__ == "__main__":
    sys.exit(main())
