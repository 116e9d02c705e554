"""config.json of foreign heads to ours: the authors' (Medusa, EAGLE-1, EAGLE-3) and vLLM's speculators format."""

import re
from collections.abc import Mapping
from typing import Any, Final

from checkpoints_convert.findings import Findings
from checkpoints_convert.heads.fields import Fields, built
from checkpoints_convert.heads.names import METHODS
from checkpoints_convert.heads.source import CONFIG, ForeignHeads
from checkpoints_convert.readers.base import SourceTensor
from jaxspec.model.heads.config import EagleConfig, HeadsConfig, MedusaConfig

# What the authors' rotary embedding uses when config.json does not say.
DEFAULT_THETA: Final = 10000.0
# The largest number of heads, and of residual blocks in one, that is believed: their names count up to it.
_MAX_COUNT: Final = 64


def foreign_config(heads: ForeignHeads, target_vocab: int | None) -> HeadsConfig:
    """Our config. ``target_vocab`` stands in where a format does not say the vocabulary.

    Raises ConversionError listing everything that is missing, contradictory or not a head that this project runs.
    """
    findings = Findings()
    if heads.dialect == "medusa":
        config = _medusa(heads, target_vocab, findings)
    elif heads.dialect.startswith("speculators"):
        config = _speculators(heads, findings)
    else:
        config = _eagle(heads, findings)
    findings.raise_if_any()
    assert config is not None
    return config


def _medusa(heads: ForeignHeads, target_vocab: int | None, findings: Findings) -> MedusaConfig | None:
    """Everything is counted in the file: the authors' own config.json names another number of heads than it holds."""
    tensors = heads.tensors
    blocks = [re.fullmatch(r"(\d{1,9})\.(\d{1,9})\.linear\.weight", name) for name in tensors]
    lm_heads = [re.fullmatch(r"(\d{1,9})\.(\d{1,9})\.weight", name) for name in tensors]
    pairs = [(int(match[1]), int(match[2])) for match in (*blocks, *lm_heads) if match]
    num_heads = 1 + max((head for head, _ in pairs), default=0)
    own = any(lm_heads)
    # The LM head comes after the blocks, so its number counts them, also where the file holds a shared block once.
    num_layers = max((int(match[2]) for match in lm_heads if match), default=0)
    if not own:
        num_layers = 1 + max((int(match[2]) for match in blocks if match), default=0)
    if max(num_heads, num_layers) > _MAX_COUNT:
        findings.add(
            f"{heads.weights.name}: its names count up to head {num_heads - 1} and block {num_layers}: "
            f"expected at most {_MAX_COUNT} of each"
        )
        return None
    said = heads.raw.get("medusa_num_layers")
    if said is not None and said != num_layers:
        findings.add(f"{CONFIG}: medusa_num_layers is {said!r}, {heads.weights.name} has {num_layers}")
    hidden = next((size for match in blocks if match for size in _matrix(tensors[match[0]])[:1]), 0)
    vocab = next((size for match in lm_heads if match for size in _matrix(tensors[match[0]])[:1]), 0)
    if not own:
        vocab = heads.raw.get("vocab_size", target_vocab)
        if vocab is None:
            findings.add(f"{heads.weights.name}: without LM heads the vocabulary is not known: give --target")
            return None
    for key, size in (("hidden_size", hidden), ("vocab_size", vocab)):
        if heads.raw.get(key, size) != size:
            findings.add(f"{CONFIG}: {key} is {heads.raw[key]!r}, {heads.weights.name} has {size}")
    return built(
        findings,
        MedusaConfig,
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=num_heads,
        num_layers=num_layers,
        own_lm_head=own,
    )


def _matrix(tensor: SourceTensor) -> tuple[int, ...]:
    return tensor.shape if len(tensor.shape) == 2 else ()


def _eagle(heads: ForeignHeads, findings: Findings) -> EagleConfig | None:
    fields = Fields(heads.raw, CONFIG, findings)
    eagle3 = heads.dialect == "eagle3"
    values = _layer(fields, scaled=False)
    hidden, vocab = values["hidden_size"], values["vocab_size"]
    if eagle3:
        values |= {
            "target_hidden_size": fields.integer("target_hidden_size", default=hidden),
            "draft_vocab_size": fields.integer("draft_vocab_size"),
            "fc_bias": fields.flag("bias", default=False),
            "aux_layers": _aux_layers(fields, findings),
            "norm_before_residual": fields.flag("norm_before_residual", default=False),
        }
    else:
        # A missing key means true in the authors' code.
        values |= {
            "target_hidden_size": hidden,
            "draft_vocab_size": vocab,
            "fc_bias": fields.flag("bias", default=True),
        }
    fields.finish()
    return _checked(heads, values, findings)


def _aux_layers(fields: Fields, findings: Findings) -> tuple[int, ...] | None:
    """Two conventions live: at the top level the layers that the residual stream enters (vLLM), inside
    ``eagle_config`` those that it leaves (SpecForge, SGLang)."""
    entered = fields.layers("eagle_aux_hidden_state_layer_ids")
    nested = fields.get("eagle_config")
    if nested is None:
        return entered
    if not isinstance(nested, Mapping):
        findings.add(f"{CONFIG}: eagle_config: expected an object, got {str(nested)[:80]!r}")
        return entered
    inner = Fields(nested, f"{CONFIG}: eagle_config", findings)
    if not inner.flag("use_aux_hidden_state", default=True):
        findings.add(f"{CONFIG}: eagle_config: use_aux_hidden_state: expected true, got false")
    left = inner.layers("eagle_aux_hidden_state_layer_ids")
    inner.finish()
    from_left = None if left is None else tuple(layer + 1 for layer in left)
    if entered is not None and from_left is not None and entered != from_left:
        findings.add(
            f"{CONFIG}: eagle_aux_hidden_state_layer_ids: {list(entered)} are entered, but eagle_config names "
            f"{list(left or ())} as left, which are entered as {list(from_left)}"
        )
    return entered if from_left is None else from_left


def _speculators(heads: ForeignHeads, findings: Findings) -> EagleConfig | None:
    fields = Fields(heads.raw, CONFIG, findings)
    inner = fields.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        findings.add(f"{CONFIG}: transformer_layer_config: expected an object, got {str(inner)[:80]!r}")
        return None
    layer = Fields(inner, f"{CONFIG}: transformer_layer_config", findings)
    if inner.get("model_type") is None:
        findings.add(f"{CONFIG}: transformer_layer_config: model_type is missing")
    values = _layer(layer, scaled=True)
    hidden, vocab = values["hidden_size"], values["vocab_size"]
    if heads.dialect == "speculators-eagle":
        bias = fields.flag("fusion_bias", default=False)
        values |= {"target_hidden_size": hidden, "draft_vocab_size": vocab, "fc_bias": bias}
    else:
        values |= {
            "target_hidden_size": fields.integer("target_hidden_size", default=hidden),
            "draft_vocab_size": fields.integer("draft_vocab_size"),
            "fc_bias": False,
            # The libraries that read this format disagree on its default.
            "norm_before_residual": fields.flag("norm_before_residual", default=None),
            "aux_layers": fields.layers("eagle_aux_hidden_state_layer_ids"),
        }
    layer.finish()
    fields.finish()
    return _checked(heads, values, findings)


def _layer(fields: Fields, *, scaled: bool) -> dict[str, Any]:
    """The decoder layer. ``scaled``: whether the format's own code applies llama3 scaling in the head."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    theta, scaling = fields.rope(DEFAULT_THETA, scaled=scaled)
    return {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads"),
        "head_dim": fields.head_dim(hidden, heads),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "vocab_size": fields.integer("vocab_size"),
    }


def _checked(heads: ForeignHeads, values: dict[str, Any], findings: Findings) -> EagleConfig | None:
    if findings.lines:
        return None
    own_embed = "embed_tokens.weight" in heads.tensors
    return built(findings, EagleConfig, method=METHODS[heads.dialect], own_embed=own_embed, **values)
