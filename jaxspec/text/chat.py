"""Chat templates: jinja2 in a sandbox, with the helpers that Hugging Face templates expect.

A template may spell control tokens; a message may not. Special strings inside messages are therefore put out of
sight before rendering (one private-use character each) and come back only after the rendered text was split at the
template's own special tokens. What the tokenizer then sees, piece by piece, is the rendered text itself, so merges
across the seam of template and message are those of the plain rendered text.
"""

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxspec.errors import InvalidRequest, UserError

# Supplementary Private Use Area-A: no case, no whitespace, no meaning to any template.
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation in which every special string was written by the template."""

    text: str
    restore: Mapping[int, str]  # for str.translate, after the text was split at its special strings


class ChatTemplate:
    """A compiled template. ``variables`` holds bos_token, eos_token and the like, ``specials`` all special strings."""

    def __init__(self, source: str, variables: Mapping[str, str], specials: Iterable[str]) -> None:
        """Raises UserError when the source is no valid template."""
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # not jinja2's alone: one that nests too deeply is a RecursionError or SyntaxError
            raise UserError(f"chat_template: expected a valid jinja2 template, got {_one_line(error)}") from error
        self._source = source
        self._variables = dict(variables)
        self._shield = _Shield(specials)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> Rendered:
        """Raises InvalidRequest for messages of the wrong form and for those that the template refuses."""
        checked = _checked(messages)
        codes = self._unused_codes(checked)
        shielded = [{key: self._shield.cover(text, codes) for key, text in message.items()} for message in checked]
        try:
            text = self._template.render(
                messages=shielded,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._variables,
            )
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            roles = [message["role"] for message in checked]
            expected = f"messages that the chat template takes ({_one_line(error)})"
            raise InvalidRequest("chat roles", roles, expected) from error
        return Rendered(text, codes.restore)

    def _unused_codes(self, messages: list[dict[str, str]]) -> "_Codes":
        taken = {char for message in messages for text in message.values() for char in text if char >= "\U000f0000"}
        return _Codes(taken.union(self._source))


class _Codes:
    """Private-use characters that occur nowhere else, one for each string they stand for."""

    def __init__(self, taken: set[str]) -> None:
        self._free = (code for code in _PRIVATE_USE if chr(code) not in taken)
        self._by_text: dict[str, str] = {}
        self.restore: dict[int, str] = {}

    def of(self, text: str) -> str:
        if text not in self._by_text:
            code = next(self._free)
            self._by_text[text] = chr(code)
            self.restore[code] = text
        return self._by_text[text]


class _Shield:
    """Hides from the split what only the template may write."""

    def __init__(self, specials: Iterable[str]) -> None:
        texts = tuple(specials)
        self._whole = re.compile("|".join(map(re.escape, texts))) if texts else None
        # Half a special string at the edge of a message must not join the other half from its neighbour.
        self._heads = {text[:length] for text in texts for length in range(1, len(text))}
        self._tails = {text[length:] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def cover(self, text: str, codes: _Codes) -> str:
        if self._whole is not None:
            text = self._whole.sub(lambda match: codes.of(match.group()), text)
        # Templates trim messages, so the edges are those of the trimmed text.
        core = text.strip()
        start = text.find(core)
        before, after = text[:start], text[start + len(core) :]
        lengths = range(min(self._longest, len(core)), 0, -1)
        if length := next((n for n in lengths if core[-n:] in self._heads), 0):
            core = core[:-length] + codes.of(core[-length:])
        if length := next((n for n in lengths if core[:n] in self._tails), 0):
            core = codes.of(core[:length]) + core[length:]
        return before + core + after


def _checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("chat", messages, "a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise InvalidRequest(f"chat[{index}]", message, "an object with role and content, and nothing else")
        for key in ("role", "content"):
            check_text(f"chat[{index}].{key}", message[key])
        if not message["role"]:
            raise InvalidRequest(f"chat[{index}].role", "", "a non-empty string")
    return [dict(message) for message in messages]


def check_text(field: str, text: str) -> None:
    """Raises InvalidRequest unless ``text`` is a string that has a UTF-8 form."""
    if not isinstance(text, str):
        raise InvalidRequest(field, text, "a string")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(field, text, f"valid Unicode (lone surrogate at {error.start})") from None


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; in serving its body stands for itself."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # jinja2's own filter escapes HTML, which no model has seen.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
