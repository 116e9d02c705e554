"""Rebuilds a Hugging Face style tokenizer folder from the metadata of a GGUF file.

A GGUF file carries the token list, the merges and the *name* of the pre-tokenizer, not the pre-tokenizer itself. The
rules behind each name are spelled out here; an unknown name is an error, because a guess would tokenise numbers and
spaces differently from how the model was trained and nothing would look wrong.
"""

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from checkpoints_convert.findings import Findings
from jaxspec.errors import UserError

# Token types of the GGUF specification; every other type is ordinary vocabulary.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5

# \p{N}{1,3}: Llama 3 reads numbers in groups of three digits.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace("{1,3}", "")

_BYTES_ONLY = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """What a ``tokenizer.ggml.pre`` name stands for, in the words of tokenizer.json."""

    pre_tokenizer: dict[str, Any]
    ignore_merges: bool = False  # a word that is a token by itself is never assembled from merges
    adds_bos: bool = False  # where the file does not say
    normalizer: dict[str, Any] | None = None


_LLAMA3 = PreTokenizer(_sequence(_split(_LLAMA3_PATTERN), _BYTES_ONLY), ignore_merges=True, adds_bos=True)
_ONE_DIGIT = PreTokenizer(_sequence({"type": "Digits", "individual_digits": True}, _GPT2_WORDS))
_QWEN2 = PreTokenizer(_sequence(_split(_QWEN2_PATTERN), _BYTES_ONLY), normalizer={"type": "NFC"})

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smollm": _ONE_DIGIT,
    "starcoder": _ONE_DIGIT,
    "gpt-2": PreTokenizer(_GPT2_WORDS),
    "qwen2": _QWEN2,
}


@dataclasses.dataclass(frozen=True)
class _Metadata:
    """The tokenizer's share of a GGUF file, checked."""

    pre: PreTokenizer
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    roles: Mapping[str, int]  # bos, eos, eot, eom, unknown, padding -> token id, where the file names them
    adds_bos: bool
    chat_template: str | None

    def ids_of_type(self, token_type: int) -> list[int]:
        return [token_id for token_id, its_type in enumerate(self.types) if its_type == token_type]


def tokenizer_from_gguf(fields: Mapping[str, Any], dst: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json into the folder ``dst``.

    ``fields``: GGUF metadata, key -> plain value (str, int, bool, list). Only byte-level BPE (``tokenizer.ggml.model``
    = ``gpt2``) is supported. Raises UserError with all findings when the metadata is incomplete or contradicts itself.
    """
    metadata = _read(fields)
    document = json.dumps(_tokenizer_json(metadata), ensure_ascii=False, indent=1)
    try:
        tokenizers.Tokenizer.from_str(document)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"tokenizer.ggml: the token list and the merges do not make a BPE model: {error}") from error
    dst.mkdir(parents=True, exist_ok=True)
    (dst / "tokenizer.json").write_text(document, encoding="utf-8")
    _write_json(dst / "tokenizer_config.json", _tokenizer_config(metadata))
    _write_json(dst / "generation_config.json", _generation_config(metadata))


def _read(fields: Mapping[str, Any]) -> _Metadata:
    findings = Findings()

    def take(name: str, kind: type, required: bool = True) -> Any:
        value = fields.get(f"tokenizer.{name}")
        if value is None:
            if required:
                findings.add(f"tokenizer.{name}: missing")
        elif not isinstance(value, kind):
            findings.add(f"tokenizer.{name}: expected {kind.__name__}, got {type(value).__name__}")
            return None
        return value

    model = take("ggml.model", str)
    if model not in ("gpt2", None):
        findings.add(f"tokenizer.ggml.model: expected 'gpt2' (byte-level BPE), got {model!r}")
    pre = take("ggml.pre", str)
    if pre is not None and pre not in PRE_TOKENIZERS:
        findings.add(f"tokenizer.ggml.pre: expected one of {', '.join(sorted(PRE_TOKENIZERS))}, got {pre!r}")
    tokens = take("ggml.tokens", list) or []
    types = take("ggml.token_type", list) or []
    merges = take("ggml.merges", list) or []
    if len(tokens) != len(types) and not findings.lines:
        findings.add(f"tokenizer.ggml.token_type: expected {len(tokens)} entries as in tokens, got {len(types)}")
    for token, count in collections.Counter(tokens).items():
        if count > 1:
            findings.add(f"tokenizer.ggml.tokens: expected distinct tokens, got {token!r} {count} times")
    broken = next((merge for merge in merges if str(merge).count(" ") != 1), None)
    if broken is not None:
        findings.add(f"tokenizer.ggml.merges: expected two tokens with one space between, got {broken!r}")
    roles: dict[str, int] = {}
    for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        token_id = take(f"ggml.{role}_token_id", int, required=False)
        if token_id is None:
            continue
        if 0 <= token_id < len(tokens):
            roles[role] = token_id
        else:
            findings.add(f"tokenizer.ggml.{role}_token_id: expected an id below {len(tokens)}, got {token_id}")
    adds_bos = take("ggml.add_bos_token", bool, required=False)
    chat_template = take("chat_template", str, required=False)
    findings.raise_if_any()
    rules = PRE_TOKENIZERS[str(pre)]
    if adds_bos is None:
        adds_bos = rules.adds_bos and "bos" in roles
    elif adds_bos and "bos" not in roles:
        raise UserError("tokenizer.ggml.add_bos_token: true, but tokenizer.ggml.bos_token_id is missing")
    return _Metadata(rules, tokens, types, merges, roles, adds_bos, chat_template)


def _tokenizer_json(metadata: _Metadata) -> dict[str, Any]:
    control = metadata.ids_of_type(CONTROL)
    added = sorted(control + metadata.ids_of_type(USER_DEFINED))
    # Entries of type UNUSED pad the list up to the embedding's rows: they are no tokens.
    vocab = {token: i for i, token in enumerate(metadata.tokens) if metadata.types[i] != UNUSED}
    if added and added == list(range(len(vocab) - len(added), len(vocab))):
        # Specials at the end, as Llama 3 has them, stay outside the model's vocabulary: with ignore_merges ordinary
        # text could otherwise meet one. Elsewhere they must be inside, or the library would number them anew.
        for token_id in added:
            del vocab[metadata.tokens[token_id]]
    specials = set(control)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(i, metadata.tokens[i], i in specials) for i in added],
        "normalizer": metadata.pre.normalizer,
        "pre_tokenizer": metadata.pre.pre_tokenizer,
        "post_processor": _post_processor(metadata),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            # Never an unknown token, whatever the file names: ordinary text must not turn into a control token.
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": metadata.pre.ignore_merges,
            "vocab": vocab,
            "merges": list(metadata.merges),
        },
    }


def _added_token(token_id: int, content: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": special}


def _post_processor(metadata: _Metadata) -> dict[str, Any]:
    if not metadata.adds_bos:
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bos_id = metadata.roles["bos"]
    bos = metadata.tokens[bos_id]

    def with_bos(name: str, type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": bos, "type_id": type_id}}, {"Sequence": {"id": name, "type_id": type_id}}]

    return {
        "type": "TemplateProcessing",
        "single": with_bos("A", 0),
        "pair": with_bos("A", 0) + with_bos("B", 1),
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _tokenizer_config(metadata: _Metadata) -> dict[str, Any]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": metadata.adds_bos,
        "clean_up_tokenization_spaces": False,  # clean-up would break decode(encode(text)) == text
    }
    config |= {names[role]: metadata.tokens[i] for role, i in metadata.roles.items() if role in names}
    if metadata.chat_template is not None:
        config["chat_template"] = metadata.chat_template
    return config


def _generation_config(metadata: _Metadata) -> dict[str, Any]:
    ends = sorted({metadata.roles[role] for role in ("eos", "eot", "eom") if role in metadata.roles})
    config: dict[str, Any] = {"eos_token_id": ends}
    if "bos" in metadata.roles:
        config["bos_token_id"] = metadata.roles["bos"]
    return config


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
