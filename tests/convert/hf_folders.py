"""Hugging Face folders as others see them: files by the safetensors library, logits by the published formulas.

Nothing here is code under test, so that a mistake made on the way in and undone on the way out still shows.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
}


class Stored(NamedTuple):
    """One tensor of a file, bit for bit."""

    encoding: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, DTYPES[self.encoding]).reshape(self.shape)


def read_file(path: Path) -> dict[str, Stored]:
    """The tensors of a file in the order in which they lie there."""
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    entries = dict(safetensors.deserialize(raw))
    assert entries.keys() == header.keys()
    found: dict[str, Stored] = {}
    for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
        entry = entries[name]
        found[name] = Stored(entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
    return found


def read_weights(folder: Path) -> dict[str, Stored]:
    """Every tensor of every file in a folder; none may be there twice."""
    found: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = read_file(path)
        assert not set(found) & set(tensors)
        found |= tensors
    return found


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    """[T, V] in float64, of the model that config.json and the tensors describe."""
    config = read_json(folder / "config.json")
    weights = {name: stored.array.astype(np.float64) for name, stored in read_weights(folder).items()}
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    angles = np.arange(len(ids))[:, None] * _frequencies(config)
    cos, sin = (np.concatenate([part, part], axis=-1)[:, None] for part in (np.cos(angles), np.sin(angles)))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

    def rotated(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-second, first], axis=-1) * sin

    x = weights["model.embed_tokens.weight"][ids]
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}"
        y = norm(x, f"{of}.input_layernorm.weight")
        q = rotated((y @ weights[f"{of}.self_attn.q_proj.weight"].T).reshape(-1, heads, size))
        k = rotated((y @ weights[f"{of}.self_attn.k_proj.weight"].T).reshape(-1, kv_heads, size))
        v = (y @ weights[f"{of}.self_attn.v_proj.weight"].T).reshape(-1, kv_heads, size)
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(size) + future
        attention = np.exp(scores - scores.max(-1, keepdims=True))
        attention /= attention.sum(-1, keepdims=True)
        x = (
            x
            + np.einsum("nts,snh->tnh", attention, v).reshape(len(ids), -1) @ weights[f"{of}.self_attn.o_proj.weight"].T
        )
        y = norm(x, f"{of}.post_attention_layernorm.weight")
        gate, up = (y @ weights[f"{of}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{of}.mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ weights[head].T


def _frequencies(config: dict[str, Any]) -> np.ndarray:
    base = config["rope_theta"] ** (-np.arange(0, config["head_dim"], 2) / config["head_dim"])
    scaling = config["rope_scaling"]
    if scaling is None:
        return base
    if scaling["rope_type"] == "linear":
        return base / scaling["factor"]
    assert scaling["rope_type"] == "llama3"
    turns = scaling["original_max_position_embeddings"] * base / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * base / scaling["factor"] + kept * base
