"""Heads that nobody trained, in the authors' formats: what a drafter costs when it hardly ever hits."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from checkpoints_convert.heads.convert import convert_heads
from jaxspec.checkpoint import open_checkpoint
from jaxspec.model.config import LlamaConfig
from jaxspec.model.heads.config import Method

MEDUSA_HEADS = 4
DRAFT_VOCAB = 8192


def untrained_heads(method: Method, target: Path, folder: Path) -> Path:
    """Converted heads of that method for ``target``, in ``folder``."""
    config = open_checkpoint(target).config
    source = folder / f"{method}-source"
    source.mkdir()
    tensors = {"medusa": _medusa, "eagle": _eagle, "eagle3": _eagle3}[method](config)
    save_file(tensors, source / "model.safetensors")
    described = {"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": 1} if method == "medusa" else _layer(config)
    if method == "eagle3":
        described |= {"draft_vocab_size": DRAFT_VOCAB}
    (source / "config.json").write_text(json.dumps(described))
    return convert_heads(source, folder / method, method=method, target=target, dtype="keep").path


def _medusa(config: LlamaConfig) -> dict[str, np.ndarray]:
    """As training starts: residual blocks of zeros, so that every head says what the target says next."""
    D = config.hidden_size
    zeros = {f"{i}.0.linear.weight": np.zeros((D, D), np.float32) for i in range(MEDUSA_HEADS)}
    return zeros | {f"{i}.0.linear.bias": np.zeros((D,), np.float32) for i in range(MEDUSA_HEADS)}


def _eagle(config: LlamaConfig) -> dict[str, np.ndarray]:
    D = config.hidden_size
    random = _Random()
    return _decoder(random, config, "layers.0", D) | {"fc.weight": random(D, 2 * D), "fc.bias": random(D)}


def _eagle3(config: LlamaConfig) -> dict[str, np.ndarray]:
    D = config.hidden_size
    random = _Random()
    ones = np.ones((D,), np.float32)
    own = {"midlayer.input_layernorm.weight": ones, "midlayer.hidden_norm.weight": ones, "norm.weight": ones}
    reduced = {
        "fc.weight": random(D, 3 * D),
        "lm_head.weight": random(DRAFT_VOCAB, D),
        "d2t": np.zeros((DRAFT_VOCAB,), np.int64),
        "t2d": np.arange(config.vocab_size) < DRAFT_VOCAB,
    }
    return _decoder(random, config, "midlayer", 2 * D) | own | reduced


def _decoder(random: "_Random", config: LlamaConfig, prefix: str, read: int) -> dict[str, np.ndarray]:
    D, F = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        f"{prefix}.self_attn.q_proj.weight": random(queries, read),
        f"{prefix}.self_attn.k_proj.weight": random(keys, read),
        f"{prefix}.self_attn.v_proj.weight": random(keys, read),
        f"{prefix}.self_attn.o_proj.weight": random(D, queries),
        f"{prefix}.post_attention_layernorm.weight": np.ones((D,), np.float32),
        f"{prefix}.mlp.gate_proj.weight": random(F, D),
        f"{prefix}.mlp.up_proj.weight": random(F, D),
        f"{prefix}.mlp.down_proj.weight": random(D, F),
    }


def _layer(config: LlamaConfig) -> dict[str, object]:
    names = dataclasses.asdict(config)
    kept = ("hidden_size", "intermediate_size", "rms_norm_eps", "rope_theta", "max_position_embeddings", "vocab_size")
    return {name: names[name] for name in kept} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_hidden_layers": 1,
        "head_dim": config.head_dim,
        "tie_word_embeddings": False,
    }


class _Random:
    """Small normal arrays, always the same ones."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __call__(self, *shape: int) -> np.ndarray:
        return self._rng.normal(0, 0.02, shape).astype(np.float32)
