"""Small checkpoints in foreign formats, made without the code under test: names, orders and bytes are spelled out."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]


class Sizes(NamedTuple):
    """Unequal, mostly prime sizes, so that no two axes can be exchanged unnoticed."""

    V: int = 53
    D: int = 19
    F: int = 23
    N: int = 6
    K: int = 2
    H: int = 4
    L: int = 3


SIZES = Sizes()

ENCODINGS = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}


def hf_config(sizes: Sizes = SIZES, **changes: Any) -> dict[str, Any]:
    """config.json in the published Llama 3 dialect; a change to ``...`` removes the key."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": sizes.H,
        "hidden_act": "silu",
        "hidden_size": sizes.D,
        "intermediate_size": sizes.F,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": sizes.N,
        "num_hidden_layers": sizes.L,
        "num_key_value_heads": sizes.K,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": sizes.V,
    }
    return {key: value for key, value in (config | changes).items() if value is not ...}


def hf_tensors(sizes: Sizes = SIZES, *, tied: bool = False, dtype: Any = np.float32, seed: int = 3) -> Tensors:
    """Random weights under their Hugging Face names."""
    V, D, F, N, K, H, L = sizes
    shapes = {"model.embed_tokens.weight": (V, D)}
    for i in range(L):
        shapes |= {
            f"model.layers.{i}.input_layernorm.weight": (D,),
            f"model.layers.{i}.self_attn.q_proj.weight": (N * H, D),
            f"model.layers.{i}.self_attn.k_proj.weight": (K * H, D),
            f"model.layers.{i}.self_attn.v_proj.weight": (K * H, D),
            f"model.layers.{i}.self_attn.o_proj.weight": (D, N * H),
            f"model.layers.{i}.post_attention_layernorm.weight": (D,),
            f"model.layers.{i}.mlp.gate_proj.weight": (F, D),
            f"model.layers.{i}.mlp.up_proj.weight": (F, D),
            f"model.layers.{i}.mlp.down_proj.weight": (D, F),
        }
    shapes |= {"model.norm.weight": (D,)} | ({} if tied else {"lm_head.weight": (V, D)})
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


def write_safetensors(path: Path, tensors: Tensors, header: dict[str, Any] | None = None) -> None:
    """One file; ``header`` replaces entries of the true one."""
    entries, end = {}, 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        entries[name] = {"dtype": ENCODINGS[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries | (header or {})).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(array.tobytes())


def write_hf(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A folder with one safetensors file and no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def write_sharded(folder: Path, config: dict[str, Any], shards: list[Tensors]) -> Path:
    """A folder with an index and one file per entry of ``shards``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def split_in_three(tensors: Tensors) -> list[Tensors]:
    names = list(tensors)
    return [{name: tensors[name] for name in names[start::3]} for start in range(3)]


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def gguf_tensors(tensors: Tensors, sizes: Sizes = SIZES) -> Tensors:
    """The same weights under their GGUF names, q and k rows in llama.cpp's interleaved order."""
    found: Tensors = {}
    for name, array in tensors.items():
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            name = f"blk.{layer}.{GGUF_NAMES[rest]}"
        else:
            name = GGUF_NAMES[name]
        if "attn_q" in name or "attn_k" in name:
            array = interleave(array, sizes.N if "attn_q" in name else sizes.K)
        found[name] = array
    return found


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: of a head's H rows, row j goes to 2j and row H/2 + j to 2j + 1."""
    size = len(weight) // heads
    moved = np.empty_like(weight)
    for head in range(heads):
        for j in range(size // 2):
            moved[head * size + 2 * j] = weight[head * size + j]
            moved[head * size + 2 * j + 1] = weight[head * size + size // 2 + j]
    return moved


def gguf_fields(sizes: Sizes = SIZES, **changes: Any) -> dict[str, Any]:
    """Metadata of the model, without a tokenizer. Keys of ``changes`` have dots written as double underscores."""
    fields: dict[str, Any] = {
        "llama.block_count": sizes.L,
        "llama.context_length": 128,
        "llama.embedding_length": sizes.D,
        "llama.feed_forward_length": sizes.F,
        "llama.attention.head_count": sizes.N,
        "llama.attention.head_count_kv": sizes.K,
        "llama.attention.key_length": sizes.H,
        "llama.attention.value_length": sizes.H,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "llama.rope.dimension_count": sizes.H,
        "llama.vocab_size": sizes.V,
    }
    fields |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in fields.items() if value is not ...}


def write_gguf(path: Path, fields: dict[str, Any], tensors: Tensors, architecture: str = "llama") -> Path:
    """A file by the ``gguf`` library's own writer."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        if array.dtype == ml_dtypes.bfloat16:
            writer.add_tensor(name, array.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
