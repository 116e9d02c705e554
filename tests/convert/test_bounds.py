"""What a hostile or broken file may claim: lengths, depths, names and kinds of file that are refused in one line each.

Most of these were found by the fuzzer (``tests/fuzz``), which broke on them once.
"""

import json
import os

import numpy as np
import pytest

from checkpoints_convert.findings import ConversionError, Findings, one_line
from checkpoints_convert.names import slots
from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.gguf_file import read_gguf
from checkpoints_convert.readers.hf import copy_tokenizer
from checkpoints_convert.readers.jsonfile import parse_object, read_object
from checkpoints_convert.readers.safetensors import read_directory
from checkpoints_convert.tokenizer_gguf import tokenizer_from_gguf
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig
from jaxspec.text import Tokenizer
from tests.convert import makers

ARRAY, UINT8, STRING = 9, 0, 8


@pytest.fixture
def hf(tmp_path):
    return makers.write_hf(tmp_path / "hf", makers.hf_config(), makers.hf_tensors())


def test_a_finding_is_one_printable_line_of_bounded_length() -> None:
    assert one_line("a\nb\x1b[31m\ud800\u202e") == "a\\nb\\x1b[31m\\ud800\\u202e"
    assert one_line("é 😀 fine") == "é 😀 fine"
    long = one_line("head" + "x" * 10**6 + "tail")
    assert len(long) < 500
    assert long.startswith("headxx")
    assert long.endswith("xxtail")
    assert len(one_line("\u202e" * 10**6)) < 500
    findings = Findings()
    findings.add("a\nb")
    findings.add("a\nb")
    assert findings.lines == ["a\\nb"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "loop"])
def test_only_files_are_opened(refused, hf, name, kind) -> None:
    (hf / name).unlink()
    if kind == "fifo":
        os.mkfifo(hf / name)
    elif kind == "folder":
        (hf / name).mkdir()
    else:
        (hf / name).symlink_to("/dev/zero" if kind == "device" else name)
    (line,) = refused(hf)
    assert name in line


@pytest.mark.timeout(30)
def test_a_source_that_is_a_pipe_or_leads_to_itself_is_refused(refused, tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "found a device or a pipe" in refused(tmp_path / "pipe")[0]
    (tmp_path / "memory").symlink_to("/proc/self/mem")  # a file, by its kind
    assert "found another kind of file" in refused(tmp_path / "memory")[0]
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    assert "found nothing" in refused(tmp_path / "loop.gguf")[0]


def test_json_is_believed_to_a_depth_a_size_and_a_number_of_digits(tmp_path) -> None:
    assert parse_object('{"a": ' * 64 + "1" + "}" * 64, "x")
    for depth in (65, 400, 970, 1000, 100_000):
        for opening, closing in ('{"a": ', "}"), ("[", "]"):
            with pytest.raises(UserError, match="too deep a nesting"):
                parse_object('{"a": ' + opening * depth + "1" + closing * depth + "}", "x")
    assert parse_object('{"a": ' + "9" * 40 + "}", "x") == {"a": 10**40 - 1}
    for digits in (41, 400, 5_000):
        with pytest.raises(UserError, match=f"x: a number of {digits} digits: expected at most 40"):
            parse_object('{"a": ' + "9" * digits + "}", "x")
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=r"config\.json: 1099511627776 bytes of JSON: expected at most"):
        read_object(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([10**39, 10**39], "takes 4" + "0" * 78 + " bytes"),
        ([1] * 9, "expected at most 8 dimensions, got 9"),
        ([10**4_000], "a number of 4001 digits"),
        ([1] * 100_000, "expected at most 8 dimensions, got 100000"),
        ([[1] * 1_000], "expected a shape of sizes"),
    ],
)
def test_a_safetensors_shape_is_small_before_it_is_multiplied(tmp_path, shape, expected) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}
    makers.write_safetensors(tmp_path / "x.safetensors", {"w": np.ones(1, np.float32)}, {"w": entry})
    with pytest.raises(UserError) as caught:
        read_directory(SourceFile(tmp_path / "x.safetensors"))
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_safetensors_header_is_bounded(tmp_path) -> None:
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write((20_000_000).to_bytes(8, "little"))
        file.truncate(1 << 30)
    with pytest.raises(UserError, match="header of 20000000 bytes: expected at most 16777216"):
        read_directory(SourceFile(tmp_path / "x.safetensors"))


@pytest.mark.parametrize(
    "name",
    ["../elsewhere/{}", "./{}", "{}\0", "sub/../{}", "a\nb", "\x1b[2J", "\ud800", "byte \udc80", "x" * 256, "é" * 128],
)
def test_a_shard_name_is_a_printable_name_in_the_folder(refused, tmp_path, name) -> None:
    """What the name leads to is there and right: only the name is wrong."""
    folder = makers.write_sharded(tmp_path / "hf", makers.hf_config(), makers.split_in_three(makers.hf_tensors()))
    (tmp_path / "elsewhere").mkdir()
    (folder / "sub").mkdir()
    shard = "model-00002-of-00003.safetensors"
    (tmp_path / "elsewhere" / shard).write_bytes((folder / shard).read_bytes())
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard, json.dumps(name.format(shard))[1:-1]))
    for line in refused(folder):
        assert "expected the name of a file in the same folder" in line
        assert line.isprintable()


def test_sizes_beyond_64_bits_are_multiplied_exactly() -> None:
    values = dict.fromkeys(("num_layers", "num_heads", "num_kv_heads", "max_position_embeddings"), 1)
    config = LlamaConfig(
        **values,
        vocab_size=10**30,
        hidden_size=2**63,
        intermediate_size=2,
        head_dim=2**62,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_word_embeddings=True,
    )
    shapes = {slot.source: slot.shape for slot in slots(config, "hf")}
    assert shapes["model.embed_tokens.weight"] == (10**30, 2**63)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (2**62, 2**63)


def gguf_head(n_tensors: int, n_fields: int, *fields: bytes) -> bytes:
    counts = n_tensors.to_bytes(8, "little") + n_fields.to_bytes(8, "little")
    return b"GGUF" + (3).to_bytes(4, "little") + counts + b"".join(fields)


def gguf_array(key: str, kind: int, count: int) -> bytes:
    head = len(key).to_bytes(8, "little") + key.encode() + ARRAY.to_bytes(4, "little")
    return head + kind.to_bytes(4, "little") + count.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (gguf_head(0, 1, gguf_array("a", UINT8, 1 << 28)), "a: more than 4194304 values in the metadata's arrays"),
        (gguf_head(0, 1, gguf_array("a", STRING, 1 << 24)), "a: more than 4194304 values in the metadata's arrays"),
        (gguf_head(0, 65_537), "65537 metadata fields and 0 tensors: expected at most 65536 of each"),
        (gguf_head(1 << 20, 0), "0 metadata fields and 1048576 tensors: expected at most 65536 of each"),
        (gguf_head(0, 1, (1 << 28).to_bytes(8, "little")), "expected at most 134217728 of metadata"),
    ],
)
def test_gguf_metadata_is_bounded_however_large_the_file(tmp_path, head, expected) -> None:
    """The file is large enough for what it claims, and nearly all of it is a hole."""
    with (tmp_path / "x.gguf").open("wb") as file:
        file.write(head)
        file.truncate(1 << 34)
    with pytest.raises(UserError) as caught:
        read_gguf(tmp_path / "x.gguf")
    assert expected in str(caught.value)


def test_a_gguf_token_list_that_is_a_number_is_refused(refused, tmp_path) -> None:
    fields = makers.gguf_fields(llama__vocab_size=..., tokenizer__ggml__tokens=7)
    path = makers.write_gguf(tmp_path / "x.gguf", fields, makers.gguf_tensors(makers.hf_tensors()))
    assert any("tokenizer.ggml.tokens: expected list, got int" in line for line in refused(path))


def test_gguf_token_types_must_be_as_many_as_the_tokens(tmp_path) -> None:
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.token_type": [],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(UserError, match="token_type: expected 2 entries as in tokens, got 0"):
        tokenizer_from_gguf(fields, tmp_path)


def test_findings_of_a_gguf_tokenizer_are_apart(tmp_path) -> None:
    fields = {"tokenizer.ggml.tokens": ["a", "a", "b", "b"], "tokenizer.ggml.pre": "new"}
    with pytest.raises(ConversionError) as caught:
        tokenizer_from_gguf(fields, tmp_path)
    assert sum("expected distinct tokens" in line for line in caught.value.findings) == 2


def test_infinite_scales_are_read_without_a_warning(shared, tmp_path) -> None:
    """Warnings are errors in this session, and would be lines on a user's terminal."""
    data = bytearray((shared / "fixtures" / "tiny-llama3" / "gguf" / "tiny-llama3-q4_0.gguf").read_bytes())
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    place = read_gguf(path).tensors["blk.0.ffn_up.weight"].place[1]
    data[place : place + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    assert not np.isfinite(read_gguf(path).tensors["blk.0.ffn_up.weight"].read()).all()


@pytest.fixture
def tokenizer(shared, tmp_path):
    """A folder with a tokenizer that is right."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((shared / "fixtures" / "tiny-llama3" / "hf" / name).read_bytes())
    Tokenizer.load(folder)
    return folder


@pytest.mark.parametrize("token_id", [1 << 22, 10**9, 10**30, -1])
def test_a_token_id_far_out_is_refused_before_a_table_is_made(tokenizer, token_id) -> None:
    document = json.loads((tokenizer / "tokenizer.json").read_text())
    first = next(iter(document["model"]["vocab"]))
    document["model"]["vocab"][first] = token_id
    (tokenizer / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Tokenizer.load(tokenizer)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tokenizer_config.json", b"[" * 100_000, "not JSON"),
        ("special_tokens_map.json", b'{"a":' * 5_000, "not JSON"),
        ("tokenizer_config.json", b'{"bos_token": "\\ud800"}', "is not a token of tokenizer.json"),
        ("tokenizer_config.json", b'{"eos_token": {"content": "a\\udfff"}}', "is not a token of tokenizer.json"),
        ("chat_template.jinja", b"\xff", "expected UTF-8 text"),
        ("chat_template.jinja", b"{% if " + b"(" * 3_000 + b"1" + b")" * 3_000 + b" %}{% endif %}", "RecursionError"),
        ("chat_template.jinja", b"{% for a in b %}" * 30 + b"{% endfor %}" * 30, "SyntaxError"),
    ],
)
def test_tokenizer_files_that_no_parser_takes_are_the_users(tokenizer, name, text, expected) -> None:
    (tokenizer / name).write_bytes(text)
    with pytest.raises(UserError, match=expected):
        Tokenizer.load(tokenizer)


def test_named_templates_that_are_no_objects_are_passed_over(tokenizer) -> None:
    config = {"chat_template": ["x", None, {"name": "default", "template": "hello"}]}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tokenizer).has_chat_template


def test_a_tokenizer_file_is_copied_only_when_it_can_be_one(tokenizer, tmp_path) -> None:
    with (tokenizer / "special_tokens_map.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=r"special_tokens_map\.json: 1099511627776 bytes: expected at most"):
        copy_tokenizer(tokenizer, tmp_path)
    (tokenizer / "special_tokens_map.json").unlink()
    (tokenizer / "special_tokens_map.json").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"special_tokens_map\.json: cannot be copied"):
        copy_tokenizer(tokenizer, tmp_path)


def test_a_broken_tokenizer_is_named_without_the_folder_it_was_copied_to(refused, hf) -> None:
    (hf / "tokenizer.json").write_text("{")
    (line,) = refused(hf)
    assert line.startswith("tokenizer.json: not JSON")
