"""``jaxspec check-lossless``: it finds nothing where nothing is wrong, and finds what is wrong."""

import dataclasses
import json

import numpy as np
import pytest

from jaxspec import Engine, SamplingParams, SpeculationConfig
from jaxspec.check import show
from jaxspec.cli import main
from jaxspec.lossless import (
    Identity,
    Position,
    Report,
    coupled_identity,
    final_law,
    greedy_identity,
    position,
    ranks,
    smallest_holm,
    texts,
)
from jaxspec.score import Scorer
from tests.speculate.oracle import sorted_law

SAMPLING = SamplingParams(max_tokens=5, temperature=0.7, top_p=0.9, ignore_eos=True)


def test_the_command_on_a_real_model(tiny_models, capsys) -> None:
    """The target drafts for itself, so that nearly every draft is judged and stands."""
    target = str(tiny_models("tiny-llama3"))
    flags = ["--draft", target, "--num-speculative-tokens", "3", "--mesh", "1", "--samples", "200", "--tokens", "4"]
    assert main(["check-lossless", "--target", target, *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["lossless"] is True
    assert [place["tokens"] for place in report["positions"]] == [200] * 4
    assert report["mean_acceptance_length"] > 2
    for name in ("greedy", "coupled"):
        assert report[name]["tokens"] > 0
        assert report[name]["differences"] == 0


def test_the_verdict_has_a_line_and_a_bar_per_position() -> None:
    same = Identity(5, 100, 0, 0)
    places = (Position(200, 0.5, 0.4), Position(200, 1e-9, 0.3))
    out = show(Report(places, 2e-9, 1e-3, same, same, 2.5)).splitlines()
    assert [line.split()[:3] for line in out[1:3]] == [["0", "200", "0.5"], ["1", "200", "1e-09"]]
    assert out[1].index("|") == out[2].index("|")
    assert out[1].count("#") < out[1].index("|") - out[1].index("#")
    assert "#|#" in out[2], "the bar goes past the alarm"
    assert "greedy: 5 texts, 100 tokens, 0 texts differ" in out[4]
    assert out[-2:] == ["mean acceptance length 2.50", "NOT LOSSLESS"]


@pytest.mark.parametrize(
    "flags", [["--samples", "99"], ["--tokens", "0"], ["--temperature", "0"], ["--false-alarm", "1"]]
)
def test_what_cannot_be_tested_is_refused(flags, tiny_models, capsys) -> None:
    assert main(["check-lossless", "--target", str(tiny_models("tiny-llama3")), *flags]) == 2
    assert "expected --samples of 100 or more" in capsys.readouterr().err


def test_text_of_another_law_is_found_out(tiny_models, monkeypatch) -> None:
    """The same texts, judged by the law that made them and by one a little cooler."""
    speculation = SpeculationConfig(method="ngram", prompt_lookup_min=1)
    engine = Engine.load(tiny_models("tiny-llama3"), speculation=speculation, mesh="1", max_slots=8, max_len=128)
    with engine:
        prompts = np.random.default_rng(3).integers(0, 490, size=(300, 5)).tolist()
        made = [text for text, _ in texts(engine, prompts, SAMPLING, range(300), None)]
        decoder = engine.programs.decoder
        scorer = Scorer(decoder.target, engine.programs.params.target, longest=16, chunk=16, with_logits=True)
        verdicts = []
        for temperature in (SAMPLING.temperature, 0.6):
            judged_by = dataclasses.replace(SAMPLING, temperature=temperature)
            rng = np.random.default_rng(5)
            us = [ranks(scorer, prompt, text, judged_by, rng) for prompt, text in zip(prompts, made, strict=True)]
            verdicts.append(smallest_holm([position([u[place] for u in us]).p_value for place in range(5)]))
        assert verdicts[0] > 1e-3
        assert verdicts[1] < 1e-6

        plain = [
            text for text, _ in texts(engine, prompts[:3], dataclasses.replace(SAMPLING, temperature=0.0), [0] * 3, 0)
        ]
        other = [list(text) for text in plain]
        other[1][2] = (other[1][2] + 1) % 490
        assert greedy_identity(scorer, prompts[:3], plain, plain) == Identity(3, 15, 0, 0)
        assert greedy_identity(scorer, prompts[:3], plain, other) == Identity(3, 15, 0, 1)
        seeds = range(3)
        assert coupled_identity(scorer, prompts[:3], plain, plain, SAMPLING, seeds) == Identity(3, 15, 0, 0)
        assert coupled_identity(scorer, prompts[:3], plain, other, SAMPLING, seeds) == Identity(3, 15, 0, 1)
        monkeypatch.setattr("jaxspec.lossless.NEAR_TIE", 1e9)
        assert greedy_identity(scorer, prompts[:3], plain, other) == Identity(3, 15, 1, 0)
        assert coupled_identity(scorer, prompts[:3], plain, other, SAMPLING, seeds) == Identity(3, 15, 1, 0)


def test_a_single_difference_or_a_small_p_value_is_the_verdict() -> None:
    good = Identity(5, 100, 1, 0)
    report = Report((position(np.random.default_rng(1).random(400)),), 0.4, 1e-3, good, good, 2.0)
    assert report.lossless
    assert not dataclasses.replace(report, smallest_corrected_p=1e-4).lossless
    assert not dataclasses.replace(report, greedy=Identity(5, 100, 0, 1)).lossless
    assert not dataclasses.replace(report, coupled=Identity(5, 100, 0, 1)).lossless
    assert good.strict() == Identity(5, 100, 0, 1), "in deterministic mode a near-tie is no excuse"


@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8}])
def test_the_law_is_the_oracle_s(options) -> None:
    rng = np.random.default_rng(11)
    for _ in range(20):
        logits = np.round(3 * rng.standard_normal(37), 1).astype(np.float32)  # rounded: ties
        sampling = SamplingParams(temperature=0.8, **options)
        expected = sorted_law(logits, 0.8, **options)
        assert np.abs(final_law(logits, sampling) - expected).max() < 1e-12
