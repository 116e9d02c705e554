"""config.json: both dialects, rope scaling by every name it has had, end tokens, and what must be refused."""

import json

import pytest

from checkpoints_convert import ConversionError
from checkpoints_convert.readers.hf_config import llama_config
from jaxspec.model.config import RopeScaling
from tests.convert.makers import SIZES, hf_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def read(generation=None, **changes):
    return llama_config(hf_config(**changes), generation or {}, has_head=True)


def findings(generation=None, *, has_head=True, **changes) -> list[str]:
    with pytest.raises(ConversionError) as caught:
        llama_config(hf_config(**changes), generation or {}, has_head=has_head)
    return list(caught.value.findings)


def test_both_dialects_say_the_same() -> None:
    old = read(rope_scaling={"rope_type": "llama3", **LLAMA3})
    new = read(
        rope_theta=...,
        rope_scaling=...,
        torch_dtype=...,
        dtype="float32",
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    )
    assert old == new
    assert old.rope_scaling == SCALING
    assert old.rope_theta == 500000.0


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "llama3", **LLAMA3}, SCALING),
        ({"type": "llama3", **LLAMA3}, SCALING),
        ({"rope_type": "llama3", "type": "llama3", **LLAMA3}, SCALING),
        (None, None),
        (..., None),
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 4}, RopeScaling("linear", 4.0)),
    ],
)
def test_rope_scaling_by_every_name(scaling, expected) -> None:
    """E09: 'rope_type' and the legacy 'type' mean the same; null means unscaled."""
    assert read(rope_scaling=scaling).rope_scaling == expected


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, ["rope_type", "'yarn'"]),
        ({"type": "dynamic", "factor": 2.0}, ["rope_type", "'dynamic'"]),
        ({"rope_type": 5}, ["rope_type", "5"]),
        ({"rope_type": "llama3", "type": "linear", **LLAMA3}, ["'llama3'", "'linear'"]),
        (LLAMA3, ["rope_type is missing"]),
        ({"rope_type": "llama3", **LLAMA3, "factor": -8}, ["factor", "-8"]),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5}, ["high_freq_factor", "0.5"]),
        ({"rope_type": "llama3", **LLAMA3, "attention_factor": 2}, ["attention_factor"]),
        ("llama3", ["rope_scaling", "'llama3'"]),
    ],
)
def test_unknown_or_broken_rope_scaling_is_refused(scaling, expected) -> None:
    """E09: never read as unscaled."""
    (line,) = findings(rope_scaling=scaling)
    for part in expected:
        assert part in line


def test_every_number_that_llama3_scaling_lacks_is_named() -> None:
    lines = findings(rope_scaling={"rope_type": "llama3"})
    assert len(lines) == 4
    for name, line in zip(LLAMA3, lines, strict=True):
        assert name in line


def test_two_places_that_disagree_are_a_finding() -> None:
    (line,) = findings(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert "500000.0" in line
    assert "10000.0" in line


REQUIRED = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "vocab_size",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_each_missing_field_is_one_finding(key) -> None:
    lines = findings(**{key: ...})
    assert len(lines) == 1, lines
    assert key in lines[0]


def test_all_missing_fields_are_listed_at_once() -> None:
    lines = findings(**dict.fromkeys(REQUIRED, ...))
    assert len(lines) == len(REQUIRED)
    for key in REQUIRED:
        assert any(key in line for line in lines), key


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model_type", "mistral", "model_type: expected 'llama', got 'mistral'"),
        ("architectures", ["LlamaForSequenceClassification"], "architectures"),
        ("hidden_act", "gelu", "hidden_act: expected 'silu', got 'gelu'"),
        ("attention_bias", True, "attention_bias"),
        ("mlp_bias", True, "mlp_bias"),
        ("quantization_config", {"quant_method": "gptq"}, "quantization_config"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor"),
        ("vocab_size", "53", "vocab_size: expected a positive integer, got '53'"),
        ("num_hidden_layers", 0, "num_hidden_layers"),
        ("hidden_size", -19, "hidden_size"),
        ("num_attention_heads", True, "num_attention_heads"),
        ("rms_norm_eps", 0.0, "rms_norm_eps"),
        ("rope_theta", "many", "rope_theta"),
        ("num_key_value_heads", 4, "expected a multiple of num_kv_heads=4, got 6"),
        ("head_dim", 5, "head_dim: expected an even number"),
        ("eos_token_id", "</s>", "eos_token_id"),
        ("eos_token_id", [2, 53], "token id: expected one in [0, 53), got 53"),
        ("bos_token_id", -1, "bos_token_id"),
        ("tie_word_embeddings", "no", "tie_word_embeddings"),
    ],
)
def test_another_model_or_a_broken_value_is_refused_by_name(key, value, named) -> None:
    (line,) = findings(**{key: value})
    assert line.startswith("config.json: ")
    assert named in line


def test_head_dim_is_derived_where_it_is_not_written() -> None:
    assert read(head_dim=..., hidden_size=24).head_dim == 4
    (line,) = findings(head_dim=..., hidden_size=25)
    assert "25" in line


def test_untied_without_a_head_is_a_contradiction() -> None:
    (line,) = findings(has_head=False)
    assert "tie_word_embeddings is false" in line
    (line,) = findings(has_head=False, tie_word_embeddings=...)
    assert "tie_word_embeddings is missing" in line


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, [3, 2], (2, 3)),
        (None, 3, (3,)),
        (None, None, ()),
    ],
)
def test_end_tokens_of_both_files_are_united(config, generation, expected) -> None:
    assert read({"eos_token_id": generation}, eos_token_id=config).eos_token_ids == expected


def test_the_sizes_go_where_they_belong() -> None:
    config = read()
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (SIZES.V, SIZES.D, SIZES.F)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (SIZES.N, SIZES.K, SIZES.H)
    assert (config.num_layers, config.max_position_embeddings, config.rms_norm_eps) == (SIZES.L, 128, 1e-5)
    assert json.loads(json.dumps(config.to_json()))["bos_token_id"] == 1
