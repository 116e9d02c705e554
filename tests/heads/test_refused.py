"""What is refused, and the line that says why. Nothing is left behind (the fixture ``refused`` looks)."""

import numpy as np
import pytest

from checkpoints_convert.heads import convert_heads
from jaxspec.checkpoint import open_heads
from jaxspec.errors import UserError
from jaxspec.model.heads.config import EagleConfig, MedusaConfig, heads_config_from_json
from tests.heads import makers

SIZES, SQUARE = makers.SIZES, makers.SQUARE
EAGLE3 = EagleConfig("eagle3", 19, 19, 23, 6, 2, 4, 1e-5, 1e4, 211, 53, 17, fc_bias=False, own_embed=False)


def eagle3_source(folder, tensors=None, **changes):
    return makers.write(folder / "src", makers.eagle3_config(**changes), tensors or makers.eagle3())


def eagle1_source(folder, tensors=None, **changes):
    return makers.write(folder / "src", makers.eagle_config(SQUARE, **changes), tensors or makers.eagle1())


# --- one method taken for another


def test_eagle1_weights_under_an_eagle3_flag_and_the_reverse(refused, shared, tmp_path, heads_folders) -> None:
    """Never loaded in silence, and never an acceptance of 1.0: both names are in the message."""
    fixtures = shared / "fixtures"
    assert refused(fixtures / "eagle1", method="eagle3") == [
        "pytorch_model.bin: expected EAGLE-3 weights (--method eagle3), found EAGLE-1 (method eagle, by the names of "
        "its tensors)"
    ]
    assert refused(fixtures / "eagle3", method="eagle") == [
        "model.safetensors: expected EAGLE-1 weights (--method eagle), found EAGLE-3 (method eagle3, by the names of "
        "its tensors)"
    ]
    (line,) = refused(fixtures / "medusa", method="eagle")
    assert "expected EAGLE-1" in line
    assert "found Medusa" in line
    # Our own folder knows its method too.
    (line,) = refused(heads_folders("eagle1"), method="eagle3")
    assert line.endswith("expected EAGLE-3 heads (--method eagle3), found EAGLE-1 (method eagle)")
    assert convert_heads(fixtures / "eagle1", tmp_path / "out", method="eagle").config.method == "eagle"


def test_eagle1_weights_with_an_eagle3_config(refused, tmp_path) -> None:
    """Fault I10: an unknown key of the config may change what the head computes."""
    (line,) = refused(eagle1_source(tmp_path, draft_vocab_size=17))
    assert line == "config.json: draft_vocab_size: unknown, it may change what the head computes"


def test_a_method_is_not_converted_into_another(refused, heads_folders) -> None:
    for name, to in (("eagle1", "eagle3"), ("eagle3", "eagle"), ("medusa", "eagle")):
        (line,) = refused(heads_folders(name), to=to)
        assert line.startswith(f"--to {to}: the heads are {open_heads(heads_folders(name)).config.method}")
    (line,) = refused(heads_folders("medusa"), to="speculators")
    assert "the format has no Medusa" in line


def test_speculators_config_and_tensors_of_two_methods(refused, tmp_path) -> None:
    tensors = makers.eagle3(layer="layers.0")
    assert refused(makers.write(tmp_path / "src", makers.speculators_config(method="eagle"), tensors)) == [
        "config.json: speculators_model_type is 'eagle', model.safetensors holds speculators-eagle3 tensors"
    ]
    assert refused(makers.write(tmp_path / "src", makers.eagle3_config(), tensors)) == [
        "config.json: speculators_model_type is missing, model.safetensors holds speculators-eagle3 tensors"
    ]


# --- the draft vocabulary


def test_absolute_ids_in_d2t_are_recognised(refused, tmp_path) -> None:
    """llama.cpp keeps absolute ids under the same name; read as offsets they would be other tokens, most in range."""
    tensors = makers.eagle3(SIZES._replace(V=211))
    absolute = makers.target_ids()
    tensors |= {"d2t": absolute, "t2d": np.isin(np.arange(211), absolute)}
    assert (absolute + np.arange(17)).max() < 211  # nothing else would tell
    config = makers.eagle3_config(SIZES._replace(V=211))
    assert refused(makers.write(tmp_path / "src", config, tensors)) == [
        "d2t: holds absolute target ids, as llama.cpp keeps them: expected offsets "
        "(target id = draft id + d2t[draft id])"
    ]


def test_d2t_and_t2d_must_agree(refused, tmp_path) -> None:
    good = makers.eagle3()

    def changed(**tensors):
        (line,) = refused(eagle3_source(tmp_path, good | tensors))
        return line

    outside = good["d2t"].copy()
    outside[16] += 1
    assert "draft id 16 gives 53, outside the target's vocabulary 0..52 (1 such)" in changed(d2t=outside)
    twice = good["d2t"].copy()
    twice[1] -= 1
    assert "17 draft ids give only 16 distinct target ids" in changed(d2t=twice)
    mask = good["t2d"].copy()
    unmarked = int(np.flatnonzero(~mask)[0])
    mask[unmarked], mask[0] = True, False
    assert changed(t2d=mask) == (
        "d2t and t2d disagree: 17 draft ids, 17 marked target ids, 1 of the draft ids' targets are not marked"
    )
    huge = good["d2t"].copy()
    huge[3] = 2**62
    assert "outside the target's vocabulary" in changed(d2t=huge)
    assert "expected a mask of booleans, got F32" in changed(t2d=good["t2d"].astype(np.float32))
    assert "expected [53], got [52]" in changed(t2d=good["t2d"][:52])


def test_without_the_mask_offsets_cannot_be_told_from_ids(refused, tmp_path) -> None:
    tensors = makers.eagle3()
    del tensors["t2d"]
    assert refused(eagle3_source(tmp_path, tensors)) == ["t2d is missing: expected [53], a mask of booleans"]


def test_a_map_of_the_whole_vocabulary_that_is_none(refused, tmp_path) -> None:
    sizes = SIZES._replace(d=53)
    tensors = makers.eagle3(sizes) | {"d2t": np.arange(53), "t2d": np.ones(53, np.bool_)}
    (line,) = refused(makers.write(tmp_path / "src", makers.eagle3_config(sizes), tensors))
    assert "holds absolute target ids" in line


# --- tensors: each exactly once


def test_every_tensor_that_is_missing_unknown_or_of_another_shape(refused, tmp_path) -> None:
    tensors = makers.eagle3()
    del tensors["midlayer.hidden_norm.weight"], tensors["midlayer.mlp.up_proj.weight"]
    tensors["midlayer.self_attn.q_proj.weight"] = np.zeros((24, 19), np.float32)
    tensors["midlayer.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    tensors["norm.weight"] = np.zeros(19, np.int32)
    assert sorted(refused(eagle3_source(tmp_path, tensors))) == [
        "midlayer.hidden_norm.weight is missing: expected [19]",
        "midlayer.mlp.up_proj.weight is missing: expected [23, 19]",
        "midlayer.self_attn.q_proj.bias: not part of these heads, [24] in model.safetensors",
        "midlayer.self_attn.q_proj.weight: expected [24, 38], got [24, 19] in model.safetensors",
        "norm.weight: expected floating-point values, got I32 in model.safetensors",
    ]


def test_a_missing_bias_key_means_that_there_is_a_bias(refused, tmp_path) -> None:
    (line,) = refused(eagle1_source(tmp_path, makers.eagle1(bias=False)))
    assert line.startswith("fc.bias is missing: expected [24] (config.json does not say bias: false")
    (line,) = refused(eagle1_source(tmp_path, bias=False))
    assert line == "fc.bias: not part of these heads, [24] in model.safetensors"


def test_eagle1_s_first_layer_has_no_input_norm(refused, tmp_path) -> None:
    tensors = makers.eagle1() | {"layers.0.input_layernorm.weight": np.ones(24, np.float32)}
    assert refused(eagle1_source(tmp_path, tensors)) == [
        "layers.0.input_layernorm.weight: not part of these heads, [24] in model.safetensors"
    ]


def test_medusa_heads_with_a_gap(refused, tmp_path) -> None:
    tensors = {name: tensor for name, tensor in makers.medusa(heads=3).items() if not name.startswith("1.")}
    assert len(refused(makers.write_medusa(tmp_path / "src", tensors))) == 3
    tensors["4000000.0.linear.weight"] = tensors["0.0.linear.weight"]
    (line,) = refused(makers.write_medusa(tmp_path / "src", tensors))
    assert "its names count up to head 4000000" in line
    (line,) = refused(makers.write_medusa(tmp_path / "src", medusa_num_layers=2))
    assert line == "config.json: medusa_num_layers is 2, medusa_lm_head.safetensors has 1"


# --- config.json


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: expected 1, got '2'"),
        ({"attention_bias": True}, "attention_bias: expected False, got 'True'"),
        ({"model_type": "qwen3"}, "model_type: expected 'llama', got 'qwen3'"),
        ({"rms_norm_eps": ...}, "rms_norm_eps is missing"),
        ({"rms_norm_eps": 10**400}, "config.json: a number of 401 digits: expected at most 40"),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta: expected a positive"),
        ({"hidden_size": "64"}, "hidden_size: expected a positive integer, got '64'"),
        ({"num_key_value_heads": 4}, "num_heads: expected a multiple of num_kv_heads=4, got 6"),
        ({"draft_vocab_size": 54}, "draft_vocab_size: expected at most 53 (vocab_size), got 54"),
        ({"draft_vocab_size": ...}, "draft_vocab_size is missing"),
        ({"norm_before_fc": True}, "norm_before_fc: expected False, got 'True'"),
        ({"logit_scale": 0.5}, "logit_scale: expected 1, got '0.5'"),
        ({"target_hidden_size": 11}, "own_embed: the target's embeddings are 11 wide, the head is 19 wide"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, "aux_layers: expected distinct target layers in ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}, "aux_layers: expected distinct target layers in ascending"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta is 20000.0, but 5.0 in rope_parameters"),
        ({"wizardry": 3}, "wizardry: unknown, it may change what the head computes"),
    ],
)
def test_configs_that_mean_another_head(refused, tmp_path, changes, expected) -> None:
    (line,) = refused(eagle3_source(tmp_path, **changes))
    assert expected in line
    assert line.startswith("config.json: ")


def test_everything_wrong_with_a_config_at_once(refused, tmp_path) -> None:
    lines = refused(eagle3_source(tmp_path, rms_norm_eps=..., vocab_size=0, wizardry=3, mlp_bias=True))
    assert len(lines) == 4


def test_speculators_configs_that_mean_another_head(refused, tmp_path) -> None:
    """norm_before_residual has two defaults among the libraries that read the format: it must be there."""
    tensors = makers.eagle3(layer="layers.0")
    for changes, expected in (
        ({"norm_before_residual": ...}, "norm_before_residual is missing"),
        ({"norm_output": True}, "norm_output: expected False"),
        ({"layer_model_type": "qwen3"}, "transformer_layer_config: model_type: expected 'llama'"),
        ({"layer_model_type": ...}, "transformer_layer_config: model_type is missing"),
        ({"transformer_layer_config": 3}, "transformer_layer_config: expected an object"),
    ):
        (line,) = refused(makers.write(tmp_path / "src", makers.speculators_config(**changes), tensors))
        assert expected in line
    config = makers.speculators_config(method="eagle", layernorms=True)
    (line,) = refused(
        makers.write(tmp_path / "src", config, makers.eagle1(SIZES, layer="transformer", fc="fusion_fc", bias=False))
    )
    assert line == "config.json: layernorms: expected False, got 'True'"


def test_a_head_as_wide_as_the_features_it_is_given() -> None:
    """The head tells its own outputs from the target's features by their width alone, as the authors' code does."""
    with pytest.raises(UserError, match="3 levels of 8 are as wide as the head"):
        EagleConfig("eagle3", 24, 8, 23, 6, 2, 4, 1e-5, 1e4, 211, 53, 17, fc_bias=False, own_embed=True)


def test_our_own_configs_with_unknown_or_contradictory_keys() -> None:
    good = MedusaConfig(19, 53, 3, 1, own_lm_head=True).to_json()
    eagle = EagleConfig("eagle", 24, 24, 23, 6, 2, 4, 1e-5, 1e4, 211, 53, 53, fc_bias=True, own_embed=True).to_json()
    for data, expected in (
        (good | {"tree": 3}, "unknown key 'tree'"),
        (good | {"method": "hydra"}, "method: expected medusa, eagle or eagle3, got 'hydra'"),
        (good | {"num_heads": 0}, "num_heads: expected a positive integer, got 0"),
        (good | {"num_layers": 0, "own_lm_head": False}, "heads without a residual block"),
        ([], "method: expected medusa"),
        (eagle | {"draft_vocab_size": 17}, "draft_vocab_size: expected 53 for method eagle, got 17"),
        (eagle | {"aux_layers": 3}, "aux_layers: expected a list"),
        (eagle | {"rms_norm_eps": "small"}, "rms_norm_eps: expected a number"),
        (eagle | {"fc_bias": 1}, "fc_bias: expected true or false, got 1"),
        (eagle | {"method": "eagle3"}, "fc_bias: expected false for method eagle3"),
    ):
        with pytest.raises(UserError) as caught:
            heads_config_from_json(data)
        assert expected in str(caught.value)
