"""What each format is read as, and that what is written in a format comes back bit for bit."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints_convert.heads import convert_heads
from jaxspec.checkpoint import open_heads
from jaxspec.model.config import RopeScaling
from jaxspec.model.heads.config import EagleConfig, MedusaConfig
from jaxspec.model.heads.params import heads_param_specs
from tests.heads import makers
from tests.heads.conftest import same_bits, tree

SIZES, SQUARE = makers.SIZES, makers.SQUARE


def q_k_v(tensors, layer, sizes) -> np.ndarray:
    """Row by row: of every kv head its G query heads, its key, its value."""
    rows = []
    G, H = sizes.N // sizes.K, sizes.H
    for kv in range(sizes.K):
        for query in range(kv * G, (kv + 1) * G):
            rows += list(tensors[f"{layer}.self_attn.q_proj.weight"][query * H : (query + 1) * H])
        for name in ("k", "v"):
            rows += list(tensors[f"{layer}.self_attn.{name}_proj.weight"][kv * H : (kv + 1) * H])
    return np.stack(rows).reshape(sizes.K, G + 2, H, -1)


def gate_up(tensors, layer) -> np.ndarray:
    return np.stack([tensors[f"{layer}.mlp.gate_proj.weight"], tensors[f"{layer}.mlp.up_proj.weight"]], axis=1)


def expected_layer(tensors, layer, sizes, *, eagle3) -> dict[str, np.ndarray]:
    found = {
        "layers.0.qkv": q_k_v(tensors, layer, sizes),
        "layers.0.o": tensors[f"{layer}.self_attn.o_proj.weight"].reshape(sizes.D, sizes.K, -1, sizes.H),
        "layers.0.mlp_norm": tensors[f"{layer}.post_attention_layernorm.weight"],
        "layers.0.gate_up": gate_up(tensors, layer),
        "layers.0.down": tensors[f"{layer}.mlp.down_proj.weight"],
    }
    if eagle3:
        found["layers.0.embed_norm"] = tensors[f"{layer}.input_layernorm.weight"]
        found["layers.0.hidden_norm"] = tensors[f"{layer}.hidden_norm.weight"]
    return found


def assert_tree(folder, expected) -> None:
    found = tree(folder)
    assert list(found) == list(heads_param_specs(open_heads(folder).config))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_medusa_counts_heads_and_blocks_in_the_file(converted, tmp_path) -> None:
    """config.json says 2 heads, the file has 3: the authors' own uploads do that, and their loader forces 5."""
    tensors = makers.medusa(heads=3, layers=2)
    source = makers.write_medusa(tmp_path / "src", tensors, medusa_num_layers=2)
    config = converted(source)
    assert config == MedusaConfig(hidden_size=19, vocab_size=53, num_heads=3, num_layers=2, own_lm_head=True)
    expected = {}
    for head in range(3):
        for block in range(2):
            expected[f"heads.{head}.block{block}"] = tensors[f"{head}.{block}.linear.weight"]
            expected[f"heads.{head}.block{block}_bias"] = tensors[f"{head}.{block}.linear.bias"]
        expected[f"heads.{head}.lm_head"] = tensors[f"{head}.2.weight"]
    assert_tree(tmp_path / "out", expected)
    result = convert_heads(source, tmp_path / "out", force=True)
    assert result.notes == ("config.json says 2 heads, medusa_lm_head.safetensors has 3: the file is right",)


def test_medusa_blocks_that_are_one_module(converted, tmp_path) -> None:
    """[ResBlock] * n is one module n times; a file that keeps shared tensors once has block 0 and the LM head's n."""
    tensors = makers.medusa(heads=2, layers=3)
    once = {name: tensor for name, tensor in tensors.items() if name.split(".")[1] not in "12"}
    assert len(once) == 2 * 3
    for head in range(2):
        for block in (1, 2):
            for kind in ("weight", "bias"):
                tensors[f"{head}.{block}.linear.{kind}"] = tensors[f"{head}.0.linear.{kind}"]
    assert converted(makers.write_medusa(tmp_path / "once", once, medusa_num_layers=3)).num_layers == 3
    from_once = tree(tmp_path / "out")
    assert converted(makers.write_medusa(tmp_path / "thrice", tensors, medusa_num_layers=3)).num_layers == 3
    assert same_bits(from_once, tree(tmp_path / "out"))
    np.testing.assert_array_equal(from_once["heads.1.block2"], tensors["1.0.linear.weight"])


def test_medusa_heads_without_config_or_lm_head(converted, refused, tmp_path, tiny_models) -> None:
    """Everything but the vocabulary is in the file; that one the target knows."""
    sizes = SIZES._replace(D=64, V=512)
    source = makers.write(tmp_path / "src", None, makers.medusa(sizes, own=False), "medusa_lm_head.safetensors")
    assert refused(source) == [
        "medusa_lm_head.safetensors: without LM heads the vocabulary is not known: give --target"
    ]
    config = converted(source, target=tiny_models("tiny-llama3"))
    assert config == MedusaConfig(hidden_size=64, vocab_size=512, num_heads=3, num_layers=1, own_lm_head=False)


def test_eagle1_by_the_names_of_its_tensors(converted, tmp_path) -> None:
    tensors = makers.eagle1()
    config = converted(makers.write(tmp_path / "src", makers.eagle_config(SQUARE), tensors))
    assert config == EagleConfig(
        method="eagle",
        hidden_size=24,
        target_hidden_size=24,
        intermediate_size=23,
        num_heads=6,
        num_kv_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope_theta=20000.0,
        max_position_embeddings=211,
        vocab_size=53,
        draft_vocab_size=53,
        fc_bias=True,
        own_embed=True,
    )
    expected = expected_layer(tensors, "layers.0", SQUARE, eagle3=False)
    expected |= {"embed": tensors["embed_tokens.weight"], "fc": tensors["fc.weight"], "fc_bias": tensors["fc.bias"]}
    assert_tree(tmp_path / "out", expected)


def test_eagle1_without_a_bias_says_so_in_its_config(converted, tmp_path) -> None:
    source = makers.write(tmp_path / "src", makers.eagle_config(SQUARE, bias=False), makers.eagle1(bias=False))
    assert not converted(source).fc_bias
    assert "fc_bias" not in tree(tmp_path / "out")


def test_eagle3_by_the_names_of_its_tensors(converted, tmp_path) -> None:
    """The architectures field says LlamaForCausalLM; d2t are offsets, kept as target ids."""
    tensors = makers.eagle3()
    source = makers.write(tmp_path / "src", makers.eagle3_config(rope_theta=...), tensors)
    config = converted(source)
    assert (config.method, config.draft_vocab_size, config.vocab_size) == ("eagle3", 17, 53)
    assert config.rope_theta == 10000.0  # what a missing key means
    assert (config.aux_layers, config.norm_before_residual, config.own_embed) == (None, False, False)
    expected = expected_layer(tensors, "midlayer", SIZES, eagle3=True)
    expected |= {name: tensors[f"{name}.weight"] for name in ("fc", "norm", "lm_head")}
    expected["target_ids"] = makers.target_ids().astype(np.int32)
    assert_tree(tmp_path / "out", expected)
    manifest = open_heads(tmp_path / "out").manifest
    assert (manifest.dtype, manifest.source_format) == ("float32", "eagle3")
    assert manifest.tensors["target_ids"].dtype == "int32"
    assert manifest.parameter_count == sum(array.size for name, array in expected.items() if name != "target_ids")
    assert sorted(manifest.sources) == ["config.json", "model.safetensors"]


def test_offsets_of_32_bits(converted, tmp_path) -> None:
    tensors = makers.eagle3()
    converted(makers.write(tmp_path / "src", makers.eagle3_config(), tensors))
    wide = tree(tmp_path / "out")
    tensors["d2t"] = tensors["d2t"].astype(np.int32)
    converted(makers.write(tmp_path / "src", makers.eagle3_config(), tensors))
    assert same_bits(wide, tree(tmp_path / "out"))


def test_eagle3_of_another_width_than_its_target(converted, tmp_path) -> None:
    tensors = makers.eagle3(target_width=11, embed=True)
    config = converted(makers.write(tmp_path / "src", makers.eagle3_config(target_hidden_size=11), tensors))
    assert (config.hidden_size, config.target_hidden_size, config.own_embed) == (19, 11, True)
    assert tree(tmp_path / "out")["fc"].shape == (19, 33)


@pytest.mark.parametrize("mapped", [False, True])
def test_eagle3_with_the_whole_vocabulary_has_no_map(converted, tmp_path, mapped) -> None:
    sizes = SIZES._replace(d=53)
    tensors = makers.eagle3(sizes)
    if mapped:
        tensors |= {"d2t": np.zeros(53, np.int64), "t2d": np.ones(53, np.bool_)}
    config = converted(makers.write(tmp_path / "src", makers.eagle3_config(sizes), tensors))
    assert not config.reduced_vocab
    assert "target_ids" not in tree(tmp_path / "out")


def test_layers_that_the_target_enters_and_layers_that_it_leaves(converted, refused, tmp_path) -> None:
    """Fault I10: two conventions for the captured layers live; taken for each other they are off by one."""
    left = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "use_aux_hidden_state": True}}
    entered = {"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}
    for changes in (left, entered, left | entered):
        source = makers.write(tmp_path / "src", makers.eagle3_config(**changes), makers.eagle3())
        assert converted(source).aux_layers == (2, 4, 7)
    both = left | {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    (line,) = refused(makers.write(tmp_path / "src", makers.eagle3_config(**both), makers.eagle3()))
    assert "[1, 3, 6] are entered, but eagle_config names [1, 3, 6] as left, which are entered as [2, 4, 7]" in line


def test_llama3_scaling_in_a_head(converted, refused, tmp_path) -> None:
    """The authors' code never applies it; the speculators library does. Any other scaling is refused."""
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    }
    authors = makers.eagle3_config(rope_scaling=scaling)
    assert converted(makers.write(tmp_path / "src", authors, makers.eagle3())).rope_scaling is None
    other = makers.speculators_config(layer_rope_scaling=scaling)
    config = converted(makers.write(tmp_path / "src", other, makers.eagle3(layer="layers.0")))
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    for kind in ("linear", "dynamic", "yarn"):
        config = makers.eagle3_config(rope_scaling={"type": kind, "factor": 2.0})
        assert refused(makers.write(tmp_path / "src", config, makers.eagle3())) == [
            f"config.json: rope scaling: expected none or llama3, got '{kind}'"
        ]


def test_speculators_eagle3(converted, tmp_path) -> None:
    tensors = makers.eagle3(layer="layers.0", embed=True)
    layers = makers.speculators_config(eagle_aux_hidden_state_layer_ids=[1, 2, 5])
    source = makers.write(tmp_path / "src", layers, tensors)
    config = converted(source)
    assert (config.method, config.norm_before_residual, config.aux_layers) == ("eagle3", True, (1, 2, 5))
    expected = expected_layer(tensors, "layers.0", SIZES, eagle3=True)
    expected |= {name: tensors[f"{name}.weight"] for name in ("fc", "norm", "lm_head")}
    expected |= {"embed": tensors["embed_tokens.weight"], "target_ids": makers.target_ids().astype(np.int32)}
    assert_tree(tmp_path / "out", expected)


def test_speculators_eagle(converted, tmp_path) -> None:
    tensors = makers.eagle1(SIZES, layer="transformer", fc="fusion_fc")
    config = converted(
        makers.write(tmp_path / "src", makers.speculators_config(method="eagle", fusion_bias=True), tensors)
    )
    assert (config.method, config.fc_bias, config.head_dim) == ("eagle", True, 4)
    expected = expected_layer(tensors, "transformer", SIZES, eagle3=False)
    expected |= {"embed": tensors["embed_tokens.weight"]}
    expected |= {"fc": tensors["fusion_fc.weight"], "fc_bias": tensors["fusion_fc.bias"]}
    assert_tree(tmp_path / "out", expected)


def test_the_file_itself_and_the_pickle_beside_it(shared, tmp_path) -> None:
    """Fixtures ship both: a safetensors file and torch's zip hold the same heads."""
    fixtures = shared / "fixtures"
    for name, files in {
        "medusa": ("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
        "eagle3": ("model.safetensors", "pytorch_model.bin"),
    }.items():
        trees = []
        for source in (fixtures / name, *(fixtures / name / file for file in files)):
            convert_heads(source, tmp_path / "out", force=True)
            trees.append(tree(tmp_path / "out"))
        assert same_bits(trees[0], trees[1])
        assert same_bits(trees[0], trees[2])
        assert set(open_heads(tmp_path / "out").manifest.sources) == {"config.json", files[1]}


def test_float16_is_kept_exactly_and_bfloat16_as_it_is(converted, shared, tmp_path) -> None:
    convert_heads(shared / "fixtures/eagle3", tmp_path / "f16")
    stored, source = tree(tmp_path / "f16"), load_file(shared / "fixtures/eagle3/model.safetensors")
    assert source["fc.weight"].dtype == np.float16
    np.testing.assert_array_equal(stored["fc"], source["fc.weight"].astype(np.float32))
    tensors = makers.eagle3()
    rounded = {n: t.astype(ml_dtypes.bfloat16) if t.dtype == np.float32 else t for n, t in tensors.items()}
    converted(makers.write(tmp_path / "src", makers.eagle3_config(), rounded))
    kept = tree(tmp_path / "out")
    assert kept["fc"].tobytes() == rounded["fc.weight"].tobytes()
    assert {array.dtype.name for array in kept.values()} == {"bfloat16", "int32"}
    converted(makers.write(tmp_path / "src", makers.eagle3_config(), tensors), dtype="bfloat16")
    assert same_bits(kept, tree(tmp_path / "out"))
