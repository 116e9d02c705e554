"""Which bytes each token stands for, and one hash for everything that decides how text becomes ids.

The fingerprint covers the ordered (id, bytes) of every token, the merges, the added tokens, the normaliser and the
pre-tokenizer. Files that say the same in different words hash alike:

- a token's bytes count, not its spelling, and not whether a special token also stands in the model's vocabulary;
- merges count as pairs of ids, so both spellings of tokenizer.json (``"a b"`` and ``["a", "b"]``) agree;
- nested pre-tokenizer sequences are flattened, and GPT-2's built-in word pattern is written out;
- settings without an effect on ids are left out: offsets, decoder, post-processor, unknown token, truncation, padding.

BOS, EOS and the chat template are left out too: they are choices made *with* a tokenizer, and a base model and its
instruct version share one.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import UserError

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


MAX_TOKENS = 1 << 22  # the largest vocabulary of any model is a tenth of it


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: a byte that prints as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def token_bytes(document: Mapping[str, Any]) -> list[bytes]:
    """The bytes of every id of a tokenizer.json of byte-level BPE; an id that no token has stands for none."""
    model = document.get("model") or {}
    vocab = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocab, Mapping) or not _is_byte_level(document.get("decoder")):
        raise UserError(
            "tokenizer.json: expected byte-level BPE (model BPE, decoder ByteLevel), "
            f"got model {model.get('type')!r}, decoder {(document.get('decoder') or {}).get('type')!r}"
        )
    added: list[Mapping[str, Any]] = document.get("added_tokens") or []
    ids = [*vocab.values(), *(token["id"] for token in added)]
    # Ids number a table: one that is far out would be all of memory, and a negative one another token's.
    if outside := next((i for i in ids if not isinstance(i, int) or not 0 <= i < MAX_TOKENS), None):
        raise UserError(f"tokenizer.json: token id {str(outside)[:40]}: expected one in [0, {MAX_TOKENS})")
    table = [b""] * (1 + max(ids, default=-1))
    for token, token_id in vocab.items():
        try:
            table[token_id] = bytes(map(BYTE_ALPHABET.__getitem__, token))
        except KeyError:  # a token outside the alphabet stands for itself
            table[token_id] = token.encode()
    for token in added:
        table[token["id"]] = token["content"].encode()
    return table


def _is_byte_level(step: Mapping[str, Any] | None) -> bool:
    if step is None:
        return False
    return step.get("type") == "ByteLevel" or any(_is_byte_level(inner) for inner in step.get("decoders", ()))


def fingerprint(document: Mapping[str, Any]) -> str:
    """sha256 (hex) of the canonical JSON described above, from the parsed tokenizer.json."""
    model = document["model"]
    canonical = {
        "tokens": [[token_id, token.hex()] for token_id, token in enumerate(token_bytes(document)) if token],
        "merges": _merges(model),
        "added_tokens": _added_tokens(document),
        "normalizer": _steps(document.get("normalizer"), "normalizers"),
        "pre_tokenizer": _steps(document.get("pre_tokenizer"), "pretokenizers"),
        "model": {
            key: model[key]
            for key in ("ignore_merges", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "dropout")
            if model.get(key)
        },
    }
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _merges(model: Mapping[str, Any]) -> list[list[int]]:
    vocab = model["vocab"]
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ())
    return [[vocab[left], vocab[right]] for left, right in pairs]


def _added_tokens(document: Mapping[str, Any]) -> list[list[Any]]:
    tokens = sorted(document.get("added_tokens") or (), key=lambda token: token["id"])
    # GGUF files carry none of these flags; off, as the families here have them, they need no mention.
    flags = ("lstrip", "rstrip", "single_word")
    return [
        [token["id"], token["content"], bool(token.get("special")), *(flag for flag in flags if token.get(flag))]
        for token in tokens
    ]


def _steps(step: Mapping[str, Any] | None, children: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for child in step[children] for inner in _steps(child, children)]
    if step["type"] == "ByteLevel" and children == "pretokenizers":
        words = {"type": "Split", "pattern": {"Regex": GPT2_PATTERN}, "behavior": "Isolated", "invert": False}
        as_bytes = {"type": "ByteLevel", "add_prefix_space": step.get("add_prefix_space", True)}
        return [words, as_bytes] if step.get("use_regex", True) else [as_bytes]
    return [dict(step)]
