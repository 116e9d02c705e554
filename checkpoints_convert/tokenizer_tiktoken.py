"""Rebuilds a Hugging Face style tokenizer folder from Meta's ``tokenizer.model`` of Llama 3 (tiktoken's text format).

A line of the file is a token in base64, a space, and its rank. The rank is both the token's id and its turn: of all
neighbours in a word that make a token together, those with the lowest rank are joined first. tokenizer.json wants
merges, pairs of tokens in the order in which they are tried; :func:`merges_of` derives them. Neither the special tokens
nor the pattern that cuts text into words is in the file: both are the family's, and written out here.
"""

import base64
import binascii
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from checkpoints_convert.findings import Findings
from checkpoints_convert.tokenizer_gguf import CONTROL, tokenizer_from_gguf
from jaxspec.errors import UserError
from jaxspec.text.fingerprint import BYTE_ALPHABET

_NORMAL: Final = 1
MAX_FILE: Final = 16 << 20  # Llama 3's has 2.2 MB
_MAX_TOKEN: Final = 512  # bytes; the longest of Llama 3 is 128 spaces
_MAX_LINES_TOLD: Final = 20
_SPELLING: Final[Mapping[int, str]] = {byte: letter for letter, byte in BYTE_ALPHABET.items()}

BOS: Final = "<|begin_of_text|>"
END_OF_TEXT, END_OF_TURN, END_OF_MESSAGE = "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"
_SPECIALS: Final = 256
# The family's special tokens in order; "" is reserved, and numbered from 0 as it comes. Llama 3.1 named three of those
# that Llama 3 had left reserved. Positions are the same.
_LLAMA_3: Final = (BOS, END_OF_TEXT, *[""] * 4, "<|start_header_id|>", "<|end_header_id|>", "", END_OF_TURN)
_LLAMA_3_1: Final = (
    *(BOS, END_OF_TEXT, "", "", "<|finetune_right_pad_id|>", ""),
    *("<|start_header_id|>", "<|end_header_id|>", END_OF_MESSAGE, END_OF_TURN, "<|python_tag|>"),
)


@dataclasses.dataclass(frozen=True)
class TiktokenModel:
    """Ordinary tokens by rank, and the special tokens that follow them."""

    tokens: tuple[bytes, ...]
    specials: tuple[str, ...]

    @property
    def bos(self) -> int:
        return len(self.tokens) + self.specials.index(BOS)

    @property
    def eos(self) -> tuple[int, ...]:
        """Every token that ends a text, a turn or a message, as the published instruct models list them. The files of
        base and instruct models are the same; a base model never makes the latter two."""
        ends = (END_OF_TEXT, END_OF_MESSAGE, END_OF_TURN)
        return tuple(len(self.tokens) + self.specials.index(name) for name in ends if name in self.specials)

    def write(self, dst: Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and generation_config.json into the folder ``dst``.

        There is no chat template: the file does not say whether the model was taught one.
        """
        spelled = [_spelled(token) for token in self.tokens]
        roles = {
            role: len(self.tokens) + self.specials.index(name)
            for role, name in (("bos", BOS), ("eos", END_OF_TEXT), ("eot", END_OF_TURN), ("eom", END_OF_MESSAGE))
            if name in self.specials
        }
        fields: dict[str, Any] = {
            "tokenizer.ggml.model": "gpt2",  # byte-level BPE
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": [*spelled, *self.specials],
            "tokenizer.ggml.token_type": [_NORMAL] * len(spelled) + [CONTROL] * len(self.specials),
            "tokenizer.ggml.merges": [f"{_spelled(left)} {_spelled(right)}" for left, right in merges_of(self.tokens)],
            "tokenizer.ggml.add_bos_token": True,
        }
        tokenizer_from_gguf(fields | {f"tokenizer.ggml.{role}_token_id": token for role, token in roles.items()}, dst)


def read_tokenizer_model(data: bytes, where: str, vocab_size: int, *, llama_3_1: bool) -> TiktokenModel:
    """Reads the content of tokenizer.model; ``where`` is its name. ``vocab_size`` is the model's: what the ranks leave
    of it is special tokens.

    Raises ConversionError with one finding per bad line, duplicate or gap; UserError for a SentencePiece model.
    """
    if data.startswith(b"\n") and b"<unk>" in data[:64]:
        raise UserError(
            f"{where}: a SentencePiece model (Llama 1 and 2), expected tiktoken's text format; give --tokenizer DIR, "
            "or move the file away for a checkpoint that takes and gives token ids only"
        )
    tokens = _tokens(data, where)
    count = vocab_size - len(tokens)
    if not 2 <= count <= _SPECIALS:
        raise UserError(
            f"{where}: {len(tokens)} ranks, and a vocabulary of {vocab_size} (params.json, or the embedding): "
            f"expected 2 to {_SPECIALS} special tokens more than ranks"
        )
    specials = special_tokens(count, llama_3_1=llama_3_1)
    for name in sorted(set(specials) & {token.decode(errors="replace") for token in tokens}):
        raise UserError(f"{where}: {name} is both an ordinary and a special token")
    return TiktokenModel(tokens, specials)


def special_tokens(count: int, *, llama_3_1: bool) -> tuple[str, ...]:
    """The first ``count`` special tokens of the family.

    >>> special_tokens(10, llama_3_1=False)[-2:], special_tokens(12, llama_3_1=True)[-2:]
    (('<|reserved_special_token_4|>', '<|eot_id|>'), ('<|python_tag|>', '<|reserved_special_token_3|>'))
    """
    names, reserved = [], 0
    for name in (*(_LLAMA_3_1 if llama_3_1 else _LLAMA_3), *[""] * _SPECIALS)[:count]:
        names.append(name or f"<|reserved_special_token_{reserved}|>")
        reserved += not name
    return tuple(names)


def _tokens(data: bytes, where: str) -> tuple[bytes, ...]:
    """Tokens by rank: every rank once, every token once, every single byte among them."""
    findings = Findings()
    by_rank: dict[int, bytes] = {}
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if len(findings.lines) == _MAX_LINES_TOLD:
            findings.add(f"{where}: more is wrong; the first {_MAX_LINES_TOLD} findings are listed")
            break
        with findings.collecting():
            token, rank = _parsed(line, f"{where}: line {number}")
            if rank in by_rank:
                findings.add(f"{where}: line {number}: rank {rank} was given before")
            elif token in ranks:
                findings.add(f"{where}: line {number}: the token of rank {ranks[token]} again")
            by_rank[rank], ranks[token] = token, rank
    findings.raise_if_any()
    missing = next((rank for rank in range(len(by_rank)) if rank not in by_rank), None)
    if missing is not None:
        findings.add(f"{where}: expected ranks 0 to {len(by_rank) - 1} without a gap, rank {missing} is missing")
    bytes_missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if bytes_missing:
        findings.add(f"{where}: expected a token for every byte, found none for byte {bytes_missing[0]}")
    findings.raise_if_any()
    return tuple(by_rank[rank] for rank in range(len(by_rank)))


def _parsed(line: bytes, where: str) -> tuple[bytes, int]:
    spelled, _, rank = line.partition(b" ")
    try:
        token = base64.b64decode(spelled, validate=True)
    except binascii.Error:
        token = b""
    if not 0 < len(token) <= _MAX_TOKEN or not rank.isdigit() or len(rank) > 9:
        raise UserError(f"{where}: expected a token in base64, a space and a rank, got {line[:40]!a}")
    return token, int(rank)


def merges_of(tokens: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Pairs of tokens in the order in which they are joined, so that BPE by merges is BPE by ranks.

    BPE joins neighbours in the order of ranks, and what it has done inside a token's bytes when the token's turn comes
    does not depend on the text around: a pair is left, always the same, and it is the only merge that the token needs.
    A trainer's vocabulary is like that throughout, and gets these merges, which are the trainer's own. 588 tokens of
    Llama 3 are left in more pieces: they are only ever whole words. For a vocabulary with such tokens every pair that
    spells a token is listed in the order of ranks, whether it can occur or not: the published tokenizer.json's list.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges: list[tuple[bytes, bytes]] = []
    for rank, token in enumerate(tokens):
        if len(token) > 1:
            pair = _last_pair(token, rank, ranks)
            if pair is None:
                return _every_pair(tokens, ranks)
            merges.append(pair)
    return merges


def _last_pair(token: bytes, rank: int, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that lower ranks leave of a token's bytes; None when they leave more."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        joined = [ranks.get(left + right, rank) for left, right in itertools.pairwise(pieces)]
        lowest = min(joined)
        if lowest >= rank:
            return None
        at = joined.index(lowest)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    left, right = pieces
    return (left, right) if max(ranks[left], ranks[right]) < rank else None


def _every_pair(tokens: Sequence[bytes], ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    merges: list[tuple[bytes, bytes]] = []
    for token in tokens:
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _spelled(token: bytes) -> str:
    return "".join(map(_SPELLING.__getitem__, token))
