"""GGUF files that must be refused: status 2, every finding listed, nothing left, nothing allocated on their word."""

import random
import resource
import struct

import gguf
import numpy as np
import pytest

from checkpoints_convert import convert
from checkpoints_convert.engine import make_plan
from checkpoints_convert.readers import open_source
from jaxspec.checkpoint import open_checkpoint
from jaxspec.errors import UserError
from jaxspec.model.config import RopeScaling
from tests.convert import makers


@pytest.fixture
def packed(tmp_path):
    """``packed(name=value, ...)``: a whole file with these changes to its metadata."""

    def write(tensors=None, architecture="llama", **changes):
        tensors = makers.gguf_tensors(makers.hf_tensors()) if tensors is None else tensors
        return makers.write_gguf(tmp_path / "model.gguf", makers.gguf_fields(**changes), tensors, architecture)

    return write


def overwrite(path, offset: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(data)] = data
    path.write_bytes(raw)


def offset_of(path, name: str) -> int:
    """Where the directory entry of a tensor has its number of dimensions."""
    raw = path.read_bytes()
    return raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


def test_wrong_magic(packed, refused) -> None:
    path = packed()
    overwrite(path, 0, b"GGML")
    (line,) = refused(path)
    assert "expected the magic b'GGUF'" in line
    assert "b'GGML'" in line


@pytest.mark.parametrize(("version", "named"), [(1, "got 1"), (4, "got 4"), (3 << 24, "a big-endian file")])
def test_unknown_versions(version, named, packed, refused) -> None:
    path = packed()
    overwrite(path, 4, struct.pack("<I", version))
    (line,) = refused(path)
    assert named in line


def test_version_2_reads_like_3(packed, tmp_path) -> None:
    path = packed()
    overwrite(path, 4, struct.pack("<I", 2))
    convert(path, tmp_path / "out")


@pytest.mark.parametrize(("offset", "named"), [(8, "tensors"), (16, "metadata fields")])
@pytest.mark.parametrize("count", [10**6, 2**40, 2**63, 2**64 - 1])
def test_huge_counts(offset, named, count, packed, refused) -> None:
    path = packed()
    overwrite(path, offset, struct.pack("<Q", count))
    (line,) = refused(path)
    assert f"truncated: {count} {named} take at least" in line


def test_truncated_anywhere(packed, tmp_path, refused) -> None:
    raw = packed().read_bytes()
    path = tmp_path / "short.gguf"
    directory = raw.index(b"output_norm.weight") + 60
    for length in [*range(0, directory, 97), len(raw) // 2, len(raw) - 64]:
        path.write_bytes(raw[:length])
        lines = refused(path)
        assert all("truncated" in line for line in lines), (length, lines)


def test_every_tensor_beyond_the_end_is_listed(packed, refused) -> None:
    path = packed()
    raw = path.read_bytes()
    path.write_bytes(raw[:-6000])
    lines = refused(path)
    assert len(lines) > 1
    assert all(f"the file has {len(raw) - 6000}" in line for line in lines)


def test_an_offset_beyond_the_end(packed, refused) -> None:
    path = packed()
    entry = offset_of(path, "output_norm.weight")
    overwrite(path, entry + 4 + 8 + 4, struct.pack("<Q", 1 << 60))
    (line,) = refused(path)
    assert "output_norm.weight ends at byte" in line


def test_an_offset_out_of_line_and_an_overlap(packed, refused) -> None:
    path = packed()
    entry = offset_of(path, "output_norm.weight")
    overwrite(path, entry + 4 + 8 + 4, struct.pack("<Q", 4))
    lines = refused(path)
    assert any("offset 4 is not a multiple of 32" in line for line in lines)
    assert any("overlap" in line for line in lines)


@pytest.mark.parametrize(
    ("at", "data", "named"),
    [
        (0, struct.pack("<I", 9), "expected 1 to 4 dimensions, got 9"),
        (0, struct.pack("<I", 0), "expected 1 to 4 dimensions, got 0"),
        (4, struct.pack("<Q", 1 << 61), "ends at byte"),
        (4, struct.pack("<Q", 0), "got [0]"),
        (12, struct.pack("<I", 999), "unknown tensor type 999"),
        (12, struct.pack("<I", gguf.GGMLQuantizationType.I32), "tensor type I32 cannot be dequantised"),
        (12, struct.pack("<I", gguf.GGMLQuantizationType.Q4_0), "expected rows of a multiple of 32 elements (Q4_0)"),
    ],
)
def test_a_directory_entry_that_lies(at, data, named, packed, refused) -> None:
    path = packed()
    overwrite(path, offset_of(path, "output_norm.weight") + at, data)
    lines = refused(path)
    assert any("output_norm.weight" in line and named in line for line in lines), lines


def test_a_tensor_twice(packed, refused) -> None:
    path = packed()
    raw = path.read_bytes()
    assert raw.count(b"blk.1.ffn_up.weight") == 1
    path.write_bytes(raw.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    (line,) = refused(path)
    assert "duplicate tensor blk.0.ffn_up.weight" in line


def test_a_metadata_key_twice(packed, refused) -> None:
    path = packed()
    path.write_bytes(path.read_bytes().replace(b"llama.attention.key_length", b"llama.attention.head_count"))
    lines = refused(path)
    assert any("duplicate metadata key llama.attention.head_count" in line for line in lines)


# Without its head a model is tied, not broken: see the next test.
NAMES = set(makers.gguf_tensors(makers.hf_tensors(makers.SIZES._replace(L=1)))) - {"output.weight"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_missing_tensor_is_named(name, packed, refused) -> None:
    tensors = makers.gguf_tensors(makers.hf_tensors())
    del tensors[name]
    (line,) = refused(packed(tensors))
    assert name in line


def test_without_a_head_the_model_is_tied(packed, tmp_path, tree) -> None:
    tensors = makers.gguf_tensors(makers.hf_tensors(tied=True))
    convert(packed(tensors), tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").config.tie_word_embeddings
    assert "lm_head" not in tree(tmp_path / "out")


def test_one_too_many_and_one_of_another_shape(packed, refused) -> None:
    tensors = makers.gguf_tensors(makers.hf_tensors())
    tensors["blk.0.attn_q.bias"] = np.zeros(24, np.float32)
    tensors["blk.2.ffn_down.weight"] = tensors["blk.2.ffn_down.weight"].T.copy()
    lines = refused(packed(tensors))
    assert len(lines) == 2
    assert any("blk.0.attn_q.bias: not part of this model" in line for line in lines)
    assert any("blk.2.ffn_down.weight: expected D,F = [19, 23], got [23, 19]" in line for line in lines)


REQUIRED = (
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.freq_base",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_each_missing_field_is_named(key, packed, refused) -> None:
    (line,) = refused(packed(**{key.replace(".", "__"): ...}))
    assert f"{key} is missing" in line


def test_all_missing_fields_are_listed_at_once(packed, refused) -> None:
    lines = refused(packed(**{key.replace(".", "__"): ... for key in REQUIRED}))
    assert len(lines) == len(REQUIRED)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama__attention__head_count": [6, 6, 4]}, "llama.attention.head_count: expected a positive integer"),
        ({"llama__rope__dimension_count": 2}, "llama.rope.dimension_count: expected the head size 4, got 2"),
        ({"llama__attention__value_length": 8}, "llama.attention.value_length: expected the head size 4, got 8"),
        ({"llama__expert_count": 8}, "llama.expert_count: expected 0, got 8"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type: expected none or linear, got 'yarn'"),
        ({"llama__rope__freq_base": float("inf")}, "llama.rope.freq_base: expected a positive number, got inf"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "expected a positive number, got nan"),
        ({"llama__vocab_size": 54}, "token_embd.weight: expected V,D = [54, 19]"),
        ({"llama__block_count": 2**31}, "2147483648 layers"),
        ({"tokenizer__ggml__eos_token_id": 53}, "token id: expected one in [0, 53), got 53"),
        ({"tokenizer__ggml__bos_token_id": "one"}, "tokenizer.ggml.bos_token_id: expected a token id"),
        ({"split__count": 4}, "one of 4 split files"),
        ({"general__alignment": 3}, "general.alignment: expected a power of two"),
    ],
)
def test_metadata_that_contradicts_the_model(changes, named, tmp_path, refused) -> None:
    fields = makers.gguf_fields(**changes)
    alignment = fields.pop("general.alignment", None)
    path = makers.write_gguf(tmp_path / "model.gguf", fields, makers.gguf_tensors(makers.hf_tensors()))
    if alignment is not None:  # the library's writer would obey it
        fields["general.alignment"] = alignment
        path = makers.write_gguf(path, fields, {})
    lines = refused(path)
    assert any(named in line for line in lines), lines


def test_another_architecture(packed, refused) -> None:
    (line,) = refused(packed(architecture="qwen2"))
    assert "general.architecture: expected 'llama', got 'qwen2'" in line


def test_end_tokens_of_every_kind_are_united(packed) -> None:
    ends = {"tokenizer__ggml__eos_token_id": 5, "tokenizer__ggml__eot_token_id": 7, "tokenizer__ggml__eom_token_id": 5}
    config = open_source(packed(tokenizer__ggml__bos_token_id=3, **ends), "auto").config
    assert config.eos_token_ids == (5, 7)
    assert config.bos_token_id == 3


def test_rope_scaling_comes_from_the_divisors_or_the_metadata(packed, refused) -> None:
    """E09's kind: a scaling that is in the file is never dropped."""
    linear = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    assert open_source(packed(**linear), "auto").config.rope_scaling == RopeScaling("linear", 4.0)
    tensors = makers.gguf_tensors(makers.hf_tensors()) | {"rope_freqs.weight": np.array([1, 8], np.float32)}
    config = open_source(packed(tensors), "auto").config
    assert config.rope_scaling == RopeScaling("divisors", divisors=(1.0, 8.0))
    (line,) = refused(packed(tensors, **linear))
    assert "both rope_freqs.weight and linear" in line
    for broken in ([1, 8, 8], [1, 0], [1, np.nan]):
        (line,) = refused(packed(tensors | {"rope_freqs.weight": np.array(broken, np.float32)}))
        assert "rope_freqs.weight: expected" in line


def test_numbers_are_the_decimals_that_were_written(packed) -> None:
    """float32 1e-5 is not 9.999999747378752e-06 in our config."""
    config = open_source(packed(), "auto").config
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 500000.0)


def test_no_change_of_bytes_does_worse_than_a_refusal(shared, tmp_path) -> None:
    """Bytes changed, cut and blown up at random: a plan, or UserError; never another exception, never gigabytes."""
    source = (shared / "fixtures" / "tiny-llama3" / "gguf" / "tiny-llama3-q4_1.gguf").read_bytes()
    header = source.index(b"blk.3.ffn_up.weight") + 100
    rng = random.Random(20)
    path = tmp_path / "changed.gguf"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = {True: 0, False: 0}
    for _ in range(150):
        raw = bytearray(source)
        for _ in range(rng.choice((1, 1, 3, 9))):
            at = rng.choice((rng.randrange(1500), rng.randrange(header - 4000, header)))
            value = rng.choice((rng.randbytes(1), b"\xff" * 8, struct.pack("<Q", 1 << 40), bytes(8)))
            raw[at : at + len(value)] = value
        path.write_bytes(raw[: rng.choice((len(raw), len(raw), rng.randrange(len(raw))))])
        try:
            make_plan(open_source(path, "gguf"), "keep")
            outcomes[True] += 1
        except UserError:
            outcomes[False] += 1
    assert outcomes[False] > 50, outcomes
    assert outcomes[True] > 5, outcomes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
