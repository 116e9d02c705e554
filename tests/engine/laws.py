"""Sampled text against the exact law: every token becomes a number that is uniform if, and only if, the law is right.

For a token x that follows a prefix, u = (mass of the ids ranked before x) + v p(x), with v uniform, is uniform on
[0, 1) and independent of all before it, whatever the ranking, as long as the ranking knows the prefix alone (the
Rosenblatt transform). Ranking ids by how much the draft favours them puts everything that a wrong acceptance law does
into the first or the last cells. The prefix is whatever the engine made of it: so thousands of tokens at every
position of a round are tested against float64 laws, not only the first of a fixed prompt.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jaxspec import Chunk, SamplingParams
from tests.engine.conftest import LOOKUP_MAX, LOOKUP_MIN, Job, Rig
from tests.engine.reference import Reference
from tests.speculate.oracle import assert_follows, sorted_law

CELLS = 16


def law(logits_V: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """The final law that ``sampling`` asks for, float64, by sorting."""
    return sorted_law(logits_V, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def follow_lookup(tokens: Sequence[int], shortest: int, longest: int) -> int | None:
    """The token that followed the latest of the longest earlier occurrences of the last tokens, the plain way."""
    tokens = list(tokens)
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                return tokens[end]
    return None


class Ranks:
    """Uniform numbers by position in the round: "plain" tokens, and offsets 0 .. gamma of speculative rounds."""

    def __init__(self, rig: Rig, jobs: Sequence[Job], streams: Sequence[Sequence[Chunk]]) -> None:
        self.by_offset: dict[str | int, list[float]] = defaultdict(list)
        self.score = self.variance = 0.0
        self._rng = np.random.default_rng(29)
        texts = [
            [*job.prompt, *(token for chunk in chunks for token in chunk.token_ids)]
            for job, chunks in zip(jobs, streams, strict=True)
        ]
        logits = batched(rig.reference, texts)
        drafts = None if rig.draft is None else batched(rig.draft, texts)
        for index, (job, chunks, text) in enumerate(zip(jobs, streams, texts, strict=True)):
            n = len(job.prompt)
            for chunk in chunks:
                for offset, token in enumerate(chunk.token_ids):
                    p_V = law(logits[index][n - 1], job.sampling)
                    if drafts is not None:
                        favour_V = np.log(law(drafts[index][n - 1], job.sampling) + 1e-12) - np.log(p_V + 1e-12)
                    else:
                        # A copied draft is the continuation of the round's prefix; the prefix decides it.
                        found = follow_lookup(text[:n], LOOKUP_MIN, LOOKUP_MAX)
                        favour_V = p_V + (np.arange(p_V.size) == found)
                    self._add("plain" if chunk.origins[0] == "plain" else offset, p_V, favour_V, token)
                    n += 1

    def _add(self, offset: str | int, p_V: np.ndarray, favour_V: np.ndarray, token: int) -> None:
        assert p_V[token] > 0, f"offset {offset}: token {token} has chance zero"
        order_V = np.lexsort((np.arange(p_V.size), p_V, np.round(favour_V, 6)))  # where p = q, by p
        upto_V = np.cumsum(p_V[order_V])
        place = int(np.flatnonzero(order_V == token)[0])
        self.by_offset[offset].append(upto_V[place] - self._rng.random() * p_V[token])
        logs_V = np.log(p_V, where=p_V > 0, out=np.zeros_like(p_V))
        mean = (p_V * logs_V).sum()
        self.score += logs_V[token] - mean
        self.variance += (p_V * logs_V**2).sum() - mean**2

    @property
    def sizes(self) -> dict[str | int, int]:
        return {offset: len(ranks) for offset, ranks in self.by_offset.items()}

    def counts(self, offset: str | int) -> np.ndarray:
        """Tokens per equally likely cell; fewer cells where there are few tokens. "all": of every offset.

        That the block law reaches an offset says something of the tokens before it: there only "all" is uniform.
        """
        found = itertools.chain(*self.by_offset.values()) if offset == "all" else self.by_offset[offset]
        ranks = np.array(list(found))
        cells = max(2, min(CELLS, ranks.size // 15))
        return np.bincount(np.minimum((ranks * cells).astype(int), cells - 1), minlength=cells)

    def assert_uniform(self, offset: str | int, at_least: int) -> None:
        """Chi-square at the oracle's false-alarm rate, given enough tokens for power."""
        counts = self.counts(offset)
        assert counts.sum() >= at_least, f"offset {offset}: {counts.sum()} tokens only"
        try:
            assert_follows(counts, np.full(counts.size, 1 / counts.size))
        except AssertionError as error:
            raise AssertionError(f"offset {offset}: {error}; tokens per cell {counts.tolist()}") from None

    @property
    def z(self) -> float:
        """Standard score of the summed log-probabilities: far below 0 where text is garbled."""
        return self.score / np.sqrt(self.variance)


def batched(reference: Reference, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Reference logits of every text, [T, V] each, padded into batches of similar length."""
    logits: dict[int, np.ndarray] = {}
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for start in range(0, len(order), 16):
        group = order[start : start + 16]
        width = len(texts[group[-1]])
        padded = [[*texts[index], *[0] * (width - len(texts[index]))] for index in group]
        logits |= dict(zip(group, reference.logits(padded), strict=True))
    return [logits[index] for index in range(len(texts))]
