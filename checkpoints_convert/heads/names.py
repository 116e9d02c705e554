"""The one table of names for heads: what every format calls each part of each leaf, and how a part lies in its leaf."""

import math
import re
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import numpy as np

from checkpoints_convert.names import DOWN, GATE, UP, K, O, Part, Q, V
from jaxspec.model.heads.config import EagleConfig, HeadsConfig, MedusaConfig, Method
from jaxspec.model.heads.params import heads_param_specs

# The formats that heads come in and go out to. "speculators" is two: its methods name their tensors differently.
HeadsDialect = Literal["medusa", "eagle", "eagle3", "speculators-eagle", "speculators-eagle3"]
METHODS: Final[Mapping[HeadsDialect, Method]] = {
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "speculators-eagle": "eagle",
    "speculators-eagle3": "eagle3",
}

# Draft ids in EAGLE-3: target id = draft id + d2t[draft id], and t2d marks the target ids that have one.
D2T: Final = "d2t"
T2D: Final = "t2d"

_WHOLE: Final = O  # any part that is its leaf, row for row


class _Row(NamedTuple):
    """One source tensor of an EAGLE head; ``{layer}`` is what the format calls the decoder layer."""

    leaf: str
    part: Part
    name: str


_EAGLE_TABLE: Final = (
    _Row("embed", _WHOLE, "embed_tokens.weight"),
    _Row("fc", _WHOLE, "{fc}.weight"),
    _Row("fc_bias", _WHOLE, "{fc}.bias"),
    _Row("layers.0.embed_norm", _WHOLE, "{layer}.input_layernorm.weight"),
    _Row("layers.0.hidden_norm", _WHOLE, "{layer}.hidden_norm.weight"),
    _Row("layers.0.qkv", Q, "{layer}.self_attn.q_proj.weight"),
    _Row("layers.0.qkv", K, "{layer}.self_attn.k_proj.weight"),
    _Row("layers.0.qkv", V, "{layer}.self_attn.v_proj.weight"),
    _Row("layers.0.o", _WHOLE, "{layer}.self_attn.o_proj.weight"),
    _Row("layers.0.mlp_norm", _WHOLE, "{layer}.post_attention_layernorm.weight"),
    _Row("layers.0.gate_up", GATE, "{layer}.mlp.gate_proj.weight"),
    _Row("layers.0.gate_up", UP, "{layer}.mlp.up_proj.weight"),
    _Row("layers.0.down", DOWN, "{layer}.mlp.down_proj.weight"),
    _Row("norm", _WHOLE, "norm.weight"),
    _Row("lm_head", _WHOLE, "lm_head.weight"),
    _Row("target_ids", _WHOLE, D2T),
)
_WORDS: Final[Mapping[HeadsDialect, Mapping[str, str]]] = {
    "eagle": {"layer": "layers.0", "fc": "fc"},
    "eagle3": {"layer": "midlayer", "fc": "fc"},
    "speculators-eagle": {"layer": "transformer", "fc": "fusion_fc"},
    "speculators-eagle3": {"layer": "layers.0", "fc": "fc"},
}

# Tensors that carry nothing which the rest does not say already, with the reason. Everything else must be consumed.
IGNORED: Final[Mapping[str, str]] = {
    r"(layers\.0|midlayer|transformer)\.self_attn\.rotary_emb\.inv_freq": "a buffer of old exports, recomputed",
    r"verifier_(lm_head|norm)\.weight": "the target's own, kept for training",
}


class HeadSlot(NamedTuple):
    """One expected source tensor and where it goes."""

    source: str
    leaf: str
    part: Part
    shape: tuple[int, ...]

    def piece(self, leaf: np.ndarray, group: int) -> np.ndarray:
        """The part of the leaf that the tensor fills, a view of the same size and order. ``group``: G."""
        return self.part.view(leaf, group)


def head_slots(config: HeadsConfig, dialect: HeadsDialect) -> list[HeadSlot]:
    """Every source tensor that heads of this config consist of, by leaf in checkpoint order. t2d fills no leaf."""
    if isinstance(config, MedusaConfig):
        return _medusa_slots(config)
    return _eagle_slots(config, dialect)


def group_size(config: HeadsConfig) -> int:
    """G, query heads per kv head; 1 where there are none."""
    return config.decoder.group_size if isinstance(config, EagleConfig) else 1


def ignored(name: str) -> bool:
    """Whether a tensor is on the named ignore list."""
    return any(re.fullmatch(pattern, name) for pattern in IGNORED)


def _medusa_slots(config: MedusaConfig) -> list[HeadSlot]:
    slots = []
    for leaf, spec in heads_param_specs(config).items():
        _, head, kind = leaf.split(".")
        if kind == "lm_head":
            name = f"{head}.{config.num_layers}.weight"
        else:
            block, _, bias = kind.removeprefix("block").partition("_")
            name = f"{head}.{block}.linear.{bias or 'weight'}"
        slots.append(HeadSlot(name, leaf, _WHOLE, spec.shape))
    return slots


def _eagle_slots(config: EagleConfig, dialect: HeadsDialect) -> list[HeadSlot]:
    specs, words = heads_param_specs(config), _WORDS[dialect]
    return [
        HeadSlot(row.name.format(**words), row.leaf, row.part, _shape(config, row, specs[row.leaf].shape))
        for row in _EAGLE_TABLE
        if row.leaf in specs
    ]


def _shape(config: EagleConfig, row: _Row, leaf: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the source tensor: two dimensions for a weight, one for a vector."""
    if len(leaf) == 1:
        return leaf
    if row.part in (Q, K, V):
        heads = config.num_heads if row.part is Q else config.num_kv_heads
        return heads * config.head_dim, leaf[-1]
    if row.part in (GATE, UP):
        return leaf[0], leaf[-1]
    return leaf[0], math.prod(leaf[1:])
