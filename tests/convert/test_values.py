"""Values survive: bit patterns, dtypes, rounding only when asked for."""

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import convert
from jaxspec.checkpoint import open_checkpoint
from tests.convert import makers

BF16 = np.dtype(ml_dtypes.bfloat16)
# NaNs with payload and sign, infinities, both zeros, the smallest subnormal, the largest value.
PATTERNS = np.array([0x7FC1, 0xFFC0, 0x7F81, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x7F7F, 0x3F80], np.uint16)


def test_bfloat16_is_bit_exact(tmp_path, tree) -> None:
    """E18, E19: without a detour through another type, NaN, infinities and -0 included."""
    weights = makers.hf_tensors(dtype=BF16)
    weights["model.embed_tokens.weight"].view(np.uint16)[0, : len(PATTERNS)] = PATTERNS
    weights["model.layers.1.self_attn.k_proj.weight"].view(np.uint16)[0, : len(PATTERNS)] = PATTERNS
    convert(makers.write_hf(tmp_path / "hf", makers.hf_config(), weights), tmp_path / "out")
    stored = tree(tmp_path / "out")
    assert {array.dtype for array in stored.values()} == {BF16}
    assert stored["embed"].view(np.uint16)[0, : len(PATTERNS)].tolist() == PATTERNS.tolist()
    key = stored["layers.1.qkv"][0, 3]  # G = 3 query heads come first
    assert key.view(np.uint16)[0, : len(PATTERNS)].tolist() == PATTERNS.tolist()


def test_bfloat16_in_gguf_is_bit_exact(tmp_path, tree) -> None:
    weights = makers.hf_tensors(dtype=BF16)
    weights["lm_head.weight"].view(np.uint16)[7, : len(PATTERNS)] = PATTERNS
    packed = makers.write_gguf(tmp_path / "model.gguf", makers.gguf_fields(), makers.gguf_tensors(weights))
    convert(packed, tmp_path / "out")
    assert tree(tmp_path / "out")["lm_head"].tobytes() == weights["lm_head.weight"].tobytes()


def test_float16_is_kept_as_float32_so_that_nothing_is_lost(tmp_path, tree) -> None:
    weights = makers.hf_tensors(dtype=np.float16)
    weights["model.norm.weight"][:3] = [65504, 6e-8, -0.0]  # the largest and the smallest of the type
    convert(makers.write_hf(tmp_path / "hf", makers.hf_config(), weights), tmp_path / "out")
    stored = tree(tmp_path / "out")
    assert {array.dtype for array in stored.values()} == {np.dtype(np.float32)}
    assert stored["final_norm"].astype(np.float16).tobytes() == weights["model.norm.weight"].tobytes()
    assert stored["embed"].astype(np.float16).tobytes() == weights["model.embed_tokens.weight"].tobytes()


def test_bfloat16_on_request_rounds_to_nearest_even(tmp_path, tree) -> None:
    weights = makers.hf_tensors()
    # Half way between two bfloat16 numbers: to the even one; a hair above: up. 1e38 would overflow float16.
    weights["model.norm.weight"][:4] = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7E967699], np.uint32).view("f4")
    convert(makers.write_hf(tmp_path / "hf", makers.hf_config(), weights), tmp_path / "out", dtype="bfloat16")
    stored = tree(tmp_path / "out")
    assert {array.dtype for array in stored.values()} == {BF16}
    assert stored["final_norm"].view(np.uint16)[:4].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7E96]


def test_float32_on_request_widens_exactly(tmp_path, tree) -> None:
    weights = makers.hf_tensors(dtype=BF16)
    convert(makers.write_hf(tmp_path / "hf", makers.hf_config(), weights), tmp_path / "out", dtype="float32")
    stored = tree(tmp_path / "out")
    assert {array.dtype for array in stored.values()} == {np.dtype(np.float32)}
    assert stored["lm_head"].tobytes() == weights["lm_head.weight"].astype(np.float32).tobytes()


def test_a_leaf_of_unlike_parts_is_wide_enough_for_all(tmp_path, tree) -> None:
    weights = makers.hf_tensors(dtype=BF16)
    name = "model.layers.2.mlp.up_proj.weight"
    weights[name] = weights[name].astype(np.float32) + np.float32(1e-6)
    convert(makers.write_hf(tmp_path / "hf", makers.hf_config(), weights), tmp_path / "out")
    stored = tree(tmp_path / "out")
    assert stored["layers.2.gate_up"].dtype == np.float32
    assert stored["layers.2.gate_up"][:, 1].tobytes() == weights[name].tobytes()
    assert stored["layers.1.gate_up"].dtype == BF16
    assert open_checkpoint(tmp_path / "out").manifest.dtype == "mixed"


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_equals_single(tied, tmp_path, tree) -> None:
    weights, config = makers.hf_tensors(tied=tied), makers.hf_config(tie_word_embeddings=tied)
    convert(makers.write_hf(tmp_path / "hf", config, weights), tmp_path / "single")
    convert(makers.write_sharded(tmp_path / "sharded", config, makers.split_in_three(weights)), tmp_path / "three")
    one, other = tree(tmp_path / "single"), tree(tmp_path / "three")
    assert {name: array.tobytes() for name, array in one.items()} == {
        name: array.tobytes() for name, array in other.items()
    }
    assert ("lm_head" in one) == (not tied)


def test_a_tied_model_may_ship_its_head_if_it_is_the_embedding(tmp_path, tree, refused) -> None:
    weights, config = makers.hf_tensors(tied=True), makers.hf_config(tie_word_embeddings=True)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    convert(makers.write_hf(tmp_path / "hf", config, weights), tmp_path / "out")
    assert "lm_head" not in tree(tmp_path / "out")
    weights["lm_head.weight"][3, 5] += 1
    (line,) = refused(makers.write_hf(tmp_path / "other", config, weights))
    assert "lm_head.weight" in line
    assert "differs from model.embed_tokens.weight" in line
