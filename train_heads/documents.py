"""Lines of JSON to prompts and to documents: which forms are understood, and what an answer is in each.

==========================================  ============================================================
``{"prompt_ids": [..], "answer_ids": [..]}``  token ids as they were generated: nothing is tokenised twice
``{"messages": [{"role", "content"}, ..]}``   a chat; every turn of the assistant is an answer
``{"prompt": "..", "answer": ".."}``          one turn of a user and one of the assistant
``{"text": ".."}``                            raw text; all of it but its first token counts as answer
==========================================  ============================================================

``{"prompt": ".."}`` alone, and a chat that ends with a user's turn, are prompts for ``generate-data``. Other keys are
carried along unread.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec import Prompt
from jaxspec.errors import UserError
from jaxspec.text import Tokenizer
from train_heads.packing import Document

FORMS = "prompt_ids and answer_ids, messages, prompt and answer, or text"


class Line(NamedTuple):
    """One JSON object of a data file."""

    where: str  # file and line, for complaints
    data: Mapping[str, Any]


def read_lines(path: str | Path) -> Iterator[Line]:
    """The objects of a JSONL file, one at a time; empty lines are skipped. A name that ends in .gz is unpacked.

    UserError names the line that is none.
    """
    opened = gzip.open if str(path).endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield Line(f"{path}:{number}", _object(raw, f"{path}:{number}"))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def file_sha256(path: str | Path) -> str:
    """Of the bytes of a data file. UserError when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _object(raw: bytes, where: str) -> Mapping[str, Any]:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: expected one JSON object per line, got {raw[:40]!r} ({error})") from None
    if not isinstance(data, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(data).__name__}")
    return data


def prompt_of(line: Line, tokenizer: Tokenizer | None) -> Prompt:
    """What is asked: ids as they are, and text as a user's message where the model has a chat template."""
    data = line.data
    if "prompt_ids" in data:
        return Prompt(ids=tuple(_ids(data, "prompt_ids", line.where)))
    if "messages" in data:
        messages = _messages(data["messages"], line.where)
        while messages and messages[-1][0] == "assistant":
            messages = messages[:-1]
        return Prompt(chat=messages)
    text = _text(data, "prompt", line.where)
    if tokenizer is not None and tokenizer.has_chat_template:
        return Prompt(chat=(("user", text),))
    return Prompt(text=text)


def document_of(line: Line, tokenizer: Tokenizer | None, vocab: int) -> Document:
    """The token ids, and which of them a served model would have said. UserError names what is missing or malformed."""
    data = line.data
    if "prompt_ids" in data and "answer_ids" in data:
        prompt, answer = (_ids(data, name, line.where) for name in ("prompt_ids", "answer_ids"))
        for token in (*prompt, *answer):
            if not 0 <= token < vocab:
                raise UserError(f"{line.where}: expected token ids in [0, {vocab - 1}], got {token}")
        return _joined([(prompt, False), (answer, True)])
    if tokenizer is None:
        raise UserError(f"{line.where}: expected prompt_ids and answer_ids, for this checkpoint has no tokenizer")
    if "messages" in data:
        return _chat(_messages(data["messages"], line.where), tokenizer, line.where)
    if "prompt" in data and "answer" in data:
        turns = (("user", _text(data, "prompt", line.where)), ("assistant", _text(data, "answer", line.where)))
        return _chat(turns, tokenizer, line.where)
    if "text" in data:
        ids = tokenizer.encode(_text(data, "text", line.where), add_bos=tokenizer.adds_bos)
        return _joined([(ids[:1], False), (ids[1:], True)])
    raise UserError(f"{line.where}: expected {FORMS}, got {', '.join(map(repr, data)) or 'no keys'}")


def _chat(messages: Sequence[tuple[str, str]], tokenizer: Tokenizer, where: str) -> Document:
    """A rendered chat. The answer of a turn is what follows the rendered turns before it with the prompt to answer."""
    if not any(role == "assistant" for role, _ in messages):
        raise UserError(f"{where}: expected at least one turn of the assistant, got roles {[r for r, _ in messages]}")
    turns = [{"role": role, "content": content} for role, content in messages]
    parts: list[tuple[list[int], bool]] = []
    done: list[int] = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        asked = tokenizer.encode_chat(turns[:index])
        said = tokenizer.encode_chat(turns[: index + 1], add_generation_prompt=False)
        if said[: len(asked)] != asked or asked[: len(done)] != done:
            raise UserError(f"{where}: this chat template rewrites earlier turns; train on prompt_ids and answer_ids")
        # A template may close a turn with more than the token at which a served model stops.
        end = next((i + 1 for i in range(len(asked), len(said)) if said[i] in tokenizer.eos_ids), len(said))
        parts += [(asked[len(done) :], False), (said[len(asked) : end], True)]
        done = said[:end]
    return _joined(parts)


def _joined(parts: Sequence[tuple[Sequence[int], bool]]) -> Document:
    ids_T = np.array([token for ids, _ in parts for token in ids], np.int32)
    answer_T = np.array([answer for ids, answer in parts for _ in ids], bool)
    return Document(ids_T, answer_T)


def _messages(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    shaped = isinstance(value, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in value
    )
    if not shaped or not value:
        raise UserError(f"{where}: messages: expected a list of objects with role and content, got {str(value)[:60]}")
    return tuple((turn["role"], turn["content"]) for turn in value)


def _text(data: Mapping[str, Any], key: str, where: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}: expected text in {key!r}, got {str(value)[:40]!r}")
    return value


def _ids(data: Mapping[str, Any], key: str, where: str) -> list[int]:
    value = data.get(key)
    if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
        raise UserError(f"{where}: expected a list of token ids in {key!r}, got {str(value)[:40]}")
    return value
