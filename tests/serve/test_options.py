"""Ranges of request parameters, and the flags that the front doors share."""

import dataclasses
import json
from typing import Any

import pytest

from jaxspec import options
from jaxspec.engine.params import Prompt, SamplingParams, SpeculationConfig, SpeculationParams
from jaxspec.errors import InvalidRequest, UserError

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", [1, 2**31 - 1, 2**70, None], [0, -1, 1.5, True]),
        ("min_tokens", [0, 5], [-1, 0.5]),
        ("temperature", [0, 0.0, 1e-6, 1, 100.0], [-0.1, 9e-7, 100.1, 1e9, NAN, INFINITY, "1"]),
        ("top_k", [0, 1, 10**6], [-1, 1.0]),
        ("top_p", [1e-9, 1], [0, -0.5, 1.01, NAN]),
        ("min_p", [0, 1], [-0.01, 1.01, NAN]),
        ("seed", [None, 0, 2**64 - 1], [-1, 2**64, 0.5]),
        ("logprobs", [None, 0, 8], [-1, 9]),
        ("stop", [(), ("a",) * 16, ("x" * 256,)], [("a",) * 17, "a"]),
        ("stop_token_ids", [(), (0, 511), (3,) * 16], [(3,) * 17]),
    ],
)
def test_each_field_takes_its_range_and_no_more(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        SamplingParams(**{field: value}).validate(vocab_size=512)
    for value in bad:
        with pytest.raises(InvalidRequest, match=rf"^{field}: expected .*, got ") as refused:
            SamplingParams(**{field: value}).validate(vocab_size=512)
        assert refused.value.field == field


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingParams(stop=("a", "")), "stop[1]"),
        (SamplingParams(stop=("x" * 257,)), "stop[0]"),
        (SamplingParams(stop=("\udcff",)), "stop[0]"),
        (SamplingParams(stop_token_ids=(3, 512)), "stop_token_ids[1]"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids[0]"),
        (SamplingParams(max_tokens=5, min_tokens=6), "min_tokens"),
    ],
)
def test_a_bad_entry_is_named_with_its_index(sampling: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sampling.validate(vocab_size=512)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (Prompt(), "prompt"),
        (Prompt(text="a", ids=(1,)), "prompt"),
        (Prompt(text=""), "prompt"),
        (Prompt(text="a\ud800"), "prompt"),
        (Prompt(ids=()), "prompt_ids"),
        (Prompt(ids=(0, 512)), "prompt_ids[1]"),
        (Prompt(ids=(-1,)), "prompt_ids[0]"),
        (Prompt(chat=()), "chat"),
        (Prompt(chat=(("user", "a"), ("", "b"))), "chat[1].role"),
        (Prompt(chat=(("user<|eot_id|>", "a"),)), "chat[0].role"),
    ],
)
def test_prompts_that_say_nothing_or_two_things_are_refused(prompt: Prompt, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prompt.validate(vocab_size=512)
    assert refused.value.field == field


def test_prompt_of_tells_text_from_ids() -> None:
    assert Prompt.of("a") == Prompt(text="a")
    assert Prompt.of([1, 2]) == Prompt(ids=(1, 2))
    assert Prompt.of(Prompt(text="b")) == Prompt(text="b")


@pytest.mark.parametrize("gamma", [-1, 9])
def test_draft_lengths_beyond_8_are_refused(gamma: int) -> None:
    with pytest.raises(InvalidRequest, match=r"num_speculative_tokens: expected an integer in \[0, 8\]"):
        SpeculationParams(gamma).validate()


@pytest.mark.parametrize(
    ("longest", "shortest", "words"),
    [
        (0, None, r"prompt_lookup_max: expected an integer in \[1, 16\]"),
        (17, None, "prompt_lookup_max"),
        (True, None, "prompt_lookup_max"),
        (None, 0, "prompt_lookup_min"),
        (None, 2.0, "prompt_lookup_min"),
        (3, 4, "prompt_lookup_min: expected at most prompt_lookup_max=3, got 4"),
        (7, 1, "prompt_lookup_max: expected at most the server's prompt_lookup_max=6, got 7"),
        (None, 7, "prompt_lookup_min: expected at most prompt_lookup_max=6, got 7"),
    ],
)
def test_lookup_lengths_of_a_request_have_ranges_and_the_servers_bound(longest, shortest, words) -> None:
    params = SpeculationParams(None, longest, shortest)

    def check() -> None:
        params.validate()
        params.lookup(SpeculationConfig(prompt_lookup_max=6))

    with pytest.raises(InvalidRequest, match=words):
        check()


def test_lookup_lengths_that_a_request_leaves_out_are_the_servers() -> None:
    server = SpeculationConfig(prompt_lookup_max=6, prompt_lookup_min=4)
    assert SpeculationParams().lookup(server) == (4, 6)
    assert SpeculationParams(None, 3).lookup(server) == (3, 3)
    assert SpeculationParams(None, 5).lookup(server) == (4, 5)
    assert SpeculationParams(None, None, 1).lookup(server) == (1, 6)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"foo": 1, "bar": 2, "method": "ngram"}, "unknown key 'bar', 'foo'"),
        ({"num_beams": 4}, "beam search keeps the most probable texts"),
        ({"method": "beam"}, "method: expected one of ngram, draft_model, "),
        ({"rejection_sample_method": "lossy"}, "rejection_sample_method: expected token, block, coupled"),
        ({"num_speculative_tokens": 9}, "num_speculative_tokens"),
        ({"prompt_lookup_max": 3, "prompt_lookup_min": 4}, "prompt_lookup_min"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max"),
        ([], "expected a JSON object"),
    ],
)
def test_speculation_config_refuses_what_it_does_not_know(data: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        SpeculationConfig.from_mapping(data)


def parsed_speculation(*arguments: str) -> SpeculationConfig:
    parser = options.Parser(prog="p")
    options.add_speculation_flags(parser)
    return options.speculation_from(parser.parse_args(arguments))


def test_flags_and_json_say_the_same() -> None:
    given = {"method": "draft_model", "model": "d", "num_speculative_tokens": 3, "prompt_lookup_max": 5}
    flags = ["--method", "draft_model", "--draft", "d", "--num-speculative-tokens", "3", "--prompt-lookup-max", "5"]
    assert parsed_speculation(*flags) == parsed_speculation("--speculative-config", json.dumps(given))
    assert parsed_speculation(*flags) == SpeculationConfig(**given)
    assert parsed_speculation() == SpeculationConfig()


def test_every_field_of_the_config_is_a_flag() -> None:
    parser = options.Parser(prog="p")
    options.add_speculation_flags(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for field in dataclasses.fields(SpeculationConfig):
        assert "--" + field.name.replace("_", "-") in flags


def test_a_draft_means_draft_model_unless_told_otherwise() -> None:
    assert parsed_speculation("--draft", "d").method == "draft_model"
    ngram = parsed_speculation("--draft", "d", "--method", "ngram")
    assert ngram.method == "ngram"
    assert "ignored" in (options.unused_note(ngram) or "")
    assert options.unused_note(parsed_speculation("--draft", "d")) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "draft_model"], "--draft"),
        (["--speculative-config", "{"], "expected JSON"),
        (["--speculative-config", "[1]"], "expected a JSON object"),
        (["--speculative-config", '{"method": "none"}', "--method", "none"], "method as flag and as key"),
    ],
)
def test_speculation_flags_that_do_not_fit_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parsed_speculation(*arguments)


def parsed_request(*arguments: str) -> tuple[Prompt, SamplingParams, SpeculationParams]:
    parser = options.Parser(prog="p")
    options.add_prompt_flags(parser)
    options.add_sampling_flags(parser)
    options.add_request_speculation_flags(parser)
    args = parser.parse_args(arguments)
    return options.prompt_from(args), options.sampling_from(args), options.request_speculation_from(args)


def test_request_flags_fill_every_field() -> None:
    prompt, sampling, speculation = parsed_request(
        *("--prompt-ids", "3,5", "--max-tokens", "7", "--min-tokens", "2", "--temperature", "0", "--top-k", "4"),
        *(
            "--top-p",
            "0.5",
            "--min-p",
            "0.1",
            "--seed",
            str(2**64 - 1),
            "--stop",
            "a",
            "--stop",
            "b",
            "--logprobs",
            "2",
        ),
        *("--stop-token-ids", "8,9", "--ignore-eos", "--show-special-tokens", "--num-speculative-tokens", "0"),
        *("--prompt-lookup-max", "5", "--prompt-lookup-min", "2"),
    )
    assert prompt == Prompt(ids=(3, 5))
    assert speculation == SpeculationParams(0, 5, 2)
    default = SamplingParams()
    for field in dataclasses.fields(SamplingParams):
        assert getattr(sampling, field.name) != getattr(default, field.name), f"--{field.name} changed nothing"
    assert parsed_request("--chat", "hi") == (Prompt(chat=(("user", "hi"),)), default, SpeculationParams())


@pytest.mark.parametrize("arguments", [[], ["--prompt", "\udcff"], ["--prompt", "a", "--temperature", "nan"]])
def test_request_flags_out_of_range_are_a_users_mistake(arguments: list[str]) -> None:
    with pytest.raises(UserError):
        parsed_request(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt", "a", "--chat", "b"],
        ["--prompt-ids", "1,,2"],
        ["--prompt-ids", "x"],
        ["--prompt", "a", "--max-tok", "3"],
        ["--prompt", "a", "--top-k", "x"],
    ],
)
def test_a_parser_complains_in_one_line_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parsed_request(*arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_exit_status_tells_mistakes_from_faults(capsys: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> int:
        def command() -> int:
            raise error

        return options.exit_status("prog", command)

    assert options.exit_status("prog", lambda: None) == 0
    assert options.exit_status("prog", lambda: 1) == 1
    assert raising(UserError("x: expected y, got z")) == 2
    assert capsys.readouterr().err == "prog: error: x: expected y, got z\n"
    assert raising(RuntimeError("broken")) == 1
    assert "RuntimeError: broken" in capsys.readouterr().err
    assert raising(KeyboardInterrupt()) == 1
