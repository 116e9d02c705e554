"""params.json of Meta's checkpoints to our config.

The file names few of the numbers that make the model. What it leaves out is implied by Meta's code, and spelled out
here: the key/value heads, the rotary base, the feed-forward width, the four numbers of rope scaling, the context.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from checkpoints_convert.findings import Findings
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig, RopeScaling

PARAMS: Final = "params.json"

_KNOWN: Final = frozenset(
    {
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "vocab_size",
        "multiple_of",
        "ffn_dim_multiplier",
        "norm_eps",
        "rope_theta",
        "use_scaled_rope",
        "rope_scaling_factor",
        "rope_high_freq_factor",
        "max_seq_len",
        "max_batch_size",  # of the server that Meta's code starts
    }
)
# Why a key that is not ours makes another model; any other unknown key might.
_REASONS: Final = {
    "moe": "a mixture of experts",
    "moe_args": "a mixture of experts",
    "quantization_args": "the weights are quantised",
    "lora_args": "the weights lack their adapters",
    "vision_model": "a vision model",
    "vision_args": "a vision model",
    "vision_chunk_size": "a vision model",
    "vision_max_num_chunks": "a vision model",
    "vision_num_cross_attention_layers": "a vision model",
    "use_qk_norm": "queries and keys are normalised",
    "nope_layer_interval": "some layers have no rotary positions",
    "attention_chunk_size": "attention is local",
}
_MULTIPLE_OF: Final = 256  # Meta's default, as is 10,000 for the rotary base of Llama 1 and 2
_THETA: Final = 10_000.0
_LARGEST: Final = 1 << 31

# use_scaled_rope carries no numbers: Meta's code (models/llama3/model.py, apply_scaling) has these, and the published
# configs say the same, but for a factor of 32 in Llama 3.2 1B and 3B. Those two are known by their sizes.
_FACTOR, _LOW, _HIGH, _ORIGINAL = 8.0, 1.0, 4.0, 8192
_FACTOR_32: Final = frozenset({(2048, 16, 128_256), (3072, 28, 128_256)})  # dim, n_layers, vocabulary

# Contexts that the models were published with; params.json never says.
_SCALED_CONTEXT: Final = 131_072  # Llama 3.1, 3.2, 3.3
_CODE_THETA, _CODE_CONTEXT = 1_000_000.0, 16_384  # Code Llama
_CONTEXT: Final = {"3": 8192, "2": 4096, "1": 2048}


class WeightSizes(NamedTuple):
    """What only the weights tell."""

    vocab_size: int
    ffn_width: int
    tied: bool  # no output head, or one that is the embedding bit for bit


class EndTokens(NamedTuple):
    """What only the tokenizer tells: ids of its BOS and of every token that ends a text."""

    bos: int | None
    eos: tuple[int, ...]


def vocabulary(params: Mapping[str, Any]) -> int | None:
    """The vocabulary size that the file states; None where it leaves that to the weights (-1, or nothing)."""
    value = params.get("vocab_size")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def is_llama_3_1(params: Mapping[str, Any]) -> bool:
    """Whether the model is of Llama 3.1 or later: they alone scale their rotary positions."""
    return params.get("use_scaled_rope") is True


def llama_config(params: Mapping[str, Any], weights: WeightSizes, tokens: EndTokens) -> LlamaConfig:
    """Our config. Raises ConversionError listing everything that is missing, contradictory or not a model we run."""
    findings = Findings()
    for key, value in params.items():
        if key not in _KNOWN and value is not None:
            findings.add(f"{PARAMS}: {key}: {_REASONS.get(key, 'unknown, it may change the model')}")
    fields, told = _Fields(params, findings), len(findings.lines)
    dim, heads = fields.integer("dim"), fields.integer("n_heads")
    if len(findings.lines) == told and fields.absent("head_dim") and dim % heads:
        findings.add(f"{PARAMS}: dim {dim} is not a multiple of n_heads {heads}")
    stated = params.get("vocab_size", -1)
    if vocabulary(params) is None and stated is not None and (stated != -1 or isinstance(stated, bool | float)):
        findings.add(
            f"{PARAMS}: vocab_size: expected a positive integer, or -1 to take it from the weights, got {stated!r}"
        )
    layers, theta = fields.integer("n_layers"), fields.number("rope_theta", _THETA)
    eps = fields.number("norm_eps")
    values: dict[str, Any] = {
        "vocab_size": vocabulary(params) or weights.vocab_size,
        "hidden_size": dim,
        "intermediate_size": weights.ffn_width,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": fields.integer("n_kv_heads", heads),
        "head_dim": fields.integer("head_dim", dim // heads or 1),
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "tie_word_embeddings": weights.tied,
        "bos_token_id": tokens.bos,
        "eos_token_ids": tokens.eos,
    }
    values["rope_scaling"] = _scaling(fields, (dim, layers, values["vocab_size"]))
    values["max_position_embeddings"] = fields.integer("max_seq_len", _context(params, theta, eps))
    multiple, multiplier = fields.integer("multiple_of", _MULTIPLE_OF), fields.number("ffn_dim_multiplier", 1.0)
    if not findings.lines and (width := _ffn_width(dim, multiple, multiplier)) != weights.ffn_width:
        findings.add(
            f"{PARAMS}: multiple_of {multiple} and ffn_dim_multiplier {multiplier:g} make a feed-forward width of "
            f"{width}, layers.0.feed_forward.w1.weight has {weights.ffn_width}"
        )
    findings.raise_if_any()
    try:
        return LlamaConfig(**values)
    except UserError as error:
        findings.add(f"{PARAMS}: {error}")
    findings.raise_if_any()
    raise AssertionError("unreachable")


class _Fields:
    """Typed access to the file; what is missing or of a wrong type is a finding. null means missing."""

    def __init__(self, params: Mapping[str, Any], findings: Findings) -> None:
        self._params = params
        self.findings = findings

    def absent(self, key: str) -> bool:
        return self._params.get(key) is None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _LARGEST:
            self.findings.add(f"{PARAMS}: {key}: expected a positive integer, got {str(value)[:80]}")
            return 1
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST
        if not usable or not math.isfinite(value):
            self.findings.add(f"{PARAMS}: {key}: expected a positive number, got {str(value)[:80]}")
            return 1.0
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._value(key, False)
        if not isinstance(value, bool):
            self.findings.add(f"{PARAMS}: {key}: expected true or false, got {str(value)[:80]}")
        return value is True

    def _value(self, key: str, default: Any) -> Any:
        if not self.absent(key):
            return self._params[key]
        if default is None:
            self.findings.add(f"{PARAMS}: {key} is missing")
            return 1
        return default


def _scaling(fields: _Fields, sizes: tuple[int, int, int]) -> RopeScaling | None:
    scaled = fields.flag("use_scaled_rope")
    if not scaled:
        for key in ("rope_scaling_factor", "rope_high_freq_factor"):
            if not fields.absent(key):
                fields.findings.add(f"{PARAMS}: {key} is given, but use_scaled_rope is not true")
        return None
    factor = fields.number("rope_scaling_factor", 32.0 if sizes in _FACTOR_32 else _FACTOR)
    high = fields.number("rope_high_freq_factor", _HIGH)
    scaling: RopeScaling | None = None
    with fields.findings.collecting():
        scaling = RopeScaling("llama3", factor, _LOW, high, _ORIGINAL)
    return scaling


def _ffn_width(dim: int, multiple_of: int, multiplier: float) -> int:
    """Meta's rounding: two thirds of 4 dim, times the multiplier, cut to an integer each time, up to a multiple."""
    width = int(multiplier * int(2 * (4 * dim) / 3))
    return -(-width // multiple_of) * multiple_of


def _context(params: Mapping[str, Any], theta: float, eps: float) -> int:
    if is_llama_3_1(params):
        return _SCALED_CONTEXT
    if theta == _CODE_THETA:
        return _CODE_CONTEXT
    if theta > _THETA:
        return _CONTEXT["3"]
    # Llama 1 and 2 differ in nothing else that the file says.
    return _CONTEXT["1"] if eps <= 1e-6 else _CONTEXT["2"]
