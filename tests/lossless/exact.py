"""Sampled texts against the exact law of every token in them, computed in float64 by the NumPy reference.

u = (chance of the ids ranked before x) + v p(x), v uniform, is uniform on [0, 1) and independent of all before it if,
and only if, x is a draw from p, whatever the ranking, as long as it knows the prefix alone (Rosenblatt 1952). Ranked is
by how much the drafter favours an id, so what a wrong acceptance law prefers or shuns lies in the first or the last
cells: a chi-square asks whether the numbers are uniform. Ranked by id they are what inverts the law's cumulative sum,
as the engine does: another chi-square asks whether pairs of neighbours are uniform. Random numbers that are used twice
show there alone.
"""

from collections.abc import Sequence

import numpy as np

from jaxspec import Chunk
from tests.engine.conftest import Job
from tests.engine.laws import law
from tests.lossless.cases import SmallRig
from tests.speculate.oracle import assert_follows

CELLS, PAIRED = 6, 4


class Exact:
    """Of some texts: u of every token, text after text, and how probable the texts are."""

    def __init__(self, rig: SmallRig, jobs: Sequence[Job], streams: Sequence[Sequence[Chunk]]) -> None:
        rng = np.random.default_rng(29)
        texts = [[token for chunk in chunks for token in chunk.token_ids] for chunks in streams]
        width = max(len(job.prompt) + len(text) for job, text in zip(jobs, texts, strict=True))
        padded = [([*job.prompt, *text] + [0] * width)[:width] for job, text in zip(jobs, texts, strict=True)]
        logits_BTV = rig.reference.logits(padded)
        self.texts: list[list[float]] = []
        self.pairs: list[tuple[float, float]] = []  # of neighbours that follow each other, ranked by id
        self.later: list[float] = []  # of tokens that follow an accepted draft
        self.first: list[float] = []  # of tokens that begin a round
        score = variance = 0.0
        for logits_TV, tokens_T, job, chunks in zip(logits_BTV, padded, jobs, streams, strict=True):
            place, us, by_id = len(job.prompt) - 1, [], []
            for chunk in chunks:
                for offset, token in enumerate(chunk.token_ids):
                    p_V = law(logits_TV[place], job.sampling)
                    assert p_V[token] > 0, f"token {token} has chance zero after {place + 1}"
                    order_V = np.lexsort((p_V, np.round(rig.favour(tokens_T[: place + 1], p_V), 6)))
                    below = p_V[order_V[: int(np.flatnonzero(order_V == token)[0])]].sum()
                    own = rng.random() * p_V[token]
                    us.append(float(below + own))
                    by_id.append(float(p_V[:token].sum() + own))
                    (self.later if offset else self.first).append(us[-1])
                    logs_V = np.log(p_V, where=p_V > 0, out=np.zeros_like(p_V))
                    score += logs_V[token] - p_V @ logs_V
                    variance += p_V @ logs_V**2 - (p_V @ logs_V) ** 2
                    place += 1
            self.texts.append(us)
            self.pairs += zip(by_id[::2], by_id[1::2], strict=False)
        self.tokens = sum(map(len, self.texts))
        # Standard score of the summed log-probabilities: far below 0 where text is garbled.
        self.z = score / np.sqrt(max(variance, 1e-9))

    def assert_uniform(self) -> None:
        """Two chi-squares, each at the oracle's false-alarm rate."""
        assert_uniform(np.concatenate(self.texts))
        cells = np.minimum((np.array(self.pairs) * PAIRED).astype(int), PAIRED - 1)
        assert_follows(np.bincount(cells @ [PAIRED, 1], minlength=PAIRED**2), np.full(PAIRED**2, PAIRED**-2))

    def assert_uniform_by_offset(self) -> None:
        """A14: what begins a round and what comes after an accepted draft, each for itself.

        For laws alone under which reaching an offset says nothing of the token there: not the block law.
        """
        assert_uniform(self.first)
        assert_uniform(self.later)


def assert_uniform(us: Sequence[float] | np.ndarray) -> None:
    """A chi-square over few cells: what drafts bias goes one way along the ranking, and fewer cells see it sooner."""
    cells = max(2, min(CELLS, len(us) // 20))
    assert len(us) >= 40
    counts = np.bincount(np.minimum((np.asarray(us) * cells).astype(int), cells - 1), minlength=cells)
    assert_follows(counts, np.full(cells, 1 / cells))
