"""Meta's original format: one model, however it was cut, and what its params.json leaves unsaid."""

import hashlib
import json
import tracemalloc

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import convert
from checkpoints_convert.readers import open_source
from checkpoints_convert.readers.meta import open_meta
from checkpoints_convert.readers.meta_config import EndTokens, WeightSizes, llama_config
from jaxspec.checkpoint import open_checkpoint, restore_params
from jaxspec.model.config import RopeScaling
from tests.convert import makers, meta_makers
from tests.convert.meta_makers import META_SIZES
from tests.model.conftest import Running, compiled_pass
from tests.model.test_goldens import TOLERANCE, worst

FIXTURES = {
    "mp1": "tiny-llama3/meta-mp1",
    "mp2": "tiny-llama3/meta-mp2",
    "llama2": "tiny-draft/meta-mp2-llama2",
}


@pytest.fixture(scope="module")
def converted(shared, tmp_path_factory):
    """``converted(name)``: the checkpoint made from a Meta fixture."""
    home = tmp_path_factory.mktemp("meta")

    def make(name):
        if not (home / name).exists():
            convert(shared / "fixtures" / FIXTURES[name], home / name)
        return home / name

    return make


def assert_same_tree(one, other) -> None:
    assert list(one) == list(other)
    for name in one:
        assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape), name
        assert one[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize(("name", "twin"), [("mp1", "tiny-llama3"), ("mp2", "tiny-llama3-bf16")])
def test_the_fixtures_give_the_trees_of_their_hugging_face_twins(name, twin, converted, tiny_models, tree) -> None:
    """Bit for bit: one file in float32, and two in bfloat16 (q/k rows interleaved, w1 = gate, w2 = down, w3 = up)."""
    assert_same_tree(tree(converted(name)), tree(tiny_models(twin)))


def test_the_llama_2_fixture_holds_the_draft_in_float16(converted, tiny_models, tree) -> None:
    """tok_embeddings cut by columns, rope.freqs left out, output.weight equal to the embedding, so tied."""
    rounded = {
        name: array.astype(np.float16).astype(np.float32) for name, array in tree(tiny_models("tiny-draft")).items()
    }
    assert_same_tree(tree(converted("llama2")), rounded)


@pytest.mark.parametrize("mesh", ["1", "4"])
@pytest.mark.parametrize(
    ("name", "file", "prefix"),
    [
        ("mp1", "tiny-llama3/goldens-meta.npz", "mp1_f32__orig8192__"),
        ("mp2", "tiny-llama3/goldens-meta.npz", "mp2_bf16__orig8192__"),
        ("llama2", "tiny-draft/goldens-meta-mp2-llama2.npz", ""),
    ],
)
def test_logits_are_the_reference_s(name, file, prefix, mesh, converted, shared) -> None:
    """With the rope that params.json implies: an original context of 8192; base 10,000 and no scaling for Llama 2."""
    goldens = np.load(shared / "fixtures" / file)
    prompts = np.load(shared / "fixtures" / "tiny-llama3" / "goldens.npz")
    checkpoint = open_checkpoint(converted(name))
    model, _ = compiled_pass(checkpoint.config, mesh, "float32")
    running = Running(
        checkpoint.config, mesh, "float32", restore_params(checkpoint, model.shardings(), jnp.dtype("float32"))
    )
    compared = 0
    for prompt in ("p7", "p33", "p150"):
        key = next(
            (key for key in (f"{prefix}{prompt}__logits", f"{prefix}{prompt}__logits_last") if key in goldens), None
        )
        if key is None:
            continue
        (logits,), _, _ = running.prefill([prompts[f"{prompt}__input_ids"]])
        expected = goldens[key] if goldens[key].ndim == 2 else goldens[key][None]
        found = worst(logits[-len(expected) :], expected)
        print(f"{name} mesh {mesh} {prompt}: {found:.2e}")
        assert found <= TOLERANCE
        compared += 1
    assert compared == (2 if name == "llama2" else 3)


def test_what_the_fixtures_configs_say(converted, tiny_models) -> None:
    ours, theirs = (open_checkpoint(path).config.to_json() for path in (converted("mp1"), tiny_models("tiny-llama3")))
    assert ours.pop("rope_scaling") == theirs.pop("rope_scaling") | {"original_max_position": 8192}
    assert (ours.pop("max_position_embeddings"), theirs.pop("max_position_embeddings")) == (131072, 512)
    assert (ours.pop("eos_token_ids"), theirs.pop("eos_token_ids")) == ((497, 504, 505), (497, 505))
    assert ours == theirs
    llama2 = open_checkpoint(converted("llama2")).config
    assert (llama2.vocab_size, llama2.rope_theta, llama2.rope_scaling) == (512, 10000.0, None)
    assert (llama2.intermediate_size, llama2.max_position_embeddings) == (96, 4096)
    assert llama2.tie_word_embeddings
    assert (llama2.bos_token_id, llama2.eos_token_ids) == (None, ())


def test_the_manifest_names_every_file_with_its_sha256(converted, shared) -> None:
    manifest = open_checkpoint(converted("mp2")).manifest
    folder = shared / "fixtures" / FIXTURES["mp2"]
    assert manifest.source_format == "meta"
    assert manifest.sources == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (8, 2), (8, 1), (32, 4), (12, 4), (9, 3)])
def test_rows_come_back_for_every_ratio_of_heads(heads, kv_heads, tmp_path, tree) -> None:
    """E02: query rows by the number of heads, key rows by that of kv heads; ratios 1, 2, 4, 8 and non-square ones."""
    sizes = META_SIZES._replace(N=heads, K=kv_heads, D=heads * 4, F=353, L=1)
    weights = makers.hf_tensors(sizes)
    convert(makers.write_hf(tmp_path / "hf", makers.hf_config(sizes), weights), tmp_path / "from-hf")
    tensors = meta_makers.meta_tensors(weights, sizes)
    convert(meta_makers.write_meta(tmp_path / "meta", meta_makers.params(sizes), [tensors]), tmp_path / "from-meta")
    assert_same_tree(tree(tmp_path / "from-meta"), tree(tmp_path / "from-hf"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("ranks", "embed_axis"), [(2, 0), (2, 1), (4, 1), (8, 0), (8, 1)])
def test_any_number_of_files_gives_the_tensors_of_one(ranks, embed_axis, dtype, tmp_path) -> None:
    """E22: the embedding cut by rows (Llama 3) or by columns (Llama 2), known by the shapes alone. Files may be cut
    unevenly: 53 rows of vocabulary do not divide."""
    tensors = meta_makers.meta_tensors(makers.hf_tensors(META_SIZES, dtype=dtype))
    shards = meta_makers.split(tensors, ranks, embed_axis)
    assert shards[0]["tok_embeddings.weight"].shape[embed_axis] < tensors["tok_embeddings.weight"].shape[embed_axis]
    source = open_meta(meta_makers.write_meta(tmp_path / "many", meta_makers.params(), shards))
    assert set(source.tensors) == set(tensors)
    for name, array in tensors.items():
        expected = array.astype(np.float32) if dtype == np.float16 else array
        got = source.tensors[name]
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), name
        assert got.read().tobytes() == expected.tobytes(), name


def test_the_feed_forward_matrices_have_their_roles(tmp_path, tree) -> None:
    """w1 = gate, w2 = down, w3 = up: each is found where its own values are."""
    sizes = META_SIZES._replace(L=1)
    tensors = meta_makers.meta_tensors(makers.hf_tensors(sizes), sizes)
    convert(meta_makers.write_meta(tmp_path / "meta", meta_makers.params(sizes), [tensors]), tmp_path / "out")
    stored = tree(tmp_path / "out")
    assert np.array_equal(stored["layers.0.gate_up"][:, 0], tensors["layers.0.feed_forward.w1.weight"])
    assert np.array_equal(stored["layers.0.gate_up"][:, 1], tensors["layers.0.feed_forward.w3.weight"])
    assert np.array_equal(stored["layers.0.down"], tensors["layers.0.feed_forward.w2.weight"])


def test_rope_freqs_are_ignored(tmp_path, tree) -> None:
    """A buffer of Llama 1 and 2, in every file."""
    tensors = meta_makers.meta_tensors(makers.hf_tensors(META_SIZES))
    shards = [shard | {"rope.freqs": np.ones(2, np.float32)} for shard in meta_makers.split(tensors, 2, 1)]
    convert(meta_makers.write_meta(tmp_path / "with", meta_makers.params(), shards), tmp_path / "from-with")
    convert(meta_makers.write_meta(tmp_path / "without", meta_makers.params(), [tensors]), tmp_path / "from-without")
    assert_same_tree(tree(tmp_path / "from-with"), tree(tmp_path / "from-without"))


@pytest.mark.parametrize(("ranks", "embed_axis"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("stated", [-1, None, ...])
def test_a_vocabulary_of_minus_one_is_that_of_the_weights(stated, ranks, embed_axis, tmp_path) -> None:
    shards = meta_makers.split(meta_makers.meta_tensors(makers.hf_tensors(META_SIZES)), ranks, embed_axis)
    folder = meta_makers.write_meta(tmp_path / "meta", meta_makers.params(vocab_size=stated), shards)
    assert open_meta(folder).config.vocab_size == 53


@pytest.mark.parametrize("embed_axis", [0, 1])
def test_a_head_that_is_the_embedding_makes_the_model_tied(embed_axis, tmp_path, tree) -> None:
    """Also when both are cut along different axes; one bit apart, it is a head of its own."""
    weights = makers.hf_tensors(META_SIZES)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    tensors = meta_makers.meta_tensors(weights)
    shards = meta_makers.split(tensors, 2, embed_axis)
    tied = open_meta(meta_makers.write_meta(tmp_path / "tied", meta_makers.params(), shards))
    assert tied.config.tie_word_embeddings
    assert "output.weight" not in tied.tensors
    convert(tmp_path / "tied", tmp_path / "out")
    assert "lm_head" not in tree(tmp_path / "out")
    for shard in shards:
        del shard["output.weight"]
    absent = open_meta(meta_makers.write_meta(tmp_path / "absent", meta_makers.params(), shards))
    assert absent.config == tied.config
    tensors["output.weight"][-1, -1] = np.nextafter(tensors["output.weight"][-1, -1], np.float32(9))
    shards = meta_makers.split(tensors, 2, embed_axis)
    assert not open_meta(
        meta_makers.write_meta(tmp_path / "own", meta_makers.params(), shards)
    ).config.tie_word_embeddings


# What params.json leaves unsaid.

WEIGHTS = WeightSizes(vocab_size=53, ffn_width=71, tied=False)
NO_TOKENS = EndTokens(None, ())


def config(weights=WEIGHTS, **changes):
    return llama_config(meta_makers.params(**changes), weights, NO_TOKENS)


def test_scaled_rope_carries_no_numbers() -> None:
    """Meta's code has factor 8, low 1, high 4, original context 8192."""
    assert config(use_scaled_rope=True).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert config(use_scaled_rope=False).rope_scaling is None
    assert config().rope_scaling is None


def test_numbers_that_a_later_file_carries_count() -> None:
    scaling = config(use_scaled_rope=True, rope_scaling_factor=16, rope_high_freq_factor=1.5).rope_scaling
    assert scaling == RopeScaling("llama3", 16.0, 1.0, 1.5, 8192)


@pytest.mark.parametrize(
    ("sizes", "multiplier", "ffn", "factor"),
    [
        ((2048, 16, 32, 8), 1.5, 8192, 32.0),  # Llama 3.2 1B
        ((3072, 28, 24, 8), 1.0, 8192, 32.0),  # Llama 3.2 3B
        ((4096, 32, 32, 8), 1.3, 14336, 8.0),  # Llama 3.1 8B
        ((8192, 80, 64, 8), 1.3, 28672, 8.0),  # Llama 3.1 and 3.3 70B
        ((16384, 126, 128, 8), 1.2, 53248, 8.0),  # Llama 3.1 405B
    ],
)
def test_the_published_models_of_llama_3(sizes, multiplier, ffn, factor) -> None:
    """Widths and factors as in the published config.json of each; Llama 3.2's small ones alone have a factor of 32."""
    dim, layers, heads, kv_heads = sizes
    multiple = {2048: 256, 3072: 256, 4096: 1024, 8192: 4096, 16384: 4096}[dim]
    found = config(
        WeightSizes(128256, ffn, tied=dim < 4096),
        dim=dim,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        vocab_size=128256,
        ffn_dim_multiplier=multiplier,
        multiple_of=multiple,
        use_scaled_rope=True,
    )
    assert found.rope_scaling == RopeScaling("llama3", factor, 1.0, 4.0, 8192)
    assert (found.intermediate_size, found.max_position_embeddings) == (ffn, 131072)


@pytest.mark.parametrize(
    ("changes", "ffn"),
    [
        ({"dim": 4096, "n_heads": 32, "n_kv_heads": ..., "multiple_of": 256}, 11008),  # Llama 2 7B
        ({"dim": 5120, "n_heads": 40, "n_kv_heads": ..., "multiple_of": 256}, 13824),  # Llama 2 13B
        ({"dim": 8192, "n_heads": 64, "n_kv_heads": 8, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 28672),  # 70B
        ({"dim": 64, "n_heads": 8, "n_kv_heads": 4, "multiple_of": 32, "ffn_dim_multiplier": 0.9}, 160),
        ({"dim": 4096, "n_heads": 32, "n_kv_heads": ..., "multiple_of": ...}, 11008),  # Meta's default is 256
        # Two thirds are cut to an integer before the multiplier: 1.5 * 170, not 1.5 * 170.67.
        ({"dim": 64, "n_heads": 8, "n_kv_heads": 4, "multiple_of": 1, "ffn_dim_multiplier": 1.5}, 255),
    ],
)
def test_the_feed_forward_width_follows_from_multiple_of(changes, ffn) -> None:
    found = config(WeightSizes(53, ffn, tied=False), **changes)
    assert found.intermediate_size == ffn
    assert found.num_kv_heads == (found.num_heads if changes["n_kv_heads"] is ... else changes["n_kv_heads"])


def test_a_missing_rope_theta_is_ten_thousand() -> None:
    assert config(rope_theta=...).rope_theta == 10000.0
    assert config(rope_theta=None).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"use_scaled_rope": True}, 131072),
        ({}, 8192),
        ({"rope_theta": 1000000.0}, 16384),
        ({"rope_theta": ...}, 4096),
        ({"rope_theta": ..., "norm_eps": 1e-6}, 2048),
        ({"max_seq_len": 1024, "use_scaled_rope": True}, 1024),
    ],
)
def test_the_context_is_the_family_s(changes, context) -> None:
    """Llama 3.1, Llama 3, Code Llama, Llama 2, Llama 1; and what a file says itself."""
    assert config(**changes).max_position_embeddings == context


# Formats and memory.


def test_the_format_is_found_by_content(tmp_path, shared) -> None:
    shards = [meta_makers.meta_tensors(makers.hf_tensors(META_SIZES))]
    folder = meta_makers.write_meta(tmp_path / "meta", meta_makers.params(), shards)
    assert open_source(folder, "auto").dialect == "meta"
    # The published repositories have both formats apart; a folder with a config.json is Hugging Face's.
    (folder / "config.json").write_text(json.dumps(makers.hf_config(META_SIZES)))
    makers.write_safetensors(folder / "model.safetensors", makers.hf_tensors(META_SIZES))
    assert open_source(folder, "auto").dialect == "hf"
    assert open_source(folder, "meta").dialect == "meta"


def test_eight_files_are_joined_with_one_piece_beside_the_whole(tmp_path) -> None:
    """Numpy's memory is traced: 16 MB of embedding in pieces of 2 MB, by rows and by columns, and the tied check."""
    sizes = META_SIZES._replace(V=4096, D=1024, F=2741, N=8, K=8, H=128, L=1)
    weights = makers.hf_tensors(sizes)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    tensors = meta_makers.meta_tensors(weights, sizes)
    for embed_axis in (0, 1):
        shards = meta_makers.split(tensors, 8, embed_axis)
        folder = meta_makers.write_meta(tmp_path / str(embed_axis), meta_makers.params(sizes), shards)
        del shards
        tracemalloc.start()
        try:
            source = open_meta(folder)
            assert source.config.tie_word_embeddings
            assert tracemalloc.get_traced_memory()[1] < 70e6  # two blocks of 16 MB, each from pieces, and their bytes
            for name, tensor in sorted(source.tensors.items(), key=lambda item: item[1].place):
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                whole = tensor.read()
                peak = tracemalloc.get_traced_memory()[1] - before
                assert np.array_equal(whole, tensors[name])
                assert peak < whole.nbytes * (1 + 1 / 8) + 100e3, name
                del whole
        finally:
            tracemalloc.stop()
