"""Who runs next: a bounded first-come queue, slots, and turns between prefill chunks and decode steps.

Pure host logic: no device, no thread. The engine asks ``next_turn`` and says what became of it.
"""

import enum
from collections import deque
from collections.abc import Iterator

from jaxspec.engine.request import Request
from jaxspec.errors import QueueFull


class Turn(enum.Enum):
    """What the devices should do next."""

    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"


class Scheduler:
    """At most one request is in prefill; its chunks alternate with decode steps, so neither starves the other."""

    def __init__(self, max_slots: int, max_queue: int) -> None:
        self.max_slots = max_slots
        self.max_queue = max_queue
        self.waiting: deque[Request] = deque()
        self.prefilling: Request | None = None
        self.running: dict[int, Request] = {}  # by slot
        self._last = Turn.DECODE

    def submit(self, request: Request) -> None:
        """Queues a request. Raises QueueFull beyond ``max_queue`` waiting ones; a free slot needs no queue."""
        if len(self.waiting) >= self.max_queue + self.free_slots:
            # A guess at when a place frees: each waiting request ahead takes a slot in turn.
            raise QueueFull(len(self.waiting), self.max_queue, retry_after_s=1.0)
        self.waiting.append(request)

    @property
    def free_slots(self) -> int:
        """Slots that neither a running request nor the one in prefill holds."""
        return self.max_slots - len(self.running) - (self.prefilling is not None)

    def next_turn(self) -> Turn:
        """Admits the first waiting request when a slot is free, then says whose turn it is."""
        if self.prefilling is None and self.waiting and self.free_slots > 0:
            self.prefilling = self.waiting.popleft()
        if self.prefilling is not None and (not self.running or self._last is Turn.DECODE):
            self._last = Turn.PREFILL
        elif self.running:
            self._last = Turn.DECODE
        else:
            return Turn.IDLE
        return self._last

    def place(self) -> int:
        """Moves the prefilled request to the lowest free slot and returns it."""
        if self.prefilling is None:
            raise ValueError("place: nothing is in prefill")
        slot = next(slot for slot in range(self.max_slots) if slot not in self.running)
        self.running[slot] = self.prefilling
        self.prefilling = None
        return slot

    def reap(self, now: float) -> Iterator[Request]:
        """Removes every cancelled or expired request, wherever it is, and yields it."""
        for slot, request in list(self.running.items()):
            if request.cancelled or request.expired(now):
                yield self.running.pop(slot)
        if self.prefilling is not None and (self.prefilling.cancelled or self.prefilling.expired(now)):
            request, self.prefilling = self.prefilling, None
            yield request
        gone = [request for request in self.waiting if request.cancelled or request.expired(now)]
        for request in gone:
            self.waiting.remove(request)
            yield request

    def everyone(self) -> list[Request]:
        """All requests in the engine, in the order in which they came to run."""
        prefilling = [] if self.prefilling is None else [self.prefilling]
        return [*self.running.values(), *prefilling, *self.waiting]

    def clear(self) -> None:
        """Forgets all requests."""
        self.running.clear()
        self.prefilling = None
        self.waiting.clear()
