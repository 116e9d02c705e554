"""``jaxspec check-lossless``: it finds nothing where nothing is wrong, and finds what is wrong."""

import dataclasses
import json

import numpy as np
import pytest

from jaxspec import Engine, SamplingParams, SpeculationConfig
from jaxspec.cli import main
from jaxspec.lossless import Identity, Report, final_law, identity, position, ranks, smallest_holm, texts
from jaxspec.score import Scorer
from tests.speculate.oracle import sorted_law

SAMPLING = SamplingParams(max_tokens=5, temperature=0.7, top_p=0.9, ignore_eos=True)


def test_the_command_prints_a_verdict_and_a_plot(tiny_models, capsys) -> None:
    target = str(tiny_models("tiny-llama3"))
    flags = ["--draft", target, "--num-speculative-tokens", "3", "--mesh", "1", "--samples", "200", "--tokens", "4"]
    assert main(["check-lossless", "--target", target, *flags]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "LOSSLESS"
    assert [line.split()[:2] for line in out[1:5]] == [[str(place), "200"] for place in range(4)]
    assert all("|" in line for line in out[1:5])
    assert "0 texts differ from plain decoding" in out[-4]
    assert "mean acceptance length 1" not in out[-2], "nothing was speculated"


def test_the_command_as_json(tiny_models, capsys) -> None:
    target = str(tiny_models("tiny-llama3"))
    flags = ["--method", "ngram", "--prompt-lookup-min", "1", "--mesh", "1", "--samples", "100", "--tokens", "2"]
    assert main(["check-lossless", "--target", target, *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["lossless"] is True
    assert [place["tokens"] for place in report["positions"]] == [100, 100]
    assert report["coupled"]["differences"] == 0


@pytest.mark.parametrize(
    "flags", [["--samples", "99"], ["--tokens", "0"], ["--temperature", "0"], ["--false-alarm", "1"]]
)
def test_what_cannot_be_tested_is_refused(flags, tiny_models, capsys) -> None:
    assert main(["check-lossless", "--target", str(tiny_models("tiny-llama3")), *flags]) == 2
    assert "expected --samples of 100 or more" in capsys.readouterr().err


def test_text_of_another_law_is_found_out(tiny_models) -> None:
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
        assert identity(scorer, prompts[:3], plain, plain) == Identity(3, 15, 0, 0)
        assert identity(scorer, prompts[:3], plain, other) == Identity(3, 15, 0, 1)


def test_a_single_difference_or_a_small_p_value_is_the_verdict() -> None:
    good = Identity(5, 100, 1, 0)
    report = Report((position(np.random.default_rng(1).random(400)),), 0.4, 1e-3, good, good, 2.0)
    assert report.lossless
    assert not dataclasses.replace(report, smallest_corrected_p=1e-4).lossless
    assert not dataclasses.replace(report, greedy=Identity(5, 100, 0, 1)).lossless
    assert not dataclasses.replace(report, coupled=Identity(5, 100, 0, 1)).lossless


@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8}])
def test_the_law_is_the_oracle_s(options) -> None:
    rng = np.random.default_rng(11)
    for _ in range(20):
        logits = np.round(3 * rng.standard_normal(37), 1).astype(np.float32)  # rounded: ties
        sampling = SamplingParams(temperature=0.8, **options)
        expected = sorted_law(logits, 0.8, **options)
        assert np.abs(final_law(logits, sampling) - expected).max() < 1e-12
