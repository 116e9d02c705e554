"""The target writes the answers that heads are trained on, through the engine that will serve them.

Heads learn what this target says, so its own answers are the data that fits (self-distillation; Cai et al. 2024,
section 2.3.2). Prompts come in an order that the seed shuffles, so that a run which was stopped has a fair sample of
all; every prompt has its own seed, so that one which was killed goes on where it was and writes the same file.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxspec import Completion, Engine, Prompt, SamplingParams, SpeculationParams
from jaxspec.checkpoint import Checkpoint
from jaxspec.errors import InvalidRequest, UserError
from train_heads.documents import file_sha256, prompt_of, read_lines
from train_heads.progress import Progress


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """What the answers depend on; kept beside them, and compared before a run goes on."""

    target: str  # sha256 over the hashes of its tensors
    data_sha256: str
    sampling: dict[str, Any]
    greedy_share: float  # of the prompts, answered at temperature 0
    seed: int
    max_len: int

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        data: str | Path,
        sampling: SamplingParams,
        greedy_share: float,
        seed: int,
        max_len: int,
    ) -> "GenerateConfig":
        """UserError when the prompts cannot be read."""
        tensors = sorted((name, record.sha256) for name, record in checkpoint.manifest.tensors.items())
        target = hashlib.sha256(json.dumps(tensors).encode()).hexdigest()
        return cls(target, file_sha256(data), dataclasses.asdict(sampling), greedy_share, seed, max_len)

    def text(self) -> str:
        """As it is kept beside the answers."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)


def check_settings(path: Path, config: GenerateConfig) -> None:
    """UserError when ``path`` has answers that were made otherwise."""
    settings = _settings(path)
    if path.exists() and path.stat().st_size and (not settings.exists() or settings.read_text() != config.text()):
        raise UserError(f"{path}: exists and was made otherwise (see {settings.name}); move it away")


def _settings(path: Path) -> Path:
    return path.with_name(path.name + ".run.json")


class Answers:
    """The file that answers are appended to, line by line; ``done`` lines are there already."""

    def __init__(self, path: Path, config: GenerateConfig) -> None:
        check_settings(path, config)
        path.parent.mkdir(parents=True, exist_ok=True)
        _settings(path).write_text(config.text())
        self._file: BinaryIO = path.open("a+b")
        self.done = self._mend()

    def _mend(self) -> int:
        """Cuts off a last line that a kill left half-written; returns how many whole ones there are."""
        self._file.seek(0)
        count = end = 0
        for line in self._file:
            if line.endswith(b"\n"):
                count, end = count + 1, end + len(line)
        self._file.truncate(end)
        return count

    def add(self, record: dict[str, Any]) -> None:
        """One line, whole or not at all."""
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """What was written is on the disk afterwards."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


@dataclasses.dataclass(frozen=True)
class Ask:
    """One prompt as it is sent."""

    line: int  # of the prompts' file, from 0
    prompt: Prompt
    sampling: SamplingParams


def plan(engine: Engine, data: str | Path, sampling: SamplingParams, greedy_share: float, seed: int) -> list[Ask]:
    """All prompts, shuffled; each with its own seed, and greedy or not by it."""
    prompts = [prompt_of(line, engine.tokenizer) for line in read_lines(data)]
    if not prompts:
        raise UserError(f"{data}: expected at least one prompt, got none")
    rng = np.random.default_rng(seed)
    order, greedy = rng.permutation(len(prompts)), rng.random(len(prompts)) < greedy_share
    asks = []
    for line in order.tolist():
        own = dataclasses.replace(sampling, seed=_seed(seed, line))
        asks.append(Ask(line, prompts[line], dataclasses.replace(own, temperature=0.0) if greedy[line] else own))
    return asks


def _seed(seed: int, line: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{line}".encode()).digest()[:8], "big")


def answers(engine: Engine, asks: Sequence[Ask], ahead: int) -> Iterator[tuple[Ask, list[int], Completion | None]]:
    """In order; ``ahead`` requests are under way at a time. None: the prompt does not fit."""
    waiting: deque[tuple[Ask, list[int], Any]] = deque()
    rest = iter(asks)
    while True:
        while len(waiting) < ahead and (ask := next(rest, None)) is not None:
            try:
                ids = engine.encode(ask.prompt)
                waiting.append((ask, ids, engine.generate(ids, ask.sampling, SpeculationParams())))
            except InvalidRequest:
                waiting.append((ask, [], None))
        if not waiting:
            return
        ask, ids, stream = waiting.popleft()
        yield ask, ids, None if stream is None else Completion.of(stream)


def generate(engine: Engine, asks: Sequence[Ask], out: Answers, slots: int, progress: Progress) -> dict[str, int]:
    """Answers what is not answered yet; returns counts. A prompt that does not fit leaves a line that says so."""
    counts = {"prompts": len(asks), "before": out.done, "too_long": 0, "tokens": 0}
    start = time.monotonic()
    for number, (ask, ids, done) in enumerate(answers(engine, asks[out.done :], 4 * slots), out.done + 1):
        if done is None:
            counts["too_long"] += 1
            out.add({"line": ask.line, "skipped": "too long"})
        else:
            counts["tokens"] += len(done.token_ids)
            out.add(
                {
                    "line": ask.line,
                    "prompt_ids": ids,
                    "answer_ids": list(done.token_ids),
                    "answer": done.text,
                    "finish_reason": done.finish_reason,
                    "temperature": ask.sampling.temperature,
                }
            )
        seconds = time.monotonic() - start
        progress.show(
            f"{number} of {len(asks)} prompts, {counts['tokens']} tokens, {counts['tokens'] / seconds:.0f} tokens/s, "
            f"{(len(asks) - number) * seconds / (number - out.done):.0f} s left",
            last=number == len(asks),
        )
    return counts
