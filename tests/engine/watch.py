"""Looks over an engine's shoulder: reads its state around every decode step, on the engine's own thread."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np

from jaxspec import Engine
from jaxspec.engine.batch import Batch, Fault
from jaxspec.engine.request import Request, StepTokens
from jaxspec.model.cache import KVCache
from jaxspec.speculate.drafters.eagle import EagleState
from jaxspec.speculate.drafters.hybrid import HybridState


@dataclasses.dataclass(frozen=True)
class Row:
    """One row in one step."""

    request_id: str
    slot: int
    gamma: int  # asked for
    drafted: int  # nodes
    accepted: int
    tokens: tuple[int, ...]  # committed
    length: int  # after the step
    lag: int  # of the drafter, after the step
    fault: int


class Watch:
    """Checks what DESIGN.md section 4 promises of every row after every step; violations fail the running test."""

    violations: ClassVar[list[str]] = []

    def __init__(self, engine: Engine) -> None:
        self.batch = engine._loop.batch
        self.meddle: Callable[[Batch, dict[int, Request]], None] | None = None  # called before each step
        self._steps: list[list[Row]] | None = None
        self._step, self.batch.step = self.batch.step, self._watched  # pyright: ignore

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[list[Row]]]:
        """The rows of every step in between."""
        self._steps = steps = []
        yield steps
        self._steps = None

    @contextlib.contextmanager
    def meddling(self, meddle: Callable[[Batch, dict[int, Request]], None]) -> Iterator[None]:
        """Lets ``meddle`` change the state before each step."""
        self.meddle = meddle
        yield
        self.meddle = None

    def row(self, slot: int) -> int:
        """Where the state keeps the row of a slot."""
        return 0 if self.batch._lone is not None else slot

    def _watched(self, running: dict[int, Request], gammas: dict[int, int]) -> dict[int, StepTokens | Fault]:
        if self.meddle is not None:
            self.meddle(self.batch, running)
        rows = {slot: self.row(slot) for slot in running}
        results = self._step(running, gammas)
        try:
            found = self._check(running, rows, gammas, results)
            if self._steps is not None:
                self._steps.append(found)
        except Exception as error:  # it would stop the engine
            self.violations.append(f"the watch failed: {error!r}")
        return results

    def _check(self, running, rows, gammas, results) -> list[Row]:
        state = self.batch._state
        assert state is not None
        length_B, target_B = np.asarray(state.length_B), np.asarray(state.target.length_B)
        hybrid = isinstance(state.drafter, HybridState)
        model = state.drafter.model if hybrid else state.drafter
        draft_B = np.asarray(model.length_B) if isinstance(model, KVCache) else None
        head_B = np.asarray(model.length_B) if isinstance(model, EagleState) else None
        tokens_BS = np.asarray(state.tokens_BS)
        programs = self.batch._programs
        drafts, bucket = programs.decoder.drafter.drafts, programs.shapes.gamma(max(gammas.values()))
        found = []
        for slot, result in results.items():
            request, row = running[slot], rows[slot]
            expect = Expectation(self.violations, f"request {request.request_id}, slot {slot}, n {request.length}")
            if isinstance(result, Fault):
                expect.equal("committed length after a fault", length_B[row], request.length)
                found.append(Row(request.request_id, slot, gammas[slot], 0, 0, (), request.length, 0, result.code))
                continue
            committed = [*request.token_ids, *result.token_ids]
            n = len(committed)
            expect.equal("committed length", length_B[row], n)
            expect.equal("length of the target cache", target_B[row], n - 1)
            expect.equal("token buffer", tokens_BS[row, :n].tolist(), committed)
            expect.at_most("committed tokens", n, request.max_length)
            levels = max(0, min(gammas[slot], request.max_length - request.length - 1))
            expect.at_most("drafted", result.n_drafted, drafts(levels))
            expect.at_most("accepted", result.n_accepted, min(levels, result.n_drafted))
            if head_B is not None:
                expect.equal("rows of the EAGLE head's cache", head_B[row], n - 1)
            if draft_B is not None:
                expect.equal("reported lag", result.lag, n - 1 - draft_B[row])
                # A round leaves out its last draft alone, and that only when it was accepted, with a token after it.
                # Copies are not fed.
                if result.n_drafted and not hybrid:
                    left_out = bucket == result.n_accepted < len(result.token_ids)
                    expect.equal("lag after a round", result.lag, int(left_out))
                expect.at_most("length of the draft cache", draft_B[row], n - 1)
            found.append(
                Row(
                    request.request_id,
                    slot,
                    gammas[slot],
                    result.n_drafted,
                    result.n_accepted,
                    tuple(result.token_ids),
                    n,
                    result.lag,
                    0,
                )
            )
        return found


@dataclasses.dataclass(frozen=True)
class Expectation:
    """Notes what does not hold, where."""

    violations: list[str]
    where: str

    def equal(self, what: str, got: object, expected: object) -> None:
        if got != expected:
            self.violations.append(f"{self.where}: {what}: expected {expected}, got {got}")

    def at_most(self, what: str, got: int, limit: int) -> None:
        if got > limit:
            self.violations.append(f"{self.where}: {what}: expected at most {limit}, got {got}")
