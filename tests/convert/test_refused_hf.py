"""Hugging Face folders that must be refused: status 2, every finding listed, nothing left."""

import json
import os

import numpy as np
import pytest

from checkpoints_convert import convert
from jaxspec.checkpoint import open_checkpoint
from tests.convert import makers

INDEX = "model.safetensors.index.json"


@pytest.fixture
def whole(tmp_path):
    return makers.write_hf(tmp_path / "hf", makers.hf_config(), makers.hf_tensors())


@pytest.fixture
def sharded(tmp_path):
    return makers.write_sharded(tmp_path / "hf", makers.hf_config(), makers.split_in_three(makers.hf_tensors()))


def change_index(folder, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_missing_shards_are_all_listed(sharded, refused) -> None:
    """E15"""
    (sharded / "model-00001-of-00003.safetensors").unlink()
    (sharded / "model-00003-of-00003.safetensors").unlink()
    lines = refused(sharded)
    assert len(lines) == 2
    for line, number in zip(lines, (1, 3), strict=True):
        assert f"model-0000{number}-of-00003.safetensors: listed in {INDEX}, not in the folder" in line


@pytest.mark.parametrize("escape", ["../x", "sub/model.safetensors", "/etc/hostname", "..", "", "a\\b", "a\0b", 7])
def test_a_shard_outside_the_folder_is_refused(escape, sharded, refused) -> None:
    """E15: even when the file is there."""
    makers.write_safetensors(sharded.parent / "x", makers.hf_tensors())
    change_index(sharded, lambda weight_map: weight_map.update({"model.norm.weight": escape}))
    (line,) = refused(sharded)
    assert "model.norm.weight" in line
    assert repr(escape) in line


def test_only_indexed_files_are_read(sharded, tmp_path, tree) -> None:
    """E17: a stray model.safetensors with the same names changes nothing, and is no source."""
    convert(sharded, tmp_path / "before")
    strayed = {name: array + 1 for name, array in makers.hf_tensors().items()}
    makers.write_safetensors(sharded / "model.safetensors", strayed)
    makers.write_safetensors(sharded / "zz.safetensors", strayed)
    convert(sharded, tmp_path / "after")
    before, after = tree(tmp_path / "before"), tree(tmp_path / "after")
    assert {name: array.tobytes() for name, array in before.items()} == {
        name: array.tobytes() for name, array in after.items()
    }
    sources = open_checkpoint(tmp_path / "after").manifest.sources
    assert set(sources) == {"config.json", INDEX, *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))}


def test_a_tensor_in_two_shards_is_a_duplicate(sharded, refused) -> None:
    """E17"""
    shard = sharded / "model-00002-of-00003.safetensors"
    second = makers.split_in_three(makers.hf_tensors())[1]
    makers.write_safetensors(shard, second | {"model.embed_tokens.weight": np.zeros((53, 19), np.float32)})
    (line,) = refused(sharded)
    assert line.startswith("model.embed_tokens.weight: duplicate")
    assert "model-00001" in line
    assert "model-00002" in line


def test_a_name_twice_in_one_header_is_a_duplicate(whole, refused) -> None:
    path = whole / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].decode()
    entry = json.dumps(json.loads(header)["model.norm.weight"])
    doubled = (header[:-1] + f', "model.norm.weight": {entry}}}').encode()
    path.write_bytes(len(doubled).to_bytes(8, "little") + doubled + raw[8 + length :])
    (line,) = refused(whole)
    assert "duplicate key model.norm.weight" in line


def test_an_index_and_its_shards_must_agree(sharded, refused) -> None:
    def move(weight_map) -> None:
        del weight_map["lm_head.weight"]
        weight_map["model.extra.weight"] = "model-00001-of-00003.safetensors"

    change_index(sharded, move)
    lines = refused(sharded)
    assert len(lines) == 2
    assert any(line.startswith("model.extra.weight") and "it is not" in line for line in lines)
    assert any(line.startswith("lm_head.weight") and "does not say" in line for line in lines)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', "{", "\xff"])
def test_a_broken_index_is_refused(index, sharded, refused) -> None:
    (sharded / INDEX).write_bytes(index.encode("latin-1"))
    (line,) = refused(sharded)
    assert INDEX in line


def test_shards_without_an_index_are_refused(sharded, refused) -> None:
    (sharded / INDEX).unlink()
    (line,) = refused(sharded)
    assert INDEX in line
    assert "model-00002-of-00003.safetensors" in line


NAMES = list(makers.hf_tensors(makers.SIZES._replace(L=1)))


@pytest.mark.parametrize("name", NAMES)
def test_each_missing_tensor_is_named(name, tmp_path, refused) -> None:
    weights = makers.hf_tensors()
    del weights[name]
    (line,) = refused(makers.write_hf(tmp_path / "hf", makers.hf_config(), weights))
    assert name in line


def test_one_too_many_and_one_too_few_and_one_of_another_shape_are_all_listed(tmp_path, refused) -> None:
    weights = makers.hf_tensors()
    del weights["model.layers.1.mlp.down_proj.weight"]
    weights["model.layers.0.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    weights["model.layers.3.input_layernorm.weight"] = np.zeros(19, np.float32)
    weights["model.layers.2.self_attn.o_proj.weight"] = weights["model.layers.2.self_attn.o_proj.weight"].T.copy()
    lines = refused(makers.write_hf(tmp_path / "hf", makers.hf_config(), weights))
    assert len(lines) == 4
    text = "\n".join(lines)
    assert "model.layers.1.mlp.down_proj.weight is missing: expected D,F = [19, 23]" in text
    assert "model.layers.0.self_attn.q_proj.bias: not part of this model" in text
    assert "model.layers.3.input_layernorm.weight: not part of this model" in text
    assert "model.layers.2.self_attn.o_proj.weight: expected D,NH = [19, 24], got [24, 19]" in text


def test_a_buffer_that_old_exports_carry_is_ignored(tmp_path) -> None:
    weights = makers.hf_tensors()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    convert(makers.write_hf(tmp_path / "hf", makers.hf_config(), weights), tmp_path / "out")


@pytest.mark.parametrize(("layers", "named"), [(2, "model.layers.2."), (4, "model.layers.3."), (10**12, "10")])
def test_a_layer_count_that_the_tensors_contradict(layers, named, tmp_path, refused) -> None:
    folder = makers.write_hf(tmp_path / "hf", makers.hf_config(num_hidden_layers=layers), makers.hf_tensors())
    lines = refused(folder)
    assert len(lines) == (1 if layers > 1000 else 9)
    assert all(named in line for line in lines)


def test_config_and_weights_are_judged_together(sharded, refused) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    (sharded / "config.json").write_text(json.dumps(makers.hf_config(rope_theta=..., vocab_size=...)))
    lines = refused(sharded)
    assert len(lines) == 3
    for word in ("model-00002-of-00003.safetensors", "rope_theta", "vocab_size"):
        assert any(word in line for line in lines), word


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1, "a": 2}', "\xff", "[" * 100_000])
def test_a_broken_config_is_refused(text, whole, refused) -> None:
    (whole / "config.json").write_bytes(text.encode("latin-1"))
    (line,) = refused(whole)
    assert "config.json" in line


def test_a_missing_config_is_refused(whole, refused) -> None:
    (whole / "config.json").unlink()
    (line,) = refused(whole)
    assert line.startswith("config.json: expected in")


def test_a_broken_generation_config_is_refused(whole, refused) -> None:
    (whole / "generation_config.json").write_text("{")
    (line,) = refused(whole)
    assert line.startswith("generation_config.json")


def test_truncated_weights_are_refused_at_every_length(whole, tmp_path, refused) -> None:
    path = whole / "model.safetensors"
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    for length in (0, 1, 7, 8, 9, header - 1, header, header + 1, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:length])
        (line,) = refused(whole)
        assert line.startswith("model.safetensors: truncated"), (length, line)
    path.write_bytes(raw + b"\0")
    (line,) = refused(whole)
    assert "the header describes" in line


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"dtype": "F8_E4M3", "shape": [19], "data_offsets": [0, 19]}, "F8_E4M3"),
        ({"dtype": "F32", "shape": [19], "data_offsets": [0, 75]}, "takes 76 bytes"),
        ({"dtype": "F32", "shape": [-19], "data_offsets": [0, 76]}, "-19"),
        ({"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 76]}, "data_offsets"),
        ({"dtype": "F32", "shape": [19], "data_offsets": [-76, 0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [19], "data_offsets": [1 << 50, (1 << 50) + 76]}, "truncated: the header describes"),
        ({"dtype": "F32", "shape": [19], "data_offsets": [0, 76]}, "begins at byte 0"),
        ({"dtype": "F32", "shape": 19}, "expected dtype, shape and data_offsets"),
        ("F32", "expected dtype, shape and data_offsets"),
    ],
)
def test_a_header_entry_that_lies_is_refused(entry, named, whole, refused) -> None:
    makers.write_safetensors(whole / "model.safetensors", makers.hf_tensors(), {"model.norm.weight": entry})
    lines = refused(whole)
    assert any(named in line for line in lines), lines


def test_a_header_length_beyond_all_reason_is_refused(whole, refused) -> None:
    (whole / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    (line,) = refused(whole)
    assert "header of" in line


def test_paths_that_hold_no_checkpoint(tmp_path, refused) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("hello")
    for path, named in ((tmp_path / "empty", "neither config.json"), (tmp_path / "note.txt", "another kind of file")):
        (line,) = refused(path)
        assert named in line
    (line,) = refused(tmp_path / "nowhere")
    assert "found nothing" in line
    (line,) = refused(tmp_path / "note.txt", "--format", "hf")
    assert "expected a Hugging Face folder" in line
    (line,) = refused(tmp_path / "empty", "--format", "gguf")
    assert "expected a GGUF file" in line


def test_a_folder_of_gguf_files_asks_for_one_of_them(shared, refused) -> None:
    (line,) = refused(shared / "fixtures" / "tiny-llama3" / "gguf")
    assert "tiny-llama3-q4_0.gguf" in line


def test_shards_may_be_links_as_in_a_download_cache(sharded, tmp_path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, shard in enumerate(sorted(sharded.glob("*.safetensors"))):
        os.rename(shard, blobs / str(number))
        shard.symlink_to(blobs / str(number))
    convert(sharded, tmp_path / "out")
