"""Runs of ``jaxspec-train`` from end to end on a tiny target: each kind, kills, intervals, steps without numbers."""

import json
import signal
import time

import jax.numpy as jnp
import pytest

from jaxspec import Completion, Engine, SamplingParams, SpeculationConfig, SpeculationParams
from jaxspec.checkpoint import open_any
from jaxspec.errors import EngineFault, UserError
from tests.train.runs import KINDS, config, finish, flags, losses, parameters, start
from train_heads import logs
from train_heads import served as serving
from train_heads.cli import main
from train_heads.config import RunConfig
from train_heads.export import export
from train_heads.job import make_job
from train_heads.loop import Run, run
from train_heads.progress import Progress


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_and_what_is_served(kind, target_dir, data, tmp_path, capsys):
    """I07, I19: a run ends in heads that the engine loads, with what serving accepts before and after, as foreseen."""
    out = tmp_path / "run"
    assert main(flags(kind, target_dir, data, out, "--steps", "2", "--serve", "1")) == 0
    assert f"{out / 'heads'}: step 2" in capsys.readouterr().out
    assert [step for step, _, _ in losses(out)] == [1, 2]
    served = [line for line in logs.read(out / logs.LOG) if line["kind"] == "served"]
    assert [line["step"] for line in served] == [0, 2]
    assert (out / logs.CURVES).read_bytes()[:4] == b"\x89PNG"
    assert list((out / "tensorboard").glob("events*"))
    folder = out / "heads"
    assert open_any(folder).manifest.source_format == "jaxspec-train"
    method = "draft_model" if kind == "draft" else kind
    given = {"draft": folder} if kind == "draft" else {"heads": folder}
    speculation = SpeculationConfig(method=method, num_speculative_tokens=2, tree_nodes=4, tree_topk=2, tree_depth=2)
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    with Engine.load(target_dir, speculation=speculation, mesh="1", max_slots=1, max_len=64, **given) as engine:
        drafted = Completion.of(engine.generate([1, 2, 3], sampling))
        plain = Completion.of(engine.generate([1, 2, 3], sampling, SpeculationParams(num_speculative_tokens=0)))
    assert drafted.token_ids == plain.token_ids
    assert drafted.summary.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_from_the_heads_of_another(kind, target_dir, data, tmp_path):
    """Its parameters and its words, whatever the new data says most; other shapes or another number are refused."""
    first, second = tmp_path / "first", tmp_path / "second"
    words = [] if kind == "eagle3" else ["--draft-vocab-size", "128"]
    assert main(flags(kind, target_dir, data, first, *words, "--steps", "2", "--serve", "0")) == 0
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt_ids": [1, 2], "answer_ids": [511, 510, 509] * 12}) + "\n" + data.read_text())
    more = [*words, "--start-from", str(first / "heads")]
    made = Run(make_job(config(*flags(kind, target_dir, other, second, *more))), second, Progress())
    try:
        folder = export(made.job, made.state.trained, made.fixed, tmp_path / "again", "float32")
    finally:
        made.close()
    assert parameters(folder) == parameters(first / "heads")
    assert made.job.objective.words.size == 128
    if kind != "eagle3":  # whose ids are a parameter
        said, before = (json.loads((heads / "draft_vocab.json").read_text()) for heads in (folder, first / "heads"))
        assert sorted(said) == sorted(before)
    with pytest.raises(UserError, match=r"draft_vocab_size: expected 128, as .* has it, got 64"):
        make_job(config(*flags(kind, target_dir, other, tmp_path / "third", *more, "--draft-vocab-size", "64")))
    shape = {"medusa": "--heads", "draft": "--layers"}.get(kind)
    if shape:
        wrong = config(*flags(kind, target_dir, other, tmp_path / "fourth", *more, shape, "4"))
        with pytest.raises(UserError, match=r"start_from: .* expected .*, found "):
            Run(make_job(wrong), tmp_path / "fourth", Progress())


def test_serving_and_training_must_agree(target_dir, data, tmp_path, monkeypatch):
    """I07: a draft of all the target's layers is accepted always, as foreseen; guesses one place off are refused."""
    arguments = flags("draft", target_dir, data, tmp_path, "--serve", "7", "--layers", "8")
    made = Run(make_job(config(*arguments)), tmp_path, Progress())
    try:
        given = made.state.trained, made.fixed
        folder = export(made.job, *given, tmp_path / "heads", "float32")
        found = serving.serve(made.job, folder, *given)
        assert found.accepted == found.foreseen >= 8
        assert found.tokens_per_target_pass > 1.5
        real = serving.guesses
        monkeypatch.setattr(serving, "guesses", lambda levels, words: jnp.roll(real(levels, words), 1, axis=2))
        with pytest.raises(EngineFault, match="do not compute the same"):
            made._serve(folder, 0)
    finally:
        made.close()


def test_a_killed_run_goes_on_to_the_same_bits(target_dir, data, tmp_path):
    """I15: losses, learning rates and parameters are those of a run that nobody killed."""
    more = ("--steps", "60", "--save-every", "7", "--evaluate-every", "20", "--serve", "0", "--features", "disk")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(flags("eagle3", target_dir, data, whole, *more)))
    process = start(flags("eagle3", target_dir, data, killed, *more))
    deadline = time.monotonic() + 300
    while not any(step >= 16 for step, _, _ in losses(killed)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    last = max(step for step, _, _ in losses(killed))
    assert last < 60
    finish(start(flags("eagle3", target_dir, data, killed, *more)))
    assert losses(killed) == losses(whole)
    assert losses(killed, "held_out") == losses(whole, "held_out")
    assert parameters(killed / "heads") == parameters(whole / "heads")


def test_intervals_are_optimiser_steps(target_dir, data, tmp_path):
    """I11: with four accumulated parts a checkpoint every two steps is one every two steps; best and last stay."""
    out = tmp_path / "run"
    more = ("--steps", "6", "--accumulate", "4", "--save-every", "2", "--evaluate-every", "3", "--serve", "0")
    result = run(config(*flags("medusa", target_dir, data, out, *more, "--keep", "2")), Progress())
    assert [step for step, _, _ in losses(out)] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _, _ in losses(out, "held_out")] == [0, 3, 6]
    steps = {int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdecimal()}
    assert {4, 6} <= steps <= {2, 4, 6}
    assert result.step in steps
    assert len({value for _, value, _ in losses(out)}) == 6, "every step sees other rows"


def test_a_step_without_numbers_is_named(target_dir, data, tmp_path):
    out = tmp_path / "run"
    more = ("--steps", "9", "--learning-rate", "1e30", "--clip", "1e30", "--serve", "0", "--save-every", "1")
    with pytest.raises(EngineFault, match=r"step \d: loss .* rows \[.*\] with documents \[\[.*checkpoint \d stays"):
        run(config(*flags("draft", target_dir, data, out, *more)), Progress())


def test_another_run_in_the_folder_is_refused(target_dir, data, tmp_path):
    out = tmp_path / "run"
    run(config(*flags("medusa", target_dir, data, out, "--steps", "1", "--serve", "0")), Progress())
    with pytest.raises(UserError, match="holds a run with another optim"):
        run(config(*flags("medusa", target_dir, data, out, "--steps", "2", "--serve", "0")), Progress())


def test_the_config_is_shown_and_read_back(tmp_path, capsys):
    arguments = [
        "eagle3",
        "--target",
        "t",
        "--data",
        "d",
        "--out",
        "o",
        "--steps",
        "7",
        "--unroll",
        "2",
        "--data-seed",
        "4",
    ]
    assert main([*arguments, "--warmup", "3", "--print-config"]) == 0
    shown = json.loads(capsys.readouterr().out)
    made = RunConfig.from_json(shown)
    assert (made.optim.steps, made.options.unroll, made.batches.seed, made.seed) == (7, 2, 4, 0)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shown))
    assert main(["eagle3", "--config", str(path), "--learning-rate", "0.5", "--print-config"]) == 0
    again = RunConfig.from_json(json.loads(capsys.readouterr().out))
    assert again.optim.learning_rate == 0.5
    assert again.options == made.options
    path.write_text(json.dumps(shown | {"bananas": 1, "optim": {"steps": 7, "warmup": 3, "momentum": 1}}))
    for words in ("optim.momentum",):
        assert main(["eagle3", "--config", str(path), "--print-config"]) == 2
        assert words in capsys.readouterr().err
    assert main(["medusa", "--config", str(path), "--print-config"]) == 2
    assert "expected medusa" in capsys.readouterr().err
    assert main(["medusa", "--target", "t", "--data", "d"]) == 2
    assert "out: expected --out" in capsys.readouterr().err
