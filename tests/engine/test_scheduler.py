"""Who runs next: first come first served, a bounded queue, and turns that starve nobody. No device, no thread."""

import pytest

from jaxspec import SamplingParams
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import Scheduler, Turn
from jaxspec.errors import QueueFull


def waiting(name: str, deadline: float | None = None) -> Request:
    return Request(
        name, [1], SamplingParams(), gamma=0, lookup=(1, 3), rests=True, seed=0, stop_ids=(), max_length=8,
        method="none", tokenizer=None, sink=lambda item: None, deadline=deadline,
    )  # fmt: skip


def names(requests) -> list[str]:
    return [request.request_id for request in requests]


def prefilled(scheduler: Scheduler, chunks: int = 1) -> int:
    """Takes turns until the request in prefill has had ``chunks`` chunks and a slot; returns the decode turns given."""
    decoding = 0
    while chunks:
        if scheduler.next_turn() is Turn.PREFILL:
            chunks -= 1
        else:
            decoding += 1
    scheduler.place()
    return decoding


def test_first_come_first_served_into_the_lowest_free_slot():
    scheduler = Scheduler(max_slots=3, max_queue=7)
    for name in "abcdefg":
        scheduler.submit(waiting(name))
    for _ in range(3):
        prefilled(scheduler)
    assert {slot: request.request_id for slot, request in scheduler.running.items()} == {0: "a", 1: "b", 2: "c"}
    assert [scheduler.next_turn() for _ in range(3)] == [Turn.DECODE] * 3
    del scheduler.running[1]
    prefilled(scheduler)
    assert scheduler.running[1].request_id == "d"
    assert names(scheduler.waiting) == ["e", "f", "g"]
    assert names(scheduler.everyone()) == ["a", "c", "d", "e", "f", "g"]


def test_nothing_to_do_is_idle():
    scheduler = Scheduler(max_slots=1, max_queue=0)
    assert scheduler.next_turn() is Turn.IDLE
    scheduler.submit(waiting("a"))
    assert scheduler.next_turn() is Turn.PREFILL
    scheduler.clear()
    assert scheduler.next_turn() is Turn.IDLE
    assert scheduler.everyone() == []


@pytest.mark.parametrize(("slots", "queue"), [(1, 0), (2, 3), (3, 11)])
def test_the_queue_holds_so_many_besides_those_for_whom_a_slot_is_free(slots, queue):
    """H16: refused at once, with a time to come back."""
    scheduler = Scheduler(slots, queue)
    for index in range(slots + queue):
        scheduler.submit(waiting(str(index)))
    with pytest.raises(QueueFull) as refused:
        scheduler.submit(waiting("one too many"))
    assert refused.value.retry_after_s > 0
    for _ in range(slots):
        prefilled(scheduler)
    assert (len(scheduler.waiting), scheduler.free_slots) == (queue, 0)
    with pytest.raises(QueueFull):
        scheduler.submit(waiting("still one too many"))
    scheduler.running.popitem()
    scheduler.submit(waiting("now"))


@pytest.mark.parametrize("chunks", [1, 2, 7, 31])
def test_a_long_prompt_gives_every_other_turn_to_those_who_decode(chunks):
    scheduler = Scheduler(max_slots=3, max_queue=3)
    scheduler.submit(waiting("decoding"))
    assert prefilled(scheduler, 5) == 0  # nobody waits: chunk after chunk
    scheduler.submit(waiting("long"))
    turns = [scheduler.next_turn() for _ in range(2 * chunks)]
    assert turns == [Turn.DECODE, Turn.PREFILL] * chunks


def test_a_stream_of_short_prompts_does_not_stop_decoding():
    scheduler = Scheduler(max_slots=7, max_queue=64)
    for index in range(7):
        scheduler.submit(waiting(str(index)))
    assert [prefilled(scheduler) for _ in range(7)] == [0, 1, 1, 1, 1, 1, 1]


def test_reaping_takes_cancelled_and_expired_requests_from_everywhere():
    """H05, H07: running, in prefill and waiting; the others keep their places."""
    scheduler = Scheduler(max_slots=3, max_queue=9)
    everyone = {name: waiting(name, deadline=5.0 if name in "bdf" else None) for name in "abcdefgh"}
    for request in everyone.values():
        scheduler.submit(request)
    prefilled(scheduler)
    prefilled(scheduler)
    assert scheduler.next_turn() in (Turn.PREFILL, Turn.DECODE)
    assert scheduler.prefilling is everyone["c"]
    for name in "ceg":
        everyone[name].cancel()
    assert names(scheduler.reap(now=4.9)) == ["c", "e", "g"]
    assert names(scheduler.reap(now=5.0)) == ["b", "d", "f"]
    assert names(scheduler.reap(now=6.0)) == []
    assert names(scheduler.everyone()) == ["a", "h"]
    assert scheduler.free_slots == 2
    prefilled(scheduler)
    assert scheduler.running[1].request_id == "h"


def test_placing_without_a_prefill_is_a_mistake_of_ours():
    with pytest.raises(ValueError, match="nothing is in prefill"):
        Scheduler(1, 1).place()
