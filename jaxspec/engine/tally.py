"""Totals since start-up, counted by the engine's thread."""

from collections import Counter

from jaxspec.engine.records import Counters
from jaxspec.engine.request import StepTokens
from jaxspec.shapes import GAMMA_MAX


class Tally:
    """Mutable counts; :meth:`counters` freezes them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to zero: warming up is nobody's traffic."""
        self.passes = 0  # target passes of decoding, whatever the rows
        self._drafts = self._drafted = self._accepted = self._committed = 0
        self._per_position = [0] * GAMMA_MAX
        self._finished: Counter[str] = Counter()

    def count(self, step: StepTokens, kept: int) -> None:
        """One row's part of a step, of whose tokens no stop cut off the first ``kept``."""
        self._committed += kept
        if step.n_drafted:
            self._drafts += 1
            self._drafted += step.n_drafted
            accepted = min(step.n_accepted, kept)
            self._accepted += accepted
            for position in range(accepted):
                self._per_position[position] += 1

    def finish(self, reason: str) -> None:
        """One request has ended."""
        self._finished[reason] += 1

    def counters(self) -> Counters:
        """The counts now."""
        return Counters(
            num_drafts=self._drafts,
            num_draft_tokens=self._drafted,
            num_accepted_tokens=self._accepted,
            num_accepted_tokens_per_pos=tuple(self._per_position),
            num_committed_tokens=self._committed,
            num_target_passes=self.passes,
            num_requests_finished=dict(self._finished),
        )
