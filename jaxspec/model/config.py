"""The frozen description of a Llama-family model. It is what ``config.json`` of a checkpoint folder holds."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from jaxspec.errors import UserError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    ``llama3`` uses all four numbers; ``linear`` uses ``factor``; ``divisors`` carries one divisor of the inverse
    frequency per rotary pair (the only form that GGUF files keep).
    """

    kind: Literal["llama3", "linear", "divisors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("llama3", "linear", "divisors"):
            raise UserError(f"rope_scaling.kind: expected llama3, linear or divisors, got {self.kind!r}")
        if not (self.factor > 0 and math.isfinite(self.factor)):
            raise UserError(f"rope_scaling.factor: expected a positive number, got {self.factor}")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise UserError(
                "rope_scaling: expected high_freq_factor > low_freq_factor > 0, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )
        if (self.kind == "divisors") != bool(self.divisors):
            raise UserError(f"rope_scaling: divisors belong to kind 'divisors' alone, got kind {self.kind!r}")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shapes and constants of a Llama-family decoder (dimension letters as in ``jaxspec.shapes``)."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name}: expected a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, got {self.num_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim: expected an even number (rotary pairs), got {self.head_dim}")
        if not (self.rms_norm_eps > 0 and self.rope_theta > 0):
            raise UserError(
                f"rms_norm_eps, rope_theta: expected positive, got {self.rms_norm_eps} and {self.rope_theta}"
            )
        scaling = self.rope_scaling
        if scaling and scaling.divisors and len(scaling.divisors) != self.head_dim // 2:
            raise UserError(
                f"rope_scaling.divisors: expected {self.head_dim // 2} (head_dim / 2), got {len(scaling.divisors)}"
            )
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise UserError(f"token id: expected one in [0, {self.vocab_size}), got {token_id}")

    @property
    def group_size(self) -> int:
        """G, query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    def to_json(self) -> dict[str, Any]:
        """A plain mapping that :meth:`from_json` takes back unchanged."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LlamaConfig":
        """Reads :meth:`to_json`'s mapping. Unknown and missing keys raise UserError with their names."""
        values = checked_fields(cls, data, "config")
        if values.get("rope_scaling") is not None:
            scaling = checked_fields(RopeScaling, values["rope_scaling"], "config.rope_scaling")
            scaling["divisors"] = tuple(scaling.get("divisors", ()))
            values["rope_scaling"] = RopeScaling(**scaling)
        values["eos_token_ids"] = tuple(values.get("eos_token_ids", ()))
        return cls(**values)


def checked_fields(cls: type, data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``data`` as keyword arguments of the dataclass ``cls``; every unknown or missing key is named in one error."""
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: expected a JSON object, got {type(data).__name__}")
    fields = dataclasses.fields(cast(Any, cls))
    names = {field.name for field in fields}
    required = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    problems = [f"unknown key {key!r}" for key in sorted(set(data) - names)]
    problems += [f"missing key {key!r}" for key in sorted(required - set(data))]
    if problems:
        raise UserError(f"{where}: {', '.join(problems)}")
    return dict(data)
