"""The target's own answers: what plain decoding says, in one order, whole lines, and on from a kill."""

import json
import os
import signal
import time

import pytest

from jaxspec import Completion, Engine, SamplingParams, SpeculationConfig
from tests.train.runs import finish, start
from train_heads.cli import main

PROMPTS = [[5 + i, 17, 3 * i + 1] for i in range(24)]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt_ids": ids} for ids in PROMPTS] + [{"prompt_ids": list(range(60))}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def flags(target_dir, prompts, out, *more):
    common = [
        "--max-tokens",
        "12",
        "--max-len",
        "48",
        "--mesh",
        "1",
        "--max-slots",
        "2",
        "--num-speculative-tokens",
        "4",
    ]
    files = ["--target", str(target_dir), "--data", str(prompts), "--out", str(out)]
    return ["generate-data", *files, *common, "--greedy-share", "0.5", *more]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_the_targets_own(target_dir, prompts, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    assert main(flags(target_dir, prompts, out)) == 0
    assert "too_long 1" in capsys.readouterr().out
    lines = read(out)
    assert sorted(line["line"] for line in lines) == list(range(25))
    assert [line["line"] for line in lines] != sorted(line["line"] for line in lines), "a prefix is a fair sample"
    (skipped,) = (line for line in lines if "skipped" in line)
    assert skipped["line"] == 24
    answered = [line for line in lines if "skipped" not in line]
    assert {line["temperature"] for line in answered} == {0.0, 1.0}
    assert all(line["prompt_ids"] == PROMPTS[line["line"]] for line in answered)
    greedy = [line for line in answered if line["temperature"] == 0.0]
    with Engine.load(target_dir, speculation=SpeculationConfig("none"), mesh="1", max_slots=1, max_len=48) as engine:
        for line in greedy[:3]:
            plain = Completion.of(engine.generate(line["prompt_ids"], SamplingParams(max_tokens=12, temperature=0.0)))
            assert line["answer_ids"] == list(plain.token_ids)
            assert line["finish_reason"] == plain.finish_reason
    # A smaller limit gives the first lines of the same; nothing to do is no fault; other options are another file.
    part = tmp_path / "part.jsonl"
    assert main(flags(target_dir, prompts, part, "--limit", "5")) == 0
    assert read(part) == lines[:5]
    assert main(flags(target_dir, prompts, part, "--limit", "5")) == 0
    assert main(flags(target_dir, prompts, part, "--limit", "5", "--top-p", "0.5")) == 2
    assert "was made otherwise" in capsys.readouterr().err


def test_a_killed_run_writes_the_same_file(target_dir, prompts, tmp_path):
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    finish(start(flags(target_dir, prompts, whole)))
    process = start(flags(target_dir, prompts, killed))
    deadline = time.monotonic() + 300
    while not killed.exists() or killed.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with killed.open("ab") as file:
        file.write(b'{"line": 3, "promp')  # what a kill in the middle of a line leaves
    finish(start(flags(target_dir, prompts, killed)))
    assert read(killed) == read(whole)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--greedy-share", "2"), "greedy-share: expected a share"),
        (("--limit", "0"), "limit: expected at least 1"),
        (("--data", os.devnull), "expected at least one prompt"),
        (("--data", "no-such-file"), "no-such-file: cannot be read"),
    ],
)
def test_what_is_refused(target_dir, prompts, tmp_path, capsys, more, words):
    assert main(flags(target_dir, prompts, tmp_path / "out" / "answers.jsonl", *more)) == 2
    assert not (tmp_path / "out").exists(), "nothing half-written stays"
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
