"""Lookahead decoding the plain way: lists, one causal pass per column, float64. The engine is followed step by step."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxspec.engine.batch import Batch
from jaxspec.engine.request import Request
from jaxspec.speculate.drafters.lookahead import POOL, LookaheadDrafter, LookaheadState
from tests.engine.conftest import Rig
from tests.engine.laws import batched
from tests.engine.reference import NEAR_TIE, Reference

Gram = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Moment:
    """One row before a step."""

    tokens: list[int]  # committed
    gamma: int  # what the next step will be asked for
    window: list[list[int]]
    passes: int
    pool: list[Gram]


def moment(state: LookaheadState, row: int, tokens: Sequence[int], gamma: int) -> Moment:
    pool = [tuple(gram) for gram in np.asarray(state.pool_BPN)[row].tolist() if gram[0] >= 0]
    return Moment(list(tokens), gamma, np.asarray(state.window_BLW)[row].tolist(), int(state.passes_B[row]), pool)


class Diary:
    """Called before each step: the moments of every request. ``gammas``: each lone request's gamma, step by step."""

    def __init__(self, gammas: Sequence[int] | None = None) -> None:
        self.moments: dict[str, list[Moment]] = {}
        self._gammas = None if gammas is None else list(gammas)

    def __call__(self, batch: Batch, running: dict[int, Request]) -> None:
        state = batch._state
        assert state is not None
        for slot, request in running.items():
            row = 0 if batch._lone is not None else slot
            asked = min(request.next_gamma(), request.ready)
            note = moment(state.drafter, row, request.token_ids, asked)
            self.moments.setdefault(request.request_id, []).append(note)
            if self._gammas:
                request.gamma = self._gammas.pop(0)  # of the next step: this one's is fixed


@dataclasses.dataclass
class Jacobi:
    """What a step must make of a moment. ``ties``: choices that were left to the engine, for rounding decides them."""

    reference: Reference
    drafter: LookaheadDrafter
    slots: int
    valid_vocab: int
    ties: int = 0

    def fed(self, now: Moment) -> bool:
        """Whether the step has a window: something was asked for, and every node has a slot."""
        nodes = self.drafter.drafts(self.drafter.levels) + self.drafter.window(self.drafter.levels)
        return now.gamma > 0 and len(now.tokens) - 1 + nodes < self.slots

    def runs(self, now: Moment) -> list[Gram]:
        """What is drafted: runs after the last token, from the pool and from the text, newest first, in turn."""
        size, count, last = self.drafter.size, self.drafter.candidates, now.tokens[-1]
        pooled = [gram[1:] for gram in now.pool if gram[0] == last][:count]
        ends = [end for end in range(len(now.tokens) - size, -1, -1) if now.tokens[end] == last]
        copied = [tuple(now.tokens[end + 1 : end + size]) for end in ends][:count]
        in_turn = [runs[i] for i in range(count) for runs in (pooled, copied) if i < len(runs)]
        return list(dict.fromkeys(in_turn))[:count]

    def drafts(self, now: Moment) -> set[Gram]:
        """The nodes of the tree, by their paths."""
        if not self.fed(now):
            return set()
        return {run[: d + 1] for run in self.runs(now) for d in range(min(now.gamma, self.drafter.levels))}

    def first_window(self, tokens: Sequence[int]) -> list[list[int]]:
        levels, columns = self.drafter.levels, self.drafter.columns
        places = [(place * 2654435761 % 2**32) // 256 % len(tokens) for place in range(levels * columns)]
        return np.array([tokens[place] for place in places]).reshape(levels, columns).tolist()

    def guess(self, moments: Sequence[Moment]) -> list[list[int] | None]:
        """The new top level of the steps between these moments, None where there is none."""
        texts: list[list[int]] = []
        for now in moments[:-1]:
            if self.fed(now):
                window = self.window(now)
                for column in range(self.drafter.columns):
                    above = [level[column] for level in window[1:]]
                    texts.append([*now.tokens, *window[0][1 : column + 1], *above])
        # After padding, a text's last place is not the last one.
        said = (logits_TV[len(text) - 1] for text, logits_TV in zip(texts, batched(self.reference, texts), strict=True))
        return [self._choices(later, said) if self.fed(now) else None for now, later in itertools.pairwise(moments)]

    def _choices(self, later: Moment, said: Iterator[np.ndarray]) -> list[int]:
        new = []
        for theirs in later.window[-1]:
            said_V = next(said)[: self.valid_vocab]
            second, best = np.sort(said_V)[-2:]
            is_tie = best - second < NEAR_TIE
            self.ties += int(is_tie)
            new.append(theirs if is_tie else int(np.argmax(said_V)))
        return new

    def window(self, now: Moment) -> list[list[int]]:
        """What is fed, the pending token in the first place."""
        window = [list(level) for level in (now.window if now.passes else self.first_window(now.tokens))]
        window[0][0] = now.tokens[-1]
        return window

    def after(self, now: Moment, new: list[int] | None) -> tuple[list[list[int]], int, list[Gram]]:
        """Window, passes and pool after the step from ``now``."""
        if new is None:
            return now.window, now.passes, now.pool
        levels, pool = [*self.window(now), new], now.pool
        if now.passes >= self.drafter.size - 2:
            seen = [tuple(level[column] for level in levels) for column in range(self.drafter.columns)]
            pool = list(dict.fromkeys([*seen, *pool]))[:POOL]
        return levels[1:], min(now.passes + 1, self.drafter.size), pool

    def check(self, moments: Sequence[Moment], rows: Sequence, text: Sequence[int], start: int) -> int:
        """Every step of one greedy request against the above; ``text`` is the whole plain text. Drafts accepted."""
        accepted = 0
        for now, row in zip(moments, rows, strict=True):
            drafts = self.drafts(now)
            n = len(now.tokens)
            stands = max((len(path) for path in drafts if path == tuple(text[n : n + len(path)])), default=0)
            assert (row.drafted, row.accepted) == (len(drafts), stands), f"step from {n} tokens"
            accepted += stands
        for (now, later), new in zip(itertools.pairwise(moments), self.guess(moments), strict=True):
            expected = self.after(now, new)
            assert (later.window, later.passes, later.pool) == expected, f"step from {len(now.tokens)} tokens"
        assert moments[0].tokens == list(text[: start + 1])
        return accepted


def jacobi_of(rig: Rig) -> Jacobi:
    decoder = rig.engine.programs.decoder
    assert isinstance(decoder.drafter, LookaheadDrafter)
    return Jacobi(rig.reference, decoder.drafter, rig.engine.programs.shapes.windows[-1], decoder.valid_vocab)
