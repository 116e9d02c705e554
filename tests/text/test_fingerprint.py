"""One tokenizer, one fingerprint: whatever file it came from, and another for anything that changes ids."""

import copy
import json

import pytest
import tokenizers

from jaxspec.text.fingerprint import GPT2_PATTERN, fingerprint


@pytest.fixture
def document(tiny_dir) -> dict:
    return json.loads((tiny_dir / "tokenizer.json").read_text(encoding="utf-8"))


def test_hugging_face_and_gguf_files_agree(tiny, tiny_from_gguf) -> None:
    assert tiny.fingerprint == tiny_from_gguf.fingerprint
    assert len(tiny.fingerprint) == 64


def test_demo_and_tiny_differ(tiny, demo) -> None:
    assert tiny.fingerprint != demo.fingerprint


def test_a_file_that_the_library_wrote_again_agrees(document, tiny_dir) -> None:
    """It spells merges as pairs, and may order keys anew."""
    again = json.loads(tokenizers.Tokenizer.from_file(str(tiny_dir / "tokenizer.json")).to_str())
    assert type(again["model"]["merges"][0]) is not type(document["model"]["merges"][0])
    assert fingerprint(again) == fingerprint(document)


def same_specials_in_vocab(document) -> None:
    document["model"]["vocab"] |= {token["content"]: token["id"] for token in document["added_tokens"]}


def same_nested_steps(document) -> None:
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [document["pre_tokenizer"]]}


def same_without_bos(document) -> None:
    document["post_processor"] = None


@pytest.mark.parametrize("change", [same_specials_in_vocab, same_nested_steps, same_without_bos])
def test_the_same_in_other_words(document, change) -> None:
    before = fingerprint(document)
    change(document)
    assert fingerprint(document) == before


def test_gpt2_words_in_both_spellings(document) -> None:
    built_in = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": GPT2_PATTERN}, "behavior": "Isolated", "invert": False}
    spelled = {"type": "Sequence", "pretokenizers": [split, built_in | {"use_regex": False}]}
    assert fingerprint(document | {"pre_tokenizer": built_in}) == fingerprint(document | {"pre_tokenizer": spelled})
    # The spelling is only right if it splits alike.
    library = [tokenizers.Tokenizer.from_str(json.dumps(document | {"pre_tokenizer": p})) for p in (built_in, spelled)]
    text = "I'm  we'LL 12 a\n\n b 漢字!? \t x"
    assert library[0].encode(text).ids == library[1].encode(text).ids


def swap_two_ids(document) -> None:
    vocab = document["model"]["vocab"]
    vocab["!"], vocab["#"] = vocab["#"], vocab["!"]


def swap_two_merges(document) -> None:
    merges = document["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]


def other_special(document) -> None:
    document["added_tokens"][-1]["content"] = "<|other|>"


def special_made_ordinary(document) -> None:
    document["added_tokens"][-1]["special"] = False


def special_that_strips(document) -> None:
    document["added_tokens"][-1]["lstrip"] = True


def one_digit(document) -> None:
    split = document["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"]["Regex"] = split["pattern"]["Regex"].replace("{1,3}", "")


def prefix_space(document) -> None:
    document["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def normalised(document) -> None:
    document["normalizer"] = {"type": "NFC"}


def merges_obeyed(document) -> None:
    document["model"]["ignore_merges"] = False


@pytest.mark.parametrize(
    "change",
    [
        swap_two_ids,
        swap_two_merges,
        other_special,
        special_made_ordinary,
        special_that_strips,
        one_digit,
        prefix_space,
        normalised,
        merges_obeyed,
    ],
)
def test_whatever_changes_ids_changes_the_fingerprint(document, change) -> None:
    changed = copy.deepcopy(document)
    change(changed)
    assert fingerprint(changed) != fingerprint(document)
