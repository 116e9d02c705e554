"""One declaration per parameter: shape and logical axes. Init, sharding, restore and conversion read it."""

from typing import NamedTuple

from jaxspec.model.config import LlamaConfig


class ParamSpec(NamedTuple):
    """Shape of a parameter and one logical axis name per dimension (see ``jaxspec.sharding``).

    ``n_in``: how many trailing axes a product with it contracts; 0 for a vector, which takes part in none.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    n_in: int


def layer_specs(config: LlamaConfig) -> dict[str, ParamSpec]:
    """Parameters of one decoder layer, by leaf name. Weights are stored [out, in].

    ``qkv`` holds, per kv head, its G query heads, then its key, then its value head, so that one product computes all
    three and a split over kv heads never separates a group. ``gate_up`` interleaves the rows of gate and up. The axis
    that is split always leads, so that a weight flattens to an [out, in] matrix without moving.
    """
    c = config
    return {
        "attn_norm": ParamSpec((c.hidden_size,), ("embed",), 0),
        "qkv": ParamSpec(
            (c.num_kv_heads, c.group_size + 2, c.head_dim, c.hidden_size), ("kv_heads", None, "head_dim", "embed"), 1
        ),
        "o": ParamSpec(
            (c.hidden_size, c.num_kv_heads, c.group_size, c.head_dim), ("embed", "kv_heads", None, "head_dim"), 3
        ),
        "mlp_norm": ParamSpec((c.hidden_size,), ("embed",), 0),
        "gate_up": ParamSpec((c.intermediate_size, 2, c.hidden_size), ("ffn", None, "embed"), 1),
        "down": ParamSpec((c.hidden_size, c.intermediate_size), ("embed", "ffn"), 1),
    }


def param_specs(config: LlamaConfig) -> dict[str, ParamSpec]:
    """Every parameter of the model by flat dotted name (``layers.3.qkv``), in checkpoint order."""
    specs = {"embed": ParamSpec((config.vocab_size, config.hidden_size), ("vocab", "embed"), 1)}
    for layer in range(config.num_layers):
        specs |= {f"layers.{layer}.{leaf}": spec for leaf, spec in layer_specs(config).items()}
    specs["final_norm"] = ParamSpec((config.hidden_size,), ("embed",), 0)
    if not config.tie_word_embeddings:
        specs["lm_head"] = ParamSpec((config.vocab_size, config.hidden_size), ("vocab", "embed"), 1)
    return specs
