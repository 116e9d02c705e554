"""Out again: what comes out is what went in, tensor by tensor, and what others make of it."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from checkpoints_convert import convert, to_hf
from checkpoints_convert.cli import main
from checkpoints_convert.export.shards import parse_size
from jaxspec.checkpoint import open_checkpoint, read_group
from jaxspec.cli import main as jaxspec
from jaxspec.model.config import RopeScaling
from jaxspec.model.rope import inverse_frequencies
from tests.conftest import TINY_MODELS
from tests.convert import makers
from tests.convert.hf_folders import logits, read_file, read_json, read_weights

TOLERANCE = 2e-4  # max abs on f32 logits; two correct implementations differ by about 2e-5 here
HF_FIXTURES = [name for name, source in TINY_MODELS.items() if source.endswith("/hf")]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def exported(tiny_models, tmp_path_factory):
    """``exported(name)``: the Hugging Face folder made of that tiny model, in one weight file."""
    home = tmp_path_factory.mktemp("exported")

    def folder(name):
        if not (home / name).exists():
            to_hf(tiny_models(name), home / name)
        return home / name

    return folder


@pytest.fixture
def source(tmp_path):
    return makers.write_hf(tmp_path / "source", makers.hf_config(), makers.hf_tensors())


def score(checkpoint, ids, folder):
    """Our own logits [T, V] of a checkpoint."""
    (folder / "ids.json").write_text(json.dumps([[int(token) for token in ids]]))
    out = folder / "logits.npz"
    files = ["--token-ids", str(folder / "ids.json"), "--logits", str(out)]
    assert jaxspec(["score", "--target", str(checkpoint), *files, "--dtype", "float32", "--json"]) == 0
    return np.load(out)["logits_0"]


def assert_same_bits(one, other) -> None:
    assert list(one) == list(other)
    for name in one:
        assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape), name
        assert one[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("name", TINY_MODELS)
def test_in_out_and_in_again_is_the_same_checkpoint(name, tiny_models, exported, tree, tmp_path) -> None:
    """E03, E04: bitwise the same parameters, the same config and the same tokenizer, whatever the first source was."""
    convert(exported(name), tmp_path / "back")
    before, after = open_checkpoint(tiny_models(name)), open_checkpoint(tmp_path / "back")
    assert_same_bits(tree(tmp_path / "back"), tree(tiny_models(name)))
    assert after.manifest.dtype == before.manifest.dtype
    assert after.manifest.tokenizer_fingerprint == before.manifest.tokenizer_fingerprint is not None
    assert after.manifest.model_version == before.manifest.model_version
    assert dataclasses.replace(after.config, rope_scaling=before.config.rope_scaling) == before.config
    if "gguf" in name or "q4_k_m" in name:
        assert before.config.rope_scaling.kind == "divisors"
        assert after.config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
        np.testing.assert_allclose(inverse_frequencies(after.config), inverse_frequencies(before.config), rtol=1e-6)
    else:
        assert after.config.rope_scaling == before.config.rope_scaling


@pytest.mark.parametrize("name", HF_FIXTURES)
def test_the_weights_are_those_of_the_original_folder(name, exported, shared) -> None:
    """E03: tensor by tensor, bit for bit, dtype included; q and k too. A tied model has no lm_head.weight."""
    assert read_weights(exported(name)) == read_weights(shared / "fixtures" / TINY_MODELS[name])


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_a_gguf_gives_the_weights_of_the_folder_it_was_made_from(kind, exported, shared) -> None:
    """E03: HF -> GGUF -> ours -> HF. llama.cpp keeps norms as float32 whatever it makes of the weights."""
    original = read_weights(shared / "fixtures" / "tiny-llama3" / "hf")
    found = read_weights(exported(f"tiny-llama3-gguf-{kind}"))
    assert set(found) == set(original)
    for name, stored in found.items():
        dtype = BFLOAT16 if kind == "bf16" and "norm" not in name else np.float32
        assert stored.array.dtype == dtype, name
        assert stored.data == original[name].array.astype(dtype).tobytes(), name


@pytest.mark.parametrize(("form", "same"), [("meta-mp1", "tiny-llama3"), ("meta-mp2", "tiny-llama3-bf16")])
def test_meta_s_files_give_the_weights_of_the_folder_with_the_same_model(form, same, shared, tmp_path) -> None:
    """E04: Meta -> ours -> HF; its interleaved rows are turned once, and split tensors are whole again."""
    convert(shared / "fixtures" / "tiny-llama3" / form, tmp_path / "in")
    to_hf(tmp_path / "in", tmp_path / "out")
    assert read_weights(tmp_path / "out") == read_weights(shared / "fixtures" / same / "hf")


@pytest.mark.parametrize("name", HF_FIXTURES)
def test_the_config_says_what_the_original_says(name, exported, shared) -> None:
    """In the dialect that transformers 4 and 5 both read, value for value."""
    original = read_json(shared / "fixtures" / TINY_MODELS[name] / "config.json")
    written = read_json(exported(name) / "config.json")
    shared_keys = written.keys() & original.keys()
    assert {key: written[key] for key in shared_keys} == {key: original[key] for key in shared_keys}
    assert written.keys() - original.keys() == {"head_dim"}
    assert original.keys() - written.keys() == {"initializer_range", "pretraining_tp", "transformers_version"}
    assert written["head_dim"] == original["hidden_size"] // original["num_attention_heads"]


def test_the_golden_logits_come_out_of_the_exported_folder(exported, shared) -> None:
    """E04: by the published formulas, at positions 0, 1 and 100: a wrong row order or rope shows late."""
    golden = np.load(shared / "fixtures" / "tiny-llama3" / "goldens.npz")
    for name in ("tiny-llama3", "tiny-llama3-gguf-f32"):
        found = logits(exported(name), golden["p150__input_ids"])
        for position in (0, 1, 100, 149):
            assert np.abs(found[position] - golden["p150__logits"][position]).max() < TOLERANCE, (name, position)


def test_the_golden_logits_of_a_llama2_folder_come_out_too(shared, tmp_path) -> None:
    """E04: Llama 2's shards, float16, rope_theta 10000 and no scaling, tied although they ship their head."""
    convert(shared / "fixtures" / "tiny-draft" / "meta-mp2-llama2", tmp_path / "in")
    to_hf(tmp_path / "in", tmp_path / "out", dtype="float16")
    original = read_weights(shared / "fixtures" / "tiny-draft" / "hf")
    found = read_weights(tmp_path / "out")
    assert found.keys() == original.keys()
    for name, stored in original.items():
        assert found[name].data == stored.array.astype(np.float16).tobytes(), name
    written = read_json(tmp_path / "out" / "config.json")
    assert (written["rope_theta"], written["rope_scaling"], written["torch_dtype"]) == (10000.0, None, "float16")
    assert written["tie_word_embeddings"] is True
    ids = np.load(shared / "fixtures" / "tiny-draft" / "goldens.npz")["p33__input_ids"]
    golden = np.load(shared / "fixtures" / "tiny-draft" / "goldens-meta-mp2-llama2.npz")["p33__logits"]
    assert np.abs(logits(tmp_path / "out", ids) - golden).max() < TOLERANCE


LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
KINDS = {
    "llama2": (makers.Sizes(N=6, K=6, H=8), 10000.0, None, [1.0] * 4),  # every query head its own kv head
    "llama3": (makers.Sizes(N=6, K=2, H=8), 500000.0, LLAMA3_ROPE, [1.0, 8.0, 8.0, 8.0]),
}


@pytest.mark.parametrize("form", ["hf", "gguf"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_kinds_of_llama_come_out_right_from_both_forms(kind, form, tmp_path) -> None:
    """E04: the row order is the source format's affair, undone once on the way in and never again on the way out."""
    sizes, theta, scaling, divisors = KINDS[kind]
    weights = {name: array * np.float32(0.3) for name, array in makers.hf_tensors(sizes).items()}
    config = makers.hf_config(sizes, rope_theta=theta, rope_scaling=scaling)
    if form == "hf":
        source = makers.write_hf(tmp_path / "source", config, weights)
    else:
        extra = {"rope_freqs.weight": np.float32(divisors)}
        fields = makers.gguf_fields(sizes, llama__rope__freq_base=theta)
        source = makers.write_gguf(tmp_path / "s.gguf", fields, makers.gguf_tensors(weights, sizes) | extra)
    convert(source, tmp_path / "in")
    to_hf(tmp_path / "in", tmp_path / "out")
    found = read_weights(tmp_path / "out")
    assert set(found) == set(weights)
    for name, array in weights.items():
        assert found[name].data == array.tobytes(), name
    written = read_json(tmp_path / "out" / "config.json")
    assert (written["rope_theta"], written["rope_scaling"]) == (theta, scaling)
    ids = np.random.default_rng(7).integers(0, sizes.V, 103)
    ours, theirs = score(tmp_path / "in", ids, tmp_path), logits(tmp_path / "out", ids)
    for position in (0, 1, 100):
        assert np.abs(ours[position] - theirs[position]).max() < TOLERANCE, position


def test_shards_are_filled_in_turn_and_indexed(tiny_models, shared, tree, tmp_path) -> None:
    limit = 40_000
    result = to_hf(tiny_models("tiny-llama3"), tmp_path / "out", shard_size=limit)
    index = read_json(tmp_path / "out" / "model.safetensors.index.json")
    original = read_weights(shared / "fixtures" / "tiny-llama3" / "hf")
    assert set(index["weight_map"]) == set(original)
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert index["metadata"] == {"total_size": sum(len(stored.data) for stored in original.values())}
    count = len(result.files)
    assert count > 3
    assert result.files == tuple(f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == list(result.files)
    seen, sizes = {}, []
    for file in result.files:
        tensors = read_file(tmp_path / "out" / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == set(tensors)
        sizes.append([len(stored.data) for stored in tensors.values()])
        seen |= tensors
    assert seen == original
    for these, following in zip(sizes, [*sizes[1:], [limit]], strict=True):
        assert sum(these) <= limit or len(these) == 1
        assert sum(these) + following[0] > limit, "there was room for one more"
    alone = {file for file, these in zip(result.files, sizes, strict=True) if sum(these) > limit}
    assert alone == {index["weight_map"]["model.embed_tokens.weight"], index["weight_map"]["lm_head.weight"], *alone}
    assert len(alone) == sum(len(stored.data) > limit for stored in original.values())
    convert(tmp_path / "out", tmp_path / "back")
    assert_same_bits(tree(tmp_path / "back"), tree(tiny_models("tiny-llama3")))


def test_one_shard_is_one_file_without_an_index(tiny_models, shared, tmp_path) -> None:
    weights = read_weights(shared / "fixtures" / "tiny-llama3" / "hf")
    total = sum(len(stored.data) for stored in weights.values())
    for size, files in ((total, 1), (total - 1, 2)):
        to_hf(tiny_models("tiny-llama3"), tmp_path / str(size), shard_size=size)
        assert len(list((tmp_path / str(size)).glob("*.safetensors"))) == files
        assert (tmp_path / str(size) / "model.safetensors.index.json").exists() == (files > 1)


def test_every_file_says_that_its_tensors_are_torch_s(tiny_models, tmp_path) -> None:
    """transformers 4 refuses a file without it."""
    result = to_hf(tiny_models("tiny-draft"), tmp_path / "out", shard_size="40KB")
    assert len(result.files) > 1
    for file in result.files:
        with safe_open(tmp_path / "out" / file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("0.04 mb", 40_000),
        ("1.5GiB", 3 << 29),
        ("3KiB", 3072),
        ("7MiB", 7 << 20),
        ("2TB", 2 * 10**12),
        ("1TiB", 1 << 40),
        ("40000", 40_000),
        (40_000, 40_000),
    ],
)
def test_a_shard_size_may_be_written_in_many_ways(text, size) -> None:
    assert parse_size(text) == size


def test_tokenizer_files_are_the_originals_with_the_clean_up_off(exported, shared) -> None:
    """D06: with clean-up, decode(encode(text)) is not the text."""
    original, out = shared / "fixtures" / "tiny-llama3" / "hf", exported("tiny-llama3")
    assert read_json(original / "tokenizer_config.json")["clean_up_tokenization_spaces"] is True
    expected = read_json(original / "tokenizer_config.json") | {"clean_up_tokenization_spaces": False}
    assert read_json(out / "tokenizer_config.json") == expected
    for name in ("tokenizer.json", "special_tokens_map.json"):
        assert (out / name).read_bytes() == (original / name).read_bytes()
    assert read_json(out / "generation_config.json") == read_json(original / "generation_config.json")
    assert {file.name for file in out.iterdir()} == {file.name for file in original.iterdir()}


def test_a_tokenizer_made_from_a_gguf_says_all_that_transformers_needs(exported) -> None:
    config = read_json(exported("tiny-llama3-gguf-f32") / "tokenizer_config.json")
    assert config["clean_up_tokenization_spaces"] is False
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["model_input_names"] == ["input_ids", "attention_mask"]


def test_all_end_tokens_are_in_both_files(tmp_path) -> None:
    """D12: an instruct model that names its end-of-turn token in generation_config.json alone must still stop."""
    for number, (bos, eos, generation, expected) in enumerate(
        [
            (1, 2, {"eos_token_id": [2, 5, 7], "temperature": 0.6, "bos_token_id": 1}, [2, 5, 7]),
            (1, 2, {}, 2),
            (None, None, {}, None),
            (None, [5, 2], {"eos_token_id": 7}, [5, 2, 7]),
        ]
    ):
        config = makers.hf_config(bos_token_id=bos, eos_token_id=eos)
        source = makers.write_hf(tmp_path / f"source{number}", config, makers.hf_tensors())
        (source / "generation_config.json").write_text(json.dumps(generation))
        convert(source, tmp_path / f"in{number}")
        to_hf(tmp_path / f"in{number}", tmp_path / f"out{number}")
        for name in ("config.json", "generation_config.json"):
            written = read_json(tmp_path / f"out{number}" / name)
            assert (written["bos_token_id"], written["eos_token_id"]) == (bos, expected), name
        convert(tmp_path / f"out{number}", tmp_path / f"back{number}")
        assert open_checkpoint(tmp_path / f"back{number}").config == open_checkpoint(tmp_path / f"in{number}").config


def test_what_else_the_generation_config_says_is_kept(tiny_models, exported) -> None:
    """do_sample false, in this fixture."""
    assert read_json(exported("tiny-llama3") / "generation_config.json")["do_sample"] is False


def test_dtypes_are_kept_rounded_or_widened(source, tmp_path) -> None:
    convert(source, tmp_path / "in")
    weights = makers.hf_tensors()
    for dtype, kind in (("float32", np.float32), ("bfloat16", BFLOAT16), ("float16", np.float16)):
        result = to_hf(tmp_path / "in", tmp_path / dtype, dtype=dtype)
        assert result.dtype == read_json(tmp_path / dtype / "config.json")["torch_dtype"] == dtype
        found = read_weights(tmp_path / dtype)
        for name, array in weights.items():
            assert found[name].array.dtype == kind
            assert found[name].data == array.astype(kind).tobytes(), name
    convert(tmp_path / "bfloat16", tmp_path / "narrow")
    to_hf(tmp_path / "narrow", tmp_path / "wide", dtype="float32")
    for name, stored in read_weights(tmp_path / "wide").items():
        assert stored.array.tobytes() == weights[name].astype(BFLOAT16).astype(np.float32).tobytes()


def test_bfloat16_bits_survive_the_way_in_and_out(tmp_path) -> None:
    """E18: NaN payloads, infinities, minus zero, subnormals."""
    sizes = makers.SIZES._replace(V=4096, D=32)
    weights = makers.hf_tensors(sizes, dtype=BFLOAT16)
    every = np.arange(1 << 16, dtype=np.uint16)
    weights["model.embed_tokens.weight"].reshape(-1)[: 1 << 16] = every.view(BFLOAT16)
    convert(makers.write_hf(tmp_path / "hf", makers.hf_config(sizes, torch_dtype="bfloat16"), weights), tmp_path / "in")
    result = to_hf(tmp_path / "in", tmp_path / "out")
    assert result.dtype == read_json(tmp_path / "out" / "config.json")["torch_dtype"] == "bfloat16"
    for name, stored in read_weights(tmp_path / "out").items():
        assert stored.data == weights[name].tobytes(), name


def test_a_model_of_several_dtypes_is_announced_as_the_widest(exported) -> None:
    assert read_json(exported("tiny-llama3-gguf-bf16") / "config.json")["torch_dtype"] == "float32"


def test_int8_is_multiplied_out_and_said(source, tmp_path, capsys) -> None:
    convert(source, tmp_path / "in", quantize="int8")
    checkpoint = open_checkpoint(tmp_path / "in")
    leaves = {name: array for group in checkpoint.groups() for name, array in read_group(checkpoint, group).items()}
    assert checkpoint.manifest.tensors["layers.1.down"].dtype == "int8"
    for dtype, kind in (("keep", np.float32), ("bfloat16", BFLOAT16)):
        out = tmp_path / dtype
        assert main(["to-hf", str(tmp_path / "in"), str(out), "--dtype", dtype]) == 0
        said = [line for line in capsys.readouterr().out.splitlines() if "stored as int8" in line]
        assert len(said) == 1
        assert f"multiplied out, in {np.dtype(kind).name}" in said[0]
        found = read_weights(out)
        for ours, theirs in (
            ("embed", "model.embed_tokens.weight"),
            ("layers.1.down", "model.layers.1.mlp.down_proj.weight"),
        ):
            assert found[theirs].data == leaves[ours].astype(kind).tobytes()
        up = leaves["layers.2.gate_up"][:, 1]
        assert found["model.layers.2.mlp.up_proj.weight"].data == up.astype(kind).tobytes()


def test_the_command_says_what_was_written(source, tmp_path, capsys) -> None:
    convert(source, tmp_path / "in")
    assert main(["to-hf", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    count = sum(array.size for array in makers.hf_tensors().values())
    assert printed.out.splitlines() == [
        f"{tmp_path / 'out'}: {count:,} parameters, 30 tensors, float32, model.safetensors",
        f"{tmp_path / 'out'}: the checkpoint has no tokenizer: this folder takes and gives token ids only",
    ]
    assert [line.split(":")[0] for line in printed.err.splitlines()] == ["exporting", "syncing to disk"]
    assert main(["to-hf", str(tmp_path / "in"), str(tmp_path / "more"), "--shard-size", "4KB"]) == 0
    assert " files" in capsys.readouterr().out.splitlines()[0]
