"""Tokenizers rebuilt from GGUF metadata (the goldens are in test_tokenizer.py)."""

import json

import pytest
import tokenizers

from checkpoints_convert.tokenizer_gguf import CONTROL, PRE_TOKENIZERS, UNUSED, USER_DEFINED, tokenizer_from_gguf
from jaxspec.errors import UserError
from jaxspec.text import Tokenizer


def rebuilt(fields, folder) -> Tokenizer:
    tokenizer_from_gguf(fields, folder)
    return Tokenizer.load(folder)


def pieces(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.id_to_bytes(i) for i in tokenizer.encode(text, add_bos=False)]


def test_everything_that_hugging_face_files_say_is_carried_over(tiny, tiny_from_gguf) -> None:
    for name in ("size", "bos_id", "adds_bos", "eos_ids", "special_ids", "max_token_bytes", "has_chat_template"):
        assert getattr(tiny_from_gguf, name) == getattr(tiny, name), name


def test_the_folder_asks_for_no_clean_up(tiny_fields, tmp_path) -> None:
    tokenizer_from_gguf(tiny_fields, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["clean_up_tokenization_spaces"] is False
    assert config["chat_template"] == tiny_fields["tokenizer.chat_template"]


@pytest.mark.parametrize(
    ("pre", "number"),
    [
        ("llama-bpe", [b"123", b"45"]),
        ("llama3", [b"123", b"45"]),
        ("smollm", [b"1", b"2", b"3", b"4", b"5"]),
        ("qwen2", [b"1", b"2", b"3", b"4", b"5"]),
        ("gpt-2", [b"12345"]),
    ],
)
def test_the_name_of_the_pre_tokenizer_decides_how_numbers_are_read(tiny_fields, tmp_path, pre, number) -> None:
    """A vocabulary with merges for 1, 12, 123, 1234 and 12345, so that only the rules keep digits apart."""
    tokens = [*map(str, range(10)), "12", "123", "45", "1234", "12345", "Ġ", "a", "Ċ"]
    fields = tiny_fields | {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": ["1 2", "12 3", "4 5", "123 4", "1234 5", "123 45"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    assert pieces(rebuilt(fields, tmp_path), "a 12345") == [b"a", b" ", *number]


def test_entries_that_pad_the_list_are_no_tokens(tiny_fields, tmp_path, tiny) -> None:
    padded = tiny_fields | {
        "tokenizer.ggml.tokens": [*tiny_fields["tokenizer.ggml.tokens"], "[PAD512]", "[PAD513]"],
        "tokenizer.ggml.token_type": [*tiny_fields["tokenizer.ggml.token_type"], UNUSED, UNUSED],
    }
    tokenizer = rebuilt(padded, tmp_path)
    assert tokenizer.size == tiny.size
    assert tokenizer.fingerprint == tiny.fingerprint


def test_user_defined_tokens_are_whole_and_shown(tiny_fields, tmp_path) -> None:
    types = list(tiny_fields["tokenizer.ggml.token_type"])
    tokens = list(tiny_fields["tokenizer.ggml.tokens"])
    tokens[511], types[511] = "<think>", USER_DEFINED
    fields = tiny_fields | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = rebuilt(fields, tmp_path)
    assert tokenizer.encode("<think>", add_bos=False) == [511]
    assert tokenizer.decode([511]) == "<think>"
    assert 511 not in tokenizer.special_ids


def test_special_tokens_keep_their_ids_wherever_they_stand(tiny_fields, tmp_path, tiny) -> None:
    """Specials moved to the front, as SmolLM2 has them."""
    tokens, types = tiny_fields["tokenizer.ggml.tokens"], tiny_fields["tokenizer.ggml.token_type"]
    assert types[496:] == [CONTROL] * 16
    fields = tiny_fields | {
        "tokenizer.ggml.tokens": tokens[496:] + tokens[:496],
        "tokenizer.ggml.token_type": types[496:] + types[:496],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 9,
    }
    tokenizer = rebuilt(fields, tmp_path)
    assert tokenizer.special_ids == frozenset(range(16))
    text = "The harbour <|eot_id|> 1984"
    assert tokenizer.encode(text, add_bos=False) == [16 + i for i in tiny.encode(text, add_bos=False)]


def test_d12_end_of_turn_ids_of_the_metadata_end_a_generation(tiny_fields, tmp_path) -> None:
    fields = tiny_fields | {"tokenizer.ggml.eos_token_id": 497, "tokenizer.ggml.eot_token_id": 511}
    assert rebuilt(fields, tmp_path).eos_ids == (497, 504, 505, 511)


@pytest.mark.parametrize(("said", "adds"), [(True, True), (False, False), (None, True)])
def test_d10_add_bos_as_the_file_says_else_as_the_family_does(tiny_fields, tmp_path, said, adds) -> None:
    fields = {k: v for k, v in tiny_fields.items() if k != "tokenizer.ggml.add_bos_token"}
    if said is not None:
        fields["tokenizer.ggml.add_bos_token"] = said
    assert rebuilt(fields, tmp_path).adds_bos is adds


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokenizer.ggml.pre": "novel"}, f"expected one of {', '.join(sorted(PRE_TOKENIZERS))}, got 'novel'"),
        ({"tokenizer.ggml.model": "llama"}, r"expected 'gpt2' \(byte-level BPE\), got 'llama'"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens: missing"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "expected 512 entries as in tokens, got 2"),
        ({"tokenizer.ggml.merges": ["a", "b c"]}, "expected two tokens with one space between, got 'a'"),
        ({"tokenizer.ggml.merges": ["zz zz"]}, "do not make a BPE model"),
        ({"tokenizer.ggml.eos_token_id": 512}, "expected an id below 512, got 512"),
        ({"tokenizer.ggml.bos_token_id": None}, "add_bos_token: true, but"),
        ({"tokenizer.ggml.tokens": ["a"] * 512}, "expected distinct tokens, got 'a' 512 times"),
        ({"tokenizer.ggml.pre": 7}, r"tokenizer\.ggml\.pre: expected str, got int"),
    ],
)
def test_metadata_that_makes_no_tokenizer_leaves_nothing_behind(tiny_fields, tmp_path, change, problem) -> None:
    folder = tmp_path / "tokenizer"
    with pytest.raises(UserError, match=problem):
        tokenizer_from_gguf(tiny_fields | change, folder)
    assert not folder.exists()


def test_bytes_that_the_vocabulary_lacks_do_not_become_the_unknown_token(tiny_fields, tmp_path) -> None:
    tokens = ["<unk>", "a", "b"]
    fields = tiny_fields | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, 1, 1],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    assert rebuilt(fields, tmp_path).encode("axb", add_bos=False) == [1, 2]
    # Nor for anyone else who reads the folder.
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.encode("axb", add_special_tokens=False).ids == [1, 2]


def test_all_findings_come_at_once(tiny_fields, tmp_path) -> None:
    broken = tiny_fields | {"tokenizer.ggml.pre": "novel", "tokenizer.ggml.merges": None}
    with pytest.raises(UserError, match=r"ggml\.pre: .*; tokenizer\.ggml\.merges: missing"):
        tokenizer_from_gguf(broken, tmp_path / "tokenizer")
