"""A tiny model on a mesh, and its passes over a ragged batch of prompts."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import open_checkpoint, restore_params
from jaxspec.model.cache import KVCache, empty_cache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import ModelDef, define
from jaxspec.sharding import make_sharding

MESHES = ("1", "4", "data=2,model=2")
SLOTS = 251  # the longest prompt, 64 more tokens, and some to spare; a prime


@lru_cache
def compiled_pass(config: LlamaConfig, mesh: str, dtype: str) -> tuple[ModelDef, Callable]:
    """The jitted pass of every model with this config: (params, tokens, positions, cache) -> logits, hidden, cache."""
    model = define(config, make_sharding(mesh), jnp.dtype(dtype))

    @jax.jit
    def forward(
        params: Mapping[str, jax.Array], tokens_BT: jax.Array, positions_BT: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        module = model.merge(params)
        hidden_BTD, cache, _ = module(tokens_BT, positions_BT, cache)
        return module.logits(hidden_BTD), hidden_BTD, cache

    return model, forward


@partial(jax.jit, static_argnums=(0, 1, 2))
def new_cache(model_key: tuple[LlamaConfig, str, str], rows: int, slots: int) -> KVCache:
    model, _ = compiled_pass(*model_key)
    return empty_cache(model.config, model.sharding, rows, slots, model.dtype)


@dataclasses.dataclass
class Running:
    """A converted model on a mesh."""

    config: LlamaConfig
    mesh: str
    dtype: str
    params: Mapping[str, jax.Array]

    def cache(self, rows: int, slots: int = SLOTS) -> KVCache:
        return new_cache((self.config, self.mesh, self.dtype), rows, slots)

    def feed(
        self, cache: KVCache, tokens_BT: np.ndarray, positions_BT: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, KVCache]:
        """One pass: logits [B, T, V], hidden [B, T, D], cache."""
        _, forward = compiled_pass(self.config, self.mesh, self.dtype)
        logits, hidden, cache = forward(self.params, np.asarray(tokens_BT), np.asarray(positions_BT), cache)
        return np.asarray(logits), np.asarray(hidden), cache

    def prefill(
        self, prompts: Sequence[np.ndarray], chunk: int | None = None
    ) -> tuple[list[np.ndarray], list[np.ndarray], KVCache]:
        """Logits and hidden states of every prompt, all rows fed together, ``chunk`` tokens a pass (None: all)."""
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        chunk = chunk or longest
        width = -(-longest // chunk) * chunk
        tokens = np.full((len(prompts), width), -7, np.int32)  # padding may hold anything
        positions = np.full((len(prompts), width), SLOTS, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            positions[row, : len(prompt)] = np.arange(len(prompt))
        cache = self.cache(len(prompts))
        logits, hidden = [], []
        for start in range(0, width, chunk):
            part = slice(start, start + chunk)
            some_logits, some_hidden, cache = self.feed(cache, tokens[:, part], positions[:, part])
            logits.append(some_logits)
            hidden.append(some_hidden)

        def rows(parts: list[np.ndarray]) -> list[np.ndarray]:
            whole = np.concatenate(parts, axis=1)
            return [whole[row, :length] for row, length in enumerate(lengths)]

        return rows(logits), rows(hidden), cache


@pytest.fixture(scope="session")
def running(tiny_models: Callable[[str], Path]) -> Callable[..., Running]:
    """``running(name, mesh="1", dtype="float32")``: that tiny model, restored into the mesh's shardings."""

    @lru_cache
    def load(name: str, mesh: str = "1", dtype: str = "float32") -> Running:
        checkpoint = open_checkpoint(tiny_models(name))
        model, _ = compiled_pass(checkpoint.config, mesh, dtype)
        params = restore_params(checkpoint, model.shardings(), jnp.dtype(dtype))
        return Running(checkpoint.config, mesh, dtype, params)

    return load
