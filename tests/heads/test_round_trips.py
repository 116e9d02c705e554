"""Heads out in the formats of others and in again."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints_convert.heads import convert_heads
from jaxspec.checkpoint import open_heads
from jaxspec.model.config import RopeScaling
from jaxspec.model.heads.config import EagleConfig, MedusaConfig, heads_config_from_json
from tests.heads import makers
from tests.heads.conftest import same_bits, tree

SIZES, SQUARE = makers.SIZES, makers.SQUARE


ROUND_TRIPS = {
    "medusa": ("medusa", makers.medusa_config(), makers.medusa(), "medusa_lm_head.safetensors"),
    "eagle": ("eagle", makers.eagle_config(SQUARE), makers.eagle1(), "model.safetensors"),
    "eagle without bias": (
        "eagle",
        makers.eagle_config(SQUARE, bias=False),
        makers.eagle1(bias=False),
        "model.safetensors",
    ),
    "eagle3": ("eagle3", makers.eagle3_config(), makers.eagle3(), "model.safetensors"),
    "eagle3, embeddings": (
        "eagle3",
        makers.eagle3_config(target_hidden_size=11, eagle_aux_hidden_state_layer_ids=[0, 3, 4]),
        makers.eagle3(target_width=11, embed=True),
        "model.safetensors",
    ),
    "eagle3, whole vocabulary": (
        "eagle3",
        makers.eagle3_config(SIZES._replace(d=53)),
        makers.eagle3(SIZES._replace(d=53)),
        "model.safetensors",
    ),
    "speculators eagle3": (
        "speculators",
        makers.speculators_config(eagle_aux_hidden_state_layer_ids=[1, 2, 5]),
        makers.eagle3(layer="layers.0", embed=True),
        "model.safetensors",
    ),
    "speculators eagle": (
        "speculators",
        makers.speculators_config(method="eagle"),
        makers.eagle1(SIZES, layer="transformer", fc="fusion_fc", bias=False),
        "model.safetensors",
    ),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_out_and_in_again(tmp_path, name) -> None:
    """Written back, a format has the very tensors that it came with; read again, they give the same heads."""
    to, config, tensors, file = ROUND_TRIPS[name]
    convert_heads(makers.write(tmp_path / "src", config, tensors, file), tmp_path / "ours")
    convert_heads(tmp_path / "ours", tmp_path / "back", to=to, base="somewhere")
    written = load_file(tmp_path / "back" / file)
    assert same_bits(dict(sorted(written.items())), dict(sorted(tensors.items())))
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == sorted(["config.json", file])
    said = json.loads((tmp_path / "back" / "config.json").read_text())
    for key in set(config) - {"transformer_layer_config", "medusa_num_heads"}:
        if key in said:
            assert said[key] == config[key], key
    convert_heads(tmp_path / "back", tmp_path / "again")
    assert same_bits(tree(tmp_path / "ours"), tree(tmp_path / "again"))
    assert open_heads(tmp_path / "again").config == open_heads(tmp_path / "ours").config


@pytest.mark.parametrize("name", ["medusa", "eagle1", "eagle3"])
def test_the_authors_fixtures_out_and_in_again(shared, heads_folders, tmp_path, name) -> None:
    """Float16 files: written as float32, of the same values under the same names."""
    method = open_heads(heads_folders(name)).config.method
    convert_heads(heads_folders(name), tmp_path / "back", to=method)
    file = "medusa_lm_head.safetensors" if name == "medusa" else "model.safetensors"
    convert_heads(tmp_path / "back", tmp_path / "again")
    assert same_bits(tree(heads_folders(name)), tree(tmp_path / "again"))
    if name != "eagle1":
        theirs, written = load_file(shared / "fixtures" / name / file), load_file(tmp_path / "back" / file)
        assert theirs.keys() == written.keys()
        for key, tensor in theirs.items():
            np.testing.assert_array_equal(written[key], tensor)
            assert written[key].dtype == (np.float32 if tensor.dtype == np.float16 else tensor.dtype)


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_from_the_authors_format_to_speculators_and_back(heads_folders, tmp_path, name) -> None:
    convert_heads(heads_folders(name), tmp_path / "spec", to="speculators", base="meta-llama/Llama-3.1-8B-Instruct")
    said = json.loads((tmp_path / "spec" / "config.json").read_text())
    config = open_heads(heads_folders(name)).config
    assert said["speculators_model_type"] == config.method == said["speculators_config"]["algorithm"]
    assert said["speculators_config"]["verifier"]["name_or_path"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert said["transformer_layer_config"]["rope_theta"] == config.rope_theta
    convert_heads(tmp_path / "spec", tmp_path / "again")
    assert same_bits(tree(heads_folders(name)), tree(tmp_path / "again"))
    assert open_heads(tmp_path / "again").config == config


def test_what_a_format_demands_comes_from_the_target(shared, refused, tmp_path, tiny_models) -> None:
    """The authors' Medusa has an LM head in every head, their EAGLE-1 its embeddings: heads that share the target's
    are written with copies, and only when the target is given."""
    target = tiny_models("tiny-llama3")
    theirs = load_file(shared / "fixtures/tiny-llama3/hf/model.safetensors")
    sizes = SIZES._replace(D=64, V=512)
    shares = makers.write(tmp_path / "medusa", None, makers.medusa(sizes, own=False), "medusa_lm_head.safetensors")
    convert_heads(shares, tmp_path / "ours", target=target)
    assert refused(tmp_path / "ours", to="medusa") == [
        "--to medusa: the format wants an LM head in every head, these heads use the target's: give --target"
    ]
    convert_heads(tmp_path / "ours", tmp_path / "back", to="medusa", target=target)
    written = load_file(tmp_path / "back" / "medusa_lm_head.safetensors")
    assert len(written) == 3 * 3
    np.testing.assert_array_equal(written["2.1.weight"], theirs["lm_head.weight"].astype(np.float32))

    sizes = sizes._replace(H=16, N=4)
    tensors = makers.eagle1(sizes)
    del tensors["embed_tokens.weight"]
    convert_heads(makers.write(tmp_path / "eagle", makers.eagle_config(sizes), tensors), tmp_path / "ours", force=True)
    assert not open_heads(tmp_path / "ours").config.own_embed
    (line,) = refused(tmp_path / "ours", to="eagle")
    assert "the embeddings in the file" in line
    convert_heads(tmp_path / "ours", tmp_path / "with", to="eagle", target=target)
    written = load_file(tmp_path / "with" / "model.safetensors")
    np.testing.assert_array_equal(
        written["embed_tokens.weight"], theirs["model.embed_tokens.weight"].astype(np.float32)
    )


def test_configs_come_back_from_json(tmp_path) -> None:
    eagle = EagleConfig("eagle3", 19, 11, 23, 6, 2, 4, 1e-5, 1e4, 211, 53, 17, False, True, True, (1, 2, 5))
    scaled = dataclasses.replace(eagle, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64))
    for config in (eagle, scaled, MedusaConfig(19, 53, 3, 1, own_lm_head=False)):
        assert heads_config_from_json(json.loads(json.dumps(config.to_json()))) == config


def test_moved_folders_and_ignored_buffers(converted, tmp_path) -> None:
    """A rotary buffer of old exports, and the target's tables that speculators keeps for training, carry nothing."""
    tensors = makers.eagle3(layer="layers.0")
    source = makers.write(tmp_path / "src", makers.speculators_config(), tensors)
    converted(source)
    plain = tree(tmp_path / "out")
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    tensors["verifier_lm_head.weight"] = np.ones((17, 19), np.float32)
    tensors["verifier_norm.weight"] = np.ones(19, np.float32)
    save_file(tensors, source / "model.safetensors")
    shutil.move(source, tmp_path / "moved")
    converted(tmp_path / "moved")
    assert same_bits(plain, tree(tmp_path / "out"))
