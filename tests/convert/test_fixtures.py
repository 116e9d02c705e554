"""Every golden checkpoint converts, and what is stored is what its own format says, value for value."""

import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from checkpoints_convert import convert
from checkpoints_convert.readers import open_source
from checkpoints_convert.readers.gguf_file import read_gguf
from jaxspec.checkpoint import open_checkpoint
from jaxspec.model.config import RopeScaling
from jaxspec.model.params import param_specs
from tests.conftest import TINY_MODELS

QUANTISED = ("q8_0", "q4_0", "q4_1")


def assert_bitwise_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert one[name].shape == other[name].shape, name
        assert one[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_fixture_converts_whole(name, tiny_models) -> None:
    checkpoint = open_checkpoint(tiny_models(name))
    specs = param_specs(checkpoint.config)
    assert {name: record.shape for name, record in checkpoint.manifest.tensors.items()} == {
        name: spec.shape for name, spec in specs.items()
    }
    assert checkpoint.manifest.parameter_count == sum(np.prod(spec.shape) for spec in specs.values())
    assert checkpoint.manifest.family == "llama"
    assert checkpoint.manifest.model_version == "3"
    assert checkpoint.manifest.tokenizer_size == checkpoint.config.vocab_size == 512
    assert checkpoint.tokenizer_dir is not None


def test_hf_sharded_and_gguf_f32_give_bitwise_equal_trees(tiny_models, shared, tmp_path, tree) -> None:
    """E03: q and k included, which a converter that forgets llama.cpp's row order gets wrong alone."""
    convert(shared / "fixtures" / "tiny-llama3" / "hf-sharded", tmp_path / "sharded")
    single = tree(tiny_models("tiny-llama3"))
    assert_bitwise_equal(tree(tmp_path / "sharded"), single)
    assert_bitwise_equal(tree(tiny_models("tiny-llama3-gguf-f32")), single)


def test_the_three_forms_have_one_tokenizer_and_one_config(tiny_models, shared, tmp_path) -> None:
    """Both config dialects read alike; GGUF keeps the rope scaling only as divisors, and llama.cpp one eos."""
    convert(shared / "fixtures" / "tiny-llama3" / "hf-sharded", tmp_path / "sharded")
    single, sharded, packed = map(
        open_checkpoint, (tiny_models("tiny-llama3"), tmp_path / "sharded", tiny_models("tiny-llama3-gguf-f32"))
    )
    assert sharded.config == single.config
    assert single.config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert single.config.eos_token_ids == (497, 505)
    theirs = packed.config.to_json()
    assert theirs.pop("rope_scaling")["divisors"] == (1.0, 8.0, 8.0, 8.0)
    assert theirs.pop("eos_token_ids") == (505,)
    ours = single.config.to_json()
    del ours["rope_scaling"], ours["eos_token_ids"]
    assert theirs == ours
    fingerprints = {checkpoint.manifest.tokenizer_fingerprint for checkpoint in (single, sharded, packed)}
    assert len(fingerprints) == 1


def test_hf_leaves_hold_the_file_s_own_rows(tiny_models, shared, tree) -> None:
    """The fused leaves, spelled out: kv head, then its query heads, key, value; gate and up rows in turn."""
    stored = tree(tiny_models("tiny-llama3-bf16"))
    path = shared / "fixtures" / "tiny-llama3-bf16" / "hf" / "model.safetensors"
    with safe_open(path, framework="flax") as file:
        source = {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - not a mapping
    kv_heads, group, size = 4, 2, 8
    for layer in range(4):
        qkv = stored[f"layers.{layer}.qkv"]
        attention = f"model.layers.{layer}.self_attn"
        for head in range(kv_heads):
            rows = slice(head * size, (head + 1) * size)
            for g in range(group):
                query = slice((head * group + g) * size, (head * group + g + 1) * size)
                assert qkv[head, g].tobytes() == source[f"{attention}.q_proj.weight"][query].tobytes()
                assert (
                    stored[f"layers.{layer}.o"][:, head, g].tobytes()
                    == source[f"{attention}.o_proj.weight"][:, query].tobytes()
                )
            assert qkv[head, group].tobytes() == source[f"{attention}.k_proj.weight"][rows].tobytes()
            assert qkv[head, group + 1].tobytes() == source[f"{attention}.v_proj.weight"][rows].tobytes()
        mlp = f"model.layers.{layer}.mlp"
        assert stored[f"layers.{layer}.gate_up"][:, 0].tobytes() == source[f"{mlp}.gate_proj.weight"].tobytes()
        assert stored[f"layers.{layer}.gate_up"][:, 1].tobytes() == source[f"{mlp}.up_proj.weight"].tobytes()
        assert stored[f"layers.{layer}.down"].tobytes() == source[f"{mlp}.down_proj.weight"].tobytes()
        for leaf, norm in (("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            assert stored[f"layers.{layer}.{leaf}"].tobytes() == source[f"model.layers.{layer}.{norm}.weight"].tobytes()
    assert stored["embed"].tobytes() == source["model.embed_tokens.weight"].tobytes()
    assert stored["final_norm"].tobytes() == source["model.norm.weight"].tobytes()
    assert stored["lm_head"].tobytes() == source["lm_head.weight"].tobytes()


def _golden_tensors(shared: Path) -> list[tuple[Path, dict]]:
    fixtures = shared / "fixtures"
    listed = []
    for folder in (fixtures / "tiny-llama3" / "gguf", fixtures / "tiny-llama3-256"):
        for entry in json.loads((folder / "tensors.json").read_text()).values():
            listed.append((folder / entry["file"], entry))
    return listed


def test_every_dequantised_tensor_has_the_golden_sha256(shared) -> None:
    """Types F32, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, read through our own directory."""
    seen = set()
    for path, entry in _golden_tensors(shared):
        tensors = read_gguf(path).tensors
        golden = entry["tensors"]
        assert set(tensors) == set(golden)
        for name, tensor in tensors.items():
            values = tensor.read().astype(np.float32)
            assert list(values.shape) == golden[name]["numpy_shape"], (path.name, name)
            assert tensor.encoding == golden[name]["type"], (path.name, name)
            assert hashlib.sha256(values.tobytes()).hexdigest() == golden[name]["sha256_f32"], (path.name, name)
            seen.add(tensor.encoding)
    assert seen == {"F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"}


def test_the_fifteen_block_types_dequantise_to_their_goldens(shared, tmp_path) -> None:
    blocks = np.load(shared / "fixtures" / "gguf-blocks" / "blocks.npz")
    kinds = sorted(key.removesuffix("_raw") for key in blocks.files if key.endswith("_raw"))
    assert len(kinds) == 15
    writer = gguf.GGUFWriter(tmp_path / "blocks.gguf", "llama")
    for kind in kinds:
        writer.add_tensor(kind, blocks[f"{kind}_raw"], raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = read_gguf(tmp_path / "blocks.gguf").tensors
    for kind in kinds:
        values = tensors[kind].read()
        assert values.dtype == ("bfloat16" if kind == "BF16" else np.float32), kind
        assert values.astype(np.float32).tobytes() == blocks[f"{kind}_dequant"].tobytes(), kind


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_become_float32(kind, tiny_models) -> None:
    manifest = open_checkpoint(tiny_models(f"tiny-llama3-gguf-{kind}")).manifest
    assert {record.dtype for record in manifest.tensors.values()} == {"float32"}
    assert manifest.dtype == "float32"


def test_bfloat16_weights_stay_and_float32_norms_beside_them_too(tiny_models) -> None:
    """llama.cpp writes norms as float32 whatever the weights are."""
    manifest = open_checkpoint(tiny_models("tiny-llama3-gguf-bf16")).manifest
    assert manifest.dtype == "mixed"
    for name, record in manifest.tensors.items():
        assert record.dtype == ("float32" if "norm" in name else "bfloat16"), name


def test_tied_models_store_one_embedding(tiny_models) -> None:
    for name in ("tiny-draft", "tiny-llama3-256-q4_k_m"):
        checkpoint = open_checkpoint(tiny_models(name))
        assert checkpoint.config.tie_word_embeddings
        assert "lm_head" not in checkpoint.manifest.tensors


def test_the_manifest_names_every_source_file_with_its_sha256(shared, tiny_models) -> None:
    folder = shared / "fixtures" / "tiny-llama3" / "hf"
    expected = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    assert open_checkpoint(tiny_models("tiny-llama3")).manifest.sources == expected


def test_the_tokenizer_files_are_carried_over(shared, tiny_models) -> None:
    folder = shared / "fixtures" / "tiny-llama3" / "hf"
    carried = open_checkpoint(tiny_models("tiny-llama3")).tokenizer_dir
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"}
    assert {file.name for file in carried.iterdir()} == names
    for name in names:
        assert (carried / name).read_bytes() == (folder / name).read_bytes()


def test_the_format_is_found_by_content(shared, tmp_path) -> None:
    plain = tmp_path / "model.bin"
    plain.write_bytes((shared / "fixtures" / "tiny-llama3" / "gguf" / "tiny-llama3-q4_0.gguf").read_bytes())
    assert open_source(plain, "auto").dialect == "gguf"
