"""One declaration per parameter of a heads folder, as ``jaxspec.model.params`` has it for models."""

from typing import Final

from jaxspec.model.heads.config import EagleConfig, HeadsConfig, MedusaConfig
from jaxspec.model.params import ParamSpec, layer_specs

# Leaves that hold token ids, int32, never cast: ``target_ids``[draft id] is the target's id.
INDEX_LEAVES: Final = frozenset({"target_ids"})


def heads_param_specs(config: HeadsConfig) -> dict[str, ParamSpec]:
    """Every parameter of the heads by flat dotted name, in checkpoint order. Weights are stored [out, in].

    The layer of an EAGLE head is ``layers.0`` in the layout of the target's layers (fused ``qkv`` and ``gate_up``); a
    Medusa head is ``heads.<i>``. Heads that share the target's LM head have its rows as ``lm_head`` once they are
    trimmed to a draft vocabulary.
    """
    return _medusa_specs(config) if isinstance(config, MedusaConfig) else _eagle_specs(config)


def _medusa_specs(config: MedusaConfig) -> dict[str, ParamSpec]:
    D, V = config.hidden_size, config.draft_vocab_size or config.vocab_size
    specs: dict[str, ParamSpec] = {}
    for head in range(config.num_heads):
        for block in range(config.num_layers):
            specs[f"heads.{head}.block{block}"] = ParamSpec((D, D), ("embed", "embed"), 1)
            specs[f"heads.{head}.block{block}_bias"] = ParamSpec((D,), ("embed",), 0)
        if config.own_lm_head:
            specs[f"heads.{head}.lm_head"] = ParamSpec((V, D), ("vocab", "embed"), 1)
    if config.reduced_vocab:
        if not config.own_lm_head:
            specs["lm_head"] = ParamSpec((V, D), ("vocab", "embed"), 1)
        specs["target_ids"] = ParamSpec((V,), (None,), 0)
    return specs


def _eagle_specs(config: EagleConfig) -> dict[str, ParamSpec]:
    D = config.hidden_size
    eagle3 = config.method == "eagle3"
    layer = layer_specs(config.decoder)
    del layer["attn_norm"]  # EAGLE-1 attends without a norm; EAGLE-3 norms the two halves of its input apart
    if eagle3:
        norm = ParamSpec((D,), ("embed",), 0)
        qkv = layer["qkv"]
        layer["qkv"] = qkv._replace(shape=(*qkv.shape[:-1], 2 * D))
        layer = {"embed_norm": norm, "hidden_norm": norm, **layer}
    specs: dict[str, ParamSpec] = {}
    if config.own_embed:
        specs["embed"] = ParamSpec((config.vocab_size, D), ("vocab", "embed"), 1)
    fc_in = config.features_size if eagle3 else 2 * D
    specs["fc"] = ParamSpec((D, fc_in), ("embed", "embed"), 1)
    if config.fc_bias:
        specs["fc_bias"] = ParamSpec((D,), ("embed",), 0)
    specs |= {f"layers.0.{leaf}": spec for leaf, spec in layer.items()}
    if eagle3:
        specs["norm"] = ParamSpec((D,), ("embed",), 0)
    if eagle3 or config.reduced_vocab:
        specs["lm_head"] = ParamSpec((config.draft_vocab_size, D), ("vocab", "embed"), 1)
    if config.reduced_vocab:
        specs["target_ids"] = ParamSpec((config.draft_vocab_size,), (None,), 0)
    return specs
