"""Mistakes over the wire: refused with INVALID_ARGUMENT naming field, value and range, or of a documented meaning."""

import contextlib
import random

import grpc
import pytest
from google.protobuf import text_format

from jaxspec.engine.params import SamplingParams, SpeculationParams
from jaxspec.engine.records import Completion
from serve.client import CallFailed, Client
from serve.protos.jaxspec.v1 import inference_pb2 as pb


def answer_to(addr: str, data: bytes) -> tuple[grpc.StatusCode, str, str | None, list[pb.GenerateChunk]]:
    """Status, message, field and chunks for the raw bytes of a GenerateRequest."""
    with grpc.insecure_channel(addr) as channel:
        call = channel.unary_stream("/jaxspec.v1.Inference/Generate", None, pb.GenerateChunk.FromString)(data)
        chunks = []
        with contextlib.suppress(grpc.RpcError):
            chunks.extend(call)
        fields = [value for key, value in call.trailing_metadata() or () if key == "jaxspec-field"]
        return call.code(), call.details() or "", (fields or [None])[0], chunks


IDS = "prompt_ids { ids: 7 ids: 11 } "


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("", "prompt", "exactly one of"),
        ('prompt: ""', "prompt", "at least 1 character"),
        ("prompt_ids {}", "prompt_ids", "at least 1 token id"),
        ("chat {}", "chat", "at least 1 message"),
        ('chat { messages { content: "a" } }', "chat[0].role", "lower-case letters"),
        ("prompt_ids { ids: 3 ids: -1 }", "prompt_ids[1]", "[0, 511], got -1"),
        ("prompt_ids { ids: 512 }", "prompt_ids[0]", "[0, 511], got 512"),
        (IDS + "sampling { max_tokens: 0 }", "max_tokens", ">= 1"),
        (IDS + "sampling { max_tokens: -1 }", "max_tokens", ">= 1"),
        (IDS + "sampling { min_tokens: -1 }", "min_tokens", ">= 0"),
        (IDS + "sampling { max_tokens: 3 min_tokens: 4 }", "min_tokens", "at most max_tokens=3"),
        (IDS + "sampling { temperature: -0.5 }", "temperature", "got -0.5"),
        (IDS + "sampling { temperature: nan }", "temperature", "got nan"),
        (IDS + "sampling { temperature: inf }", "temperature", "got inf"),
        (IDS + "sampling { temperature: 1e9 }", "temperature", "[1e-06, 100]"),
        (IDS + "sampling { top_p: 0 }", "top_p", "(0, 1]"),
        (IDS + "sampling { top_p: nan }", "top_p", "got nan"),
        (IDS + "sampling { top_k: -1 }", "top_k", "0 turns top-k off"),
        (IDS + "sampling { min_p: 1.5 }", "min_p", "[0, 1]"),
        (IDS + "sampling { logprobs: 9 }", "logprobs", "[0, 8]"),
        (IDS + "sampling { num_beams: 4 }", "num_beams", "beam search"),
        (IDS + "sampling { stop_token_ids: 512 }", "stop_token_ids[0]", "[0, 511]"),
        (IDS + 'stop: "a" stop: ""', "stop[1]", "1 to 256 characters"),
        (IDS + 'stop: "a" ' * 1 + 'stop: "b" ' * 16, "stop", "at most 16"),
        (IDS + "speculation { num_speculative_tokens: 9 }", "num_speculative_tokens", "[0, 8]"),
        (IDS + "speculation { num_speculative_tokens: -1 }", "num_speculative_tokens", "[0, 8]"),
        (IDS + "content_type: 7", "content_type", "CONTENT_TYPE_CODE"),
        (IDS + 'request_id: ""', "request_id", "1 to 128"),
        (IDS + 'request_id: "a b"', "request_id", "without spaces"),
    ],
)
def test_a_mistake_is_named(server, text: str, field: str, words: str):
    request = text_format.Parse(text, pb.GenerateRequest())
    code, message, named, chunks = answer_to(server.addr, request.SerializeToString())
    assert (code, named, chunks) == (grpc.StatusCode.INVALID_ARGUMENT, field, [])
    assert message.startswith(f"{field}: expected ")
    assert words in message


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (pb.GenerateRequest(prompt="QQ").SerializeToString().replace(b"QQ", b"\xc3\x28"), "prompt"),
        (pb.GenerateRequest(prompt="a", stop=["QQ"]).SerializeToString().replace(b"QQ", b"\xff\xfe"), "stop[0]"),
        (b"\xff\xff", "request"),
        (pb.GenerateRequest(prompt="a").SerializeToString() + b"\x98\x06\x01", "request"),
    ],
    ids=["prompt", "stop", "not a message", "unknown field"],
)
def test_bytes_that_are_no_request_are_refused_by_name(server, data: bytes, field: str):
    code, _, named, _ = answer_to(server.addr, data)
    assert (code, named) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_seeds_beyond_64_bits_are_refused_before_they_are_sent(client: Client):
    with pytest.raises(ValueError, match=r"seed: expected an integer in \[0, 2\*\*64 - 1\]"):
        client.generate([7], SamplingParams(seed=2**64))


@pytest.mark.parametrize("max_tokens", [1, 5, 2**31 - 1, None], ids=str)
def test_h18_max_tokens_one_huge_and_unset(client: Client, goldens, max_tokens: int | None):
    ids = (goldens["p150"].ids * 2)[:240]
    done = Completion.of(client.generate(ids, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)))
    room = 251 - 240
    assert len(done.token_ids) == min(max_tokens or room, room)
    assert done.finish_reason == "length"


@pytest.mark.parametrize("gamma", [0, 8])
def test_h20_one_token_fits_behind_the_longest_prompt(client: Client, goldens, gamma: int):
    ids = (goldens["p150"].ids * 2)[:250]
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    done = Completion.of(client.generate(ids, greedy, SpeculationParams(gamma)))
    assert (len(done.token_ids), done.finish_reason) == (1, "length")


@pytest.mark.parametrize("length", [251, 252, 2510])
def test_h19_longer_prompts_are_refused_with_both_numbers(client: Client, goldens, length: int):
    ids = (goldens["p150"].ids * 20)[:length]
    with pytest.raises(CallFailed) as failed:
        list(client.generate(ids))
    assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.value.field == "prompt_ids"
    assert str(length) in failed.value.message
    assert "250" in failed.value.message
    assert client.serving()


def enormous_prompts() -> dict[str, str]:
    rng = random.Random(7)
    return {
        "one letter": "a" * 1_000_000,
        "random letters": "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=1_000_000)),
        "cjk": "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(100_000)),
    }


def test_d17_enormous_prompts_are_refused_while_another_stream_goes_on(client: Client, server, goldens):
    golden = goldens["p33"]
    stream = client.generate(golden.ids, golden.sampling())
    chunks = [next(stream)]
    for text in enormous_prompts().values():
        with pytest.raises(CallFailed) as failed:
            list(client.generate(text))
        assert (failed.value.code, failed.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")
    assert Completion.of([*chunks, *stream]).token_ids == golden.greedy


def test_a_message_over_the_limit_is_refused_by_the_transport(client: Client, server):
    with pytest.raises(CallFailed) as failed:
        list(client.generate("a" * (server.server.options.max_request_bytes + 1)))
    assert failed.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.value.retry_after_s is None


def test_the_other_methods_refuse_by_name_too(client: Client):
    with pytest.raises(CallFailed) as failed:
        client.abort("")
    assert (failed.value.code, failed.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")
