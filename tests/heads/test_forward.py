"""What no golden covers: the options of the formats, a shared LM head, meshes. Oracles in float64, one token a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.heads.config import EagleConfig, MedusaConfig
from jaxspec.model.heads.definition import HeadsDef, define_heads, random_heads
from jaxspec.model.heads.params import heads_param_specs
from jaxspec.model.heads.parts import TargetTables
from jaxspec.model.rope import inverse_frequencies
from jaxspec.sharding import make_sharding

FLOAT32 = jnp.dtype("float32")
TOLERANCE = 1e-5
NO_TABLES = TargetTables(None, None)  # for heads that have their own
EAGLE3 = {
    "method": "eagle3",
    "hidden_size": 19,
    "target_hidden_size": 11,
    "intermediate_size": 23,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 211,
    "vocab_size": 53,
    "draft_vocab_size": 17,
    "fc_bias": False,
    "own_embed": True,
}
# Splits on four devices: kv heads, ffn, vocabularies.
SPLITS = EAGLE3 | {"num_heads": 8, "num_kv_heads": 4, "intermediate_size": 44, "vocab_size": 52, "draft_vocab_size": 16}


def random_params(heads: HeadsDef, seed: int) -> dict[str, np.ndarray]:
    """Every float leaf random, norms and biases too; target ids ascending."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, spec in heads.abstract_params().items():
        if name == "target_ids":
            ids = rng.permutation(heads.config.vocab_size)[: spec.shape[0]]
            params[name] = np.sort(ids).astype(np.int32)
        else:
            params[name] = rng.normal(0, 0.4, spec.shape).astype(np.float32)
    return params


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def after_attention(
    p: dict[str, np.ndarray], read: np.ndarray, residual: np.ndarray, config: EagleConfig
) -> np.ndarray:
    """A row of one token attends to itself alone: its heads give its kv head's value."""
    qkv = np.einsum("kghd,bd->bkgh", p["layers.0.qkv"], read)
    value = qkv[:, :, -1]  # [B, K, H]
    attended = np.repeat(value[:, :, None], config.decoder.group_size, axis=2)
    x = residual + np.einsum("dkgh,bkgh->bd", p["layers.0.o"], attended)
    pair = np.einsum("fud,bd->bfu", p["layers.0.gate_up"], norm(x, p["layers.0.mlp_norm"], config.rms_norm_eps))
    return x + (silu(pair[..., 0]) * pair[..., 1]) @ p["layers.0.down"].T


def run_eagle(heads: HeadsDef, params, tokens, features, target=NO_TABLES):
    """One token per row, the first of its sequence: hidden [B, D], draft logits [B, d]."""

    @jax.jit
    def run(params, tokens, features):
        module, cache = heads.merge(params), heads.empty_cache(len(tokens), 5).layers[0]
        hidden, _ = module(tokens[:, None], features[:, None], jnp.zeros((len(tokens), 1), jnp.int32), cache, target)
        return hidden[:, 0], module.logits(hidden, target)[:, 0]

    shardings = heads.shardings()
    placed = {name: jax.device_put(array, shardings[name]) for name, array in params.items()}
    return tuple(np.asarray(array) for array in run(placed, tokens, features))


@pytest.mark.parametrize("mesh", ["1", "4", "data=2,model=2"])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_eagle3_of_another_width_with_embeddings_of_its_own(norm_before_residual, mesh) -> None:
    config = EagleConfig(**(SPLITS | {"norm_before_residual": norm_before_residual}))
    heads = define_heads(config, make_sharding(mesh), FLOAT32)
    params = random_params(heads, 5)
    rng = np.random.default_rng(6)
    tokens, aux = np.asarray([3, 51], np.int32), rng.normal(size=(2, 33)).astype(np.float32)
    own = rng.normal(size=(2, 19)).astype(np.float32)
    p = {name: array.astype(np.float64) for name, array in params.items()}
    for features, hidden in ((aux, aux.astype(np.float64) @ p["fc"].T), (own, own.astype(np.float64))):
        normed = norm(hidden, p["layers.0.hidden_norm"], config.rms_norm_eps)
        embedded = norm(p["embed"][tokens], p["layers.0.embed_norm"], config.rms_norm_eps)
        residual = normed if norm_before_residual else hidden
        expected = after_attention(p, np.concatenate([embedded, normed], axis=-1), residual, config)
        got, logits = run_eagle(heads, params, tokens, features)
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
        judged = norm(expected, p["norm"], config.rms_norm_eps) @ p["lm_head"].T
        np.testing.assert_allclose(logits, judged, atol=TOLERANCE, rtol=TOLERANCE)


def test_eagle1_with_the_target_s_tables() -> None:
    """No embeddings, no LM head, no bias: the embedding comes first, and no norm comes before attention."""
    config = EagleConfig(
        **(EAGLE3 | {"method": "eagle", "target_hidden_size": 19, "draft_vocab_size": 53, "own_embed": False})
    )
    heads = define_heads(config, make_sharding("1"), FLOAT32)
    assert not {"embed", "fc_bias", "norm", "lm_head", "target_ids"} & set(heads_param_specs(config))
    params = random_params(heads, 8)
    rng = np.random.default_rng(9)
    table, head = (rng.normal(size=(53, 19)).astype(np.float32) for _ in range(2))
    target = TargetTables(lambda tokens: jnp.asarray(table)[tokens], lambda hidden: hidden @ jnp.asarray(head).T)
    tokens, features = np.asarray([7, 52, 0], np.int32), rng.normal(size=(3, 19)).astype(np.float32)
    p = {name: array.astype(np.float64) for name, array in params.items()}
    x = np.concatenate([table[tokens], features], axis=-1).astype(np.float64) @ p["fc"].T
    expected = after_attention(p, x, x, config)
    got, logits = run_eagle(heads, params, tokens, features, target)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
    np.testing.assert_allclose(logits, expected @ head.T.astype(np.float64), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("own", [False, True])
def test_medusa_heads_of_two_blocks(own) -> None:
    config = MedusaConfig(hidden_size=19, vocab_size=53, num_heads=3, num_layers=2, own_lm_head=own)
    heads = define_heads(config, make_sharding("1"), FLOAT32)
    params = random_params(heads, 11)
    rng = np.random.default_rng(12)
    shared_head = rng.normal(size=(53, 19)).astype(np.float32)
    target = TargetTables(lambda tokens: tokens, lambda hidden: hidden @ jnp.asarray(shared_head).T)
    hidden = rng.normal(size=(2, 5, 19)).astype(np.float32)
    logits = np.asarray(jax.jit(lambda params: heads.merge(params)(hidden, target))(params))
    assert logits.shape == (3, 2, 5, 53)
    for head in range(3):
        x = hidden.astype(np.float64)
        for block in range(2):
            x = x + silu(x @ params[f"heads.{head}.block{block}"].T + params[f"heads.{head}.block{block}_bias"])
        last = params[f"heads.{head}.lm_head"] if own else shared_head
        np.testing.assert_allclose(logits[head], x @ last.T, atol=1e-4, rtol=1e-4)


def test_parameters_lie_where_the_declaration_says() -> None:
    heads = define_heads(EagleConfig(**SPLITS), make_sharding("4"), jnp.dtype("bfloat16"))
    params, abstract = random_heads(heads, 3), heads.abstract_params()
    assert {name: spec.shape for name, spec in heads_param_specs(heads.config).items()} == {
        name: array.shape for name, array in params.items()
    }
    split = {"embed", "layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down", "lm_head"}
    for name, array in params.items():
        assert (array.sharding, array.dtype) == (abstract[name].sharding, abstract[name].dtype)
        assert array.dtype == (jnp.int32 if name == "target_ids" else jnp.bfloat16)
        ways = 4 if name in split else 1
        assert array.addressable_shards[0].data.size * ways == array.size, name


def test_restored_on_four_devices_as_on_one(running) -> None:
    """The same folder on both meshes: token ids are never cast, weights are split, outputs agree."""
    one, four = running("eagle3", "1"), running("eagle3", "4")
    assert four.params["target_ids"].dtype == jnp.int32
    assert len(four.params["lm_head"].sharding.device_set) == 4
    assert four.params["lm_head"].addressable_shards[0].data.shape == (32, 64)
    rng = np.random.default_rng(2)
    tokens, aux = rng.integers(0, 512, (2, 9)), rng.normal(size=(2, 9, 192)).astype(np.float32)
    positions = np.tile(np.arange(9), (2, 1))
    results = [heads.eagle(tokens, aux, positions, heads.cache(2, 11))[:2] for heads in (one, four)]
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, atol=TOLERANCE)


def test_a_medusa_head_has_no_cache() -> None:
    heads = define_heads(MedusaConfig(19, 53, 3, 1, own_lm_head=True), make_sharding("1"), FLOAT32)
    with pytest.raises(ValueError, match="no cache"):
        heads.empty_cache(1, 5)


def test_rotary_frequencies_are_the_head_s_own(running) -> None:
    """The target's llama3 scaling and theta stay with the target."""
    eagle3 = running("eagle3", "1")
    expected = (1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)).astype(np.float32)
    np.testing.assert_allclose(inverse_frequencies(eagle3.definition.config.decoder), expected, rtol=1e-6)
    assert eagle3.target.config.rope_theta == 500000.0
