"""What is refused, and the line that says why. Nothing is left behind (the fixture ``refused`` looks)."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints_convert import ConversionError
from checkpoints_convert.heads import convert_heads
from jaxspec.checkpoint import open_checkpoint, open_heads
from jaxspec.errors import UserError
from jaxspec.model.heads.config import EagleConfig, MedusaConfig, heads_config_from_json, resolved_aux_layers
from tests.heads import makers
from tests.heads.conftest import same_bits, tree

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


# --- the target


def test_heads_that_do_not_fit_the_target(refused, shared, tiny_models) -> None:
    """All at once, each with both values."""
    target = tiny_models("tiny-draft")
    width = f"--target {target}: hidden size: the head was made for 64, the target has 32"
    for name in ("medusa", "eagle1"):
        assert refused(shared / "fixtures" / name, target=target) == [width]
    lines = refused(shared / "fixtures/eagle3", target=target)
    assert lines[0] == width
    assert "of a target with 2 layers the rule 2, n/2, n-3 gives 2, 1, -1" in lines[1]
    assert len(lines) == 2


def test_layers_that_a_target_has_not(refused, shared, tiny_models, heads_folders) -> None:
    """Fault I18: on a shallow target the rule 2, n/2, n-3 names fewer than three layers."""
    shallow = tiny_models("tiny-llama3")
    assert refused(shared / "fixtures/eagle3", target=shallow) == [
        f"--target {shallow}: layer ids: the head names none, and of a target with 4 layers the rule 2, n/2, n-3 "
        "gives 2, 2, 1: expected 3 distinct ones in 0..3"
    ]
    # Once bound to a target of 8 layers it names them.
    assert refused(heads_folders("eagle3"), target=shallow) == [
        f"--target {shallow}: layer ids: the head sees layers [2, 4, 5], the target has 0..3"
    ]


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(8, (2, 4, 5)), (7, (2, 3, 4)), (32, (2, 16, 29)), (3, (0, 1, 2)), (80, (2, 40, 77))]
)
def test_the_authors_rule(num_layers, expected) -> None:
    assert resolved_aux_layers(EAGLE3, num_layers) == expected


@pytest.mark.parametrize("num_layers", [1, 2, 4, 5, 6])
def test_targets_too_shallow_for_the_authors_rule(num_layers) -> None:
    """Fault I18."""
    with pytest.raises(UserError, match=f"of a target with {num_layers} layers the rule"):
        resolved_aux_layers(EAGLE3, num_layers)


def test_vocabulary_and_width_of_a_target(refused, tmp_path, tiny_models) -> None:
    target = tiny_models("tiny-llama3-8l")
    assert refused(eagle3_source(tmp_path), target=target) == [
        f"--target {target}: hidden size: the head was made for 19, the target has 64",
        f"--target {target}: vocabulary: the head was made for 53 ids, the target has 512",
    ]


def test_the_tokenizer_that_heads_were_recorded_with(refused, shared, tmp_path, tiny_models, heads_folders) -> None:
    """Fault D21: shapes fit, the words do not. The target's fingerprint goes into the heads' manifest."""
    target = tiny_models("tiny-llama3")
    fingerprint = open_checkpoint(target).manifest.tokenizer_fingerprint
    heads = open_heads(heads_folders("medusa"))
    assert fingerprint is not None
    assert heads.manifest.tokenizer_fingerprint == fingerprint
    assert heads.tokenizer_dir is None
    other = tmp_path / "other"
    _with_fingerprint(target, other, "0" * 64)
    (line,) = refused(heads_folders("medusa"), target=other)
    assert line == (
        f"--target {other}: tokenizer: the heads were recorded with fingerprint {fingerprint}, "
        f"the target has {'0' * 64}"
    )
    # Foreign files record nothing: without a target there is no fingerprint, and none to compare with later.
    result = convert_heads(shared / "fixtures/medusa", tmp_path / "unbound")
    assert result.fingerprint is None
    assert open_heads(tmp_path / "unbound").manifest.tokenizer_fingerprint is None
    bound = convert_heads(tmp_path / "unbound", tmp_path / "bound", target=other)
    assert bound.fingerprint == "0" * 64
    assert same_bits(tree(tmp_path / "bound"), tree(heads_folders("medusa")))
    # Bound once, they stay bound where no target is given.
    assert convert_heads(tmp_path / "bound", tmp_path / "again").fingerprint == "0" * 64


def _with_fingerprint(target, copy, fingerprint) -> None:
    """The same checkpoint with another fingerprint in its manifest; only config and manifest are read here."""
    shutil.copytree(target, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tokenizer_fingerprint"] = fingerprint
    (copy / "manifest.json").write_text(json.dumps(manifest))


# --- what other formats cannot say


def test_what_the_authors_loader_would_take_for_something_else(refused, tmp_path, tiny_models) -> None:
    tensors = makers.eagle3(layer="layers.0", embed=True)
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    }
    config = makers.speculators_config(layer_rope_scaling=scaling)
    convert_heads(makers.write(tmp_path / "src", config, tensors), tmp_path / "ours")
    assert refused(tmp_path / "ours", to="eagle3") == [
        "eagle3: the authors' heads have no rope scaling, these have llama3",
        "eagle3: the authors' heads norm after the residual, these have norm_before_residual",
    ]
    tensors = makers.eagle1(SIZES, layer="transformer", fc="fusion_fc", bias=False)
    config = makers.speculators_config(method="eagle")
    convert_heads(makers.write(tmp_path / "src", config, tensors), tmp_path / "ours", force=True)
    assert refused(tmp_path / "ours", to="eagle") == [
        "eagle: the authors' head_dim is hidden_size / num_attention_heads, these have 4 with 19 / 6"
    ]
    convert_heads(
        makers.write_medusa(tmp_path / "medusa", makers.medusa(heads=2, layers=2), medusa_num_layers=2), tmp_path / "m"
    )
    assert refused(tmp_path / "m", to="medusa") == [
        "medusa: head 0: its 2 blocks differ, the authors' loader shares one",
        "medusa: head 1: its 2 blocks differ, the authors' loader shares one",
    ]


def test_layers_that_the_authors_code_does_not_look_at(refused, shared, tmp_path, tiny_models) -> None:
    target = tiny_models("tiny-llama3-8l")
    source = tmp_path / "src"
    source.mkdir()
    config = json.loads((shared / "fixtures/eagle3/config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}))
    save_file(load_file(shared / "fixtures/eagle3/model.safetensors"), source / "model.safetensors")
    convert_heads(source, tmp_path / "ours", target=target)
    assert refused(tmp_path / "ours", to="eagle3", target=target) == [
        "eagle3: the authors' code looks at layers [2, 4, 5] of this target, these heads see [1, 4, 6]"
    ]
    convert_heads(tmp_path / "ours", tmp_path / "spec", to="speculators", target=target)
    said = json.loads((tmp_path / "spec" / "config.json").read_text())
    assert said["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]


# --- places


def test_what_is_no_heads_at_all(refused, shared, tmp_path, tiny_models) -> None:
    (line,) = refused(tmp_path / "nowhere")
    assert line.endswith("expected heads, found nothing")
    (line,) = refused(shared / "fixtures/tiny-llama3/hf")
    assert line == "model.safetensors: expected heads, found a whole model (convert it with to-orbax)"
    (line,) = refused(tiny_models("tiny-llama3"))
    assert "expected speculative heads, found a model" in line
    (tmp_path / "empty").mkdir()
    (line,) = refused(tmp_path / "empty")
    assert "found none of them" in line
    (tmp_path / "notes.txt").write_text("")
    (line,) = refused(tmp_path / "notes.txt")
    assert "expected heads: a folder, or a file" in line
    (line,) = refused(makers.write(tmp_path / "src", {}, {"a": np.zeros(3, np.float32)}))
    assert line.endswith("or speculators heads, found a")
    (line,) = refused(makers.write(tmp_path / "bare", None, makers.eagle3()))
    assert line.startswith("config.json: expected in ")
    (line,) = refused(shared / "fixtures/eagle3", target=tmp_path / "empty")
    assert "expected a converted checkpoint" in line
    with pytest.raises(UserError, match="to: expected orbax, medusa"):
        convert_heads(shared / "fixtures/eagle3", tmp_path / "out", to="gguf")


def test_destinations(shared, tmp_path, heads_folders) -> None:
    source = heads_folders("eagle3")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("only copy")
    for to in ("orbax", "eagle3", "speculators"):
        with pytest.raises(ConversionError, match="not replaced, even with --force"):
            convert_heads(source, precious, to=to, force=True)
        with pytest.raises(ConversionError, match="exists already; give --force"):
            convert_heads(source, precious, to=to)
        with pytest.raises(ConversionError, match="source and destination are the same"):
            convert_heads(source, source, to=to, force=True)
        for _ in range(2):
            convert_heads(source, tmp_path / to, to=to, force=True)
    assert (precious / "thesis.txt").read_text() == "only copy"
    # The model that the heads are for is never written over, force or not.
    with pytest.raises(ConversionError, match="expected a place apart from the target"):
        convert_heads(source, tmp_path / "orbax", target=tmp_path / "orbax", force=True)
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_leaves_nothing(heads_folders, tmp_path, monkeypatch) -> None:
    """The writer of foreign files fails midway: no folder, no hidden sibling."""

    def full(path, *arguments) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("checkpoints_convert.heads.write.write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        convert_heads(heads_folders("eagle3"), tmp_path / "out", to="eagle3")
    assert list(tmp_path.iterdir()) == []
