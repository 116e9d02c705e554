"""Heads in the serving engine, on prompts that training never saw: what they give, and whether training knew it.

The engine decodes greedily, plain chains drafted greedily, and reports how many drafts it accepted. The same texts go
through the training code, whose guesses say which drafts are right: walking over them as the engine does must accept as
many. A shift of labels, positions or hidden states between training and serving shows here at once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import jax
import numpy as np

from jaxspec import Completion, Engine, SamplingParams, SpeculationConfig
from jaxspec.shapes import NODES_MAX
from train_heads.draft import DraftObjective
from train_heads.eagle import EagleObjective
from train_heads.job import Job, place
from train_heads.medusa import MedusaObjective
from train_heads.objective import Objective, Params, guesses, look
from train_heads.packing import Document, Rows, pack

# Tokens of an answer that is decoded, at most.
ANSWER: Final = 48


class Served(NamedTuple):
    """What the engine measured. Rates are means over all tokens of all prompts."""

    tokens_per_target_pass: float  # greedy
    tokens_per_target_pass_sampled: float  # T = 1
    acceptance: tuple[float, ...]  # [i]: of greedy drafts i, how many were accepted of those that were drafted
    accepted: int  # greedy drafts, by the engine
    foreseen: int  # the same by the training code's guesses

    def as_dict(self) -> dict[str, float]:
        """For the log."""
        rates = {f"acceptance{index}": rate for index, rate in enumerate(self.acceptance)}
        values = self._asdict() | rates
        del values["acceptance"]
        return values

    @property
    def agrees(self) -> bool:
        """To 2 %, or two drafts: near-ties may fall either way."""
        return abs(self.accepted - self.foreseen) <= max(2, 0.02 * self.accepted)


def serve(job: Job, folder: Path, trained: Params, fixed: Params) -> Served | None:
    """Loads ``folder`` beside the target and decodes the prompts of held-out documents; None where none is short
    enough."""
    objective, config = job.objective, job.config
    tokens = min(ANSWER, config.batches.row // 2)
    prompts = _prompts(job, config.serve, tokens)
    if not prompts:
        return None
    depth = _depth(objective)
    is_draft = isinstance(objective, DraftObjective)
    words = objective.words
    speculation = SpeculationConfig(
        method="draft_model" if is_draft else config.kind,
        num_speculative_tokens=depth,
        tree_topk=1,
        tree_choices=",".join(["1"] * depth) if config.kind == "medusa" else None,
        draft_sample_method="greedy",
        draft_vocab_size=None if words.whole or config.kind == "eagle3" else words.size,
    )
    with Engine.load(
        config.target,
        draft=folder if is_draft else None,
        heads=None if is_draft else folder,
        speculation=speculation,
        mesh=config.mesh,
        dtype=config.dtype,
        max_slots=min(4, config.serve),
        # Near the end of a context trees have no room, and rows decode plainly.
        max_len=min(config.batches.row + NODES_MAX, job.checkpoint.config.max_position_embeddings),
        max_queue=2 * config.serve,
    ) as engine:
        greedy = _decode(engine, prompts, SamplingParams(max_tokens=tokens, temperature=0.0))
        drawn = _decode(engine, prompts, SamplingParams(max_tokens=tokens, temperature=1.0, seed=1))
    histogram = np.sum([done.summary.speculation.acceptance_histogram for done in greedy], axis=0)[: depth + 1]
    reached = np.cumsum(histogram[::-1])[::-1]  # [i]: steps that accepted at least i drafts
    guess, foreseen = _make_guesses(job), 0
    for prompt, done in zip(prompts, greedy, strict=True):
        ids_T = np.array([*prompt, *done.token_ids], np.int32)
        rows = pack([Document(ids_T, np.arange(len(ids_T)) >= len(prompt))], config.batches.row)
        guessed_KBT = guess(trained, fixed, job.target, place(job, rows, False))
        first = 1 if is_draft else 2
        foreseen += walk(np.asarray(guessed_KBT)[:, 0], ids_T, len(prompt), first, depth, tokens)
    return Served(
        _per_pass(greedy),
        _per_pass(drawn),
        tuple((reached[1:] / np.maximum(reached[:-1], 1)).tolist()),
        sum(done.summary.speculation.num_accepted_draft_tokens for done in greedy),
        foreseen,
    )


def _depth(objective: Objective) -> int:
    """Levels whose guesses training knows: a deeper one would rest on drafts that it never made."""
    if isinstance(objective, MedusaObjective):
        return min(4, objective.config.num_heads)
    if isinstance(objective, EagleObjective):
        return 1
    return 4 if isinstance(objective, DraftObjective) else min(4, objective.steps)  # pyright: ignore[reportAttributeAccessIssue]


def _prompts(job: Job, count: int, tokens: int) -> list[list[int]]:
    """What comes before the first answer of held-out documents, where an answer of ``tokens`` has room."""
    found = []
    for number in job.held_out_documents:
        document = job.corpus[number]
        start = int(np.argmax(document.answer_T))
        if 0 < start <= job.config.batches.row - tokens:
            found.append(document.ids_T[:start].tolist())
        if len(found) == count:
            break
    return found


def _decode(engine: Engine, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[Completion]:
    streams = [engine.generate(prompt, sampling) for prompt in prompts]
    return [Completion.of(stream) for stream in streams]


def _per_pass(done: Sequence[Completion]) -> float:
    passes = sum(
        (len(each.token_ids) - 1) / each.summary.speculation.tokens_per_target_pass
        for each in done
        if len(each.token_ids) > 1
    )
    return sum(len(each.token_ids) - 1 for each in done) / passes if passes else 0.0


def walk(guessed_KT: np.ndarray, ids_T: np.ndarray, prompt: int, first: int, depth: int, limit: int) -> int:
    """How many drafts the engine accepts of a text if it drafts what the training code guesses.

    ``guessed_KT``: by level and token; ``first``: the place of the first level (2 for heads, which have seen the token
    before the pending one; 1 for a draft, whose deeper drafts are its first level, further on). ``limit``: tokens that
    the engine was asked for. It drafts one less than are left, for a step says one by itself.
    """
    at, accepted = prompt, 0  # ``at``: the pending token, said but not yet passed through the target
    while at < len(ids_T) - 1:
        right, most = 0, min(depth, prompt + limit - at - 2)
        while right < most and at + 1 + right < len(ids_T):
            level, row = (0, at + right) if first == 1 else (right, at - 1)
            if guessed_KT[level, row] != ids_T[at + 1 + right]:
                break
            right += 1
        accepted += right
        at += right + 1
    return accepted


def _make_guesses(job: Job) -> Callable[[Params, Params, Params, Rows], jax.Array]:
    objective = job.objective

    def run(trained: Params, fixed: Params, target: Params, rows: Rows) -> jax.Array:
        features = look(objective.target, target, rows, objective.taps)
        return guesses(objective.levels(trained, fixed, target, rows, features, None), objective.words)

    return jax.jit(run)
