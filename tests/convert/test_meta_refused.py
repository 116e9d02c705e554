"""What is wrong with a folder of Meta's format is told at once, by the file, the tensor and the key."""

import json

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import convert
from tests.convert import makers, meta_makers
from tests.convert.meta_makers import META_SIZES


@pytest.fixture
def tensors():
    return meta_makers.meta_tensors(makers.hf_tensors(META_SIZES))


@pytest.fixture
def shards(tensors):
    return meta_makers.split(tensors, 3)


def folder(tmp_path, shards, **changes):
    return meta_makers.write_meta(tmp_path / "meta", meta_makers.params(**changes), shards)


# E22: copies of a norm.


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.attention_norm.weight", "layers.2.ffn_norm.weight"])
def test_norms_that_differ_between_files_are_named(name, tmp_path, shards, refused) -> None:
    """E22: by 1e-3; the files and the difference are told, and nothing is averaged."""
    shards[2][name] = shards[2][name] + np.float32(1e-3)
    (line,) = refused(folder(tmp_path, shards))
    assert line.startswith(f"{name}: consolidated.00.pth and consolidated.02.pth hold copies")
    assert "by up to 0.001" in line
    assert "at most 0.0001" in line


def test_norms_within_the_tolerance_are_those_of_the_first_file(tmp_path, shards, tensors, tree) -> None:
    """Never a mean: a mean is in no file."""
    shards[1]["norm.weight"] = shards[1]["norm.weight"] + np.float32(9e-5)
    convert(folder(tmp_path, shards), tmp_path / "out")
    assert tree(tmp_path / "out")["final_norm"].tobytes() == tensors["norm.weight"].tobytes()


def test_copies_in_bfloat16_may_be_one_step_apart(tmp_path, refused, tree) -> None:
    """Meta's 70B Llama 3 has such norms; two steps are not rounding."""
    weights = makers.hf_tensors(META_SIZES, dtype=ml_dtypes.bfloat16)
    weights["model.norm.weight"] = np.linspace(0.3, 3, META_SIZES.D).astype(ml_dtypes.bfloat16)
    shards = meta_makers.split(meta_makers.meta_tensors(weights), 2)
    first = shards[0]["norm.weight"]
    shards[1]["norm.weight"] = (first.view(np.uint16) + np.uint16(1)).view(ml_dtypes.bfloat16)
    convert(folder(tmp_path, shards), tmp_path / "out")
    assert tree(tmp_path / "out")["final_norm"].tobytes() == first.tobytes()
    shards[1]["norm.weight"] = (first.view(np.uint16) + np.uint16(2)).view(ml_dtypes.bfloat16)
    (line,) = refused(folder(tmp_path, shards))
    assert line.startswith("norm.weight: consolidated.00.pth and consolidated.01.pth")


def test_a_value_that_is_no_number_in_one_copy_is_a_difference(tmp_path, shards, refused) -> None:
    shards[1]["norm.weight"] = shards[1]["norm.weight"].copy()
    shards[1]["norm.weight"][3] = np.nan
    (line,) = refused(folder(tmp_path, shards))
    assert "differ in 1 values" in line


# The set of files.


def test_a_missing_rank_is_named(tmp_path, shards, refused) -> None:
    path = folder(tmp_path, shards)
    (path / "consolidated.01.pth").unlink()
    (line,) = refused(path)
    assert line.startswith("consolidated.01.pth: expected in")
    assert "found consolidated.00.pth, consolidated.02.pth" in line


def test_a_missing_last_rank_shows_in_the_shapes(tmp_path, shards, refused) -> None:
    """No file says how many there are. Every tensor that is cut is named."""
    path = folder(tmp_path, shards)
    (path / "consolidated.02.pth").unlink()
    lines = refused(path, "--format", "meta")
    assert len(lines) == 1
    assert "w1.weight has 48" in lines[0]
    cut = [meta_makers.params(multiple_of=48, ffn_dim_multiplier=0.7)]
    (path / "params.json").write_text(json.dumps(cut[0]))
    lines = refused(path)
    assert len(lines) == 2 + 4 * META_SIZES.L
    assert all("do not add up to" in line for line in lines)
    assert any(line.startswith("tok_embeddings.weight: its pieces do not add up to [53, 24]") for line in lines)
    assert any("[18, 24] in consolidated.00.pth, [18, 24] in consolidated.01.pth" in line for line in lines)


def test_stray_files_are_named(tmp_path, shards, refused) -> None:
    """E17: nothing in the folder may override, or be taken for, a part of the set."""
    path = folder(tmp_path, shards)
    for name in ("consolidated.3.pth", "consolidated.00 (1).pth", "backup.pth"):
        (path / name).write_bytes(b"x")
    lines = refused(path)
    assert sorted(line.split(": ")[0] for line in lines) == [
        "backup.pth",
        "consolidated.00 (1).pth",
        "consolidated.3.pth",
    ]


def test_no_files_at_all(tmp_path, refused) -> None:
    path = folder(tmp_path, [])
    (line,) = refused(path)
    assert line.startswith("consolidated.00.pth: expected in")


def test_one_file_asks_for_its_folder(tmp_path, shards, refused) -> None:
    path = folder(tmp_path, shards)
    (line,) = refused(path / "consolidated.00.pth")
    assert "name the folder" in line
    (line,) = refused(path / "consolidated.00.pth", "--format", "meta")
    assert "expected a Meta folder, found a file" in line


def test_params_and_files_are_told_together(tmp_path, shards, refused) -> None:
    path = folder(tmp_path, shards)
    (path / "params.json").write_text('{"dim": 24, "dim": 24}')
    (path / "consolidated.01.pth").write_bytes(b"PK")
    lines = refused(path)
    assert any("duplicate key dim" in line for line in lines)
    assert any(line.startswith("consolidated.01.pth: ") for line in lines)
    (path / "params.json").unlink()
    assert any("params.json: expected in" in line for line in refused(path))


def test_a_tensor_that_one_file_lacks_is_named(tmp_path, shards, refused) -> None:
    del shards[1]["layers.0.attention.wk.weight"]
    (line,) = refused(folder(tmp_path, shards))
    assert line == "layers.0.attention.wk.weight: in consolidated.00.pth, but not in consolidated.01.pth"


def test_a_tensor_that_all_files_lack_and_one_that_none_should_have(tmp_path, shards, refused) -> None:
    for shard in shards:
        del shard["layers.2.attention.wk.weight"]
        shard["layers.2.attention.wk.bias"] = np.zeros(8, np.float32)
    lines = refused(folder(tmp_path, shards))
    assert [line.split(":")[0].split(" ")[0] for line in lines] == [
        "layers.2.attention.wk.weight",
        "layers.2.attention.wk.bias",
    ]


def test_pieces_of_different_types_are_named(tmp_path, shards, refused) -> None:
    shards[1]["layers.0.attention.wo.weight"] = shards[1]["layers.0.attention.wo.weight"].astype(np.float16)
    (line,) = refused(folder(tmp_path, shards))
    assert line == (
        "layers.0.attention.wo.weight: of different types: F32 in consolidated.02.pth, F16 in consolidated.01.pth"
    )


def test_pieces_that_add_up_along_no_axis_are_named(tmp_path, shards, refused) -> None:
    shards[0]["layers.0.attention.wv.weight"] = shards[0]["layers.0.attention.wv.weight"][:-1].copy()
    (line,) = refused(folder(tmp_path, shards))
    assert line.startswith("layers.0.attention.wv.weight: its pieces do not add up to [8, 24] along one axis: [2, 24]")


def test_without_the_tensors_that_tell_the_sizes(tmp_path, shards, refused) -> None:
    for shard in shards:
        del shard["tok_embeddings.weight"], shard["layers.0.feed_forward.w1.weight"]
    lines = refused(folder(tmp_path, shards))
    assert [line.split(" ")[0] for line in lines] == ["tok_embeddings.weight", "layers.0.feed_forward.w1.weight"]


# params.json.


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"moe": {"num_experts": 8}}, "moe: a mixture of experts"),
        ({"quantization_args": {"spinquant": True}}, "quantization_args: the weights are quantised"),
        ({"lora_args": {"rank": 16, "scale": 2.0}}, "lora_args: the weights lack their adapters"),
        ({"vision_chunk_size": 448}, "vision_chunk_size: a vision model"),
        ({"sliding_window": 4096}, "sliding_window: unknown, it may change the model"),
        ({"dim": "24"}, "dim: expected a positive integer, got 24"),
        ({"dim": ...}, "dim is missing"),
        ({"n_layers": 0}, "n_layers: expected a positive integer, got 0"),
        ({"n_layers": True}, "n_layers: expected a positive integer, got True"),
        ({"n_heads": 1 << 40}, "n_heads: expected a positive integer"),
        ({"n_heads": 7}, "dim 24 is not a multiple of n_heads 7"),
        ({"n_kv_heads": 4}, "expected a multiple of num_kv_heads=4"),
        ({"vocab_size": -2}, "vocab_size: expected a positive integer, or -1"),
        ({"vocab_size": -1.0}, "vocab_size: expected a positive integer, or -1"),
        ({"vocab_size": 54}, "tok_embeddings.weight: its pieces do not add up to [54, 24]"),
        ({"norm_eps": ...}, "norm_eps is missing"),
        ({"norm_eps": float("nan")}, "norm_eps: expected a positive number, got nan"),
        ({"rope_theta": "5e5"}, "rope_theta: expected a positive number"),
        ({"use_scaled_rope": "yes"}, "use_scaled_rope: expected true or false, got yes"),
        ({"rope_scaling_factor": 8}, "rope_scaling_factor is given, but use_scaled_rope is not true"),
        ({"use_scaled_rope": True, "rope_high_freq_factor": 1}, "expected high_freq_factor > low_freq_factor"),
        ({"multiple_of": 73}, "make a feed-forward width of 73, layers.0.feed_forward.w1.weight has 71"),
        ({"ffn_dim_multiplier": 1.3}, "make a feed-forward width of 142"),
        ({"ffn_dim_multiplier": 0}, "ffn_dim_multiplier: expected a positive number, got 0"),
        ({"n_layers": 1 << 30}, "the config says 1073741824 layers"),
    ],
)
def test_a_key_that_does_not_fit_is_named(changes, named, tmp_path, shards, refused) -> None:
    lines = refused(folder(tmp_path, shards, **changes))
    assert any(named in line for line in lines), lines


def test_all_keys_are_told_at_once(tmp_path, shards, refused) -> None:
    lines = refused(folder(tmp_path, shards, moe={}, lora_args={}, dim=None, norm_eps="x", use_scaled_rope=1))
    assert len(lines) == 5
    assert all(line.startswith("params.json: ") for line in lines)


def test_keys_that_say_nothing_are_no_findings(tmp_path, shards) -> None:
    """null is what Meta's code takes for "not there"; a batch size is the server's."""
    path = folder(tmp_path, shards, quantization_args=None, moe_args=None, n_kv_heads=2, max_batch_size=32)
    convert(path, tmp_path / "out")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"dim": 1e999999}', "[" * 100_000, '{"dim": ' + "9" * 5000 + "}"])
def test_a_params_file_that_is_none(text, tmp_path, shards, refused) -> None:
    path = folder(tmp_path, shards)
    (path / "params.json").write_text(text)
    lines = refused(path)
    assert all("params.json" in line for line in lines)
