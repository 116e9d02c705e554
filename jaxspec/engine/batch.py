"""The rows on the devices: one DecodeState, its slots, and the buckets that fit them.

Alone, a request decodes in a state of one row; a second one makes it a state of all slots, and back, unless there is
one bucket of rows for all. The slot of a request is the scheduler's; a state of one row keeps whichever it is.
"""

from typing import cast

import jax
import numpy as np
from numpy.typing import DTypeLike

from jaxspec.engine.records import TokenLogprob
from jaxspec.engine.request import Request, StepTokens, seed_words
from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate.programs import Programs
from jaxspec.speculate.sampling import RowSampling
from jaxspec.speculate.state import STOP_IDS, DecodeState, HostReport, Logprobs, RowParams, StepReport


class Fault(Exception):
    """A row's step failed with this FAULTS code; nothing was committed."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Prefill:
    """A request on its way in: a state of one row that grows chunk by chunk."""

    def __init__(self, programs: Programs, request: Request) -> None:
        self._programs = programs
        self._request = request
        window = programs.shapes.window(min(request.length + programs.nodes, programs.shapes.windows[-1]))
        tokens = np.zeros((1, window), np.int32)
        tokens[0, : request.length] = request.token_ids
        self.state = programs.start(tokens, np.array([request.length], np.int32), row_params(request))
        self._done = 0
        self._length = request.length

    def advance(self, largest_chunk: int) -> StepTokens | None:
        """Runs one chunk. The last one returns the first token. Raises Fault."""
        chunk = self._programs.shapes.chunk(self._length - self._done, largest_chunk)
        self.state, report = self._programs.prefill(self.state, self._done, chunk)
        self._done += chunk
        if self._done < self._length:
            # Waits here, not at some later step: cancellation is noticed between chunks.
            report.packed.block_until_ready()
            return None
        return read_rows(report, {0: self._request})[0]


class Batch:
    """All decoding rows. Slots are the scheduler's."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._state: DecodeState | None = None
        self._lone: int | None = None  # the slot that the only row of a one-row state stands for
        self._narrowest = programs.shapes.rows[0]

    @property
    def window(self) -> int:
        """S of the current state, 0 without one."""
        return 0 if self._state is None else self._state.shape[1]

    def insert(self, row: DecodeState, slot: int, running: dict[int, Request]) -> None:
        """Puts a prefilled row into ``slot``; ``running`` are the requests that are there already."""
        if not running:
            self._state, self._lone = row, slot
            if self._narrowest > 1:
                self._state = self._widened()
            return
        window = max(self.window, row.shape[1])
        state = self._programs.grow(self._widened(), window)
        self._state = self._programs.insert(state, self._programs.grow(row, window), slot)

    def _widened(self) -> DecodeState:
        """The state of all slots; a lone row moves to its slot."""
        state = self._state
        if state is None:
            raise ValueError("batch: no rows")
        if self._lone is not None:
            state = self._programs.insert(self._programs.empty(state.shape[1]), state, self._lone)
            self._lone = None
        return state

    def fit(self, running: dict[int, Request]) -> None:
        """Before a step: drops what nobody uses, narrows to a lone row, grows when the longest row needs it."""
        if not running:
            self._state = self._lone = None
            return
        state = self._state
        if state is None:
            raise ValueError("batch: running requests, but no rows")
        if len(running) == 1 and self._lone is None and state.shape[0] > self._narrowest:
            (self._lone,) = running
            state = self._programs.extract(state, self._lone)
        longest = max(request.length for request in running.values())
        needed = min(longest + self._programs.nodes, self._programs.shapes.windows[-1])
        self._state = self._programs.grow(state, self._programs.shapes.window(needed))

    def catch_up(self, slot: int, request: Request) -> None:
        """Feeds the drafter of one row everything it lacks."""
        if self._state is None:
            raise ValueError("batch: no rows")
        alone = self._lone is not None or self._state.shape[0] == 1
        row = self._state if alone else self._programs.extract(self._state, slot)
        row = catch_up(self._programs, row, request)
        self._state = row if alone else self._programs.insert(self._state, row, slot)

    def step(self, running: dict[int, Request], gammas: dict[int, int]) -> dict[int, StepTokens | Fault]:
        """One decode step of all running rows; reads its report."""
        state = self._state
        if state is None:
            raise ValueError("batch: no rows")
        rows = {0 if self._lone is not None else slot: slot for slot in running}
        gamma_B = np.full((state.shape[0],), -1, np.int32)
        for row, slot in rows.items():
            gamma_B[row] = gammas[slot]
        bucket = self._programs.shapes.gamma(max(gammas.values()))
        self._state, report = self._programs.step(state, gamma_B, bucket)
        results = read_rows_or_faults(report, {row: running[slot] for row, slot in rows.items()})
        return {rows[row]: result for row, result in results.items()}


def catch_up(programs: Programs, row: DecodeState, request: Request) -> DecodeState:
    """Runs the drafter over the committed tokens that it lacks, in chunks."""
    end = request.length - 1
    done = end - request.lag
    while done < end:
        chunk = programs.shapes.chunk(end - done, programs.shapes.chunks[-1])
        row = programs.prefill_drafter(row, done, chunk)
        done += chunk
    request.ready, request.lag = GAMMA_MAX, 0
    return row


def row_params(request: Request) -> RowParams:
    """The row parameters of a request, for a state of one row."""
    sampling = request.sampling
    stop_ids = [*request.stop_ids, *[-1] * (STOP_IDS - len(request.stop_ids))]
    return RowParams(
        sampling=RowSampling(
            _host([sampling.temperature], np.float32),
            _host([min(sampling.top_k, np.iinfo(np.int32).max)], np.int32),
            _host([sampling.top_p], np.float32),
            _host([sampling.min_p], np.float32),
        ),
        seed_B2=_host([seed_words(request.seed)], np.uint32),
        stop_ids_BE=_host([stop_ids], np.int32),
        min_length_B=_host([request.prompt_length + sampling.min_tokens], np.int32),
        max_length_B=_host([request.max_length], np.int32),
        wants_logprobs_B=_host([sampling.logprobs is not None], np.bool_),
        lookup_min_B=_host([request.lookup[0]], np.int32),
        lookup_max_B=_host([request.lookup[1]], np.int32),
    )


def _host(values: object, dtype: DTypeLike) -> jax.Array:
    """A host array where a program takes a device array: the call uploads it."""
    return cast(jax.Array, np.array(values, dtype))


def read_rows(report: StepReport, requests: dict[int, Request]) -> dict[int, StepTokens]:
    """Like :func:`read_rows_or_faults`, but raises the first Fault."""
    results = read_rows_or_faults(report, requests)
    for result in results.values():
        if isinstance(result, Fault):
            raise result
    return results  # pyright: ignore[reportReturnType]


def read_rows_or_faults(report: StepReport, requests: dict[int, Request]) -> dict[int, StepTokens | Fault]:
    """Waits for a step and splits its report by row. The one transfer of a step, unless log-probabilities are due."""
    host = HostReport.read(report)
    asked = any(request.sampling.logprobs is not None for request in requests.values())
    logprobs = jax.device_get(report.logprobs) if asked else None
    results: dict[int, StepTokens | Fault] = {}
    for row, request in requests.items():
        if host.fault[row]:
            results[row] = Fault(int(host.fault[row]))
            continue
        count = int(host.n_new[row])
        results[row] = StepTokens(
            token_ids=host.tokens[row, :count].tolist(),
            n_drafted=int(host.n_drafted[row]),
            n_accepted=int(host.n_accepted[row]),
            bonus=bool(host.bonus[row]),
            finish=int(host.finish[row]),
            ready=int(host.ready[row]),
            lag=int(host.lag[row]),
            logprobs=_logprobs(logprobs, row, host.tokens[row, :count], request.sampling.logprobs),
        )
    return results


def _logprobs(
    logprobs: Logprobs | None, row: int, token_ids: np.ndarray, count: int | None
) -> tuple[TokenLogprob, ...] | None:
    if logprobs is None or count is None:
        return None
    return tuple(
        TokenLogprob(
            int(token_id),
            float(logprobs.chosen_BE[row, offset]),
            tuple(
                zip(
                    logprobs.top_ids_BEC[row, offset, :count].tolist(),
                    logprobs.top_BEC[row, offset, :count].tolist(),
                    strict=True,
                )
            ),
        )
        for offset, token_id in enumerate(token_ids)
    )
