"""The config is what decides: every field is read somewhere, and every number that shapes a pass is felt in it."""

import ast
import dataclasses
import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.errors import UserError
from jaxspec.model.cache import empty_cache
from jaxspec.model.config import LlamaConfig, RopeScaling
from jaxspec.model.llama import define, random_params
from jaxspec.sharding import make_sharding

PACKAGE = Path(jaxspec.__file__).parent
CONFIG = LlamaConfig(
    vocab_size=13,
    hidden_size=10,
    intermediate_size=11,
    num_layers=1,
    num_heads=6,
    num_kv_heads=3,
    head_dim=14,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
    bos_token_id=2,
    eos_token_ids=(3, 5),
)


@cache
def attributes_read() -> frozenset[str]:
    """Attribute names that the package reads, validation of the configs aside (it reads every field by nature)."""
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                node.body = [part for part in node.body if getattr(part, "name", "") != "__post_init__"]
        names |= {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        }
    return frozenset(names)


@pytest.mark.parametrize(
    "name", [field.name for cls in (LlamaConfig, RopeScaling) for field in dataclasses.fields(cls)]
)
def test_every_field_is_read(name) -> None:
    assert name in attributes_read()


def hidden(config: LlamaConfig) -> np.ndarray:
    """What a pass over five tokens says, with weights that depend on shapes alone."""
    model = define(config, make_sharding("1"), jnp.dtype("float32"))
    params = random_params(model, 7)

    @jax.jit
    def forward():
        cache = empty_cache(config, model.sharding, 1, 7, model.cache_dtype)
        tokens, positions = jnp.asarray([[2, 3, 5, 7, 11]]), jnp.asarray([[0, 1, 2, 3, 4]])
        module = model.merge(params)
        return module.logits(module(tokens, positions, cache).hidden_BTD)

    return np.asarray(forward())


@cache
def plain() -> np.ndarray:
    return hidden(CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-2},
        {"rope_theta": 1e2},
        {"rope_scaling": None},
        {"rope_scaling": RopeScaling("llama3", 9.0, 1.0, 4.0, 64)},
        {"rope_scaling": RopeScaling("llama3", 8.0, 2.0, 4.0, 64)},
        {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 20.0, 64)},
        {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 16)},
        {"rope_scaling": RopeScaling("linear", 3.0)},
        {"rope_scaling": RopeScaling("divisors", divisors=(1, 2, 3, 5, 7, 11, 13))},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_every_number_of_the_config_is_felt(change) -> None:
    """No default of a leaf function shadows the config."""
    changed = hidden(dataclasses.replace(CONFIG, **change))
    assert np.max(np.abs(changed - plain())) > 1e-4


def test_json_round_trip() -> None:
    for config in (CONFIG, dataclasses.replace(CONFIG, rope_scaling=RopeScaling("divisors", divisors=(1.5,) * 7))):
        assert LlamaConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size: expected a positive integer, got 0"),
        ({"vocab_size": True}, "vocab_size: expected a positive integer, got True"),
        ({"num_layers": 2.0}, "num_layers: expected a positive integer, got 2.0"),
        ({"num_heads": 7}, "num_heads: expected a multiple of num_kv_heads=3, got 7"),
        ({"head_dim": 7, "rope_scaling": None}, "head_dim: expected an even number"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps, rope_theta: expected positive, got 0.0"),
        ({"rope_theta": float("nan")}, "rms_norm_eps, rope_theta: expected positive"),
        ({"eos_token_ids": (3, 13)}, r"token id: expected one in \[0, 13\), got 13"),
        ({"bos_token_id": -1}, r"token id: expected one in \[0, 13\), got -1"),
    ],
)
def test_a_config_that_cannot_be(change, message) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "yarn"}, "expected llama3, linear or divisors, got 'yarn'"),
        ({"factor": 0.0}, "factor: expected a positive number"),
        ({"factor": float("inf")}, "factor: expected a positive number"),
        ({"high_freq_factor": 1.0}, "expected high_freq_factor > low_freq_factor > 0"),
        ({"divisors": (1.0,)}, "divisors belong to kind 'divisors' alone"),
        ({"kind": "divisors"}, "divisors belong to kind 'divisors' alone"),
    ],
)
def test_a_scaling_that_cannot_be(change, message) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(RopeScaling("llama3", 8.0, 1.0, 4.0, 64), **change)


def test_divisors_must_be_one_per_pair() -> None:
    with pytest.raises(UserError, match=r"expected 7 \(head_dim / 2\), got 1"):
        dataclasses.replace(CONFIG, rope_scaling=RopeScaling("divisors", divisors=(2.0,)))


def test_unknown_and_missing_keys_are_named_together() -> None:
    data = CONFIG.to_json() | {"hidden_sise": 7, "attention_bias": False}
    del data["head_dim"]
    expected = "config: unknown key 'attention_bias', unknown key 'hidden_sise', missing key 'head_dim'"
    with pytest.raises(UserError, match=expected):
        LlamaConfig.from_json(data)
    with pytest.raises(UserError, match=r"config.rope_scaling: unknown key 'type'"):
        LlamaConfig.from_json(CONFIG.to_json() | {"rope_scaling": {"kind": "linear", "type": "linear"}})
    with pytest.raises(UserError, match="config: expected a JSON object, got list"):
        LlamaConfig.from_json([])
