"""``make demo``: serves the demo model, streams three prompts with and without speculation, and compares the texts.

Drafted tokens are coloured on a terminal. The last line is one JSON object; the exit status is 0 only if every
speculative text is the plain one (a near-tie of the plain run excepted and counted) and the server stopped cleanly.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from demo_prompts import DemoPrompt, demo_prompts
from demo_server import Server, ServerFailed
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from shipped import TREE, shipped_heads

from jaxspec import Chunk, SamplingParams, SpeculationParams
from jaxspec.engine.records import Completion
from serve.client import CallFailed, Client

ROOT = Path(__file__).resolve().parent.parent
STYLES = {"draft": "bold green", "correction": "yellow", "bonus": "cyan", "plain": ""}
PLAIN = SpeculationParams(num_speculative_tokens=0)
# Passes of different widths round differently, bfloat16 logits by up to 0.067 (docs/decisions/deterministic.md), so
# an argmax can flip where two logits nearly tie.
NEAR_TIE = 0.13


def drafting(model: Path) -> list[str]:
    """Flags of the server: copies where the text repeats itself, else the shipped head, for a model that has one.

    In bfloat16 a pass over eight tokens costs hardly more than one over a single token, on CPUs as elsewhere.
    """
    heads = shipped_heads(model).get("eagle3")
    tree = [part for name, value in TREE.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return ["--dtype", "bfloat16"] + ([] if heads is None else ["--method", "hybrid", "--heads", str(heads), *tree])


class Steps:
    """Progress of one long part: a bar on a terminal, a line per tenth elsewhere."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self.console, self.title, self.total = console, title, total
        self.tenths = 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task(title, total=total)

    def __enter__(self) -> "Steps":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def at(self, done: int, total: int | None = None) -> None:
        """``done`` of ``total`` steps are behind us."""
        self.total = total or self.total
        self.bar.update(self.task, completed=done, total=self.total)
        tenths = 10 * done // self.total
        if not self.console.is_terminal and tenths > self.tenths:
            self.console.print(f"{self.title}: {done} of {self.total}")
        self.tenths = max(self.tenths, tenths)


def show(console: Console, chunks: Iterable[Chunk]) -> Completion:
    """Prints a stream as it comes, each token in the colour of its origin."""
    parts = []
    for chunk in chunks:
        parts.append(chunk)
        start = 0
        for end, origin in zip(chunk.text_ends, chunk.origins, strict=True):
            console.print(Text(chunk.text[start:end], STYLES[origin]), end="", soft_wrap=True)
            start = end
        console.print(Text(chunk.text[start:]), end="", soft_wrap=True)
        console.file.flush()
    console.print()
    return Completion.of(parts)


def count(console: Console, chunks: Iterable[Chunk], title: str, total: int) -> Completion:
    """Takes in a stream behind a progress bar."""
    parts = []
    tokens = 0
    with Steps(console, title, total) as steps:
        for chunk in chunks:
            parts.append(chunk)
            tokens += len(chunk.token_ids)
            steps.at(tokens)
    return Completion.of(parts)


def is_near_tie(client: Client, demo: DemoPrompt, plain: Completion, speculative: Completion) -> bool:
    """Whether the plain run's two best tokens nearly tie where the texts part. Plain text is asked for once more."""
    pairs = enumerate(zip(plain.token_ids, speculative.token_ids, strict=False))
    place = next((index for index, (a, b) in pairs if a != b), None)
    if place is None:
        return False
    again = Completion.of(client.generate(demo.prompt, sampling(demo, max_tokens=place + 1, logprobs=2), PLAIN))
    if again.logprobs is None or len(again.logprobs) <= place:
        return False
    (first, best), (second, other) = again.logprobs[place].top
    return {first, second} == {plain.token_ids[place], speculative.token_ids[place]} and best - other < NEAR_TIE


def sampling(demo: DemoPrompt, max_tokens: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=demo.stop, logprobs=logprobs)


def run_prompt(console: Console, client: Client, demo: DemoPrompt) -> dict[str, object]:
    """One prompt, speculative and plain: its entry in the last line."""
    console.rule(demo.name)
    console.print(Text(demo.shown, "dim"))
    greedy = sampling(demo, demo.max_tokens)
    speculative = show(console, client.generate(demo.prompt, greedy, SpeculationParams()))
    title = f"{demo.name}: the same without speculation"
    plain = count(console, client.generate(demo.prompt, greedy, PLAIN), title, demo.max_tokens)
    equal = speculative.token_ids == plain.token_ids and speculative.text == plain.text
    spec = speculative.summary.speculation
    entry = {
        "name": demo.name,
        "text_equal_to_plain": equal,
        "near_ties": int(not equal and is_near_tie(client, demo, plain, speculative)),
        "plain_tokens_per_s": rounded(plain.summary.timing.tokens_per_s),
        "spec_tokens_per_s": rounded(speculative.summary.timing.tokens_per_s),
        "mean_acceptance_length": rounded(spec.mean_acceptance_length),
    }
    console.print(
        f"{len(speculative.token_ids)} tokens, {spec.num_accepted_draft_tokens} of them accepted drafts; "
        f"{entry['spec_tokens_per_s']} tokens/s against {entry['plain_tokens_per_s']} plain",
        highlight=False,
    )
    return entry


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def mesh_size(text: str) -> str:
    """The --mesh argument: refuses anything but auto and a positive number."""
    if text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected auto or a number of virtual CPU devices, got {text!r}")
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", type=mesh_size, default="auto", help="auto, or a number of virtual CPU devices")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m")
    arguments = parser.parse_args(argv)
    # A pipe that is not a terminal gets whole lines, however long.
    console = Console(width=None if sys.stdout.isatty() else 120)
    began = time.monotonic()
    ok = False
    try:
        with Server(arguments.model, arguments.mesh, ROOT / ".cache", drafting(arguments.model)) as server:
            with Steps(console, "server: compiling", total=1) as steps:
                port = server.wait_until_ready(steps.at)
            console.print(f"ready after {time.monotonic() - began:.0f} s on port {port}", highlight=False)
            console.print("drafted and accepted", style=STYLES["draft"], end=" · ")
            console.print("correction", style=STYLES["correction"], end=" · ")
            console.print("bonus", style=STYLES["bonus"])
            with Client(f"127.0.0.1:{port}") as client:
                mesh = dict(sorted(client.server_info().mesh.items()))
                entries = [run_prompt(console, client, demo) for demo in demo_prompts()]
        ok = all(entry["text_equal_to_plain"] or entry["near_ties"] for entry in entries)
        console.print("server stopped cleanly")
    except (ServerFailed, CallFailed) as problem:
        print(problem, file=sys.stderr)
        return 1
    print(json.dumps({"demo": "ok" if ok else "failed", "mesh": mesh, "prompts": entries}), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    # A reader who has seen enough (make demo | head) is no fault.
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
