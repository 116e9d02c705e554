"""Small heads in foreign formats, made without the code under test: names and shapes are spelled out."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]


class Sizes(NamedTuple):
    """Unequal, mostly prime sizes, so that no two axes can be exchanged unnoticed. d: draft vocabulary."""

    V: int = 53
    D: int = 19
    F: int = 23
    N: int = 6
    K: int = 2
    H: int = 4
    d: int = 17


SIZES = Sizes()
# The authors' EAGLE-1 derives the head dimension, so there N x H is D.
SQUARE = Sizes(D=24)


def array(*shape: int, seed: list[int]) -> np.ndarray:
    seed[0] += 1
    return np.random.default_rng(seed[0]).normal(0, 0.3, shape).astype(np.float32)


def medusa(sizes: Sizes = SIZES, *, heads: int = 3, layers: int = 1, own: bool = True) -> Tensors:
    seed = [100]
    found: Tensors = {}
    for head in range(heads):
        for block in range(layers):
            found[f"{head}.{block}.linear.weight"] = array(sizes.D, sizes.D, seed=seed)
            found[f"{head}.{block}.linear.bias"] = array(sizes.D, seed=seed)
        if own:
            found[f"{head}.{layers}.weight"] = array(sizes.V, sizes.D, seed=seed)
    return found


def _layer(sizes: Sizes, prefix: str, read: int, seed: list[int]) -> Tensors:
    return {
        f"{prefix}.self_attn.q_proj.weight": array(sizes.N * sizes.H, read, seed=seed),
        f"{prefix}.self_attn.k_proj.weight": array(sizes.K * sizes.H, read, seed=seed),
        f"{prefix}.self_attn.v_proj.weight": array(sizes.K * sizes.H, read, seed=seed),
        f"{prefix}.self_attn.o_proj.weight": array(sizes.D, sizes.N * sizes.H, seed=seed),
        f"{prefix}.post_attention_layernorm.weight": 1 + array(sizes.D, seed=seed),
        f"{prefix}.mlp.gate_proj.weight": array(sizes.F, sizes.D, seed=seed),
        f"{prefix}.mlp.up_proj.weight": array(sizes.F, sizes.D, seed=seed),
        f"{prefix}.mlp.down_proj.weight": array(sizes.D, sizes.F, seed=seed),
    }


def eagle1(sizes: Sizes = SQUARE, *, layer: str = "layers.0", fc: str = "fc", bias: bool = True) -> Tensors:
    """``layer="transformer", fc="fusion_fc"``: as speculators names them."""
    seed = [200]
    found = _layer(sizes, layer, sizes.D, seed)
    found["embed_tokens.weight"] = array(sizes.V, sizes.D, seed=seed)
    found[f"{fc}.weight"] = array(sizes.D, 2 * sizes.D, seed=seed)
    if bias:
        found[f"{fc}.bias"] = array(sizes.D, seed=seed)
    return found


def target_ids(sizes: Sizes = SIZES) -> np.ndarray:
    """Ascending ids with gaps and runs; the last of the vocabulary is among them."""
    rest = np.random.default_rng(7).permutation(np.arange(4, sizes.V - 1))[: sizes.d - 4]
    return np.sort(np.concatenate([[0, 1, 2, sizes.V - 1], rest]))


def eagle3(
    sizes: Sizes = SIZES, *, layer: str = "midlayer", target_width: int | None = None, embed: bool = False
) -> Tensors:
    """``layer="layers.0"``: as speculators names it."""
    seed = [300]
    found = _layer(sizes, layer, 2 * sizes.D, seed)
    found[f"{layer}.input_layernorm.weight"] = 1 + array(sizes.D, seed=seed)
    found[f"{layer}.hidden_norm.weight"] = 1 + array(sizes.D, seed=seed)
    found["norm.weight"] = 1 + array(sizes.D, seed=seed)
    found["fc.weight"] = array(sizes.D, 3 * (target_width or sizes.D), seed=seed)
    found["lm_head.weight"] = array(sizes.d, sizes.D, seed=seed)
    if embed:
        found["embed_tokens.weight"] = array(sizes.V, sizes.D, seed=seed)
    ids = target_ids(sizes)
    if sizes.d < sizes.V:
        found["d2t"] = ids - np.arange(sizes.d)
        found["t2d"] = np.isin(np.arange(sizes.V), ids)
    return found


def medusa_config(**changes: Any) -> dict[str, Any]:
    return _changed({"base_model_name_or_path": "somewhere", "medusa_num_heads": 2, "medusa_num_layers": 1}, changes)


def eagle_config(sizes: Sizes = SIZES, **changes: Any) -> dict[str, Any]:
    """As the authors write it for EAGLE-1; a change to ``...`` removes the key."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": sizes.H,
        "hidden_act": "silu",
        "hidden_size": sizes.D,
        "initializer_range": 0.02,
        "intermediate_size": sizes.F,
        "max_position_embeddings": 211,
        "model_type": "llama",
        "num_attention_heads": sizes.N,
        "num_hidden_layers": 1,
        "num_key_value_heads": sizes.K,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": sizes.V,
    }
    return _changed(config, changes)


def eagle3_config(sizes: Sizes = SIZES, **changes: Any) -> dict[str, Any]:
    return _changed(eagle_config(sizes) | {"draft_vocab_size": sizes.d}, changes)


def speculators_config(sizes: Sizes = SIZES, method: str = "eagle3", **changes: Any) -> dict[str, Any]:
    """config.json of vLLM's speculators library; ``layer_<key>`` changes transformer_layer_config."""
    layer = {key: value for key, value in eagle_config(sizes).items() if key not in ("torch_dtype",)}
    layer |= {key.removeprefix("layer_"): value for key, value in changes.items() if key.startswith("layer_")}
    config: dict[str, Any] = {
        "speculators_model_type": method,
        "speculators_version": "0.1.0",
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somewhere"},
        },
        "torch_dtype": "float32",
        "transformer_layer_config": {key: value for key, value in layer.items() if value is not ...},
        "transformers_version": "4.57.1",
    }
    if method == "eagle3":
        config |= {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": sizes.d,
            "eagle_aux_hidden_state_layer_ids": None,
            "embed_requires_grad": False,
            "norm_before_fc": False,
            "norm_before_residual": True,
            "target_hidden_size": None,
        }
    else:
        config |= {
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
            "fusion_bias": False,
            "layernorms": False,
            "transformer_layer_architecture": "LlamaDecoderLayer",
        }
    return _changed(config, {key: value for key, value in changes.items() if not key.startswith("layer_")})


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (config | changes).items() if value is not ...}


def write(folder: Path, config: dict[str, Any] | None, tensors: Tensors, file: str = "model.safetensors") -> Path:
    """A folder of heads, weights by the safetensors library's own writer."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / file)
    return folder


def write_medusa(folder: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    return write(folder, medusa_config(**changes), tensors or medusa(), "medusa_lm_head.safetensors")
