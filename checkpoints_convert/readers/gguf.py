"""A GGUF file of the ``llama`` architecture: its metadata to our config, its tensors under their GGUF names."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from checkpoints_convert.findings import Findings
from checkpoints_convert.names import Dialect, embed_name, head_name
from checkpoints_convert.readers.base import SourceTensor
from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.gguf_file import GgufFile, read_gguf
from checkpoints_convert.tokenizer_gguf import tokenizer_from_gguf
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig, RopeScaling

ARCHITECTURE: Final = "llama"
ROPE_DIVISORS: Final = "rope_freqs.weight"
_END_TOKENS: Final = ("eos", "eot", "eom")


@dataclasses.dataclass(frozen=True)
class GgufSource:
    """See :class:`checkpoints_convert.readers.base.Source`."""

    file: GgufFile
    config: LlamaConfig
    dialect: Dialect = "gguf"

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self.file.tensors

    @property
    def files(self) -> Mapping[str, SourceFile]:
        return {self.file.file.name: self.file.file}

    def write_tokenizer(self, dst: Path) -> bool:
        if "tokenizer.ggml.tokens" not in self.file.fields:
            return False
        tokenizer_from_gguf(self.file.fields, dst)
        return True


def open_gguf(path: Path) -> GgufSource:
    """Opens a file. Raises ConversionError with everything that is missing or contradictory in it."""
    file = read_gguf(path)
    return GgufSource(file, _config(file))


class _Fields:
    """Typed access to the metadata; what is missing or of a wrong type is a finding."""

    def __init__(self, file: GgufFile, findings: Findings) -> None:
        self._fields = file.fields
        self._where = file.file.name
        self._findings = findings

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._findings.add(f"{self._where}: {key}: expected a positive integer, got {str(value)[:80]}")
            return 1
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            self._findings.add(f"{self._where}: {key}: expected a positive number, got {str(value)[:80]}")
            return 1.0
        return float(value)

    def token(self, key: str) -> int | None:
        value = self._fields.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            self._findings.add(f"{self._where}: {key}: expected a token id, got {str(value)[:80]}")
            return None
        return value

    def _value(self, key: str, default: float | None) -> Any:
        value = self._fields.get(key, default)
        if value is None:
            self._findings.add(f"{self._where}: {key} is missing")
            return 1
        return value


def _config(file: GgufFile) -> LlamaConfig:
    findings = Findings()
    where, fields = file.file.name, _Fields(file, findings)
    if (architecture := file.fields.get("general.architecture")) != ARCHITECTURE:
        findings.add(f"{where}: general.architecture: expected {ARCHITECTURE!r}, got {architecture!r}")
        findings.raise_if_any()
    if file.fields.get("split.count", 0) not in (0, 1):
        findings.add(f"{where}: one of {file.fields['split.count']} split files; merge them first (llama-gguf-split)")
        findings.raise_if_any()
    if file.fields.get("llama.expert_count", 0):
        findings.add(f"{where}: llama.expert_count: expected 0, got {file.fields['llama.expert_count']}")
    hidden, heads = fields.integer("llama.embedding_length"), fields.integer("llama.attention.head_count")
    head_dim = fields.integer("llama.attention.key_length", hidden // heads or 1)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (size := fields.integer(key, head_dim)) != head_dim:
            findings.add(f"{where}: {key}: expected the head size {head_dim}, got {size}")
    values: dict[str, Any] = {
        "vocab_size": _vocab_size(file, fields),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("llama.feed_forward_length"),
        "num_layers": fields.integer("llama.block_count"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("llama.attention.head_count_kv"),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("llama.rope.freq_base"),
        "max_position_embeddings": fields.integer("llama.context_length"),
        "tie_word_embeddings": head_name("gguf") not in file.tensors,
        "rope_scaling": _scaling(file, fields, findings, head_dim),
        "bos_token_id": fields.token("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": _end_ids(fields),
    }
    findings.raise_if_any()
    try:
        return LlamaConfig(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _vocab_size(file: GgufFile, fields: _Fields) -> int:
    """From the metadata; files that leave it out mean the length of the token list, or of the embedding."""
    embed = file.tensors.get(embed_name("gguf"))
    tokens = file.fields.get("tokenizer.ggml.tokens")
    default = len(tokens) if isinstance(tokens, list) and tokens else embed.shape[0] if embed else None
    return fields.integer("llama.vocab_size", default)


def _end_ids(fields: _Fields) -> tuple[int, ...]:
    ids = (fields.token(f"tokenizer.ggml.{name}_token_id") for name in _END_TOKENS)
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _scaling(file: GgufFile, fields: _Fields, findings: Findings, head_dim: int) -> RopeScaling | None:
    """llama3 scaling is kept only as a tensor of divisors; linear scaling only as metadata."""
    where = file.file.name
    kind = file.fields.get("llama.rope.scaling.type", "none")
    linear: float | None = None
    if kind == "linear":
        linear = fields.number("llama.rope.scaling.factor")
    elif kind != "none":
        findings.add(f"{where}: llama.rope.scaling.type: expected none or linear, got {kind!r}")
    elif "llama.rope.scale_linear" in file.fields:
        linear = fields.number("llama.rope.scale_linear")
    tensor = file.tensors.get(ROPE_DIVISORS)
    if tensor is None:
        return RopeScaling("linear", factor=linear) if linear not in (None, 1.0) else None
    if linear not in (None, 1.0):
        findings.add(f"{where}: has both {ROPE_DIVISORS} and linear rope scaling")
    if tensor.shape != (head_dim // 2,):
        findings.add(f"{where}: {ROPE_DIVISORS}: expected shape [{head_dim // 2}], got {list(tensor.shape)}")
        return None
    divisors = tuple(float(value) for value in tensor.read())
    if not all(0 < value < math.inf for value in divisors):
        findings.add(f"{where}: {ROPE_DIVISORS}: expected positive numbers, got {divisors}")
        return None
    return RopeScaling("divisors", divisors=divisors)
