"""200 requests of 32 clients at once, with random cancels, aborts and deadlines."""

import random
import threading
import time
from collections import Counter

import grpc

from jaxspec.engine.params import SamplingParams, SpeculationParams
from jaxspec.engine.records import Chunk, Completion
from serve.client import CallFailed, Client

REQUESTS, CLIENTS = 200, 32


def test_every_stream_ends_every_slot_comes_back_and_tokens_are_the_solo_runs(server, goldens):
    names = sorted(goldens)
    solo = {
        seed: Completion.of(
            server.engine.generate(
                list(goldens["p7"].ids), SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=seed)
            )
        ).token_ids
        for seed in range(3)
    }
    jobs = list(range(REQUESTS))
    endings: Counter[str] = Counter()
    problems: list[str] = []
    lock = threading.Lock()

    def end(ending: str, problem: str | None = None) -> None:
        with lock:
            endings[ending] += 1
            if problem is not None:
                problems.append(problem)

    def run(client: Client, job: int) -> None:
        rng = random.Random(job)
        gamma = SpeculationParams(rng.choice((None, 0, 1, 2, 5, 8)))
        count = rng.randint(1, 64)
        golden = goldens[rng.choice(names)]
        prompt, sampling, expected = golden.ids, golden.sampling(count), golden.greedy[:count]
        if job % 4 == 0:
            seed = rng.randrange(3)
            prompt, sampling = goldens["p7"].ids, SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=seed)
            gamma, expected = SpeculationParams(), solo[seed]
        fate = rng.choice(("finish", "finish", "cancel", "deadline", "abort"))
        timeout_s = rng.uniform(0.001, 0.3) if fate == "deadline" else None
        request_id = f"job-{job}"
        stream = client.generate(prompt, sampling, gamma, request_id=request_id, timeout_s=timeout_s)
        chunks: list[Chunk] = []
        cancel_after = rng.randint(0, 3)
        try:
            for chunk in stream:
                chunks.append(chunk)
                if fate == "cancel" and len(chunks) > cancel_after:
                    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
                if fate == "abort" and len(chunks) == 1:
                    client.abort(request_id)
        except CallFailed as failed:
            if failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED and failed.retry_after_s is not None:
                time.sleep(min(failed.retry_after_s, 0.05))
                with lock:
                    jobs.append(job)
                return
            right = failed.code is grpc.StatusCode.DEADLINE_EXCEEDED and fate == "deadline"
            end(failed.code.name, None if right else f"{job} ({fate}): {failed}")
            return
        tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
        if chunks and chunks[-1].finish_reason is not None:
            ending = chunks[-1].finish_reason
            right = tokens == expected if ending != "abort" else tokens == expected[: len(tokens)] and fate == "abort"
        else:
            ending, right = "cancelled", fate == "cancel" and tokens == expected[: len(tokens)]
        end(ending, None if right else f"{job} ({fate}): ended {ending} with {tokens}, expected {expected}")

    def work() -> None:
        with Client(server.addr) as client:
            while True:
                with lock:
                    if not jobs:
                        return
                    job = jobs.pop(0)
                run(client, job)

    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not problems
    assert sum(endings.values()) == REQUESTS, endings
    assert endings["length"] > 50, endings
    assert min(endings["cancelled"], endings["DEADLINE_EXCEEDED"]) > 0, endings
    server.wait_idle()
