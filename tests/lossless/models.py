"""A target of 16 tokens and every kind of draft for it, made by hand: small enough to know what each of them will say.

Token x is embedded as the x-th unit vector, so a row of hidden states is nearly the token itself, and the head's column
x is nearly the law of what follows x. Attention blurs that: the ``mixed`` target depends on all of its prefix, and the
drafts know only the column. The ``sure`` target has no attention; its greedy text follows one cycle, and every draft
made for it is right, all the way down.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

V = D = 16  # tokens, and as many dimensions
DRAFTED = 13  # ids that the EAGLE-3 head may say: those of the cycle
CONTEXT = 128
MEDUSA_HEADS = 3
DRAFT_SHARPNESS = 2.0  # drafts are far surer of what they say than the target is
SCALE = 4.0  # an embedding has root mean square 1, so that norms leave it alone
THETA = 10000.0
N, K, H, F = 2, 1, 8, 8  # of the target and the draft model; heads have one head of 16


def after() -> np.ndarray:
    """[V], the likeliest successor of each token: a cycle through the ids below DRAFTED, which the others lead into."""
    order = np.random.default_rng(5).permutation(DRAFTED)
    successor = np.zeros(V, int)
    successor[order] = np.roll(order, -1)
    successor[DRAFTED:] = order[: V - DRAFTED]
    return successor


def columns(sharpness: float) -> np.ndarray:
    """[V, V]: column x has the logits of what follows x."""
    logits_VV = np.random.default_rng(3).normal(0, 1.1, (V, V))
    logits_VV[after(), np.arange(V)] = logits_VV.max(axis=0) + 0.3
    return sharpness * logits_VV


def llama(layers: int, blur: float, sharpness: float, seed: int) -> Tensors:
    """``blur``: size of what attention and MLP add to the tokens themselves."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int, scale: float) -> np.ndarray:
        return rng.normal(0, scale, (rows, cols))

    found = {"model.embed_tokens.weight": SCALE * np.eye(V), "model.norm.weight": np.ones(D)}
    found["lm_head.weight"] = columns(sharpness) / SCALE
    for index in range(layers):
        layer = f"model.layers.{index}"
        found |= {
            f"{layer}.input_layernorm.weight": np.ones(D),
            f"{layer}.self_attn.q_proj.weight": matrix(N * H, D, 0.5),
            f"{layer}.self_attn.k_proj.weight": matrix(K * H, D, 0.5),
            f"{layer}.self_attn.v_proj.weight": matrix(K * H, D, 0.5),
            f"{layer}.self_attn.o_proj.weight": matrix(D, N * H, blur),
            f"{layer}.post_attention_layernorm.weight": np.ones(D),
            f"{layer}.mlp.gate_proj.weight": matrix(F, D, 0.3),
            f"{layer}.mlp.up_proj.weight": matrix(F, D, 0.3),
            f"{layer}.mlp.down_proj.weight": matrix(D, F, blur),
        }
    return found


@functools.cache
def reached(steps: int) -> np.ndarray:
    """[V, V]: column x has the law of the token so many steps after x, as the drafts see it."""
    logits_VV = columns(DRAFT_SHARPNESS)
    chances_VV = np.exp(logits_VV - logits_VV.max(axis=0))
    return np.linalg.matrix_power(chances_VV / chances_VV.sum(axis=0), steps)


def medusa() -> Tensors:
    """Head i guesses token t + 2 + i from token t: i + 2 steps of the chain, and of the cycle."""
    found, end = {}, after()
    for head in range(MEDUSA_HEADS):
        end = after()[end]
        guess_VV = np.log(reached(head + 2))
        guess_VV[end, np.arange(V)] = guess_VV.max(axis=0) + 0.3
        found[f"{head}.0.linear.weight"] = np.zeros((D, D))
        found[f"{head}.0.linear.bias"] = np.zeros(D)
        found[f"{head}.1.weight"] = guess_VV / SCALE
    return found


def _layer(prefix: str, qk: np.ndarray, v: np.ndarray, o: np.ndarray) -> Tensors:
    return {
        f"{prefix}.self_attn.q_proj.weight": qk,
        f"{prefix}.self_attn.k_proj.weight": qk,
        f"{prefix}.self_attn.v_proj.weight": v,
        f"{prefix}.self_attn.o_proj.weight": o,
        f"{prefix}.post_attention_layernorm.weight": np.ones(D),
        f"{prefix}.mlp.gate_proj.weight": np.zeros((F, D)),
        f"{prefix}.mlp.up_proj.weight": np.zeros((F, D)),
        f"{prefix}.mlp.down_proj.weight": np.zeros((D, F)),
    }


def eagle1() -> Tensors:
    """The embedding it is given is what it says, a little of the feature with it."""
    eye, nothing = np.eye(D), np.zeros((D, D))
    return {"fc.weight": np.hstack([DRAFT_SHARPNESS * eye, 0.05 * eye])} | _layer("layers.0", 0.2 * eye, eye, nothing)


def eagle3() -> Tensors:
    """Attention looks at the row itself and exchanges the feature's token for the embedded one."""
    eye, nothing = np.eye(D), np.zeros((D, D))
    layer = _layer("midlayer", np.hstack([4 * eye, nothing]), np.hstack([eye, -eye]), eye)
    ids = np.arange(DRAFTED)
    return layer | {
        "midlayer.input_layernorm.weight": np.ones(D),
        "midlayer.hidden_norm.weight": np.ones(D),
        "norm.weight": np.ones(D),
        "fc.weight": np.hstack([0.5 * eye, 0.5 * eye]),  # of the two levels that it sees
        "lm_head.weight": columns(DRAFT_SHARPNESS)[ids] / SCALE,
        "d2t": np.zeros(DRAFTED, np.int64),
        "t2d": np.arange(V) < DRAFTED,
    }


def _config(heads: int, kv_heads: int, head_dim: int, layers: int) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": D,
        "intermediate_size": F,
        "max_position_embeddings": CONTEXT,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "vocab_size": V,
    }


HEADS_CONFIGS: Mapping[str, dict] = {
    "medusa": {"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": 1},
    "eagle": _config(1, 1, D, 1) | {"bias": False},
    "eagle3": _config(1, 1, D, 1) | {"draft_vocab_size": DRAFTED, "eagle_aux_hidden_state_layer_ids": [0, 1]},
}


def write_llama(folder: Path, layers: int, tensors: Tensors) -> None:
    """A checkpoint in ``folder``/hf, and beside it the frequencies that the NumPy reference turns by."""
    _write(folder / "hf", _config(N, K, H, layers), tensors)
    np.savez(folder / "goldens.npz", rope_inv_freq=THETA ** (-np.arange(0, H, 2) / H))


def write_heads(folder: Path, method: str, tensors: Tensors) -> None:
    """As the authors' code writes it."""
    file = "medusa_lm_head.safetensors" if method == "medusa" else "model.safetensors"
    _write(folder, HEADS_CONFIGS[method], tensors, file)


def _write(folder: Path, config: dict, tensors: Tensors, file: str = "model.safetensors") -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in tensors.items()}
    save_file({name: np.ascontiguousarray(x) for name, x in kept.items()}, folder / file)
