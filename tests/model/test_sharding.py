"""The rules table, meshes as users write them, and where every parameter lives."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import define, random_params
from jaxspec.model.params import param_specs
from jaxspec.sharding import RULES, make_sharding, parse_mesh

CONFIG = LlamaConfig(
    vocab_size=20,
    hidden_size=14,
    intermediate_size=44,
    num_layers=2,
    num_heads=12,
    num_kv_heads=4,
    head_dim=6,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
# SmolLM2-135M: 3 kv heads do not divide four ways, ffn and vocabulary do.
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=1,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def partitions(config: LlamaConfig, mesh: str) -> dict[str, tuple]:
    shardings = define(config, make_sharding(mesh), jnp.dtype("float32")).shardings()
    return {name: tuple(sharding.spec) for name, sharding in shardings.items()}


def test_every_parameter_of_a_model() -> None:
    layer = {
        "attn_norm": (None,),
        "qkv": ("model", None, None, None),  # [K, G + 2, H, D]: a group stays together
        "o": (None, "model", None, None),  # [D, K, G, H]
        "mlp_norm": (None,),
        "gate_up": ("model", None, None),  # [F, 2, D]
        "down": (None, "model"),  # [D, F]
    }
    expected = {"embed": ("model", None), "final_norm": (None,), "lm_head": ("model", None)}
    for index in range(2):
        expected |= {f"layers.{index}.{leaf}": spec for leaf, spec in layer.items()}
    assert partitions(CONFIG, "4") == expected
    assert partitions(CONFIG, "data=2,model=2") == expected


def test_what_does_not_divide_is_replicated_and_described() -> None:
    found = partitions(SMOLLM2, "4")
    assert found["layers.0.qkv"] == (None, None, None, None)
    assert found["layers.0.o"] == (None, None, None, None)
    assert found["layers.0.gate_up"] == ("model", None, None)
    assert found["layers.0.down"] == (None, "model")
    assert found["embed"] == ("model", None)
    specs = {name: (spec.axes, spec.shape) for name, spec in param_specs(SMOLLM2).items()}
    assert make_sharding("4").describe(specs) == [
        "layers.0.qkv: kv_heads=3 is not divisible by model=4: replicated",
        "layers.0.o: kv_heads=3 is not divisible by model=4: replicated",
    ]
    assert make_sharding("1").describe(specs) == []


def test_parameters_are_what_the_declaration_says() -> None:
    """The module's own tree and the declared names, shapes and places: the same set, really placed there."""
    model = define(CONFIG, make_sharding("data=2,model=2"), jnp.dtype("bfloat16"))
    params = random_params(model, 3)
    abstract = model.abstract_params()
    assert {name: spec.shape for name, spec in param_specs(CONFIG).items()} == {n: p.shape for n, p in params.items()}
    for name, array in params.items():
        assert array.sharding == abstract[name].sharding
        assert array.dtype == abstract[name].dtype == jnp.bfloat16
        ways = 2 if "model" in tuple(abstract[name].sharding.spec) else 1
        assert array.addressable_shards[0].data.size * ways == array.size
    assert "lm_head" not in param_specs(SMOLLM2)


def test_two_axes_on_one_mesh_axis_collide() -> None:
    sharding = make_sharding("4")
    with pytest.raises(ValueError, match=r"axes \('vocab', 'ffn'\): two of them map to mesh axis 'model'"):
        sharding.spec(("vocab", "ffn"), (20, 44))
    # A collision is one of the rules, not of the sizes at hand.
    with pytest.raises(ValueError, match="two of them map to mesh axis 'model'"):
        sharding.spec(("kv_heads", "ffn"), (3, 44))


def test_an_axis_without_a_rule_and_a_wrong_rank_raise() -> None:
    sharding = make_sharding("4")
    with pytest.raises(KeyError, match="heads_of_state"):
        sharding.spec(("heads_of_state",), (4,))
    with pytest.raises(ValueError, match=r"expected one per dimension of \(4, 5\)"):
        sharding.spec(("vocab",), (4, 5))


def test_specs_on_both_axes() -> None:
    sharding = make_sharding("data=2,model=2")
    assert sharding.spec(("batch", "kv_heads", "slots", "head_dim"), (6, 4, 7, 6)) == PartitionSpec(
        "data", "model", None, None
    )
    assert sharding.spec(("batch", None), (5, 4)) == PartitionSpec(None, None)
    assert {axis for axis in RULES.values() if axis} == {"data", "model"}


@pytest.mark.parametrize(
    ("text", "data", "model"),
    [
        ("auto", 1, 4),
        ("4", 1, 4),
        (" 2 ", 1, 2),
        ("data=2,model=2", 2, 2),
        ("model=2, data=1", 1, 2),
        ("model=3", 1, 3),
        ('{"data": 2, "model": 1}', 2, 1),
        ('{"model": 4}', 1, 4),
        ({"data": 4}, 4, 1),
        ({}, 1, 1),
    ],
)
def test_meshes_as_users_write_them(text, data, model) -> None:
    assert parse_mesh(text, 4) == {"data": data, "model": model}


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "model", "model=", "model=x", "model=0", "rows=2", "data=2;model=2", "model=2,", "model=2,model=4",
     '{"model": 1.5}', '{"model": true}', '{"model": "2"}', "{", "[2, 2]", "2x2", "²", {"model": 0}, {"expert": 2}],
)  # fmt: skip
def test_meshes_that_are_none(text) -> None:
    with pytest.raises(UserError, match=r"^mesh: expected"):
        parse_mesh(text, 4)


@pytest.mark.parametrize("text", ["5", "data=2,model=3", {"data": 5}])
def test_meshes_that_need_more_devices(text) -> None:
    with pytest.raises(UserError, match=r"needs \d devices, 4 visible"):
        parse_mesh(text, 4)


def test_the_mesh_takes_the_first_devices_with_automatic_axes() -> None:
    mesh = make_sharding("data=1,model=2").mesh
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mesh.axis_names == ("data", "model")
    assert list(mesh.devices.flat) == jax.devices()[:2]
