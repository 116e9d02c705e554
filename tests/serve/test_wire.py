"""Messages and records: what one side writes the other reads; what does not parse is refused by name."""

import dataclasses
from pathlib import Path

import pytest

from jaxspec.engine import records
from jaxspec.engine.params import Prompt, SamplingParams, SpeculationParams
from jaxspec.errors import InvalidRequest
from scripts.proto import ROOT, generate
from serve import wire
from serve.protos.jaxspec.v1 import inference_pb2 as pb


def test_the_committed_code_is_what_protoc_makes(tmp_path: Path) -> None:
    for made in generate(tmp_path):
        committed = ROOT / made.relative_to(tmp_path)
        assert committed.read_text() == made.read_text(), f"{committed.name} is stale: run make proto"


@pytest.mark.parametrize(
    "prompt",
    [Prompt(text="née ✓"), Prompt(ids=(3, 496, 511)), Prompt(chat=(("system", ""), ("user", "<|eot_id|>")))],
)
def test_requests_come_back_as_they_were(prompt: Prompt) -> None:
    sampling = SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.0,
        top_k=5,
        top_p=0.9,
        min_p=0.05,
        seed=2**64 - 1,
        stop=("a", "é"),
        stop_token_ids=(11, 13),
        ignore_eos=True,
        logprobs=0,
        skip_special_tokens=False,
    )
    request = wire.write_request(prompt, sampling, SpeculationParams(0, 5, 2), "id-1")
    parsed = wire.parse(pb.GenerateRequest, request.SerializeToString())
    assert wire.read_request(parsed, 512) == wire.Call(prompt, sampling, SpeculationParams(0, 5, 2), "id-1")


def test_unset_is_not_zero() -> None:
    request = pb.GenerateRequest(prompt="a", sampling=pb.Sampling())
    call = wire.read_request(request, 512)
    assert call.sampling == SamplingParams()
    assert call.speculation == SpeculationParams(None)
    assert call.request_id is None
    request.sampling.temperature = 0.0
    assert wire.read_request(request, 512).sampling.temperature == 0.0


def test_chunks_come_back_as_they_were() -> None:
    summary = records.Summary(
        records.Usage(3, 2),
        records.Timing(1.5, None, None),
        records.SpeculationSummary.of(
            method="ngram",
            histogram=(1, 2, 0, 0, 0, 0, 0, 0, 1),
            num_draft_tokens=17,
            num_tokens=14,
            num_target_passes=5,
        ),
        seed=2**64 - 1,
    )
    logprobs = (records.TokenLogprob(7, -0.5, ((7, -0.5), (9, -1.25))), records.TokenLogprob(11, -0.25))
    middle = records.Chunk("r", (7, 11), "né", ("draft", "bonus"), (1, 2), logprobs)
    last = records.Chunk("r", text="!", logprobs=(), finish_reason="stop", summary=summary)
    for chunk in (middle, last):
        message = pb.GenerateChunk.FromString(wire.write_chunk(chunk).SerializeToString())
        assert wire.read_chunk(message, with_logprobs=True) == chunk
    assert wire.read_chunk(wire.write_chunk(middle), with_logprobs=False).logprobs is None


def test_every_origin_and_finish_reason_has_a_word_on_the_wire() -> None:
    origins = tuple(records.ORIGINS)
    chunk = records.Chunk("r", tuple(range(len(origins))), "", origins, (0,) * len(origins))
    assert wire.read_chunk(wire.write_chunk(chunk), with_logprobs=False) == chunk
    assert len(pb.TokenOrigin.values()) == len(origins) + 1
    assert len(pb.FinishReason.values()) == len(records.FINISH_REASONS) + 1


def test_answers_come_back_as_they_were() -> None:
    model = records.ModelInfo("llama", "3", 70_553_706_496, 128256, 8192, "bfloat16", None, False, (128001, 128009))
    assert wire.read_model_info(wire.write_model_info(model)) == model
    server = records.ServerInfo(
        "0.1.0", {"data": 1, "model": 4}, "cpu", 4, 1024, 64, "ngram", "token", 8, gamma_buckets=(0, 2, 4, 8)
    )
    assert wire.read_server_info(wire.write_server_info(server)) == server
    looking = dataclasses.replace(server, prompt_lookup_max=8, prompt_lookup_min=3)
    assert wire.read_server_info(wire.write_server_info(looking)) == looking
    counters = records.Counters(3, 24, 9, (3, 2, 2, 1, 1, 0, 0, 0), 40, 12, {"stop": 2, "length": 1})
    loads = records.Loads(2, 5, 1, 77, 3072, counters)
    assert wire.read_loads(wire.write_loads(loads)) == loads


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(prompt="QQ"), "prompt"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user"), pb.ChatMessage(content="QQ")])), None),
        (pb.GenerateRequest(prompt="a", stop=["b", "QQ"]), "stop[1]"),
        (pb.GenerateRequest(prompt="a", request_id="QQ"), "request_id"),
    ],
)
def test_text_that_is_not_utf8_is_refused_with_its_field(request_: pb.GenerateRequest, field: str | None) -> None:
    data = request_.SerializeToString().replace(b"QQ", b"\xc3\x28")
    with pytest.raises(InvalidRequest, match="UTF-8") as refused:
        wire.parse(pb.GenerateRequest, data)
    assert refused.value.field == (field or "chat.messages[1].content")


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"jaxspec\.v1\.GenerateRequest message"):
        wire.parse(pb.GenerateRequest, b"\xff\xff\xff")


@pytest.mark.parametrize(
    ("prefix", "where"),
    [(b"", "request"), (b"\x22", "sampling")],
    ids=["top", "nested"],
)
def test_fields_of_a_newer_client_are_refused(prefix: bytes, where: str) -> None:
    field_99 = b"\x98\x06\x01"
    data = prefix + bytes([len(field_99)]) + field_99 if prefix else field_99
    with pytest.raises(InvalidRequest, match="unknown field 99") as refused:
        wire.parse(pb.GenerateRequest, data)
    assert refused.value.field == where
