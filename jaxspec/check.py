"""``jaxspec check-lossless`` from end to end: engines, texts, tests, verdict. The statistics are in ``lossless``."""

import dataclasses
import math
from collections.abc import Callable
from typing import Final

import numpy as np

from jaxspec.checkpoint import open_checkpoint
from jaxspec.engine.engine import Engine
from jaxspec.engine.params import SamplingParams, SpeculationConfig
from jaxspec.lossless import Report, coupled_identity, greedy_identity, position, ranks, smallest_holm, texts
from jaxspec.score import Scorer
from jaxspec.shapes import NODES_MAX
from jaxspec.text import Tokenizer

MADE_PROMPTS: Final = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "Once upon a time, in a village by the sea,",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "Question: What is the capital of France?\nAnswer:",
)
_GREEDY_TOKENS: Final = 64
_SLOTS: Final = 8
_BAR: Final = 40


@dataclasses.dataclass(frozen=True)
class Task:
    """What to test; the fields are the flags of the command."""

    target: str
    speculation: SpeculationConfig
    mesh: str
    dtype: str | None
    deterministic: bool
    compilation_cache: str | None
    max_len: int | None
    samples: int
    tokens: int
    temperature: float
    top_p: float
    false_alarm: float
    prompts: tuple[str, ...]


def run(task: Task, say: Callable[[str], None]) -> Report:
    """Loads what is needed, one engine after the other, and tests. Raises UserError as Engine.load does."""
    prompts = prompt_ids(task)
    longest = max(map(len, prompts)) + max(task.tokens, _GREEDY_TOKENS) + 1
    sampling = SamplingParams(max_tokens=task.tokens, temperature=task.temperature, top_p=task.top_p, ignore_eos=True)
    greedy = dataclasses.replace(sampling, temperature=0.0, top_p=1.0, max_tokens=_GREEDY_TOKENS)
    asked = [prompts[i % len(prompts)] for i in range(task.samples)]
    seeds = list(range(task.samples))

    with load(task, task.speculation, longest) as engine:
        programs = engine.programs
        scorer = Scorer(programs.decoder.target, programs.params.target, longest=longest, chunk=64, with_logits=True)
        say(f"greedy: {len(prompts)} texts with speculation and without")
        plain, drafted = (
            [text for text, _ in texts(engine, prompts, greedy, seeds[: len(prompts)], gamma)] for gamma in (0, None)
        )
        same_greedy = greedy_identity(scorer, prompts, plain, drafted)
        say(f"sampling {task.samples} texts of {task.tokens} tokens")
        made = list(texts(engine, asked, sampling, seeds, None))
        say("testing every position against the target's own law")
        rng = np.random.default_rng(1)
        us = [ranks(scorer, prompt, text, sampling, rng) for prompt, (text, _) in zip(asked, made, strict=True)]
    positions = tuple(position([u[i] for u in us if len(u) > i]) for i in range(task.tokens))

    say("coupled: sampled texts with speculation and without, token for token")
    coupled_config = dataclasses.replace(task.speculation, rejection_sample_method="coupled")
    few = min(task.samples, 100)
    with load(task, coupled_config, longest) as engine:
        plain, drafted = (
            [text for text, _ in texts(engine, asked[:few], sampling, seeds[:few], gamma)] for gamma in (0, None)
        )
    same_coupled = coupled_identity(scorer, asked[:few], plain, drafted, sampling, seeds[:few])
    if task.deterministic:
        same_greedy, same_coupled = same_greedy.strict(), same_coupled.strict()
    return Report(
        positions,
        smallest_holm([place.p_value for place in positions]),
        task.false_alarm,
        same_greedy,
        same_coupled,
        float(np.mean([length for _, length in made])),
    )


def load(task: Task, speculation: SpeculationConfig, longest: int) -> Engine:
    """An engine of a few slots."""
    limit = open_checkpoint(task.target).config.max_position_embeddings
    slots = max(NODES_MAX, speculation.slots_per_step)
    return Engine.load(
        task.target,
        draft=speculation.model if speculation.takes_draft else None,
        heads=speculation.heads_folder if speculation.takes_heads else None,
        speculation=speculation,
        mesh=task.mesh,
        dtype=task.dtype,
        max_slots=_SLOTS,
        # Room for all nodes of a tree, so that the last tokens are speculated, too.
        max_len=task.max_len if task.max_len is not None else min(limit, max(128, longest + slots)),
        max_queue=1 << 16,
        deterministic=task.deterministic,
        compilation_cache=task.compilation_cache,
    )


def prompt_ids(task: Task) -> list[list[int]]:
    """The prompts as token ids; random ids for a checkpoint without a tokenizer."""
    checkpoint = open_checkpoint(task.target)
    if checkpoint.tokenizer_dir is None:
        rng = np.random.default_rng(0)
        return rng.integers(0, checkpoint.config.vocab_size, size=(len(MADE_PROMPTS), 13)).tolist()
    tokenizer = Tokenizer.load(checkpoint.tokenizer_dir)
    given = task.prompts or MADE_PROMPTS
    return [tokenizer.encode(text, add_bos=tokenizer.adds_bos) for text in given]


def show(report: Report) -> str:
    """The verdict in words, with a bar of -log10(p) per position; the line is where the alarm would be."""
    alarm = -math.log10(report.false_alarm / len(report.positions))
    scale = _BAR / max(2 * alarm, 1)
    lines = [
        f"{'position':>8} {'tokens':>7} {'p-value':>9} {'KS':>9}  -log10 p (alarm at |)",
    ]
    for index, place in enumerate(report.positions):
        height = -math.log10(max(place.p_value, 1e-300))
        bar = ["#" if column < height * scale else " " for column in range(_BAR)]
        bar[min(_BAR - 1, round(alarm * scale))] = "|"
        lines.append(
            f"{index:>8} {place.tokens:>7} {place.p_value:>9.3g} {place.ks_p_value:>9.3g}  {''.join(bar).rstrip()}"
        )
    lines.append(
        f"smallest p-value, corrected for {len(report.positions)} positions: {report.smallest_corrected_p:.3g} "
        f"(alarm below {report.false_alarm:g})"
    )
    for name, found in (("greedy", report.greedy), ("coupled", report.coupled)):
        if found is not None:
            lines.append(
                f"{name}: {found.texts} texts, {found.tokens} tokens, {found.differences} texts differ from plain "
                f"decoding, {found.flips} part at a near-tie"
            )
    lines.append(f"mean acceptance length {report.mean_acceptance_length:.2f}")
    lines.append("LOSSLESS" if report.lossless else "NOT LOSSLESS")
    return "\n".join(lines)
