"""Requests come, wait, expire and are called off at any moment; nothing of them stays behind."""

import asyncio
import random
import threading
import time

import pytest

from jaxspec import Completion, Prompt, SamplingParams, SpeculationParams
from jaxspec.errors import InvalidRequest, QueueFull, Unavailable
from tests.engine.conftest import SMALL_MAX_LEN, SMALL_QUEUE, SMALL_SLOTS, Job, Rig, greedy

LONG = greedy(None)


def settled(rig: Rig) -> None:
    """Returns once nobody is in the engine; fails if that does not come about."""
    until = time.monotonic() + 30
    while (loads := rig.engine.loads()).running or loads.waiting:
        assert time.monotonic() < until, f"still there: {loads}"
        time.sleep(0.001)
    rig.assert_idle()


def test_a_full_queue_refuses_at_once_and_takes_again_later(plain, goldens):
    """H16 at the engine."""
    streams = [plain.start(Job(goldens["p7"].ids, LONG)) for _ in range(SMALL_SLOTS + SMALL_QUEUE)]
    refusals = 0
    for _ in range(3 * SMALL_QUEUE):
        try:
            streams.append(plain.start(Job(goldens["p7"].ids, LONG)))
        except QueueFull as full:
            refusals += full.retry_after_s > 0
    texts = {Completion.of(stream).token_ids for stream in streams}
    assert texts == {tuple(goldens["p7"].greedy[: SMALL_MAX_LEN - 7])}
    assert refusals > 0
    settled(plain)


def test_the_expired_never_reach_the_model(plain, goldens):
    """H07: a deadline that passes in the queue costs no pass; one that passes later ends the stream."""
    busy = [plain.start(Job(goldens["p7"].ids, LONG)) for _ in range(SMALL_SLOTS)]
    late = plain.start(Job(goldens["p33"].ids, LONG), timeout_s=0.0)
    before = plain.engine.loads().counters
    with pytest.raises(TimeoutError, match="deadline exceeded after 0 tokens"):
        list(late)
    for stream in busy:
        assert Completion.of(stream).finish_reason == "length"
    settled(plain)
    after = plain.engine.loads().counters
    assert after.num_requests_finished["deadline"] - before.num_requests_finished.get("deadline", 0) == 1
    alone = SMALL_SLOTS * (SMALL_MAX_LEN - 7)
    assert after.num_committed_tokens - before.num_committed_tokens <= alone


def test_a_deadline_in_mid_stream_ends_it(near_draft, goldens):
    """The tokens before it are right; the slot comes back."""
    seen: list[int] = []

    def dawdle(batch, running) -> None:
        time.sleep(0.01)

    with near_draft.watch.meddling(dawdle):
        stream = near_draft.start(Job(goldens["p7"].ids, LONG, 1), timeout_s=0.3)
        with pytest.raises(TimeoutError, match=r"deadline exceeded after \d+ tokens") as late:
            seen.extend(token for chunk in stream for token in chunk.token_ids)
        settled(near_draft)
    assert f"after {len(seen)} tokens" in str(late.value)
    assert seen[:64] == goldens["p7"].greedy[: len(seen)]


@pytest.mark.parametrize("leave", ["close", "drop"])
def test_a_stream_that_nobody_began_to_read_ends_when_it_is_closed_or_dropped(leave, plain, goldens):
    """B03: the first possible moment to leave is before the first chunk."""
    before = plain.engine.loads().counters
    for _ in range(4):
        streams = [plain.start(Job(goldens["p7"].ids, LONG)) for _ in range(SMALL_SLOTS + SMALL_QUEUE)]
        if leave == "close":
            for stream in streams:
                stream.close()  # pyright: ignore
        del streams
        settled(plain)
    after = plain.engine.loads().counters
    aborted = after.num_requests_finished["abort"] - before.num_requests_finished.get("abort", 0)
    assert aborted == 4 * (SMALL_SLOTS + SMALL_QUEUE)


def test_aborts_at_random_moments_leave_nothing(near_draft, goldens):
    """H05: waiting, in any chunk of the prefill, between steps; by id and by closing; bystanders feel nothing."""
    rng = random.Random(11)
    bystanders = [near_draft.start(Job(goldens["p7"].ids, greedy(64), gamma)) for gamma in (0, 4)]

    def doomed(number: int) -> None:
        own = random.Random(number)
        for trial in range(8):
            request_id = f"doomed-{number}-{trial}"
            prompt = goldens[own.choice(("p7", "p150"))].ids
            stream = near_draft.start(Job(prompt, greedy(64), own.randint(0, 8)), request_id=request_id)
            if own.random() < 0.5:
                time.sleep(own.random() * 0.02)
                near_draft.engine.abort(request_id)
                assert list(stream)[-1].finish_reason in ("abort", "length")
            else:
                for _ in range(own.randint(0, 3)):
                    next(stream)
                stream.close()  # pyright: ignore

    threads = [threading.Thread(target=doomed, args=(rng.randrange(1000),)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for stream in bystanders:
        assert list(Completion.of(stream).token_ids) == goldens["p7"].greedy
    settled(near_draft)
    assert not near_draft.engine.abort("doomed-0-0")


def test_asyncio_streams_end_with_their_task(near_draft, goldens):
    """Cancelled before, while and after the first token; the others finish."""

    async def read(job: Job) -> list[int]:
        seen: list[int] = []
        async for chunk in near_draft.engine.stream(job.prompt, job.sampling, SpeculationParams(job.gamma)):
            seen += chunk.token_ids
        return seen

    async def main() -> list[list[int]]:
        job = Job(goldens["p33"].ids, greedy(64), 4)
        kept = [asyncio.create_task(read(job)) for _ in range(3)]
        for delay in (0, 0.001, 0.01, 0.03):
            dropped = asyncio.create_task(read(job))
            await asyncio.sleep(delay)
            dropped.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dropped
        return await asyncio.gather(*kept)

    assert asyncio.run(main()) == [goldens["p33"].greedy] * 3
    settled(near_draft)


def test_an_id_in_use_is_refused(plain, goldens):
    stream = plain.start(Job(goldens["p7"].ids, LONG), request_id="mine")
    with pytest.raises(InvalidRequest, match=r"request_id: .*'mine'"):
        plain.start(Job(goldens["p7"].ids, LONG), request_id="mine")
    list(stream)
    assert Completion.of(plain.start(Job(goldens["p7"].ids, greedy(1)), request_id="mine")).finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt_ids: expected at least 1 token id"),
        ([512], {}, r"prompt_ids\[0\]: expected a token id in \[0, 511\], got 512"),
        ([-1], {}, r"prompt_ids\[0\]: "),
        ([7] * SMALL_MAX_LEN, {}, f"'{SMALL_MAX_LEN} tokens'.*|at most {SMALL_MAX_LEN - 1} tokens"),
        ([7], {"min_tokens": SMALL_MAX_LEN}, f"min_tokens: expected at most {SMALL_MAX_LEN - 1}"),
        ([7], {"stop": ("",)}, r"stop\[0\]: "),
        ([7], {"stop_token_ids": (512,)}, r"stop_token_ids\[0\]: "),
        ([7], {"temperature": float("nan")}, "temperature: "),
    ],
)
def test_requests_that_cannot_be_are_refused_before_they_queue(prompt, options, message, plain):
    """H19 and the like: nothing is clamped, the engine is not troubled."""
    with pytest.raises(InvalidRequest, match=message):
        plain.start(Job(prompt, SamplingParams(**options)))
    plain.assert_idle()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt(text="x" * 10_000), f"prompt: expected at most {SMALL_MAX_LEN - 1} tokens .*got '10000 characters'"),
        (Prompt(text="a b c d " * 30), f"prompt: expected at most {SMALL_MAX_LEN - 1} tokens"),
        (Prompt(chat=(("user", "x" * 10_000),)), f"chat: expected at most {SMALL_MAX_LEN - 1} tokens"),
    ],
)
def test_text_that_cannot_fit_is_refused_with_both_numbers(prompt, message, plain):
    """H19, D17."""
    with pytest.raises(InvalidRequest, match=message):
        plain.engine.generate(prompt)
    plain.assert_idle()


def test_draining_refuses_finishes_and_then_aborts(make_rig, goldens):
    rig = make_rig(method="none", warm=False, max_slots=SMALL_SLOTS, max_len=SMALL_MAX_LEN)
    quick = rig.start(Job(goldens["p7"].ids, greedy(5)))
    rig.engine.drain(timeout_s=60)
    assert list(Completion.of(quick).token_ids) == goldens["p7"].greedy[:5]
    with pytest.raises(Unavailable, match="draining"):
        rig.run(goldens["p7"].ids, greedy(5))
    rig.engine.close()
    rig.engine.close()
    assert not rig.engine.ready
