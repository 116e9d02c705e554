"""Cancels, deadlines, aborts, bursts and slow readers: every stream ends, every slot comes back."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxspec.engine.params import SamplingParams, SpeculationParams
from jaxspec.engine.records import Chunk, Completion
from serve.client import CallFailed, Client
from serve.protos.jaxspec.v1 import inference_pb2 as pb
from serve.protos.jaxspec.v1 import inference_pb2_grpc

PLAIN = SpeculationParams(0)
# As long as the context allows: some hundred steps, so that a test acts while it runs.
LONG = SamplingParams(temperature=0.0, ignore_eos=True)


def started(client: Client, count: int, prefix: str = "long") -> list[Iterator[Chunk]]:
    """Long requests, each with its first chunk taken."""
    streams = [client.generate([7], LONG, PLAIN, request_id=f"{prefix}-{i}") for i in range(count)]
    for stream in streams:
        next(stream)
    return streams


def close(streams: list[Iterator[Chunk]]) -> None:
    for stream in streams:
        stream.close()  # pyright: ignore[reportAttributeAccessIssue]


def finished(server) -> Counter[str]:
    return Counter(server.loads().counters.num_requests_finished)


def test_h01_h04_cancelled_streams_leave_their_slots_to_the_next(client: Client, server, goldens, slow_steps):
    before = finished(server)
    for round_ in range(3):
        close(started(client, 3, f"round-{round_}"))
        server.wait_idle()
    streams = started(client, 3)
    waiting = client.generate(goldens["p33"].ids, goldens["p33"].sampling())
    close(streams[:1])
    assert Completion.of(waiting).token_ids == goldens["p33"].greedy
    close(streams)
    server.wait_idle()
    assert finished(server) - before == {"abort": 3 * 3 + 3, "length": 1}, "nobody decoded on for the dead"


def test_h04_a_client_that_vanishes_frees_its_slots(server, goldens, slow_steps):
    before = finished(server)
    with Client(server.addr) as vanishing:
        started(vanishing, 3, "vanishing")
        assert server.loads().running == 3
    with Client(server.addr) as third:
        assert Completion.of(third.generate(goldens["p7"].ids, goldens["p7"].sampling())).token_ids
    server.wait_idle()
    assert finished(server) - before == {"abort": 3, "length": 1}


def resident_mb() -> float:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def test_h02_cancelled_calls_leave_no_memory_behind(client: Client, server):
    def cycles(count: int) -> None:
        for _ in range(count):
            stream = client.generate([7], LONG)
            next(stream)
            close([stream])

    cycles(150)
    server.wait_idle()
    before = resident_mb()
    cycles(300)
    server.wait_idle()
    assert resident_mb() - before < 3, "300 cancelled calls must not keep 10 KB each"


def test_h05_an_abort_is_never_lost_whenever_it_comes(client: Client, server, slow_steps):
    rng = random.Random(11)
    with grpc.insecure_channel(server.addr) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for trial in range(60):
            prompt = pb.TokenIds(ids=[7] * rng.choice((1, 149)))
            request = pb.GenerateRequest(prompt_ids=prompt, request_id=f"abort-{trial}")
            request.sampling.ignore_eos = True
            request.speculation.num_speculative_tokens = rng.choice((0, 8))
            call = stub.Generate(request)
            call.initial_metadata()  # the id is known from here on, also while the prompt is still being tokenized
            time.sleep(rng.choice((0, 0, 0.001, 0.005, 0.02)))
            assert client.abort(f"abort-{trial}")
            chunks = list(call)
            assert chunks[-1].finish_reason == pb.FINISH_REASON_ABORT
            assert chunks[-1].usage.completion_tokens == sum(len(chunk.token_ids) for chunk in chunks)
    server.wait_idle()


def test_abort_of_a_waiting_request_ends_it_while_the_slots_are_taken(client: Client, server, slow_steps):
    streams = started(client, 3)
    waiting = client.generate([7], LONG, request_id="waiting")
    chunks: list[Chunk] = []
    reader = threading.Thread(target=lambda: chunks.extend(waiting))
    reader.start()
    server.wait("in the queue", lambda loads: loads.waiting == 1)
    assert client.abort("waiting")
    reader.join(timeout=30)
    assert [chunk.finish_reason for chunk in chunks] == ["abort"]
    assert server.loads().running == 3
    assert not client.abort("waiting")
    close(streams)


def test_a_request_id_in_use_is_refused_and_free_again_afterwards(client: Client, server, slow_steps):
    streams = started(client, 1, "taken")
    with pytest.raises(CallFailed) as failed:
        next(client.generate([7], LONG, request_id="taken-0"))
    assert failed.value.code is grpc.StatusCode.ALREADY_EXISTS
    close(streams)
    server.wait_idle()
    close(started(client, 1, "taken"))


def test_the_request_id_is_in_the_initial_metadata(server):
    with grpc.insecure_channel(server.addr) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=[7]), sampling=pb.Sampling(max_tokens=1))
        )
        metadata = dict(call.initial_metadata())
        chunks = list(call)
    assert {chunk.request_id for chunk in chunks} == {metadata["jaxspec-request-id"]}


def test_h07_an_expired_request_leaves_the_queue_before_it_reaches_the_model(client: Client, server, slow_steps):
    streams = started(client, 3)
    with pytest.raises(CallFailed) as failed:
        list(client.generate([7], LONG, timeout_s=0.05))
    assert failed.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    server.wait("out of the queue", lambda loads: loads.waiting == 0)
    assert server.loads().running == 3, "the slots were taken all the time"
    close(streams)


def test_h06_a_deadline_ends_prefill_and_decoding(client: Client, server, goldens, slow_steps):
    before = finished(server)
    long_prompt, short_prompt = (goldens["p150"].ids * 2)[:240], [7]
    for prompt, timeout_s in ((long_prompt, 0.001), (long_prompt, 0.004), (short_prompt, 0.02), (short_prompt, 0.05)):
        with pytest.raises(CallFailed) as failed:
            list(client.generate(prompt, LONG, PLAIN, timeout_s=timeout_s))
        assert failed.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    server.wait_idle()
    assert set(finished(server) - before) <= {"deadline", "abort"}, "nobody decoded on for the dead"


def test_h16_every_request_of_a_burst_is_answered(client: Client, server, goldens, slow_steps):
    golden = goldens["p7"]
    with grpc.insecure_channel(server.addr) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=golden.ids))
        request.sampling.max_tokens, request.sampling.temperature, request.sampling.ignore_eos = 64, 0.0, True
        calls = [stub.Generate(request) for _ in range(200)]
        codes: dict[grpc.StatusCode, int] = {}
        for call in calls:
            tokens: list[int] = []
            try:
                for chunk in call:
                    tokens += chunk.token_ids
                assert tuple(tokens) == golden.greedy
            except grpc.RpcError:
                retry = dict(call.trailing_metadata())["retry-after-ms"]
                assert int(retry) > 0
                assert not tokens
            codes[call.code()] = codes.get(call.code(), 0) + 1
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert codes[grpc.StatusCode.OK] >= 3 + 11, "slots and queue at least are served"
    server.wait_idle()


def test_h24_many_streams_make_progress_together(server, goldens, monkeypatch):
    golden = goldens["p7"]
    monkeypatch.setattr(server.engine._loop.scheduler, "max_queue", 200)
    with grpc.insecure_channel(server.addr) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=golden.ids))
        request.sampling.max_tokens, request.sampling.temperature, request.sampling.ignore_eos = 16, 0.0, True
        calls = [stub.Generate(request) for _ in range(200)]
        for call in calls:
            assert tuple(token for chunk in call for token in chunk.token_ids) == golden.greedy[:16]


def test_h10_a_reader_that_pauses_holds_no_slot_and_gets_every_token(client: Client, server, goldens):
    golden = goldens["p33"]
    stream = client.generate(golden.ids, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, logprobs=8))
    first = next(stream)
    server.wait_idle()
    done = Completion.of([first, *stream])
    assert done.token_ids[:64] == golden.greedy
    assert len(done.token_ids) == done.summary.usage.completion_tokens == 200
    assert done.logprobs is not None
    assert [entry.token_id for entry in done.logprobs] == list(done.token_ids)


def test_h03_a_forgotten_stream_ends_at_the_servers_own_limit(client: Client, server, slow_steps, monkeypatch):
    monkeypatch.setattr(server.server.service, "max_stream_s", 0.05)
    with pytest.raises(CallFailed) as failed:
        list(client.generate([7], LONG, PLAIN))
    assert failed.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_h15_clients_may_ping_through_a_quiet_stream(loading_server):
    pings = [
        ("grpc.keepalive_time_ms", 1000),  # the core pings no faster
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(loading_server.addr, options=pings) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(call).status == health_pb2.HealthCheckResponse.NOT_SERVING
        time.sleep(4)  # pings without data; under the core's own limit the third meets a GOAWAY
        call.cancel()
        with pytest.raises(grpc.RpcError) as ended:
            next(call)
        assert ended.value.code() is grpc.StatusCode.CANCELLED, "still open, until we left"


def test_a_drain_refuses_new_requests_and_ends_the_rest_with_abort(doomed_server, slow_down):
    slow_down(doomed_server)
    with Client(doomed_server.addr) as client:
        (stream,) = started(client, 1)
        doomed_server.call(doomed_server.server.drain)
        assert not client.serving()
        with pytest.raises(CallFailed) as failed:
            next(client.generate([7], LONG))
        assert failed.value.code is grpc.StatusCode.UNAVAILABLE
        assert Completion.of(stream).finish_reason == "abort"


def test_health_turns_bad_when_the_engine_dies(doomed_server, monkeypatch):
    """H19: the process lives, but nothing can be served."""

    def explode(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with Client(doomed_server.addr) as client:
        assert client.serving()
        monkeypatch.setattr(doomed_server.engine.programs, "prefill", explode)
        with pytest.raises(CallFailed) as failed:
            list(client.generate([7], LONG))
        assert failed.value.code is grpc.StatusCode.INTERNAL
        doomed_server.wait("health", lambda _: not client.serving())
        with pytest.raises(CallFailed) as failed:
            next(client.generate([7], LONG))
        assert failed.value.code is grpc.StatusCode.UNAVAILABLE
