"""What assets/smollm2-135m ships: files that are what their cards say, and drafts that the demo model accepts."""

import gzip
import json
from pathlib import Path

import pytest

from jaxspec import Completion, Engine, Prompt, SamplingParams, SpeculationConfig, SpeculationParams
from jaxspec.checkpoint import open_any, read_stored, tensor_sha256

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "assets" / "smollm2-135m"
SHIPPED = sorted(path.name for path in ASSETS.iterdir() if (path / "manifest.json").is_file())
QUESTION = Prompt(chat=(("user", "Why is the sea salty?"),))


@pytest.mark.parametrize("kind", SHIPPED)
def test_a_folder_is_small_whole_and_described(kind):
    folder = ASSETS / kind
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 24_000_000
    checkpoint, card = open_any(folder), (folder / "README.md").read_text()
    for group in checkpoint.groups():
        for name, array in read_stored(checkpoint, group).items():
            assert f"| {name} | `{tensor_sha256(array)}` |" in card
    assert "jaxspec-train" in card
    assert "tokens per target pass" in card


@pytest.mark.parametrize("kind", SHIPPED)
def test_the_demo_model_accepts_its_drafts(kind, demo_model):
    """Chains of the likeliest token: untrained heads give 1.01 tokens per pass here. The text is the plain one."""
    method = "draft_model" if kind == "draft" else kind
    place = {"draft" if kind == "draft" else "heads": ASSETS / kind}
    speculation = SpeculationConfig(
        method=method, num_speculative_tokens=4, tree_topk=1, tree_choices="1,1,1,1" if kind == "medusa" else None
    )
    greedy = SamplingParams(max_tokens=48, temperature=0.0)
    with Engine.load(demo_model, **place, speculation=speculation, mesh="1", max_slots=1, max_len=128) as engine:
        plain = Completion.of(engine.generate(QUESTION, greedy, SpeculationParams(0)))
        drafted = Completion.of(engine.generate(QUESTION, greedy))
    assert drafted.token_ids == plain.token_ids
    assert drafted.summary.speculation.tokens_per_target_pass > 1.25


def test_the_answers_are_ids_of_the_model(demo_model):
    vocab = open_any(demo_model).config.vocab_size
    with gzip.open(ASSETS / "answers.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    answered = [line for line in lines if "skipped" not in line]
    tokens = sum(len(line["answer_ids"]) for line in answered)
    assert f"{len(answered):,} ({tokens:,} tokens)" in (ASSETS / "README.md").read_text()
    assert len({line["line"] for line in lines}) == len(lines)
    assert all(0 <= token < vocab for line in answered for token in (*line["prompt_ids"], *line["answer_ids"]))
