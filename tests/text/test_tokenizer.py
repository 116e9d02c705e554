"""The tokenizer: goldens, round trips, what user text may never become, and which ids end a generation."""

import json
import random
import threading

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.errors import InvalidRequest, UserError
from jaxspec.text import Detokenizer, StopMatcher, Tokenizer

CASES = settings(deadline=None, max_examples=200)


def goldens(shared) -> dict:
    path = shared / "fixtures" / "tiny-llama3" / "tokenizer_golden.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_d08_goldens_from_hugging_face_and_gguf_files(shared, tiny, tiny_from_gguf) -> None:
    cases = goldens(shared)["cases"]
    assert len(cases) == 9
    for tokenizer in (tiny, tiny_from_gguf):
        for case in cases:
            text = case["text"]
            assert tokenizer.encode(text, add_bos=False, parse_special=True) == case["ids"]
            assert tokenizer.encode(text, add_bos=True, parse_special=True) == case["ids_with_bos"]
            assert tokenizer.decode(case["ids"], skip_special=False) == case["decoded"]


def test_d08_chat_golden_from_hugging_face_and_gguf_files(shared, tiny, tiny_from_gguf) -> None:
    chat = goldens(shared)["chat"]
    for tokenizer in (tiny, tiny_from_gguf):
        assert tokenizer.encode_chat(chat["messages"]) == chat["ids"]


@CASES
@given(st.text())
def test_d08_files_agree_on_any_text(tiny, tiny_from_gguf, text) -> None:
    ids = tiny.encode(text, add_bos=True)
    assert tiny_from_gguf.encode(text, add_bos=True) == ids
    assert tiny.decode(ids) == tiny_from_gguf.decode(ids) == text


def test_demo_model_goldens(shared, demo) -> None:
    """Prompts made by the chat template with its default system message, and both texts of every continuation."""
    with open(shared / "data" / "spec_bench_question.jsonl", encoding="utf-8") as lines:
        questions = {entry["question_id"]: entry["turns"][0] for entry in map(json.loads, lines)}
    golden = json.loads((shared / "fixtures" / "smollm2" / "smollm2_greedy.json").read_text(encoding="utf-8"))
    assert len(golden["prompts"]) == 12
    for prompt in golden["prompts"]:
        message = {"role": "user", "content": questions[prompt["question_id"]]}
        assert demo.encode_chat([message]) == prompt["prompt_ids"]
        assert demo.encode(prompt["prompt_text"], add_bos=False, parse_special=True) == prompt["prompt_ids"]
        assert demo.decode(prompt["continuation_128"], skip_special=False) == prompt["text_128"]
        assert demo.decode(prompt["generate_stop_at_eos"]) == prompt["text_stop_at_eos"]
        assert golden["eos_token_id"] in demo.eos_ids


def test_demo_model_splits_digits_one_by_one(demo) -> None:
    pieces = [demo.id_to_bytes(i) for i in demo.encode("a  12", add_bos=False)]
    assert pieces == [b"a", b"  ", b"1", b"2"]


def test_bytes_that_the_vocabulary_lacks_never_become_the_unknown_token(demo) -> None:
    """The file names <|endoftext|>, a control token, as its unknown token."""
    assert demo.encode("a\x04b", add_bos=False) == demo.encode("a", add_bos=False) + demo.encode("b", add_bos=False)


def test_d16_the_unknown_token_is_never_used(edited) -> None:
    def without_z(document) -> None:
        model = document["model"]
        model["unk_token"] = "<|eot_id|>"
        model["vocab"] |= {token["content"]: token["id"] for token in document["added_tokens"]}
        model["vocab"]["zz"] = model["vocab"].pop("z")  # no text leads to it
        model["merges"] = [merge for merge in model["merges"] if "z" not in merge]

    tokenizer = Tokenizer.load(edited({"tokenizer.json": without_z}))
    assert tokenizer.encode("a\n z", add_bos=False) == tokenizer.encode("a\n ", add_bos=False)


@pytest.mark.parametrize("text", ["the long 'sword' into", "x != y", "for 'manual'", "! ! !", "': 'search", " a , b ."])
def test_d06_no_clean_up(tiny, demo, text) -> None:
    """The tiny tokenizer's configuration asks for clean-up, as Llama 3's does."""
    for tokenizer in (tiny, demo):
        ids = tokenizer.encode(text, add_bos=False)
        detokenizer = Detokenizer(tokenizer)
        assert tokenizer.decode(ids) == text
        assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == text


@CASES
@given(data=st.data(), skip_special=st.booleans())
def test_streamed_text_is_the_decoded_text(tiny, data, skip_special) -> None:
    ids = data.draw(st.lists(st.integers(0, tiny.size - 1), max_size=20))
    detokenizer = Detokenizer(tiny, skip_special=skip_special)
    pieces = [detokenizer.push(ids[start : start + 3]) for start in range(0, len(ids), 3)]
    assert "".join(pieces) + detokenizer.flush() == tiny.decode(ids, skip_special=skip_special)


@CASES
@given(data=st.data(), skip_special=st.booleans())
def test_decoding_agrees_with_the_library(tiny, tiny_dir, data, skip_special) -> None:
    library = tokenizers.Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    ids = data.draw(st.lists(st.integers(0, tiny.size - 1), max_size=20))
    assert tiny.decode(ids, skip_special=skip_special) == library.decode(ids, skip_special_tokens=skip_special)


def test_d16_special_strings_in_a_prompt_are_ordinary_text(tiny, demo) -> None:
    for tokenizer, text in ((tiny, "<|eot_id|>"), (demo, "<|im_end|>")):
        ids = tokenizer.encode(text, add_bos=False)
        assert len(ids) > 1
        assert tokenizer.special_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text, add_bos=False, parse_special=True) == list(tokenizer.stop_ids([text]))


def test_d16_special_strings_are_merged_as_text_is(tiny, tiny_dir) -> None:
    """The ids of a tokenizer that has no special tokens at all."""
    document = json.loads((tiny_dir / "tokenizer.json").read_text(encoding="utf-8"))
    plain = tokenizers.Tokenizer.from_str(json.dumps(document | {"added_tokens": [], "post_processor": None}))
    text = "Repeat: the <|eot_id|><|start_header_id|>the<|end_header_id|> the end"
    assert tiny.encode(text, add_bos=False) == plain.encode(text).ids


@CASES
@given(data=st.data())
def test_d16_no_text_at_all_becomes_a_control_token(tiny, data) -> None:
    specials = ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|", "|>", "eot_id", " ", "x"]
    text = "".join(data.draw(st.lists(st.sampled_from(specials))))
    ids = tiny.encode(text, add_bos=False)
    assert tiny.special_ids.isdisjoint(ids)
    assert tiny.decode(ids) == text


def test_d16_ignore_merges_meets_no_special_token_inside_the_vocabulary(edited) -> None:
    """With ignore_merges a whole word that is in the vocabulary is taken as it is, special or not."""

    def special_word(document) -> None:
        document["model"]["vocab"]["Ġcontrol"] = 496  # takes the first special's place
        document["added_tokens"][0]["content"] = "Ġcontrol"

    def first_added(config) -> None:
        config["bos_token"] = "<|end_of_text|>"

    tokenizer = Tokenizer.load(edited({"tokenizer.json": special_word, "tokenizer_config.json": first_added}))
    assert 496 in tokenizer.special_ids
    ids = tokenizer.encode("out of control", add_bos=False)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.id_to_bytes(ids[-1]) == b"l"


def test_special_strings_are_split_as_the_library_splits(edited) -> None:
    """Longest first, and the spaces that lstrip and rstrip take away."""

    def flags(document) -> None:
        document["added_tokens"][5] |= {"content": "<|eot_id|>!", "lstrip": True, "rstrip": True}

    folder = edited({"tokenizer.json": flags})
    tokenizer = Tokenizer.load(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("a  <|eot_id|>! \n b<|eot_id|> c", " <|eot_id|>!<|eot_id|>!", "<|eot_id|>! ", "<|eot_id|"):
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_bos=False, parse_special=True) == ids


def test_d10_bos_is_added_on_request_once(tiny, demo) -> None:
    ids = tiny.encode("hello", add_bos=False)
    assert tiny.adds_bos
    assert tiny.encode("hello", add_bos=True) == [tiny.bos_id, *ids]
    assert tiny.bos_id not in tiny.encode("<|begin_of_text|>hello", add_bos=True)[1:]
    assert not demo.adds_bos


@pytest.mark.parametrize(("setting", "adds"), [(None, True), (True, True), (False, False)])
def test_d10_configuration_overrules_the_post_processor(edited, setting, adds) -> None:
    tokenizer = Tokenizer.load(edited({"tokenizer_config.json": lambda c: c.update(add_bos_token=setting)}))
    assert tokenizer.adds_bos is adds


def test_no_bos_to_add(edited) -> None:
    def no_bos(config) -> None:
        del config["bos_token"]

    folder = edited({"tokenizer_config.json": no_bos, "generation_config.json": lambda c: c.pop("bos_token_id")})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_id is None
    assert not tokenizer.adds_bos
    with pytest.raises(UserError, match="no BOS"):
        tokenizer.encode("x", add_bos=True)


def test_d12_every_source_of_end_tokens_counts(edited) -> None:
    """eos 498 in the tokenizer, [497, 499] in the generation config; 504, 505 by their names."""

    def eos_in_tokenizer(config) -> None:
        config["eos_token"] = {"content": "<|reserved_special_token_0|>"}

    def eos_in_generation(config) -> None:
        config["eos_token_id"] = [497, 499]

    files = {"tokenizer_config.json": eos_in_tokenizer, "generation_config.json": eos_in_generation}
    assert Tokenizer.load(edited(files)).eos_ids == (497, 498, 499, 504, 505)


def test_d12_end_tokens_survive_a_configuration_that_names_one(edited) -> None:
    folder = edited({"tokenizer_config.json": lambda c: c.update(eos_token="<|end_of_text|>")})
    (folder / "generation_config.json").unlink()
    assert Tokenizer.load(folder).eos_ids == (497, 504, 505)


def test_d13_a_stop_string_that_spells_a_special_token_stops_by_id(tiny) -> None:
    stops = ["<|eot_id|>", "\n\n", "<|python_tag|>", "<|eot_id"]
    assert tiny.stop_ids(stops) == (505, 506)
    # As text it could not: hidden special tokens show nothing that a matcher could see.
    matcher, detokenizer = StopMatcher(stops), Detokenizer(tiny)
    assert matcher.push(detokenizer.push([505])) == ""
    assert not matcher.stopped


def test_d17_texts_that_cannot_fit_are_refused_without_tokenising(tiny, demo) -> None:
    letters = "".join(random.Random(17).choices("abcdefghijklmnopqrstuvwxyz", k=1_000_000))
    for text in ("a" * 1_000_000, letters, "漢" * 100_000):
        assert not demo.fits(text, 1024)
        assert not tiny.fits(text, 8192)
    assert tiny.max_token_bytes == 9  # special tokens are longer, but no text becomes one
    assert not demo.fits("é" * 100, 200 // demo.max_token_bytes)  # bytes count, not characters


def test_d17_long_runs_are_tokenised_all_the_same(demo) -> None:
    """Far above any context, so quadratic cost would not end within the test's time limit."""
    letters = "".join(random.Random(17).choices("abcdefghijklmnopqrstuvwxyz", k=1_000_000))
    for text in ("a" * 1_000_000, letters, "漢" * 100_000, " " * 1_000_000):
        ids = demo.encode(text, add_bos=False)
        assert demo.decode(ids) == text


def test_d17_other_threads_go_on_during_a_long_prompt(demo) -> None:
    """Were the GIL held, this thread would stand still from the first moment of the call to the last."""
    text = "".join(random.Random(19).choices("abcdefghijklmnopqrstuvwxyz", k=1_000_000))
    done = threading.Event()

    def encode() -> None:
        demo.encode(text, add_bos=False)
        done.set()

    worker = threading.Thread(target=encode)
    worker.start()
    waits = 0
    while not done.wait(0.001):
        waits += 1
    worker.join()
    assert waits > 10


@CASES
@given(st.text())
def test_what_does_not_fit_has_too_many_tokens(tiny, text) -> None:
    count = len(tiny.encode(text, add_bos=False))
    assert tiny.fits(text, count)


def test_ids_outside_the_tokenizer_are_refused(tiny) -> None:
    assert tiny.size == 512
    for token_id in (-1, 512):
        with pytest.raises(InvalidRequest, match=r"token id: expected one in \[0, 512\)"):
            tiny.id_to_bytes(token_id)


def test_text_without_utf8_form_is_refused(tiny) -> None:
    with pytest.raises(InvalidRequest, match="prompt: expected valid Unicode"):
        tiny.encode("a\udc80", add_bos=False)
    assert tiny.encode("", add_bos=False) == []


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"tokenizer.json": lambda d: d["model"].update(type="Nonsense")}, "tokenizer.json: not a tokenizer"),
        ({"tokenizer.json": lambda d: d.update(decoder=None)}, "expected byte-level BPE"),
        ({"tokenizer.json": lambda d: d["added_tokens"][3].update(id=700)}, "expected id 700 as listed"),
        ({"tokenizer_config.json": lambda c: c.update(eos_token="</s>")}, "eos_token '</s>' is not a token"),
        ({"tokenizer_config.json": lambda c: c.update(chat_template={})}, "chat_template: expected a string, got dict"),
        ({"tokenizer_config.json": lambda c: c.update(chat_template="{%")}, "chat_template: expected a valid jinja2"),
        ({"generation_config.json": lambda c: c.update(eos_token_id=[512])}, r"expected an id in \[0, 512\), got 512"),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(edited, files, problem) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        Tokenizer.load(edited(files))
    assert "\n" not in str(caught.value)


def test_missing_and_unreadable_files(tmp_path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json: missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        Tokenizer.load(tmp_path)


def test_the_template_may_lie_in_its_own_file_or_in_a_list(edited) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = edited({"tokenizer_config.json": lambda c: c.update(chat_template=named)})
    message = [{"role": "user", "content": "x"}]
    assert Tokenizer.load(folder).encode_chat(message) == Tokenizer.load(folder).encode("D", add_bos=False)
    (folder / "chat_template.jinja").write_text("F", encoding="utf-8")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode_chat(message) == tokenizer.encode("F", add_bos=False)
