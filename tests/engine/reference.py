"""The same models in plain NumPy and float64, straight from safetensors: what the engine must agree with."""

import dataclasses
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

NEAR_TIE = 1e-3  # top-2 logit gap under which float32 passes of different widths may disagree on the argmax


@dataclasses.dataclass(frozen=True)
class Reference:
    """A Hugging Face Llama checkpoint; ``hidden`` and ``logits`` are all it does."""

    folder: Path

    @cached_property
    def config(self) -> dict:
        return json.loads((self.folder / "hf" / "config.json").read_text())

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        return {name: x.astype(np.float64) for name, x in load_file(self.folder / "hf" / "model.safetensors").items()}

    @cached_property
    def inverse_frequencies(self) -> np.ndarray:
        return np.load(self.folder / "goldens.npz")["rope_inv_freq"].astype(np.float64)

    def logits(self, tokens_BT) -> np.ndarray:
        """float64 [B, T, V]; what pads the end of a row changes nothing before it."""
        tied = self.config["tie_word_embeddings"]
        return self.hidden(tokens_BT) @ self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    def hidden(self, tokens_BT) -> np.ndarray:
        """float64 [B, T, D] after the final norm."""
        tokens_BT = np.asarray(tokens_BT)
        config, weights = self.config, self.weights
        rows, length = tokens_BT.shape
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        angles = np.arange(length)[:, None] * self.inverse_frequencies[None, :]
        cos, sin = np.cos(angles)[None, :, None, :], np.sin(angles)[None, :, None, :]
        causal = np.where(np.tril(np.ones((length, length), bool)), 0.0, -np.inf)

        def norm(x, name):
            scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"])
            return x / scale * weights[f"{name}.weight"]

        def rotate(x):
            first, second = np.split(x, 2, axis=-1)
            return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

        x = weights["model.embed_tokens.weight"][tokens_BT]
        for index in range(config["num_hidden_layers"]):
            layer = f"model.layers.{index}"

            def project(x, name, layer=layer):
                return x @ weights[f"{layer}.{name}.weight"].T

            inside = norm(x, f"{layer}.input_layernorm")
            q = rotate(project(inside, "self_attn.q_proj").reshape(rows, length, heads, -1))
            k = rotate(project(inside, "self_attn.k_proj").reshape(rows, length, kv_heads, -1))
            v = project(inside, "self_attn.v_proj").reshape(rows, length, kv_heads, -1)
            k, v = (np.repeat(y, heads // kv_heads, axis=2) for y in (k, v))
            q, k, v = (y.transpose(0, 2, 1, 3) for y in (q, k, v))
            scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1]) + causal
            attention = np.exp(scores - scores.max(axis=-1, keepdims=True))
            attention /= attention.sum(axis=-1, keepdims=True)
            attended = (attention @ v).transpose(0, 2, 1, 3).reshape(rows, length, -1)
            x = x + project(attended, "self_attn.o_proj")
            inside = norm(x, f"{layer}.post_attention_layernorm")
            gate = project(inside, "mlp.gate_proj")
            x = x + project(gate / (1 + np.exp(-gate)) * project(inside, "mlp.up_proj"), "mlp.down_proj")
        return norm(x, "model.norm")

    def gap(self, tokens: Sequence[int]) -> float:
        """How far the best next logit is ahead of the second best."""
        second, best = np.sort(self.logits([tokens])[0, -1])[-2:]
        return float(best - second)

    def near_ties(self, prompt: Sequence[int], got: Sequence[int], expected: Sequence[int]) -> int:
        """0 when two greedy texts are equal, 1 when they part at a near-tie; fails otherwise."""
        if tuple(got) == tuple(expected):
            return 0
        pairs = zip(got, expected, strict=False)
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(got), len(expected)))
        assert same < min(len(got), len(expected)), f"lengths differ: {len(got)}, expected {len(expected)}"
        gap = self.gap([*prompt, *expected[:same]])
        assert gap < NEAR_TIE, f"token {same} is {got[same]}, expected {expected[same]}, which leads by {gap:.4f}"
        return 1
