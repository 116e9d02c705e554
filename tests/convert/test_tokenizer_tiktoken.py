"""Meta's tokenizer.model becomes the tokenizer that the ranks describe."""

import base64
import itertools
import json

import numpy as np
import pytest

from checkpoints_convert import convert
from checkpoints_convert.tokenizer_tiktoken import merges_of, read_tokenizer_model, special_tokens
from jaxspec.checkpoint import open_checkpoint
from jaxspec.errors import UserError
from jaxspec.text import Tokenizer
from tests.convert import meta_makers

BYTES = [bytes([byte]) for byte in range(256)]


def written(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.fixture
def model_file(shared):
    return shared / "fixtures" / "tiny-llama3" / "meta-mp1" / "tokenizer.model"


@pytest.fixture
def folder(model_file, tmp_path):
    """The fixture's tokenizer, written out."""
    read_tokenizer_model(model_file.read_bytes(), "tokenizer.model", 512, llama_3_1=True).write(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def by_ranks(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's rule, spelled out: a word that is a token is one; else the leftmost pair of the lowest rank joins."""
    if word in ranks:
        return [ranks[word]]
    pieces = [word[i : i + 1] for i in range(len(word))]
    while True:
        pairs = [(ranks[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ranks]
        if not pairs:
            return [ranks[piece] for piece in pieces]
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_the_golden_ids_come_out(folder, shared) -> None:
    """Goldens on which HF tokenizers, tiktoken and llama.cpp agree."""
    golden = json.loads((shared / "fixtures" / "tiny-llama3" / "tokenizer_golden.json").read_text())
    tokenizer = Tokenizer.load(folder)
    assert len(golden["cases"]) == 9
    for case in golden["cases"]:
        assert tokenizer.encode(case["text"], add_bos=False, parse_special=True) == case["ids"]
        assert tokenizer.encode(case["text"], add_bos=True, parse_special=True) == case["ids_with_bos"]
        assert tokenizer.decode(case["ids"], skip_special=False) == case["decoded"]


def test_it_is_the_tokenizer_of_the_hugging_face_folder(folder, shared, tiny_models, tmp_path) -> None:
    """By fingerprint, so that a draft from one format goes with a target from another."""
    theirs = Tokenizer.load(shared / "fixtures" / "tiny-llama3" / "hf")
    ours = Tokenizer.load(folder)
    assert ours.fingerprint == theirs.fingerprint
    assert (ours.size, ours.bos_id, ours.adds_bos) == (theirs.size, theirs.bos_id, True)
    assert ours.special_ids == theirs.special_ids
    assert ours.eos_ids == theirs.eos_ids == (497, 504, 505)
    assert not ours.has_chat_template
    convert(shared / "fixtures" / "tiny-llama3" / "meta-mp1", tmp_path / "meta")
    manifest, other = open_checkpoint(tmp_path / "meta").manifest, open_checkpoint(tiny_models("tiny-llama3")).manifest
    assert manifest.tokenizer_fingerprint == other.tokenizer_fingerprint
    assert manifest.tokenizer_size == other.tokenizer_size
    assert manifest.model_version == other.model_version == "3"


def test_the_files_say_what_the_family_does(folder) -> None:
    """Clean-up is off, for it breaks decode(encode(x)) == x; prompts begin with BOS; three tokens end a text."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["clean_up_tokenization_spaces"] is False
    assert config["add_bos_token"] is True
    assert config["bos_token"] == "<|begin_of_text|>"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 496, "eos_token_id": [497, 504, 505]}
    document = json.loads((folder / "tokenizer.json").read_text())
    assert document["model"]["ignore_merges"] is True
    assert len(document["model"]["vocab"]) == 496
    assert [token["id"] for token in document["added_tokens"]] == list(range(496, 512))


def test_special_strings_in_a_text_are_text(folder) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("a<|eot_id|>b", add_bos=False)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == "a<|eot_id|>b"


def test_words_split_as_the_ranks_say(folder, model_file) -> None:
    """2,000 random words of frequent letters, against the rule spelled out above."""
    lines = (line.split() for line in model_file.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    rng = np.random.default_rng(5)
    letters = np.array(list("aaabcdeeeeghhiilmnnoorrsstttuwwy"))
    tokenizer = Tokenizer.load(folder)
    merged = 0
    for _ in range(2000):
        word = " " * int(rng.integers(2)) + "".join(rng.choice(letters, size=int(rng.integers(1, 14))))
        expected = by_ranks(word.encode(), ranks)
        assert tokenizer.encode(word, add_bos=False) == expected, word
        merged += len(expected) < len(word)
    assert merged > 1500


def test_a_trainers_vocabulary_gets_the_trainers_merges(folder, shared) -> None:
    theirs = json.loads((shared / "fixtures" / "tiny-llama3" / "hf" / "tokenizer.json").read_text())
    ours = json.loads((folder / "tokenizer.json").read_text())

    def pairs(document: dict) -> list[list[str]]:
        return [merge.split(" ") if isinstance(merge, str) else merge for merge in document["model"]["merges"]]

    assert pairs(ours) == pairs(theirs)


def test_the_pair_that_is_left_of_a_token_is_its_merge() -> None:
    """aab: first aa (rank 257) has its turn, not ab (258)."""
    assert merges_of([*BYTES, b"bc", b"aa", b"ab", b"aab", b"aabbc"]) == [
        (b"b", b"c"),
        (b"a", b"a"),
        (b"a", b"b"),
        (b"aa", b"b"),
        (b"aab", b"bc"),
    ]


def test_with_a_token_that_merges_cannot_make_every_pair_is_listed() -> None:
    """588 tokens of Llama 3 are such: whole words only. xyz is left in three pieces; then abc has both its pairs, in
    the order of their ranks, as the published tokenizer.json lists them."""
    assert merges_of([*BYTES, b"ab", b"bc", b"abc", b"xyz"]) == [
        (b"a", b"b"),
        (b"b", b"c"),
        (b"a", b"bc"),
        (b"ab", b"c"),
    ]


def test_both_lists_of_merges_split_alike(tmp_path) -> None:
    """A vocabulary with and without an unreachable token: the ids of all other words are the rule's either way."""
    tokens = [*BYTES, b"th", b"he", b"the", b"in", b"ing", b"thing", b"re", b"her", b"there"]
    rng = np.random.default_rng(6)
    words = ["".join(rng.choice(list("theringx"), size=int(rng.integers(1, 12)))) for _ in range(1000)]
    for number, vocabulary in enumerate((tokens, [*tokens, b"qqq"])):
        ranks = {token: rank for rank, token in enumerate(vocabulary)}
        assert len(merges_of(vocabulary)) == (9 if number == 0 else 10)
        model = read_tokenizer_model(written(vocabulary), "t", len(vocabulary) + 10, llama_3_1=False)
        model.write(tmp_path / str(number))
        tokenizer = Tokenizer.load(tmp_path / str(number))
        for word in [*words, "qqq", "qqqq"]:
            assert tokenizer.encode(word, add_bos=False) == by_ranks(word.encode(), ranks), (number, word)


def test_the_256_special_tokens_of_llama_3_and_3_1() -> None:
    """Positions are the same; 3.1 gave names to three that 3 had reserved."""
    old, new = special_tokens(256, llama_3_1=False), special_tokens(256, llama_3_1=True)
    for names in (old, new):
        assert len(set(names)) == 256
        assert names[:2] == ("<|begin_of_text|>", "<|end_of_text|>")
        assert names[6:8] == ("<|start_header_id|>", "<|end_header_id|>")
        assert names[9] == "<|eot_id|>"
    assert (old[2], old[5], old[8], old[10], old[255]) == tuple(
        f"<|reserved_special_token_{number}|>" for number in (0, 3, 4, 5, 250)
    )
    assert (new[4], new[8], new[10]) == ("<|finetune_right_pad_id|>", "<|eom_id|>", "<|python_tag|>")
    assert (new[3], new[5], new[11], new[255]) == tuple(
        f"<|reserved_special_token_{number}|>" for number in (1, 2, 3, 247)
    )


def test_llama_3_ends_without_the_token_that_3_1_added(model_file) -> None:
    """Whether the model is 3.1 is known by its scaled rotary positions, which 3 has not."""
    data = model_file.read_bytes()
    old = read_tokenizer_model(data, "tokenizer.model", 512, llama_3_1=False)
    new = read_tokenizer_model(data, "tokenizer.model", 512, llama_3_1=True)
    assert (old.bos, old.eos) == (496, (497, 505))
    assert (new.bos, new.eos) == (496, (497, 504, 505))


def refusal(data: bytes, vocab_size: int = 512) -> list[str]:
    with pytest.raises(UserError) as caught:
        read_tokenizer_model(data, "tokenizer.model", vocab_size, llama_3_1=True)
    lines = list(getattr(caught.value, "findings", (str(caught.value),)))
    assert all(line.startswith("tokenizer.model: ") and line.isprintable() for line in lines)
    return lines


def test_every_bad_line_is_named() -> None:
    lines = written(BYTES).splitlines()
    lines[3] = b"AA=== 3"
    lines[5] = b"!!!! 5"
    lines[7] = b"Bw=="
    lines[9] = b"CQ== nine"
    lines[11] = b"Cw==  11"
    lines[13] = b" 13"
    lines[15] = b"Dw== -15"
    lines[17] = base64.b64encode(b"x" * 513) + b" 17"
    lines[20] = lines[19]
    lines[30] = b"Hw== 30"
    found = refusal(b"\n".join(lines))
    assert [line.split(": ")[1] for line in found] == [
        f"line {number}" for number in (4, 6, 8, 10, 12, 14, 16, 18, 21, 32)
    ]
    assert "rank 19 was given before" in found[8]
    assert "the token of rank 30 again" in found[9]
    assert "got b'AA=== 3'" in found[0]


def test_a_file_of_nonsense_is_told_in_few_lines() -> None:
    found = refusal(bytes(range(256)) * 4096)
    assert len(found) == 21
    assert "the first 20 findings" in found[-1]


def test_gaps_and_missing_bytes_are_named() -> None:
    (line,) = refusal(written([*BYTES, b"ab"]).replace(b" 256\n", b" 300\n"))
    assert "rank 256 is missing" in line
    (line,) = refusal(written([*BYTES[:-1], b"ab"]))
    assert "none for byte 255" in line
    found = refusal(b"")
    assert any("byte 0" in line for line in found)


@pytest.mark.parametrize("vocab_size", [256, 257, 513])
def test_the_vocabulary_must_leave_room_for_special_tokens(vocab_size) -> None:
    (line,) = refusal(written(BYTES), vocab_size)
    assert f"a vocabulary of {vocab_size}" in line
    assert "256 ranks" in line


def test_a_special_token_among_the_ranks_is_refused() -> None:
    (line,) = refusal(written([*BYTES, b"<|eot_id|>"]))
    assert "<|eot_id|> is both" in line


SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x0c\n\x03<s>\x15\x00\x00\x00\x00\x18\x03"


def test_a_sentencepiece_model_is_refused_with_a_way_out(tmp_path, refused, shared) -> None:
    """Llama 1 and 2. Another tokenizer may be given; without the file the checkpoint takes and gives ids."""
    sizes = meta_makers.META_SIZES._replace(V=512)
    tensors = meta_makers.meta_tensors(meta_makers.hf_tensors(sizes), sizes)
    folder = meta_makers.write_meta(tmp_path / "meta", meta_makers.params(sizes), [tensors])
    (folder / "tokenizer.model").write_bytes(SENTENCEPIECE)
    (line,) = refused(folder)
    assert "SentencePiece" in line
    assert "--tokenizer DIR" in line
    convert(folder, tmp_path / "given", tokenizer=shared / "fixtures" / "tiny-llama3" / "hf")
    assert open_checkpoint(tmp_path / "given").manifest.tokenizer_size == 512
    (folder / "tokenizer.model").unlink()
    convert(folder, tmp_path / "ids")
    assert open_checkpoint(tmp_path / "ids").tokenizer_dir is None


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path, refused, shared) -> None:
    folder = meta_makers.write_meta(
        tmp_path / "meta",
        meta_makers.params(),
        [meta_makers.meta_tensors(meta_makers.hf_tensors(meta_makers.META_SIZES))],
    )
    (folder / "tokenizer.model").write_bytes(
        (shared / "fixtures" / "tiny-llama3" / "meta-mp1" / "tokenizer.model").read_bytes()
    )
    (line,) = refused(folder)
    assert "496 ranks, and a vocabulary of 53" in line
