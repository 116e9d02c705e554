"""config.json of Hugging Face, in both dialects that live, to our config.

Published Llama 3 has ``rope_theta`` + ``rope_scaling`` + ``torch_dtype``; transformers 5 writes ``rope_parameters`` +
``dtype`` + ``head_dim``.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from checkpoints_convert.findings import Findings
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig, RopeScaling

# What the forward pass assumes. A file that says otherwise is another model, whatever its tensors look like.
_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
}
_LLAMA3_NUMBERS: Final = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
_ROPE_KEYS: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", *_LLAMA3_NUMBERS})


class _Fields:
    """Typed access to the raw object; what is missing or of a wrong type is a finding, once."""

    def __init__(self, raw: Mapping[str, Any], findings: Findings) -> None:
        self.raw = raw
        self.findings = findings

    def integer(self, key: str) -> int:
        value = self._required(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            self.findings.add(f"config.json: {key}: expected a positive integer, got {value!r}")
            return 1
        return 1 if value is None else value

    def number(self, key: str) -> float:
        return _positive(self._required(key), key, self.findings)

    def _required(self, key: str) -> Any:
        value = self.raw.get(key)
        if value is None:
            self.findings.add(f"config.json: {key} is missing")
        return value


def llama_config(raw: Mapping[str, Any], generation: Mapping[str, Any], *, has_head: bool) -> LlamaConfig:
    """Our config from config.json and generation_config.json (empty where there is none).

    ``has_head``: whether the weights hold an output head, for the message when the config contradicts them. Raises
    ConversionError listing everything that is missing, contradictory or not a model that this project runs.
    """
    findings = Findings()
    _check_kind(raw, findings)
    fields = _Fields(raw, findings)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim") if raw.get("head_dim") is not None else hidden // heads
    if raw.get("head_dim") is None and hidden % heads:
        findings.add(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    tied = raw.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        findings.add(f"config.json: tie_word_embeddings: expected true or false, got {tied!r}")
    elif not tied and not has_head:
        says = "is false" if "tie_word_embeddings" in raw else "is missing, which means false"
        findings.add(f"config.json: tie_word_embeddings {says}, but there is no lm_head.weight")
    values: dict[str, Any] = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads"),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "tie_word_embeddings": tied,
    }
    rope = _rope_object(raw, findings)
    values["rope_theta"] = _theta(raw, rope, findings)
    values["rope_scaling"] = _scaling(rope, findings)
    values["bos_token_id"] = next(iter(_token_ids(raw, "bos_token_id", "config.json", findings)), None)
    # Instruct models name their end-of-turn token only in generation_config.json: whoever says "end" is believed.
    eos = _token_ids(raw, "eos_token_id", "config.json", findings)
    eos += _token_ids(generation, "eos_token_id", "generation_config.json", findings)
    values["eos_token_ids"] = tuple(dict.fromkeys(eos))
    findings.raise_if_any()
    try:
        return LlamaConfig(**values)
    except UserError as error:
        findings.add(f"config.json: {error}")
    findings.raise_if_any()
    raise AssertionError("unreachable")


def _check_kind(raw: Mapping[str, Any], findings: Findings) -> None:
    if raw.get("model_type") != "llama":
        findings.add(f"config.json: model_type: expected 'llama', got {raw.get('model_type')!r}")
    architectures = raw.get("architectures")
    if architectures is not None and architectures != ["LlamaForCausalLM"]:
        findings.add(f"config.json: architectures: expected ['LlamaForCausalLM'], got {architectures!r}")
    for key, accepted in _FIXED.items():
        if key in raw and raw[key] not in accepted:
            findings.add(f"config.json: {key}: expected {accepted[0]!r}, got {str(raw[key])[:80]!r}")


def _rope_object(raw: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """rope_parameters, or rope_scaling of the older dialect; both may be there if they agree."""
    found: dict[str, dict[str, Any]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = raw.get(key)
        if value is not None and not isinstance(value, dict):
            findings.add(f"config.json: {key}: expected an object or null, got {value!r}")
        elif value is not None:
            found[key] = value
    merged: dict[str, Any] = {}
    for key, value in found.items():
        for name, entry in value.items():
            if merged.setdefault(name, entry) != entry:
                findings.add(f"config.json: rope_parameters and rope_scaling disagree on {name}")
            if name not in _ROPE_KEYS:
                findings.add(f"config.json: {key}.{name}: unknown, it may change the rotary positions")
    if merged.get("partial_rotary_factor", 1) != 1:
        findings.add(f"config.json: partial_rotary_factor: expected 1, got {merged['partial_rotary_factor']!r}")
    return merged


def _theta(raw: Mapping[str, Any], rope: Mapping[str, Any], findings: Findings) -> float:
    outer, inner = raw.get("rope_theta"), rope.get("rope_theta")
    if outer is None and inner is None:
        findings.add("config.json: rope_theta is missing")
        return 1.0
    if outer is not None and inner is not None and outer != inner:
        findings.add(f"config.json: rope_theta is {outer!r}, but {inner!r} in rope_parameters")
    return _positive(outer if outer is not None else inner, "rope_theta", findings)


def _scaling(rope: Mapping[str, Any], findings: Findings) -> RopeScaling | None:
    named = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    if len(named) == 2 and named[0] != named[1]:
        findings.add(f"config.json: rope_type is {named[0]!r}, but type is {named[1]!r}")
        return None
    if not named:
        if set(rope) & set(_LLAMA3_NUMBERS):
            findings.add("config.json: rope_type is missing, though scaling numbers are there")
        return None
    kind = named[0]
    if kind == "default":
        return None
    if kind not in ("llama3", "linear"):
        findings.add(f"config.json: rope_type: expected default, linear or llama3, got {kind!r}")
        return None
    needed = _LLAMA3_NUMBERS if kind == "llama3" else {"factor": "factor"}
    numbers: dict[str, Any] = {}
    for name, ours in needed.items():
        if rope.get(name) is None:
            findings.add(f"config.json: rope scaling {kind!r} lacks {name}")
        else:
            numbers[ours] = _positive(rope[name], name, findings)
    if len(numbers) < len(needed) or findings.lines:
        return None
    if "original_max_position" in numbers:
        numbers["original_max_position"] = int(numbers["original_max_position"])
    scaling: RopeScaling | None = None
    with findings.collecting():
        scaling = RopeScaling(kind, **numbers)
    return scaling


def _positive(value: Any, key: str, findings: Findings) -> float:
    if value is None:  # a finding already
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        findings.add(f"config.json: {key}: expected a positive number, got {value!r}")
        return 1.0
    return float(value)


def _token_ids(raw: Mapping[str, Any], key: str, where: str, findings: Findings) -> list[int]:
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        findings.add(f"{where}: {key}: expected a token id or a list of them, got {value!r}")
        return []
    return list(ids)
