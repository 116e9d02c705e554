"""One request from admission to its last chunk: its tokens, its text, its counts. Host logic only."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from jaxspec.engine.params import SamplingParams
from jaxspec.engine.records import Chunk, SpeculationSummary, Summary, Timing, TokenLogprob, Usage
from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate.gamma import GammaState, choose, update
from jaxspec.speculate.state import LENGTH, STOPPED
from jaxspec.text import Detokenizer, StopMatcher, Tokenizer

Sink = Callable[[Chunk | BaseException], None]


@dataclasses.dataclass(frozen=True)
class StepTokens:
    """What one step committed to one row, on the host."""

    token_ids: Sequence[int]
    n_drafted: int
    n_accepted: int
    bonus: bool  # the last token came after the last draft: nothing was rejected
    finish: int  # RUNNING, STOPPED or LENGTH
    ready: int  # tokens the drafter could draft next
    lag: int  # committed tokens that the drafter lacks
    logprobs: tuple[TokenLogprob, ...] | None = None


class Request:
    """A request in the engine. Its owner is the engine's thread; ``cancel`` alone may be called from others."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        gamma: int,
        lookup: tuple[int, int],
        seed: int,
        stop_ids: Sequence[int],
        max_length: int,
        method: str,
        rests: bool,
        tokenizer: Tokenizer | None,
        sink: Sink,
        deadline: float | None,
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.gamma = gamma
        self.lookup = lookup  # shortest and longest suffix that is looked up
        self.seed = seed
        self.stop_ids = tuple(stop_ids)
        self.max_length = max_length  # committed length (prompt included) that ends it with "length"
        self.deadline = deadline  # time.monotonic()
        self.token_ids = list(prompt_ids)  # prompt and everything committed
        self.prompt_length = len(prompt_ids)
        self.restarts = 0  # after a fault in its row
        self.ready = 0
        self.lag = 0
        self._method = method
        self._rests = rests  # drafts that keep failing are not asked for, for a while
        self._sink = sink
        self._cancelled = threading.Event()
        self._closed = False
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special=sampling.skip_special_tokens) if tokenizer is not None else None
        )
        self._matcher = StopMatcher(sampling.stop)
        self._gamma_state = GammaState()
        self._histogram = [0] * (GAMMA_MAX + 1)
        self._n_drafted = 0
        self._n_passes = 0
        self._decoded = 0  # tokens that came from decoding passes, not from the prefill
        self._admitted = time.monotonic()
        self._first_token = self._last_token = 0.0

    @property
    def length(self) -> int:
        """n, committed tokens."""
        return len(self.token_ids)

    @property
    def completion_length(self) -> int:
        return self.length - self.prompt_length

    def cancel(self) -> None:
        """Asks for the end; the engine obliges before its next step. Any thread."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def expired(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and now >= self.deadline

    def next_gamma(self) -> int:
        """Drafts to ask for in the next step: own history, room left; 0 where the drafter has nothing."""
        limit = min(self.gamma, self.max_length - self.length - 1)
        return choose(self._gamma_state, limit) if self._rests else limit

    def absorb(self, step: StepTokens) -> Chunk:
        """Takes in what a step committed: the chunk to :meth:`send`, with a finish reason when it ends the request."""
        self.ready, self.lag = step.ready, step.lag
        first = self.completion_length == 0
        kept, text, text_ends = self._read(step.token_ids)
        if not first:
            self._n_passes += 1
            self._gamma_state = update(self._gamma_state, step.n_drafted, step.n_accepted)
            if step.n_drafted:
                self._n_drafted += step.n_drafted
                # What a stop cut off was accepted, but is in no text and so in no count.
                self._histogram[min(step.n_accepted, kept)] += 1
        if kept:
            self.token_ids += step.token_ids[:kept]
            self._last_token = time.monotonic()
            self._first_token = self._first_token or self._last_token
            self._decoded += 0 if first else kept
        reason = None
        if self._matcher.stopped or step.finish == STOPPED:
            reason = "stop"
        elif step.finish == LENGTH:
            reason = "length"
        logprobs = None if step.logprobs is None else step.logprobs[:kept]
        return Chunk(
            self.request_id,
            tuple(step.token_ids[:kept]),
            text + (self._flush() if reason else ""),
            self._origins(step)[:kept],
            text_ends,
            logprobs,
            reason,
            self.summary() if reason else None,
        )

    def abort(self) -> None:
        """Ends it with finish reason "abort"; what was held back comes out."""
        self.send(Chunk(self.request_id, text=self._flush(), finish_reason="abort", summary=self.summary()))

    def fail(self, error: BaseException) -> None:
        """Ends it with an error."""
        self.send(error)

    def send(self, item: Chunk | BaseException) -> None:
        """Hands a chunk or an error to whoever reads. Nothing follows an end."""
        if self._closed:
            return
        self._closed = isinstance(item, BaseException) or item.finish_reason is not None
        self._sink(item)

    def _read(self, token_ids: Sequence[int]) -> tuple[int, str, tuple[int, ...]]:
        """Tokens up to the one that completes a stop string, their text, and where each token's text ends."""
        if self._detokenizer is None:
            return len(token_ids), "", (0,) * len(token_ids)
        text, ends = "", []
        for token_id in token_ids:
            text += self._matcher.push(self._detokenizer.push((token_id,)))
            ends.append(len(text))
            if self._matcher.stopped:
                break
        return len(ends), text, tuple(ends)

    def _flush(self) -> str:
        if self._detokenizer is None or self._matcher.stopped:
            return ""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()

    @staticmethod
    def _origins(step: StepTokens) -> tuple[str, ...]:
        if step.n_drafted == 0:
            return ("plain",) * len(step.token_ids)
        last = "bonus" if step.bonus else "correction"
        return ("draft",) * step.n_accepted + (last,)

    def summary(self) -> Summary:
        """Counts so far."""
        decoding_s = self._last_token - self._first_token
        tpot_ms = 1000 * decoding_s / self._decoded if self._decoded else None
        timing = Timing(
            ttft_ms=1000 * (self._first_token - self._admitted) if self._first_token else None,
            tpot_ms=tpot_ms,
            tokens_per_s=1000 / tpot_ms if tpot_ms else None,
        )
        speculation = SpeculationSummary.of(
            method=self._method,
            histogram=self._histogram,
            num_draft_tokens=self._n_drafted,
            num_tokens=self._decoded,
            num_target_passes=self._n_passes,
        )
        return Summary(Usage(self.prompt_length, self.completion_length), timing, speculation, self.seed)


def seed_words(seed: int) -> tuple[int, int]:
    """A 64-bit seed as two 32-bit words, high first."""
    return seed >> 32, seed & 0xFFFFFFFF
