"""Does this engine, on this checkpoint, say what the target alone would say? The statistics behind ``check-lossless``.

Every sampled token x that follows a prefix gives a number u = (chance of the ids ranked before x) + v p(x), with v
uniform: it is uniform on [0, 1) and independent of all before it if, and only if, x came from p (Rosenblatt 1952). p is
the target's final law after the prefix, from its own plain pass, in float64. So thousands of texts are tested at every
position, whatever they say, by one chi-square per position, corrected for their number (Holm 1979).

A Kolmogorov-Smirnov test of the same numbers is only reported. On token ids, as it is often done, it would assume an
order that ids do not have.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxspec.engine.engine import Engine
from jaxspec.engine.params import SamplingParams, SpeculationParams
from jaxspec.engine.records import Chunk
from jaxspec.engine.request import seed_words
from jaxspec.score import Scorer
from jaxspec.speculate.noise import gumbel

CELLS: Final = 16
NEAR_TIE: Final = 1e-3  # of the two largest logits, or log p + g: rounding may choose either (float32)
EDGE: Final = 1e-5  # of top-p: rounding may let a token in or not
_IN_FLIGHT: Final = 64


@dataclasses.dataclass(frozen=True)
class Position:
    """The test of one position after the prompt."""

    tokens: int
    p_value: float  # chi-square of the ranks over equal cells
    ks_p_value: float  # reported alone


@dataclasses.dataclass(frozen=True)
class Identity:
    """Two ways to the same text, token for token."""

    texts: int
    tokens: int
    flips: int  # texts that part where the plain run's first two candidates nearly tie
    differences: int  # texts that part elsewhere

    def strict(self) -> "Identity":
        """Near-ties excuse nothing: for an engine that promises the same text to the last bit."""
        return dataclasses.replace(self, flips=0, differences=self.flips + self.differences)


@dataclasses.dataclass(frozen=True)
class Report:
    """``lossless`` is the verdict: no corrected p-value below ``false_alarm``, and no text that parts without a tie."""

    positions: tuple[Position, ...]
    smallest_corrected_p: float
    false_alarm: float
    greedy: Identity
    coupled: Identity | None
    mean_acceptance_length: float

    @property
    def lossless(self) -> bool:
        parted = self.greedy.differences + (self.coupled.differences if self.coupled else 0)
        return self.smallest_corrected_p >= self.false_alarm and parted == 0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"lossless": self.lossless, **dataclasses.asdict(self)}


def final_law(logits_V: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """The law that ``sampling`` asks for, float64, the plain way: temperature, top-k, top-p (ties kept), min-p."""
    logits_V = logits_V.astype(np.float64)
    p_V = np.exp((logits_V - logits_V.max()) / sampling.temperature)
    p_V /= p_V.sum()
    if 0 < sampling.top_k < p_V.size:
        p_V = np.where(p_V >= np.partition(p_V, -sampling.top_k)[-sampling.top_k], p_V, 0)
        p_V /= p_V.sum()
    if sampling.top_p < 1:
        falling = np.sort(p_V)[::-1]
        before = np.cumsum(falling) - falling
        p_V = np.where(p_V >= falling[before < sampling.top_p][-1], p_V, 0)
        p_V /= p_V.sum()
    p_V = np.where(p_V >= sampling.min_p * p_V.max(), p_V, 0)
    return p_V / p_V.sum()


def texts(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int], gamma: int | None
) -> Iterator[tuple[list[int], float]]:
    """One text per prompt and seed, and its mean acceptance length; many requests at a time."""
    asked = list(zip(prompts, seeds, strict=True))
    for start in range(0, len(asked), _IN_FLIGHT):
        streams = [
            engine.generate(list(prompt), dataclasses.replace(sampling, seed=seed), SpeculationParams(gamma))
            for prompt, seed in asked[start : start + _IN_FLIGHT]
        ]
        for stream in streams:
            chunks: list[Chunk] = list(stream)
            summary = chunks[-1].summary
            length = 1.0 if summary is None else summary.speculation.mean_acceptance_length
            yield [token for chunk in chunks for token in chunk.token_ids], length


def ranks(
    scorer: Scorer, prompt: Sequence[int], text: Sequence[int], sampling: SamplingParams, rng: np.random.Generator
) -> list[float]:
    """u of every token of a text."""
    found = []
    for place, logits_V in enumerate(_logits(scorer, prompt, text)):
        p_V = final_law(logits_V, sampling)
        token = text[place]
        # Ranked by chance: what a wrong law prefers or shuns then fills the first or the last cells.
        before = p_V[(p_V < p_V[token]) | ((p_V == p_V[token]) & (np.arange(p_V.size) < token))].sum()
        # A token that p cannot say has no place in the order: u = 1 or more lands in the last cell.
        found.append(float(before + rng.random() * p_V[token]) if p_V[token] > 0 else 1.0)
    return found


def position(us: Sequence[float]) -> Position:
    """The tests of one position."""
    us_ = np.asarray(us)
    cells = max(2, min(CELLS, us_.size // 20))
    counts = np.bincount(np.minimum((us_ * cells).astype(int), cells - 1), minlength=cells)
    return Position(us_.size, float(stats.chisquare(counts).pvalue), float(stats.kstest(us_, "uniform").pvalue))


def smallest_holm(p_values: Sequence[float]) -> float:
    """The smallest p-value, corrected for how many there are."""
    return min(1.0, min(p_values) * len(p_values))


def greedy_identity(
    scorer: Scorer, prompts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
) -> Identity:
    """Compares greedy texts with those of plain decoding. A flip: the two largest logits nearly tie where they part."""

    def ties(index: int, logits_V: np.ndarray, place: int) -> bool:
        return _gap(logits_V) < NEAR_TIE

    return _identity(scorer, prompts, plain, other, ties)


def coupled_identity(
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    sampling: SamplingParams,
    seeds: Sequence[int],
) -> Identity:
    """The same for texts sampled under the coupled law, whose choice is argmax(log p + g) with the noise of the seed.

    A flip: the two best nearly tie, or a token that lies at the edge of the top-p set would change the choice.
    """

    def ties(index: int, logits_V: np.ndarray, place: int) -> bool:
        position = np.full((1, 1), len(prompts[index]) + place, np.int32)
        seed = np.array([seed_words(seeds[index])], np.uint32)
        ids = np.arange(logits_V.size, dtype=np.int32)[None, None, :]
        noise_V = np.asarray(gumbel(jnp.asarray(seed), jnp.asarray(position), jnp.asarray(ids)))[0, 0]
        choices = set()
        for top_p in (sampling.top_p - EDGE, sampling.top_p, min(1.0, sampling.top_p + EDGE)):
            law_V = final_law(logits_V, dataclasses.replace(sampling, top_p=top_p))
            score_V = np.log(law_V, where=law_V > 0, out=np.full(law_V.size, -np.inf)) + noise_V
            choices.add(int(np.argmax(score_V)))
            if _gap(score_V) < NEAR_TIE:
                return True
        return len(choices) > 1

    return _identity(scorer, prompts, plain, other, ties)


def _identity(
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    ties: Callable[[int, np.ndarray, int], bool],
) -> Identity:
    flips = differences = 0
    for index, (prompt, one, two) in enumerate(zip(prompts, plain, other, strict=True)):
        if list(one) == list(two):
            continue
        place = next(i for i, pair in enumerate(zip([*one, None], [*two, None], strict=False)) if pair[0] != pair[1])
        if place < len(one) and ties(index, list(_logits(scorer, prompt, one[: place + 1]))[-1], place):
            flips += 1
        else:
            differences += 1
    return Identity(len(plain), sum(map(len, plain)), flips, differences)


def _gap(scores_V: np.ndarray) -> float:
    """Between the two largest."""
    second, best = np.partition(scores_V, -2)[-2:]
    return float(best - second)


def _logits(scorer: Scorer, prompt: Sequence[int], text: Sequence[int]) -> Iterator[np.ndarray]:
    """float32 [V] before each token of the text."""
    whole = [part.logits_TV for part in scorer.parts([*prompt, *text[:-1]]) if part.logits_TV is not None]
    yield from np.concatenate(whole)[len(prompt) - 1 :]
