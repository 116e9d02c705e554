"""What does not fit together is refused before anything is compiled, in one line that names both sides."""

import re

import pytest

from jaxspec import Engine, SpeculationConfig
from jaxspec.errors import UserError

FINGERPRINT = "0" * 64


def refused(target, message: str, **options) -> None:
    with pytest.raises(UserError) as error:
        Engine.load(target, **{"mesh": "1", "max_len": 61, "max_slots": 2, **options})
    assert re.search(message, str(error.value)), error.value
    assert "\n" not in str(error.value)


def test_an_ordinary_checkpoint_must_have_every_row_of_its_embedding(edited):
    """D20: 128 rows short of its config."""
    refused(edited("tiny-llama3", vocab_size=640), r"embed: config.json implies shape \[640, 64\].*\[512, 64\]")
    refused(edited("tiny-llama3", num_layers=5), r"lacks layers.4")


def test_a_context_beyond_what_was_trained_is_refused(checkpoints, edited):
    """E11, with both numbers."""
    refused(checkpoints("tiny-llama3"), r"max_len: expected 2\.\.512 .*got 513", max_len=513)
    refused(edited("tiny-llama3", max_position_embeddings=60), r"max_len: expected 2\.\.60 .*got 61")
    refused(checkpoints("tiny-llama3"), r"max_len: .*got 1\b", max_len=1)


def test_a_draft_with_another_tokenizer_is_refused_with_both_fingerprints(checkpoints, edited):
    """Equality of fingerprints, not of sizes."""
    stranger = edited("tiny-draft", "manifest.json", tokenizer_fingerprint=FINGERPRINT)
    ours = edited("tiny-draft", "manifest.json").joinpath("manifest.json").read_text()
    own = re.search(r'"tokenizer_fingerprint": "(\w{64})"', ours)
    assert own is not None
    refused(checkpoints("tiny-llama3"), f"fingerprint {own.group(1)}, got {FINGERPRINT}", draft=stranger)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_version": "9"}, r"expected family llama 3 .*got llama 9"),
        ({"family": "camel"}, r"expected family llama 3 .*got camel 3"),
    ],
)
def test_a_draft_of_another_family_is_refused_with_both(values, message, checkpoints, edited):
    refused(checkpoints("tiny-llama3"), message, draft=edited("tiny-draft", "manifest.json", **values))


def test_without_tokenizers_the_vocabularies_must_agree(edited):
    target = edited("tiny-llama3", "manifest.json", tokenizer_fingerprint=None)
    stranger = edited("tiny-draft", "manifest.json", tokenizer_fingerprint=FINGERPRINT)
    refused(target, f"expected fingerprint None, got {FINGERPRINT}", draft=stranger)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "5"}, r"mesh: '5' needs 5 devices, 4 visible"),
        ({"mesh": {"data": 3, "model": 2}}, r"needs 6 devices, 4 visible"),
        ({"mesh": "model=0"}, r"mesh: expected positive sizes"),
        ({"mesh": "rows=2"}, r"mesh: expected positive sizes for the axes data and model"),
        ({"mesh": "two"}, r"mesh: expected auto, N or data=D,model=M, got 'two'"),
        ({"dtype": "float64"}, r"dtype: expected float32 or bfloat16, got 'float64'"),
        ({"max_slots": 0}, r"max_slots: expected 1\.\.1024, got 0"),
        ({"max_queue": -1}, r"max_queue: expected an integer >= 0, got -1"),
        ({"speculation": SpeculationConfig(method="draft_model")}, r"draft_model needs a draft checkpoint"),
        ({"draft": "/nowhere"}, r"/nowhere: expected the folder of a converted checkpoint"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message, checkpoints):
    refused(checkpoints("tiny-llama3"), message, **options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "beam"}, r"method: expected one of ngram, draft_model, .*none, got 'beam'"),
        (
            {"rejection_sample_method": "typical"},
            r"rejection_sample_method: expected token, block, coupled, got 'typical'",
        ),
        ({"num_speculative_tokens": 9}, r"num_speculative_tokens: expected an integer in 0\.\.8, got 9"),
        ({"prompt_lookup_max": 0}, r"prompt_lookup_max: "),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, r"prompt_lookup_min: expected .*prompt_lookup_max=4"),
        ({"gamma": 4, "tree": 1}, r"unknown key 'gamma', 'tree'; expected .*num_speculative_tokens"),
        ({"num_beams": 4}, r"num_beams: expected 1 or unset: beam search"),
    ],
)
def test_a_speculation_config_names_its_mistakes(values, message):
    with pytest.raises(UserError, match=message):
        SpeculationConfig.from_mapping(values)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    refused(tmp_path, r"expected a converted checkpoint, found no manifest.json")
    refused(tmp_path / "missing", r"expected the folder of a converted checkpoint")


def test_a_draft_with_a_shorter_context_is_taken_with_a_line(checkpoints, edited, caplog):
    """B10: said once, at the start."""
    caplog.set_level("INFO", "jaxspec")
    short = edited("tiny-draft", max_position_embeddings=40)
    with Engine.load(checkpoints("tiny-llama3"), draft=short, mesh="1", max_len=61, max_slots=2):
        pass
    assert caplog.text.count("trained for 40 positions, past them rows decode without it") == 1


def test_an_unused_draft_is_ignored_with_a_line(checkpoints, caplog):
    caplog.set_level("INFO", "jaxspec")
    speculation = SpeculationConfig(method="ngram")
    with Engine.load(checkpoints("tiny-llama3"), draft="/nowhere", speculation=speculation, mesh="1", max_len=61):
        pass
    assert "draft /nowhere: ignored by method ngram" in caplog.text
