"""config.json of heads in the formats of others, and what those formats cannot say."""

from typing import Any

from checkpoints_convert.export.hf_config import architecture, rope_scaling
from checkpoints_convert.findings import Findings
from checkpoints_convert.heads.names import HeadsDialect
from jaxspec.checkpoint import Checkpoint
from jaxspec.model.config import LlamaConfig
from jaxspec.model.heads.config import EagleConfig, HeadsConfig, MedusaConfig, rule_layers


def foreign_json(config: HeadsConfig, dialect: HeadsDialect, torch_dtype: str, base: str | None) -> dict[str, Any]:
    """config.json. ``base``: what Hugging Face calls the target; null where nobody said."""
    if isinstance(config, MedusaConfig):
        return {
            "base_model_name_or_path": base,
            "hidden_size": config.hidden_size,
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "torch_dtype": torch_dtype,
            "vocab_size": config.vocab_size,
        }
    layer = architecture(config.decoder, torch_dtype)
    if dialect == "eagle":
        return layer | {"bias": config.fc_bias}
    if dialect == "eagle3":
        return layer | _eagle3(config)
    return _speculators(config, dialect, layer, base)


def unsayable(
    config: HeadsConfig, dialect: HeadsDialect, target: Checkpoint[LlamaConfig] | None, findings: Findings
) -> None:
    """A finding for everything about these heads that readers of the format would silently take for something else."""
    if isinstance(config, MedusaConfig) or dialect.startswith("speculators"):
        return
    if config.rope_scaling is not None:
        findings.add(f"{dialect}: the authors' heads have no rope scaling, these have {config.rope_scaling.kind}")
    if config.norm_before_residual:
        findings.add(f"{dialect}: the authors' heads norm after the residual, these have norm_before_residual")
    if dialect == "eagle" and config.head_dim * config.num_heads != config.hidden_size:
        findings.add(
            f"{dialect}: the authors' head_dim is hidden_size / num_attention_heads, these have {config.head_dim} "
            f"with {config.hidden_size} / {config.num_heads}"
        )
    if target is not None and config.aux_layers is not None:
        rule = rule_layers(target.config.num_layers)
        if config.aux_layers != rule:
            findings.add(
                f"{dialect}: the authors' code looks at layers {list(rule)} of this target, "
                f"these heads see {list(config.aux_layers)}"
            )


def _eagle3(config: EagleConfig) -> dict[str, Any]:
    said: dict[str, Any] = {"draft_vocab_size": config.draft_vocab_size}
    # The authors' code takes the very presence of the key for another width.
    if config.target_hidden_size != config.hidden_size:
        said["target_hidden_size"] = config.target_hidden_size
    if config.aux_layers is not None:
        said["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layers)
    return said


def _speculators(config: EagleConfig, dialect: HeadsDialect, layer: dict[str, Any], base: str | None) -> dict[str, Any]:
    layer["rope_scaling"] = rope_scaling(config.decoder)
    said: dict[str, Any] = {
        "speculators_config": {
            "algorithm": config.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": base},
        },
        "speculators_model_type": config.method,
        "torch_dtype": layer["torch_dtype"],
        "transformer_layer_config": layer,
    }
    if dialect == "speculators-eagle":
        return said | {
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
            "fusion_bias": config.fc_bias,
            "layernorms": False,
            "transformer_layer_architecture": "LlamaDecoderLayer",
        }
    return said | {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": None if config.aux_layers is None else list(config.aux_layers),
        "norm_before_residual": config.norm_before_residual,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
    }
