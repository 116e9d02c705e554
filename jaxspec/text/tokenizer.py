"""The tokenizer of a checkpoint: byte-level BPE from a Hugging Face style folder, with user text kept plain.

Text that a user wrote never becomes a control token, whatever it spells; control ids come from the chat template and
from BOS alone. Decoding is by bytes and never cleaned up, so ``decode(encode(text)) == text``.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jaxspec.errors import InvalidRequest, UserError
from jaxspec.text.chat import ChatTemplate, check_text
from jaxspec.text.fingerprint import fingerprint, token_bytes

# Everything of a tokenizer folder that is read here; all but the first may be absent.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)

# Tokens that end a turn or a text in the families served here, whatever the configuration forgot to list.
_END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>")
_SPACE = re.compile(r"\s*")
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class _Special(NamedTuple):
    token_id: int
    lstrip: bool
    rstrip: bool


class Tokenizer:
    """Attributes

    size: ids are 0 <= id < size (a model's vocabulary may be padded beyond).
    fingerprint: sha256 hex, see ``jaxspec.text.fingerprint``.
    bos_id, adds_bos: the BOS id, and whether prompts of this family start with it.
    eos_ids: every id that ends a generation, ascending.
    special_ids: control tokens: never made from user text, not shown by default.
    max_token_bytes: length of the longest ordinary token.
    has_chat_template: whether ``encode_chat`` works.
    """

    def __init__(self, folder: Path) -> None:
        self._backend, document = _read_tokenizer(folder / "tokenizer.json")
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        try:
            self._bytes = token_bytes(document)
            self.fingerprint = fingerprint(document)
            added = [token for token in document.get("added_tokens") or () if token.get("special")]
            self._specials = {
                token["content"]: _Special(token["id"], bool(token.get("lstrip")), bool(token.get("rstrip")))
                for token in added
            }
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{folder / 'tokenizer.json'}: malformed ({type(error).__name__}: {error})") from error
        self.size = len(self._bytes)
        self.special_ids = frozenset(special.token_id for special in self._specials.values())
        self.max_token_bytes = max(
            (len(token) for token_id, token in enumerate(self._bytes) if token_id not in self.special_ids), default=0
        )
        self._byte_ids = {
            token[0]: token_id
            for token_id, token in enumerate(self._bytes)
            if len(token) == 1 and token_id not in self.special_ids
        }
        # Longest first: where one special string starts another, the longer one counts.
        texts = sorted(self._specials, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        roles = {role: text for role in _ROLES if (text := _token_text(config.get(role))) is not None}
        self.bos_id = self._id_of_role(roles, "bos_token", generation.get("bos_token_id"))
        self.eos_ids = self._end_ids(roles, generation.get("eos_token_id"))
        self.adds_bos = self._starts_with_bos(config.get("add_bos_token"))
        template = _template_source(folder, config)
        self._chat = None if template is None else ChatTemplate(template, roles, self._specials)

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Reads TOKENIZER_FILES from ``folder``. Raises UserError, naming the file, for whatever is wrong there."""
        return cls(Path(folder))

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, *, add_bos: bool, parse_special: bool = False) -> list[int]:
        """Token ids of ``text``. The GIL is free meanwhile, so other threads go on during a long prompt.

        Special strings inside are ordinary text unless ``parse_special`` says that the whole text is trusted. Bytes
        that the vocabulary lacks (SmolLM2 has no U+0004, say) are left out, as the reference tokenizer does.
        Raises InvalidRequest for text without a UTF-8 form, UserError for ``add_bos`` where there is no BOS.
        """
        check_text("prompt", text)
        if add_bos and self.bos_id is None:
            raise UserError("add_bos: this tokenizer has no BOS token")
        ids = [self.bos_id] if add_bos and self.bos_id is not None else []
        pieces = self._split(text) if parse_special else [text]
        return ids + self._encode_pieces(pieces)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation (``role``, ``content``) in the model's own template.

        The template alone decides about BOS and all other control tokens; nothing in a message becomes one.
        Raises UserError without a template, InvalidRequest for messages that are malformed or that it refuses.
        """
        if self._chat is None:
            raise UserError("chat: this checkpoint has no chat template; send a plain prompt")
        rendered = self._chat.render(messages, add_generation_prompt=add_generation_prompt)
        pieces = self._split(rendered.text)
        return self._encode_pieces(p.translate(rendered.restore) if isinstance(p, str) else p for p in pieces)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ``ids``; bytes that are no UTF-8 show as U+FFFD."""
        hidden = self.special_ids if skip_special else frozenset()
        return b"".join(self.id_to_bytes(i) for i in ids if i not in hidden).decode(errors="replace")

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, of a special one too. Raises InvalidRequest outside [0, size)."""
        if not 0 <= token_id < self.size:
            raise InvalidRequest("token id", token_id, f"one in [0, {self.size})")
        return self._bytes[token_id]

    def fits(self, text: str, max_tokens: int) -> bool:
        """False when the bytes of ``text`` fill more than ``max_tokens`` tokens: a refusal without tokenising."""
        limit = max_tokens * self.max_token_bytes
        return len(text) <= limit and len(text.encode(errors="surrogatepass")) <= limit

    def stop_ids(self, stops: Iterable[str]) -> tuple[int, ...]:
        """Ids of those stop strings that spell a special token.

        Hidden special tokens produce no text that a stop string could match, so these must stop by id as well.
        """
        return tuple(self._specials[stop].token_id for stop in stops if stop in self._specials)

    def _split(self, text: str) -> Iterator[str | int]:
        """Ordinary text and the ids of special strings, in order, as the tokenizers library splits."""
        start = 0
        for match in self._special_pattern.finditer(text) if self._special_pattern else ():
            special = self._specials[match.group()]
            before = text[start : match.start()]
            yield before.rstrip() if special.lstrip else before
            yield special.token_id
            start = match.end()
            if special.rstrip and (space := _SPACE.match(text, start)):
                start = space.end()
        yield text[start:]

    def _encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                ids += self._encode_plain(piece)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        # The batch form is the one that lets other threads run; "fast" leaves out the offsets.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self.special_ids.isdisjoint(ids):
            return ids
        # A tokenizer with ignore_merges meets a special token that its vocabulary holds as a plain word: spell it.
        spelled = ([i] if i not in self.special_ids else map(self._byte_ids.get, self._bytes[i]) for i in ids)
        return [token_id for group in spelled for token_id in group if token_id is not None]

    def _id_of_role(self, roles: Mapping[str, str], role: str, fallback: Any) -> int | None:
        if role in roles:
            # What has no UTF-8 form is no token, and nothing that the library can be asked for.
            is_text = roles[role].encode(errors="replace").decode() == roles[role]
            token_id = self._backend.token_to_id(roles[role]) if is_text else None
            if token_id is None:
                raise UserError(f"tokenizer_config.json: {role} {roles[role]!r} is not a token of tokenizer.json")
            return token_id
        if fallback is not None and not (isinstance(fallback, int) and 0 <= fallback < self.size):
            raise UserError(f"generation_config.json: {role}_id: expected an id in [0, {self.size}), got {fallback!r}")
        return fallback

    def _end_ids(self, roles: Mapping[str, str], configured: Any) -> tuple[int, ...]:
        found = {self._specials[text].token_id for text in _END_TOKENS if text in self._specials}
        for token_id in configured if isinstance(configured, list) else [configured]:
            checked = self._id_of_role({}, "eos_token", token_id)
            found |= set() if checked is None else {checked}
        own = self._id_of_role(roles, "eos_token", None)
        return tuple(sorted(found if own is None else found | {own}))

    def _starts_with_bos(self, configured: Any) -> bool:
        if self.bos_id is None:
            return False
        if isinstance(configured, bool):
            return configured
        return self.bos_id in self._backend.encode("", add_special_tokens=True).ids


def _read_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    document = _read_json(path)
    if not document:
        raise UserError(f"{path}: missing or empty")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path}: not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # special strings in a text are text; see Tokenizer._split for the others
    # A byte that the vocabulary lacks is left out: as the unknown token it would often be a control token.
    backend.model.unk_token = None
    for token in document.get("added_tokens") or ():
        if backend.token_to_id(token["content"]) != token["id"]:
            raise UserError(
                f"{path}: added token {token['content']!r}: expected id {token['id']} as listed, "
                f"but the vocabulary leads to {backend.token_to_id(token['content'])}"
            )
    return backend, document


def _read_json(path: Path) -> dict[str, Any]:
    """An absent file reads as empty."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _token_text(value: Any) -> str | None:
    """Token roles are written as a string or as an object with ``content``."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: expected UTF-8 text, got {error.reason} at byte {error.start}") from None
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates: tools and retrieval have their own, we use the plain one
        named = [entry for entry in source if isinstance(entry, Mapping)]
        source = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise UserError(f"tokenizer_config.json: chat_template: expected a string, got {type(source).__name__}")
    return source
