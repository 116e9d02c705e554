"""The one table of names: what every format calls each part of each leaf, and how a part lies inside its leaf.

Shapes are those of the source, weights [out, in]. A leaf that fuses several source tensors has one row per part.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

import numpy as np

from jaxspec.model.config import LlamaConfig

Dialect = Literal["hf", "gguf", "meta"]
View = Callable[[np.ndarray, int], np.ndarray]


class Part(NamedTuple):
    """How a source tensor fills its leaf. Dimension letters as in ``jaxspec.shapes``."""

    shape: str  # of the source tensor, e.g. "NH,D"
    view: View  # (leaf, G) -> the piece of the leaf that the tensor fills, any shape of the same size and order
    heads: str = ""  # letter of the number of heads whose rows rotary positions turn; empty when they turn none

    @property
    def whole(self) -> bool:
        """Whether the tensor is the leaf, row for row."""
        return self.view is _whole and not self.heads


def _whole(leaf: np.ndarray, group: int) -> np.ndarray:
    return leaf


VECTOR = Part("D", _whole)
TABLE_VD = Part("V,D", _whole)
Q = Part("NH,D", lambda qkv, group: qkv[:, :group], heads="N")
K = Part("KH,D", lambda qkv, group: qkv[:, group], heads="K")
V = Part("KH,D", lambda qkv, group: qkv[:, group + 1])
O = Part("D,NH", _whole)  # noqa: E741
GATE = Part("F,D", lambda gate_up, group: gate_up[:, 0])
UP = Part("F,D", lambda gate_up, group: gate_up[:, 1])
DOWN = Part("D,F", _whole)


class Row(NamedTuple):
    """One source tensor in every dialect; ``{i}`` is the layer."""

    leaf: str
    part: Part
    names: Mapping[Dialect, str]


def _row(leaf: str, part: Part, hf: str, gguf: str, meta: str) -> Row:
    return Row(leaf, part, {"hf": f"{hf}.weight", "gguf": f"{gguf}.weight", "meta": f"{meta}.weight"})


def _layer_row(leaf: str, part: Part, hf: str, gguf: str, meta: str) -> Row:
    return _row(f"layers.{{i}}.{leaf}", part, f"model.layers.{{i}}.{hf}", f"blk.{{i}}.{gguf}", f"layers.{{i}}.{meta}")


# Every name ends with ".weight"; those of a layer begin with "model.layers.{i}.", "blk.{i}." and "layers.{i}.".
TABLE: Final = (
    _row("embed", TABLE_VD, "model.embed_tokens", "token_embd", "tok_embeddings"),
    _layer_row("attn_norm", VECTOR, "input_layernorm", "attn_norm", "attention_norm"),
    _layer_row("qkv", Q, "self_attn.q_proj", "attn_q", "attention.wq"),
    _layer_row("qkv", K, "self_attn.k_proj", "attn_k", "attention.wk"),
    _layer_row("qkv", V, "self_attn.v_proj", "attn_v", "attention.wv"),
    _layer_row("o", O, "self_attn.o_proj", "attn_output", "attention.wo"),
    _layer_row("mlp_norm", VECTOR, "post_attention_layernorm", "ffn_norm", "ffn_norm"),
    _layer_row("gate_up", GATE, "mlp.gate_proj", "ffn_gate", "feed_forward.w1"),
    _layer_row("gate_up", UP, "mlp.up_proj", "ffn_up", "feed_forward.w3"),
    _layer_row("down", DOWN, "mlp.down_proj", "ffn_down", "feed_forward.w2"),
    _row("final_norm", VECTOR, "model.norm", "output_norm", "norm"),
    _row("lm_head", TABLE_VD, "lm_head", "output", "output"),
)

# Tensors that carry nothing which the config does not say already, with the reason. Everything else must be consumed.
IGNORED: Final[Mapping[Dialect, Mapping[str, str]]] = {
    "hf": {
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "a buffer of old exports, recomputed from rope_theta"
    },
    "gguf": {
        r"rope_freqs\.weight": "read into the config as rope divisors",
        r"blk\.\d+\.attn_rot_embd": "a buffer of old exports, recomputed from rope.freq_base",
    },
    "meta": {r"rope\.freqs": "a buffer of Llama 1 and 2, recomputed from rope_theta"},
}

# Dialects that keep query and key rows as interleaved (even, odd) rotary pairs; ours are in half-split order.
INTERLEAVED: Final[frozenset[Dialect]] = frozenset({"gguf", "meta"})


@dataclasses.dataclass(frozen=True)
class Slot:
    """One expected source tensor and where it goes."""

    source: str
    leaf: str
    part: Part
    shape: tuple[int, ...]


def slots(config: LlamaConfig, dialect: Dialect) -> Iterator[Slot]:
    """Every source tensor that a model of this config consists of, by leaf in checkpoint order."""
    sizes = _sizes(config)
    layer_rows = [row for row in TABLE if "{i}" in row.leaf]
    first, last = TABLE[0], [row for row in TABLE[1:] if "{i}" not in row.leaf]
    if config.tie_word_embeddings:
        last = [row for row in last if row.leaf != "lm_head"]
    numbered = [(row, i) for i in range(config.num_layers) for row in layer_rows]
    for row, i in [(first, 0), *numbered, *((row, 0) for row in last)]:
        shape = tuple(math.prod(sizes[letter] for letter in dim) for dim in row.part.shape.split(","))
        yield Slot(row.names[dialect].format(i=i), row.leaf.format(i=i), row.part, shape)


def head_name(dialect: Dialect) -> str:
    """Name of the output head's tensor."""
    return next(row.names[dialect] for row in TABLE if row.leaf == "lm_head")


def embed_name(dialect: Dialect) -> str:
    """Name of the embedding's tensor."""
    return TABLE[0].names[dialect]


def ignored(name: str, dialect: Dialect) -> bool:
    """Whether a tensor is on the named ignore list."""
    return any(re.fullmatch(pattern, name) for pattern in IGNORED[dialect])


def place(tensor: np.ndarray, leaf: np.ndarray, slot: Slot, config: LlamaConfig, dialect: Dialect) -> None:
    """Writes a source tensor into its piece of ``leaf``, in our row order, cast to the leaf's dtype."""
    if slot.part.heads and dialect in INTERLEAVED:
        tensor = half_split_rows(tensor, _sizes(config)[slot.part.heads])
    target = slot.part.view(leaf, config.group_size)
    target[...] = tensor.reshape(target.shape)


def take(leaf: np.ndarray, slot: Slot, config: LlamaConfig, dialect: Dialect) -> np.ndarray:
    """The inverse of :func:`place`: what a source tensor of this dialect holds, in its shape, as a view if it can."""
    tensor = slot.part.view(leaf, config.group_size).reshape(slot.shape)
    if slot.part.heads and dialect in INTERLEAVED:
        tensor = interleaved_rows(tensor, _sizes(config)[slot.part.heads])
    return tensor


def half_split_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved rotary pairs (0, 0', 1, 1', ...) to halves (0, 1, ..., 0', 1', ...).

    ``heads`` is the number of heads *of this matrix*: K for keys, never N / K.

    >>> half_split_rows(np.array([[0], [10], [1], [11], [2], [12], [3], [13]]), heads=2).ravel().tolist()
    [0, 1, 10, 11, 2, 3, 12, 13]
    """
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def interleaved_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of :func:`half_split_rows`."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _sizes(config: LlamaConfig) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
    }
