"""Which lines are understood, what is an answer in them, and what is refused with which words."""

import gzip
import json

import numpy as np
import pytest

from jaxspec.errors import UserError
from jaxspec.text import Tokenizer
from train_heads.documents import Line, document_of, prompt_of, read_lines


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return Tokenizer.load(demo_model / "tokenizer")


def answer_text(document, tokenizer):
    return tokenizer.decode(document.ids_T[document.answer_T].tolist(), skip_special=False)


def test_ids_are_taken_as_they_are():
    document = document_of(Line("f:1", {"prompt_ids": [5, 6], "answer_ids": [7, 8, 9]}), None, 10)
    assert document.ids_T.tolist() == [5, 6, 7, 8, 9]
    assert document.answer_T.tolist() == [False, False, True, True, True]


def test_every_turn_of_the_assistant_is_an_answer_with_its_end(tokenizer):
    """The rendered chat is that of the template; an answer ends with the token at which a served model stops."""
    turns = [("user", "Hello"), ("assistant", "Hi!"), ("user", "And?"), ("assistant", "Nothing.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    document = document_of(Line("f:1", {"messages": messages}), tokenizer, tokenizer.size)
    assert answer_text(document, tokenizer) == "Hi!<|im_end|>Nothing.<|im_end|>"
    whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert whole[: len(document.ids_T)] == document.ids_T.tolist()
    pair = document_of(Line("f:1", {"prompt": "Hello", "answer": "Hi!"}), tokenizer, tokenizer.size)
    assert answer_text(pair, tokenizer) == "Hi!<|im_end|>"
    # What serving is asked is what comes before the first answer.
    asked = tokenizer.encode_chat(messages[:1])
    assert pair.ids_T[~pair.answer_T].tolist() == asked


def test_raw_text_is_all_answer_but_its_first_token(tokenizer):
    document = document_of(Line("f:1", {"text": "Once upon a time"}), tokenizer, tokenizer.size)
    assert document.answer_T.tolist() == [False] + [True] * (len(document.ids_T) - 1)


def test_prompts(tokenizer):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert prompt_of(Line("f:1", chat), tokenizer).chat == (("user", "a"),)
    assert prompt_of(Line("f:1", {"prompt": "a"}), tokenizer).chat == (("user", "a"),)
    assert prompt_of(Line("f:1", {"prompt": "a"}), None).text == "a"
    assert prompt_of(Line("f:1", {"prompt_ids": [1, 2]}), None).ids == (1, 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "expected prompt_ids and answer_ids, messages"),
        ({"prompt": "a"}, "expected prompt_ids and answer_ids, messages"),
        ({"messages": []}, "messages: expected a list of objects"),
        ({"messages": [{"role": "user"}]}, "messages: expected a list of objects"),
        ({"messages": [{"role": "user", "content": "a"}]}, "at least one turn of the assistant"),
        ({"prompt": "a", "answer": ""}, "expected text in 'answer'"),
        ({"text": 3}, "expected text in 'text'"),
        ({"prompt_ids": [1], "answer_ids": [True]}, "a list of token ids in 'answer_ids'"),
        ({"prompt_ids": [1], "answer_ids": [49152]}, "expected token ids in"),
    ],
)
def test_what_is_refused(tokenizer, data, words):
    with pytest.raises(UserError, match=words) as error:
        document_of(Line("f:7", data), tokenizer, 49152)
    assert str(error.value).startswith("f:7: ")
    assert "\n" not in str(error.value)


def test_a_checkpoint_without_tokenizer_takes_ids_alone():
    with pytest.raises(UserError, match="has no tokenizer"):
        document_of(Line("f:1", {"text": "a"}), None, 10)


def test_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1}\n\n  \n{"b": 2}\n')
    assert [(line.where, dict(line.data)) for line in read_lines(path)] == [
        (f"{path}:1", {"a": 1}),
        (f"{path}:4", {"b": 2}),
    ]
    for text, words in (("[1]", "a JSON object, got list"), ("{", "one JSON object per line"), ("\xff", "per line")):
        path.write_bytes(json.dumps({"a": 1}).encode() + b"\n" + text.encode("latin-1") + b"\n")
        with pytest.raises(UserError, match=words) as error:
            list(read_lines(path))
        assert str(error.value).startswith(f"{path}:2: ")
    packed = tmp_path / "data.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"a": 1}\n'))
    assert [line.data for line in read_lines(packed)] == [{"a": 1}]
    for raw in (b'{"a": 1}\n', gzip.compress(b'{"a": 1}\n')[:-9]):
        packed.write_bytes(raw)
        with pytest.raises(UserError, match="cannot be read"):
            list(read_lines(packed))
    with pytest.raises(UserError, match="cannot be read"):
        list(read_lines(tmp_path / "none"))


def test_masks_are_of_the_tokens_that_they_lie_on(tokenizer):
    """I05: the first answer token is one, the prompt's last is none."""
    document = document_of(Line("f:1", {"prompt": "a", "answer": "b"}), tokenizer, tokenizer.size)
    first = int(np.argmax(document.answer_T))
    assert tokenizer.decode([int(document.ids_T[first])]) == "b"
    assert not document.answer_T[:first].any()
    assert document.answer_T[first:].all()
