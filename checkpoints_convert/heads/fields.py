"""Typed access to a foreign config.json: what is missing, of a wrong type or unknown is a finding."""

import math
from collections.abc import Mapping
from typing import Any, Final

from checkpoints_convert.findings import Findings
from jaxspec.errors import UserError
from jaxspec.model.config import RopeScaling

# What the forward pass of every head assumes. A file that says otherwise is another head, whatever its tensors are.
_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu", "swish"),
    "num_hidden_layers": (1,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "qkv_bias": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "layer_types": (["full_attention"], None),
    "logit_scale": (1, 1.0, None),
    "model_type": ("llama", None),
    "add_para_norm": (False, None),
    "layernorms": (False, None),
    "norm_before_fc": (False, None),
    "fc_norm": (False, None),
    "norm_output": (False, None),
    "parallel_drafting": (False, None),
}
# Keys that change nothing about what a head computes: training, generation, library versions.
_HARMLESS: Final = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
    "auto_map", "base_model_name_or_path", "bos_token_id", "chunk_size_feed_forward", "dtype", "embed_requires_grad",
    "eos_token_id", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id",
    "max_window_layers", "num_lookahead_tokens", "output_attentions", "output_hidden_states", "pad_token_id",
    "pretraining_tp", "problem_type", "resid_pdrop", "return_dict", "speculators_config", "speculators_model_type",
    "speculators_version", "tie_word_embeddings", "tokenizer_class", "torch_dtype", "torchscript",
    "transformer_layer_architecture", "transformers_version", "unk_token_id", "use_bfloat16", "use_cache",
})  # fmt: skip
# For linear or dynamic scaling the authors' code has numbers of its own; llama3 it never applies.
NO_SCALING: Final = (None, "default")


class Fields:
    """One JSON object. Every key must be asked for, harmless, or of its one accepted value: see :meth:`finish`."""

    def __init__(self, raw: Mapping[str, Any], where: str, findings: Findings) -> None:
        self.raw = raw
        self.where = where
        self.findings = findings
        self._asked: set[str] = set()

    def get(self, key: str) -> Any:
        """The raw value, None where the key is missing."""
        self._asked.add(key)
        return self.raw.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. Without a default a missing key is a finding, and 1 stands in."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._add(key, "a positive integer", value)
            return 1
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if (number := _positive(value)) is None:
            self._add(key, "a positive number", value)
            return 1.0
        return number

    def flag(self, key: str, default: bool | None) -> bool:
        """true or false."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            self._add(key, "true or false", value)
            return False
        return value

    def layers(self, key: str) -> tuple[int, ...] | None:
        """A list of layer numbers; None where there is none."""
        value = self.get(key)
        if not value and isinstance(value, list | None):
            return None
        if not isinstance(value, list) or not all(type(layer) is int and layer >= 0 for layer in value):
            self._add(key, "a list of layers", value)
            return None
        return tuple(value)

    def head_dim(self, hidden: int, heads: int) -> int:
        """``head_dim``, or what the other two imply."""
        if self.get("head_dim") is not None:
            return self.integer("head_dim")
        if hidden % heads:
            self.findings.add(f"{self.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        return max(1, hidden // heads)

    def rope(self, default_theta: float, *, scaled: bool) -> tuple[float, RopeScaling | None]:
        """theta and scaling. llama3 scaling counts where ``scaled``, and is never applied where not; any other is a
        finding."""
        found: dict[str, Any] = {}
        for key in ("rope_parameters", "rope_scaling"):
            value = self.get(key)
            if value is not None and not isinstance(value, dict):
                self._add(key, "an object or null", value)
            elif value is not None:
                found |= value
        inner, outer = found.get("rope_theta"), self.get("rope_theta")
        if inner is not None and outer is not None and inner != outer:
            self.findings.add(f"{self.where}: rope_theta is {outer!r}, but {inner!r} in rope_parameters")
        if inner is not None and _positive(inner) is None:
            self._add("rope_parameters.rope_theta", "a positive number", inner)
        theta = self.number("rope_theta", default=_positive(inner) or default_theta)
        kind = found.get("rope_type", found.get("type"))
        if kind in NO_SCALING or (kind == "llama3" and not scaled):
            return theta, None
        if kind != "llama3":
            self._add("rope scaling", "none or llama3", kind)
            return theta, None
        numbers = Fields(found, f"{self.where}: rope scaling", self.findings)
        scaling: RopeScaling | None = None
        with self.findings.collecting():
            scaling = RopeScaling(
                "llama3",
                factor=numbers.number("factor"),
                low_freq_factor=numbers.number("low_freq_factor"),
                high_freq_factor=numbers.number("high_freq_factor"),
                original_max_position=numbers.integer("original_max_position_embeddings"),
            )
        return theta, scaling

    def finish(self) -> None:
        """Findings for what was never asked for: a key that means another head, and one that nobody knows."""
        for key, value in self.raw.items():
            if key in _FIXED:
                if value not in _FIXED[key]:
                    self._add(key, repr(_FIXED[key][0]), value)
            elif key not in self._asked and key not in _HARMLESS:
                self.findings.add(f"{self.where}: {key}: unknown, it may change what the head computes")

    def _add(self, key: str, expected: str, value: object) -> None:
        if value is None:
            self.findings.add(f"{self.where}: {key} is missing")
        else:
            self.findings.add(f"{self.where}: {key}: expected {expected}, got {str(value)[:80]!r}")


def _positive(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON has integers of any length
        return None
    return number if math.isfinite(number) and number > 0 else None


def built(findings: Findings, make: Any, **values: Any) -> Any:
    """``make(**values)``, or None and a finding where the values do not go together."""
    try:
        return make(**values)
    except UserError as error:
        findings.add(f"config.json: {error}")
        return None
