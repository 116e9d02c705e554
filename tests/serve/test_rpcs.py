"""Every method over a real channel: exact tokens, whole text, and what the server says about itself."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jaxspec import terminal
from jaxspec.engine.params import Prompt, SamplingParams, SpeculationParams
from jaxspec.engine.records import Completion
from jaxspec.text import Tokenizer
from serve import client_cli
from serve.client import CallFailed, Client
from serve.protos.jaxspec.v1 import inference_pb2 as pb


@pytest.fixture(scope="module")
def tokenizer(tiny_models: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.load(tiny_models("tiny-llama3") / "tokenizer")


@pytest.mark.parametrize("gamma", [None, 0, 1, 3, 8])
@pytest.mark.parametrize("name", ["p1", "p7", "p33", "p150"])
def test_greedy_tokens_are_the_references_for_every_draft_length(client: Client, goldens, tokenizer, name, gamma):
    golden = goldens[name]
    done = Completion.of(client.generate(golden.ids, golden.sampling(), SpeculationParams(gamma)))
    assert done.token_ids == golden.greedy
    assert done.text == tokenizer.decode(list(golden.greedy))
    assert done.finish_reason == "length"
    assert done.summary.usage.prompt_tokens == len(golden.ids)
    assert done.summary.usage.completion_tokens == len(golden.greedy) == len(done.origins)
    drafts = done.summary.speculation
    assert (drafts.num_draft_tokens == 0) == (gamma == 0)
    assert done.origins.count("draft") == drafts.num_accepted_draft_tokens
    assert sum(drafts.acceptance_histogram) == drafts.num_spec_steps


def test_the_stream_is_whole_characters_and_shares_of_tokens(client: Client, goldens):
    chunks = list(client.generate(goldens["p33"].ids, goldens["p33"].sampling()))
    assert len(chunks) > 2, "a stream, not one answer"
    assert len({chunk.request_id for chunk in chunks}) == 1
    for chunk in chunks:
        assert len(chunk.text_ends) == len(chunk.origins) == len(chunk.token_ids)
        assert list(chunk.text_ends) == sorted(chunk.text_ends)
        assert not chunk.text_ends or chunk.text_ends[-1] <= len(chunk.text)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert [chunk.summary for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_a_seed_repeats_a_sampled_completion_and_is_reported(client: Client, goldens):
    sampling = SamplingParams(max_tokens=17, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01)
    first = Completion.of(client.generate(goldens["p7"].ids, sampling))
    seeds = (first.summary.seed, 2**64 - 1, 2**63)
    again = [
        Completion.of(client.generate(goldens["p7"].ids, SamplingParams(**{**vars(sampling), "seed": seed})))
        for seed in seeds
    ]
    assert again[0].token_ids == first.token_ids
    assert [done.summary.seed for done in again] == list(seeds)
    assert again[1].token_ids != again[2].token_ids, "all 64 bits count"


def test_logprobs_come_one_per_token_with_their_alternatives(client: Client, goldens):
    golden = goldens["p7"]
    sampling = SamplingParams(max_tokens=13, temperature=0.0, ignore_eos=True, logprobs=3)
    done = Completion.of(client.generate(golden.ids, sampling))
    assert done.logprobs is not None
    assert [entry.token_id for entry in done.logprobs] == list(golden.greedy[:13])
    for entry in done.logprobs:
        assert entry.logprob <= 0
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob, abs=1e-5)), "greedy takes the best"
    none_asked = SamplingParams(max_tokens=3, temperature=0.0)
    assert Completion.of(client.generate(golden.ids, none_asked)).logprobs is None
    no_alternatives = SamplingParams(max_tokens=3, temperature=0.0, logprobs=0)
    entries = Completion.of(client.generate(golden.ids, no_alternatives)).logprobs
    assert entries is not None
    assert [len(entry.top) for entry in entries] == [0, 0, 0]


def test_stop_text_is_never_sent_and_all_views_end_together(client: Client, goldens, tokenizer):
    golden = goldens["p33"]
    whole = tokenizer.decode(list(golden.greedy))
    stop = next(whole[i : i + 5] for i in range(20, len(whole)) if whole[i : i + 5].isprintable())
    sampling = SamplingParams(
        max_tokens=64, temperature=0.0, ignore_eos=True, stop=("never to be seen", stop), logprobs=0
    )
    chunks = list(client.generate(golden.ids, sampling))
    done = Completion.of(chunks)
    assert done.text == whole[: whole.index(stop)]
    assert done.finish_reason == "stop"
    assert done.token_ids == golden.greedy[: len(done.token_ids)]
    assert done.logprobs is not None
    assert len(done.logprobs) == len(done.token_ids) == done.summary.usage.completion_tokens


def test_text_and_chat_prompts_are_tokenized_by_the_model(client: Client, tokenizer):
    text = "née <|eot_id|> 7 + 11"
    greedy = SamplingParams(max_tokens=11, temperature=0.0, ignore_eos=True)
    ids = tokenizer.encode(text, add_bos=tokenizer.adds_bos)
    from_text = Completion.of(client.generate(text, greedy))
    assert from_text.token_ids == Completion.of(client.generate(ids, greedy)).token_ids
    assert from_text.summary.usage.prompt_tokens == len(ids)


def test_a_begin_of_sequence_token_alone_is_a_prompt(client: Client, goldens):
    assert Completion.of(client.generate([496], goldens["p1"].sampling(5))).token_ids == goldens["p1"].greedy[:5]


def test_the_servers_words_about_itself(client: Client, server):
    model, info, loads = client.model_info(), client.server_info(), client.loads()
    assert model == server.engine.model_info()
    assert (model.family, model.vocab_size, model.has_tokenizer) == ("llama", 512, True)
    assert info == server.engine.server_info()
    assert (info.max_slots, info.max_len, info.max_queue) == (3, 251, 11)
    assert (loads.running, loads.waiting, loads.slots_free) == (0, 0, 3)
    with grpc.insecure_channel(server.addr) as channel:
        ask = channel.unary_unary("/jaxspec.v1.Inference/GetServerInfo", None, pb.ServerInfo.FromString)
        limits = ask(b"")
    assert limits.max_request_bytes == server.server.options.max_request_bytes
    assert limits.max_stream_s == server.server.options.max_stream_s


def test_counters_add_up(client: Client, server, goldens):
    before = client.loads().counters
    done = Completion.of(client.generate(goldens["p33"].ids, goldens["p33"].sampling()))
    after = client.loads().counters
    drafts = done.summary.speculation
    assert after.num_drafts - before.num_drafts == drafts.num_spec_steps
    assert after.num_draft_tokens - before.num_draft_tokens == drafts.num_draft_tokens
    assert after.num_accepted_tokens - before.num_accepted_tokens == drafts.num_accepted_draft_tokens
    assert after.num_committed_tokens - before.num_committed_tokens == 64
    assert sum(after.num_accepted_tokens_per_pos) == after.num_accepted_tokens
    assert after.num_requests_finished["length"] == before.num_requests_finished.get("length", 0) + 1


def test_reflection_names_the_services_and_their_messages(server):
    with grpc.insecure_channel(server.addr) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) == {
            "jaxspec.v1.Inference",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        file = database.FindFileContainingSymbol("jaxspec.v1.Inference")
    (service,) = file.service
    assert [method.name for method in service.method] == [
        "Generate",
        "Abort",
        "GetModelInfo",
        "GetServerInfo",
        "GetLoads",
    ]
    assert service.method[0].server_streaming
    assert {"GenerateRequest", "GenerateChunk", "Sampling"} <= {message.name for message in file.message_type}


def test_health_is_told_for_the_server_and_the_service(server):
    with grpc.insecure_channel(server.addr) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "jaxspec.v1.Inference"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as refused:
            stub.Check(health_pb2.HealthCheckRequest(service="jaxspec.v1.Nothing"))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def test_metrics_have_the_names_and_the_numbers(client: Client, server, goldens):
    Completion.of(client.generate(goldens["p33"].ids, goldens["p33"].sampling()))
    counters = client.loads().counters
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server.metrics_port}/metrics") as reply:
        lines = [line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in lines}
    assert values["jaxspec_spec_decode_num_drafts_total"] == counters.num_drafts > 0
    assert values["jaxspec_spec_decode_num_draft_tokens_total"] == counters.num_draft_tokens
    assert values["jaxspec_spec_decode_num_accepted_tokens_total"] == counters.num_accepted_tokens
    for position, count in enumerate(counters.num_accepted_tokens_per_pos):
        assert values[f'jaxspec_spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'] == count
    assert values["jaxspec_time_to_first_token_seconds_count"] >= 1
    assert values["jaxspec_time_per_output_token_seconds_count"] >= 1
    assert values["jaxspec_num_requests_running"] == values["jaxspec_num_requests_waiting"] == 0
    assert 0 <= values["jaxspec_kv_cache_usage_perc"] <= 1
    assert values['jaxspec_requests_total{status="OK"}'] >= 1


def run_client(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = client_cli.main(arguments)
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_the_command_line_client_prints_the_one_object(server, goldens, tokenizer, capsys):
    golden = goldens["p7"]
    ids = ",".join(map(str, golden.ids))
    flags = ("--addr", server.addr, "--prompt-ids", ids, "--temperature", "0", "--max-tokens", "16", "--ignore-eos")
    status, out, _ = run_client(capsys, *flags, "--json")
    assert status == 0
    told = json.loads(out)
    assert list(told) == ["text", "token_ids", "finish_reason", "usage", "timing", "speculation", "seed"]
    assert told["token_ids"] == list(golden.greedy[:16])
    assert told["text"] == tokenizer.decode(list(golden.greedy[:16]))
    assert told["usage"] == {"prompt_tokens": 7, "completion_tokens": 16}
    assert set(told["timing"]) == {"ttft_ms", "tpot_ms", "tokens_per_s"}
    assert set(told["speculation"]) == {
        "method",
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "draft_acceptance_rate",
        "mean_acceptance_length",
        "tokens_per_target_pass",
        "acceptance_histogram",
    }
    status, out, err = run_client(capsys, *flags, "--color", "never")
    assert (status, out) == (0, told["text"] + "\n")
    assert err.startswith("[length: 16 tokens after 7")
    status, out, _ = run_client(capsys, *flags, "--num-speculative-tokens", "0", "--color", "always")
    assert "\x1b[32m" not in out, "nothing was drafted"


def test_drafted_tokens_are_in_colour(server, goldens, capsys):
    golden = goldens["p33"]
    drafted = Completion.of(Client(server.addr).generate(golden.ids, golden.sampling())).origins.count("draft")
    ids = ",".join(map(str, golden.ids))
    flags = ("--addr", server.addr, "--prompt-ids", ids, "--temperature", "0", "--max-tokens", "64", "--ignore-eos")
    _, plain, _ = run_client(capsys, *flags, "--color", "never")
    _, coloured, _ = run_client(capsys, *flags, "--color", "always")
    assert drafted > 0
    assert "\x1b[32m" in coloured
    printable = plain.translate(terminal.VISIBLE)
    assert coloured.replace("\x1b[32m", "").replace("\x1b[0m", "") == printable


@pytest.mark.parametrize("question", ["--info", "--server-info", "--loads"])
def test_the_command_line_client_asks(server, capsys, question):
    status, out, _ = run_client(capsys, "--addr", server.addr, question)
    assert status == 0
    assert json.loads(out)


def test_the_command_line_clients_exit_status(server, capsys):
    at = ("--addr", server.addr)
    assert run_client(capsys, *at, "--health")[:2] == (0, "SERVING\n")
    assert run_client(capsys, *at, "--abort", "nobody")[0] == 1
    status, _, err = run_client(capsys, *at, "--prompt-ids", "512")
    assert status == 2
    assert "INVALID_ARGUMENT: prompt_ids[0]" in err
    status, _, err = run_client(capsys, *at, "--prompt", "a", "--top-k", "-1")
    assert (status, err.count("\n")) == (2, 1)
    assert run_client(capsys, *at, "--prompt", "a", "--timeout-s", "nan")[0] == 2
    status, _, err = run_client(capsys, "--addr", "127.0.0.1:1", "--prompt", "a")
    assert status == 1
    assert "UNAVAILABLE" in err


def test_calls_that_fail_say_so_with_code_and_field(client: Client):
    with pytest.raises(CallFailed) as failed:
        list(client.generate(Prompt(ids=(512,))))
    assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.value.field == "prompt_ids[0]"
