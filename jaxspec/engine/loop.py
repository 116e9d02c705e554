"""The loop that owns the devices: one thread takes turns between prefill chunks and decode steps.

Everything here but ``submit``, ``cancel``, ``drain``, ``close`` and ``loads`` runs in the loop's own thread.
"""

import logging
import threading
import time

from jaxspec.engine.batch import Batch, Fault, Prefill, catch_up
from jaxspec.engine.load import Loaded
from jaxspec.engine.records import Loads
from jaxspec.engine.request import Request, StepTokens
from jaxspec.engine.scheduler import Scheduler, Turn
from jaxspec.engine.tally import Tally
from jaxspec.errors import EngineFault, InvalidRequest, Unavailable
from jaxspec.shapes import GAMMA_MAX
from jaxspec.speculate.programs import BUSY_CHUNK
from jaxspec.speculate.state import FAULTS

LOG = logging.getLogger("jaxspec")
MAX_RESTARTS = 1
ABORTING_S = 5.0  # for what a drain had to abort


class Loop:
    """Scheduler, batch and the thread that drives them."""

    def __init__(self, loaded: Loaded, *, max_slots: int, max_len: int, max_queue: int) -> None:
        self._loaded = loaded
        self._programs = loaded.programs
        self._cache_tokens = max_slots * max_len
        self.scheduler = Scheduler(max_slots, max_queue)
        self.batch = Batch(loaded.programs)
        self.tally = Tally()
        self._prefill: Prefill | None = None
        self._changed = threading.Condition()  # guards the scheduler and the flags below
        self._draining = self._stopping = False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxspec-engine", daemon=True)
        self._thread.start()

    # ---- from any thread -----------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Taking requests, and alive."""
        return not self._draining and self._broken is None

    def refuse_unless_open(self) -> None:
        """Raises EngineFault after a crash, Unavailable while draining."""
        if self._broken is not None:
            raise EngineFault(f"the engine stopped: {self._broken}")
        if self._draining:
            raise Unavailable("the engine is draining and takes no new requests")

    def submit(self, request: Request) -> None:
        """Queues a request. Raises QueueFull, InvalidRequest for an id in use, or as ``refuse_unless_open``."""
        with self._changed:
            self.refuse_unless_open()
            if any(other.request_id == request.request_id for other in self.scheduler.everyone()):
                raise InvalidRequest("request_id", request.request_id, "one that no running request has")
            self.scheduler.submit(request)
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """Ends it before the next step."""
        request.cancel()
        with self._changed:
            self._changed.notify_all()

    def find(self, request_id: str) -> list[Request]:
        """The request of this id, if it is here."""
        with self._changed:
            return [request for request in self.scheduler.everyone() if request.request_id == request_id]

    def drain(self, timeout_s: float) -> None:
        """Refuses new requests, lets the others finish for up to ``timeout_s`` seconds, then aborts the rest."""
        with self._changed:
            self._draining = True
            self._changed.wait_for(self._idle, max(0.0, timeout_s))
            for request in self.scheduler.everyone():
                request.cancel()
            self._changed.notify_all()
            self._changed.wait_for(self._idle, ABORTING_S)

    def _idle(self) -> bool:
        return self._broken is not None or not self.scheduler.everyone()

    def close(self) -> None:
        """Aborts what runs and stops the thread."""
        self.drain(0.0)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def loads(self) -> Loads:
        """What is going on now."""
        with self._changed:
            running = list(self.scheduler.running.values())
            return Loads(
                running=len(running) + (self.scheduler.prefilling is not None),
                waiting=len(self.scheduler.waiting),
                slots_free=self.scheduler.free_slots,
                cache_tokens_used=sum(request.length for request in running),
                cache_tokens_total=self._cache_tokens,
                counters=self.tally.counters(),
            )

    # ---- the loop's own thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._reap()
                    turn = self.scheduler.next_turn()
                    if turn is Turn.IDLE:
                        self._changed.notify_all()  # a drain may be waiting for this
                        if self._stopping:
                            return
                        self._changed.wait(timeout=self._until_next_deadline())
                        continue
                if turn is Turn.PREFILL:
                    self._prefill_turn()
                else:
                    self._decode_turn()
        except BaseException as error:  # the devices are in an unknown state: end everything, say so, take no more
            LOG.exception("the engine stopped")
            with self._changed:
                self._broken = error
                for request in self.scheduler.everyone():
                    request.fail(EngineFault(f"the engine stopped: {error}"))
                self.scheduler.clear()
                self._changed.notify_all()

    def _until_next_deadline(self) -> float | None:
        deadlines = [request.deadline for request in self.scheduler.everyone() if request.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _reap(self) -> None:
        """Ends cancelled and expired requests; their slots are free at once."""
        now = time.monotonic()
        prefilling = self.scheduler.prefilling
        for request in self.scheduler.reap(now):
            if request is prefilling:
                self._prefill = None
            if request.cancelled:
                request.abort()
                self.tally.finish("abort")
            else:
                request.fail(TimeoutError(f"deadline exceeded after {request.completion_length} tokens"))
                self.tally.finish("deadline")

    def _prefill_turn(self) -> None:
        request = self.scheduler.prefilling
        if request is None:
            raise ValueError("prefill: no request")
        if self._prefill is None:
            self._prefill = Prefill(self._programs, request)
        largest = BUSY_CHUNK if self.scheduler.running else self._programs.shapes.chunks[-1]
        try:
            first = self._prefill.advance(largest)
        except Fault as fault:
            self._prefill = None
            with self._changed:
                self.scheduler.prefilling = None
                self._fault(request, fault)
            return
        if first is None:
            return
        row, self._prefill = self._prefill.state, None
        if self._deliver(request, first, None):
            return
        if self._wants_catch_up(request):
            row = catch_up(self._programs, row, request)
        running = dict(self.scheduler.running)
        with self._changed:
            slot = self.scheduler.place()
        self.batch.insert(row, slot, running)

    def _wants_catch_up(self, request: Request) -> bool:
        fits = request.length + GAMMA_MAX <= self._loaded.draft_context
        lacks = request.ready == 0 and request.lag > 1
        return self._programs.decoder.drafter.has_cache and request.next_gamma() > 0 and lacks and fits

    def _decode_turn(self) -> None:
        running = dict(self.scheduler.running)
        self.batch.fit(running)
        for slot, request in running.items():
            if self._wants_catch_up(request):
                self.batch.catch_up(slot, request)
        gammas = {slot: min(request.next_gamma(), request.ready) for slot, request in running.items()}
        self.tally.passes += 1
        for slot, result in self.batch.step(running, gammas).items():
            request = running[slot]
            if isinstance(result, Fault):
                with self._changed:
                    self.scheduler.running.pop(slot)
                    self._fault(request, result)
                continue
            self._deliver(request, result, slot)

    def _deliver(self, request: Request, step: StepTokens, slot: int | None) -> bool:
        """Sends what a step gave a request in ``slot`` (None: in prefill). True when that ends it.

        Whoever reads the last chunk finds the slot free and the ending counted.
        """
        chunk = request.absorb(step)
        self.tally.count(step, len(chunk.token_ids))
        if chunk.finish_reason is None:
            request.send(chunk)
            return False
        with self._changed:
            if slot is None:
                self.scheduler.prefilling = None
            else:
                self.scheduler.running.pop(slot)
            self.tally.finish(chunk.finish_reason)
            request.send(chunk)
        return True

    def _fault(self, request: Request, fault: Fault) -> None:
        """A row's fault: its committed tokens are prefilled again, once; the second time the request ends."""
        sentence = FAULTS[fault.code]
        LOG.warning("request %s: %s", request.request_id, sentence)
        if request.restarts < MAX_RESTARTS:
            request.restarts += 1
            self.scheduler.waiting.appendleft(request)
        else:
            request.fail(EngineFault(f"request {request.request_id}: {sentence}"))
            self.tally.finish("fault")
