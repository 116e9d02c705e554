"""``jaxspec generate``: the reference's tokens, the promised JSON, and one line for every mistake."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec import Prompt
from jaxspec.checkpoint import open_checkpoint
from jaxspec.cli import context_for, prompt_length
from jaxspec.text import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
GREEDY = ("--temperature", "0", "--ignore-eos", "--mesh", "1")
PLAIN = ("--method", "none", *GREEDY)


def csv(ids) -> str:
    return ",".join(str(token_id) for token_id in ids)


@pytest.mark.parametrize(
    ("prompt", "flags"),
    [
        ("p7", ["--draft", "DRAFT"]),
        ("p33", ["--method", "none"]),
        ("p33", ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}']),
        ("p7", ["--method", "none", "--mesh", "4"]),
    ],
    ids=["draft", "plain", "ngram", "plain-mesh-4"],
)
def test_greedy_ids_are_the_references(jaxspec, tiny, tiny_draft, goldens, prompt, flags) -> None:
    flags = [str(tiny_draft) if flag == "DRAFT" else flag for flag in flags]
    ids = goldens[f"{prompt}__input_ids"].tolist()
    arguments = ("--prompt-ids", csv(ids), "--max-tokens", "64", *GREEDY, *flags)
    told = jaxspec("generate", "--target", tiny, *arguments, "--json").json
    assert told["token_ids"] == goldens[f"{prompt}__greedy_ids"].tolist()
    assert told["finish_reason"] == "length"
    assert told["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 64}
    drafted = told["speculation"]["num_draft_tokens"]
    assert (drafted == 0) == ("none" in flags)


def test_json_has_the_promised_keys_in_order(jaxspec, tiny) -> None:
    told = jaxspec(
        *("generate", "--target", tiny, "--prompt", "Hello, world", "--mesh", "1", "--method", "none"),
        *("--max-tokens", "5", "--seed", str(2**64 - 1), "--temperature", "0.7", "--top-k", "11", "--json"),
    ).json
    assert list(told) == ["text", "token_ids", "finish_reason", "usage", "timing", "speculation", "seed"]
    assert list(told["usage"]) == ["prompt_tokens", "completion_tokens"]
    assert list(told["timing"]) == ["ttft_ms", "tpot_ms", "tokens_per_s"]
    assert list(told["speculation"]) == [
        *("method", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "draft_acceptance_rate"),
        *("mean_acceptance_length", "tokens_per_target_pass", "acceptance_histogram"),
    ]
    assert told["seed"] == 2**64 - 1
    assert len(told["speculation"]["acceptance_histogram"]) == 9
    assert len(told["token_ids"]) == told["usage"]["completion_tokens"] <= 5


def test_text_streams_what_json_reports_and_special_spellings_in_a_prompt_are_text(jaxspec, tiny) -> None:
    prompt = "<|begin_of_text|><|eot_id|>"
    arguments = ("generate", "--target", tiny, "--prompt", prompt, "--max-tokens", "23", "--color", "never", *PLAIN)
    told = jaxspec(*arguments, "--json").json
    streamed = jaxspec(*arguments)
    assert told["usage"]["prompt_tokens"] > 10
    assert (streamed.status, streamed.out) == (0, told["text"] + "\n")
    assert streamed.err.startswith("[length: 23 tokens after ")
    assert streamed.err.count("\n") == 1


def test_a_chat_goes_through_the_template(jaxspec, tiny) -> None:
    flags = ("--max-tokens", "1", "--json", *PLAIN)
    chat = jaxspec("generate", "--target", tiny, "--chat", "Hi", *flags).json
    plain = jaxspec("generate", "--target", tiny, "--prompt", "Hi", *flags).json
    assert chat["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 3


def test_logprobs_come_when_asked_for(jaxspec, tiny) -> None:
    flags = ("--prompt-ids", "496,7", "--max-tokens", "3", "--logprobs", "2", "--json", *PLAIN)
    told = jaxspec("generate", "--target", tiny, *flags).json
    assert [entry["token_id"] for entry in told["logprobs"]] == told["token_ids"]
    assert all(entry["top"][0]["logprob"] == entry["logprob"] for entry in told["logprobs"])


def test_without_a_tokenizer_ids_come_and_go(jaxspec, without_tokenizer, goldens) -> None:
    arguments = ("generate", "--target", without_tokenizer, "--max-tokens", "11", *PLAIN)
    done = jaxspec(*arguments, "--prompt-ids", csv(goldens["p7__input_ids"]))
    assert (done.status, done.out) == (0, csv(goldens["p7__greedy_ids"][:11]) + "\n")
    for flag in ("--prompt", "--chat"):
        refused = jaxspec(*arguments, flag, "Hello")
        assert refused.status == 2
        assert refused.err.startswith(f"jaxspec generate: error: {flag[2:]}: expected prompt_ids")
        assert refused.err.count("\n") == 1


def test_only_the_smallest_window_of_one_row_is_compiled(jaxspec, tiny, goldens, compilations) -> None:
    prompt = csv(goldens["p33__input_ids"])
    with compilations() as seen:
        done = jaxspec("generate", "--target", tiny, "--prompt-ids", prompt, "--max-tokens", "64", *PLAIN)
    assert done.status == 0
    assert sorted(name for name in seen.names if "step" in name or "start" in name or "prefill" in name) == [
        *("jit(prefill)",) * 3,  # one per chunk length
        *("jit(start)", "jit(step)"),
    ]
    assert not any("insert" in name or "extract" in name for name in seen.names)


def test_the_context_lets_a_known_length_stay_in_one_window(tiny) -> None:
    checkpoint = open_checkpoint(tiny)

    def context(prompt: Prompt, max_tokens: int | None, trained: int = 1 << 17) -> int:
        config = dataclasses.replace(checkpoint.config, max_position_embeddings=trained)
        return context_for(dataclasses.replace(checkpoint, config=config), prompt, max_tokens)

    ids = Prompt(ids=(7,) * 100)
    assert context(ids, 128) == 1024  # a window of 256 holds 100 + 128 tokens and the drafts
    assert context(ids, 147) == 1024
    assert context(ids, 148) == 2048  # 257 with the drafts: a window of 512
    assert context(ids, None) == 1024
    assert context(Prompt(ids=(7,) * 1500), None) == 2048
    assert context(ids, 2**31 - 1, trained=8192) == 8192
    assert context(ids, 5, trained=512) == 512
    assert context(Prompt(text="a" * 10**6), 5, trained=512) == 512  # left for the engine to refuse
    assert context(Prompt(text="Hello " * 90), 100) == 2048
    assert context(Prompt(chat=(("user", "Hello " * 90),)), 100) == 2048


def test_a_prompt_is_measured_as_the_engine_will_tokenize_it(tiny) -> None:
    checkpoint, tokenizer = open_checkpoint(tiny), Tokenizer.load(tiny / "tokenizer")
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    assert prompt_length(checkpoint, Prompt(ids=(7, 11))) == 2
    assert prompt_length(checkpoint, Prompt(text="Hello")) == len(tokenizer.encode("Hello", add_bos=True))
    assert prompt_length(checkpoint, Prompt(chat=(("user", "Hello"),))) == len(chat)


@pytest.mark.parametrize(("length", "status"), [(31, 0), (32, 2), (33, 2), (5120, 2)])
def test_h19_h20_prompts_around_the_context(jaxspec, tiny, length, status) -> None:
    flags = ("--max-len", "32", "--max-tokens", str(2**31), "--json", *PLAIN)
    done = jaxspec("generate", "--target", tiny, "--prompt-ids", csv([7] * length), *flags)
    assert done.status == status
    if status == 0:
        assert done.json["usage"] == {"prompt_tokens": 31, "completion_tokens": 1}
        assert done.json["finish_reason"] == "length"
    else:
        expected = f"prompt_ids: expected at most 31 tokens (max_len 32 - 1), got '{length} tokens'"
        assert done.err == f"jaxspec generate: error: {expected}\n"


ONE = ("--prompt-ids", "7,11")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "prompt: expected one of --prompt, --chat and --prompt-ids, got none"),
        (["--prompt", ""], "prompt: expected at least 1 character"),
        (["--prompt", "\udcff"], "prompt: expected valid Unicode"),
        (["--chat", "a\udcc3"], "chat[0].content: expected valid Unicode"),
        (["--prompt-ids", ""], "expected token ids separated by commas"),
        (["--prompt-ids", "7,512"], "prompt_ids[1]: expected a token id in [0, 511], got 512"),
        (["--prompt-ids=-1"], "prompt_ids[0]: expected a token id >= 0, got -1"),
        ([*ONE, "--max-tokens", "0"], "max_tokens: expected an integer >= 1"),
        ([*ONE, "--max-tokens", "3", "--min-tokens", "4"], "min_tokens: expected at most max_tokens=3, got 4"),
        ([*ONE, "--temperature", "-0.5"], "temperature: expected 0 (greedy) or a number in [1e-06, 100], got -0.5"),
        ([*ONE, "--temperature", "nan"], "temperature: expected a finite number, got nan"),
        ([*ONE, "--temperature", "1e9"], "temperature: expected 0 (greedy) or a number in [1e-06, 100]"),
        ([*ONE, "--top-p", "0"], "top_p: expected a number in (0, 1]"),
        ([*ONE, "--top-k", "-1"], "top_k: expected an integer >= 0"),
        ([*ONE, "--min-p", "1.5"], "min_p: expected a number in [0, 1]"),
        ([*ONE, "--seed", str(2**64)], "seed: expected an integer in [0, 2**64 - 1]"),
        ([*ONE, "--seed", "-1"], "seed: expected an integer in [0, 2**64 - 1]"),
        ([*ONE, "--stop", "a", "--stop", ""], "stop[1]: expected 1 to 256 characters"),
        ([*ONE, "--stop", "\udcff"], "stop[0]: expected valid Unicode"),
        ([*ONE, *("--stop", "a") * 17], "stop: expected at most 16 strings"),
        ([*ONE, "--stop-token-ids", "512"], "stop_token_ids[0]: expected a token id in [0, 511], got 512"),
        ([*ONE, "--logprobs", "9"], "logprobs: expected an integer in [0, 8]"),
        ([*ONE, "--num-speculative-tokens", "9"], "num_speculative_tokens: expected an integer in 0..8, got 9"),
        ([*ONE, "--num-beams", "4"], "num_beams: expected 1 or unset: beam search keeps the most probable texts"),
        ([*ONE, "--speculative-config", '{"num_beams": 4}'], "num_beams: expected 1 or unset: beam search"),
        ([*ONE, "--speculative-config", '{"gama": 4, "x": 1}'], "speculative-config: unknown key 'gama', 'x'"),
        ([*ONE, "--speculative-config", "{"], "speculative-config: expected JSON"),
        ([*ONE, "--method", "draft_model"], "method draft_model: expected the draft's folder in --draft, got none"),
        ([*ONE, "--method", "beam"], "--method: invalid choice: 'beam'"),
        ([*ONE, "--method", "medusa"], "method medusa: expected the heads' folder in --heads, got none"),
        ([*ONE, "--max-len", "513"], "max_len: expected 2..512"),
        ([*ONE, "--mesh", "5"], "mesh: '5' needs 5 devices, 4 visible"),
        ([*ONE, "--draft", "nowhere"], "nowhere: expected the folder of a converted checkpoint, found nothing"),
        ([*ONE, "--target", "nowhere"], "nowhere: expected the folder of a converted checkpoint, found nothing"),
        ([*ONE, "--beam", "4"], "unrecognized arguments: --beam 4"),
    ],
    ids=lambda value: " ".join(value[-2:]).encode(errors="replace").decode()[:40] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_status_2(jaxspec, tiny, flags, words) -> None:
    done = jaxspec("generate", "--target", tiny, "--mesh", "1", *flags)
    assert (done.status, done.out) == (2, "")
    assert words in done.err
    assert done.err.startswith("jaxspec")
    assert done.err.count("\n") == 1


def test_an_unused_draft_is_noted_and_not_even_opened(jaxspec, tiny) -> None:
    flags = ("--draft", "nowhere", "--method", "ngram", "--max-tokens", "1", "--json", *ONE, *GREEDY)
    done = jaxspec("generate", "--target", tiny, *flags)
    assert done.json["speculation"]["method"] == "ngram"
    assert done.err == "jaxspec generate: --draft nowhere: ignored, method ngram uses no draft model\n"


def test_only_commands_that_exist_are_taken(jaxspec) -> None:
    for arguments in ([], ["check-lossless"]):
        done = jaxspec(*arguments)
        assert (done.status, done.err.count("\n")) == (2, 1)


def process(*arguments: str | Path) -> subprocess.Popen:
    command = [sys.executable, "-W", "error", "-m", "jaxspec", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ))


def test_bytes_that_are_no_utf8_are_refused_before_jax_is_imported(tiny) -> None:
    code = "import sys; from jaxspec.cli import main; status = main(); print('jax' in sys.modules); sys.exit(status)"
    command = [sys.executable, "-c", code, "generate", "--target", tiny, "--prompt", b"caf\xc3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"False\n")
    line = b"prompt: expected valid Unicode text, without lone surrogates, got 'caf\\udcc3'"
    assert done.stderr == b"jaxspec generate: error: " + line + b"\n"


def test_a_reader_that_leaves_early_is_no_fault_of_the_models(tiny) -> None:
    flags = ("--max-tokens", "400", *PLAIN)
    with process("generate", "--target", tiny, "--prompt", "Hello", *flags) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(1) != b""
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(timeout=60) == 1
