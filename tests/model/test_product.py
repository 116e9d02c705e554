"""The one matrix product with parameters."""

import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.model.layers import look_up, product


@pytest.mark.parametrize(
    ("in_shape", "out_shape"),
    [((7,), (11,)), ((7,), (11, 13)), ((5, 7), (11,)), ((5, 7, 3), (11,)), ((7,), (11, 3, 5))],
)
def test_contracts_the_last_axes_of_out_in_weights(in_shape, out_shape) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, 3, *in_shape), np.float32)
    weight = rng.standard_normal((*out_shape, *in_shape), np.float32)
    got = jax.jit(product, static_argnums=2)(x, weight, len(in_shape))
    expected = np.tensordot(
        x.astype(np.float64),
        weight.astype(np.float64),
        (range(2, 2 + len(in_shape)), range(len(out_shape), len(out_shape) + len(in_shape))),
    )
    assert got.dtype == jnp.float32
    assert got.shape == (2, 3, *out_shape)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_bfloat16_accumulates_in_float32(rows) -> None:
    """Counting to 1009 in bfloat16 would stop at 256; an input rounded to bfloat16 is no reason to round the sum."""
    # Not under one jit: XLA may drop a rounding to bfloat16 that is followed by a conversion to float32.
    got = product(jnp.ones((1, rows, 1009)), jnp.ones((5, 1009), jnp.bfloat16), 1)
    np.testing.assert_array_equal(got, np.full((1, rows, 5), 1009, np.float32))


def test_bfloat16_weights_meet_bfloat16_inputs() -> None:
    rng = np.random.default_rng(11)
    x = rng.standard_normal((2, 3, 7), np.float32)
    weight = rng.standard_normal((5, 7), np.float32).astype(ml_dtypes.bfloat16)
    got = jax.jit(product, static_argnums=2)(x, weight, 1)
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_allclose(got, rounded @ weight.astype(np.float64).T, atol=1e-6)


def dots(dtype: type, rows: int) -> list[str]:
    """Result shapes of the products in the executable of a product of so many rows."""
    x, weight = jax.ShapeDtypeStruct((1, rows, 77), jnp.float32), jax.ShapeDtypeStruct((13, 77), dtype)
    compiled = jax.jit(product, static_argnums=2).lower(x, weight, 1).compile()
    return re.findall(r"= (\w+\[[\d,]+\])\S* dot\(", compiled.as_text())


def test_one_row_of_bfloat16_runs_as_two() -> None:
    assert dots(jnp.bfloat16, 1) == ["f32[2,13]"]
    assert dots(jnp.bfloat16, 3) == ["f32[3,13]"]


@pytest.mark.parametrize(("in_shape", "out_shape"), [((11, 7, 3), (13,)), ((77,), (13, 3, 5))])
def test_weights_are_not_moved_before_the_product(in_shape, out_shape) -> None:
    """XLA's CPU backend transposes a weight of rank above 2 at every pass: 190 ms a token instead of 23."""
    x = jax.ShapeDtypeStruct((1, 5, *in_shape), jnp.float32)
    weight = jax.ShapeDtypeStruct((*out_shape, *in_shape), jnp.float32)
    text = jax.jit(product, static_argnums=2).lower(x, weight, len(in_shape)).compile().as_text()
    found = re.findall(r"= f32\[([\d,]+)\]\S* ([\w-]+)\(", text.split("ENTRY")[1])
    ops = {op for dims, op in found if math.prod(map(int, dims.split(","))) == math.prod(weight.shape)}
    assert "parameter" in ops
    assert ops <= {"parameter", "bitcast"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_the_product(dtype):
    """In the operands' dtype: float32 to the last digits, bfloat16 to its own step against the float64 truth."""
    keys = jax.random.split(jax.random.key(0), 3)
    x_BTI = jax.random.normal(keys[0], (2, 3, 7)).astype(dtype)
    weight_OI = jax.random.normal(keys[1], (5, 7)).astype(dtype)
    pull_BTO = jax.random.normal(keys[2], (2, 3, 5))
    _, back = jax.vjp(lambda x, weight: product(x, weight, 1), x_BTI, weight_OI)
    to_x, to_weight = back(pull_BTO)
    assert (to_x.dtype, to_weight.dtype) == (x_BTI.dtype, weight_OI.dtype)
    x, weight, pull = (np.asarray(array, np.float64) for array in (x_BTI, weight_OI, pull_BTO))
    tolerance = {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    np.testing.assert_allclose(np.asarray(to_x, np.float64), pull @ weight, atol=tolerance)
    np.testing.assert_allclose(np.asarray(to_weight, np.float64), np.einsum("bto,bti->oi", pull, x), atol=tolerance)


def test_a_lookup_in_a_loop_copies_no_table():
    def chain(table_VD, id_B):
        def step(id_B, _):
            row_BD = look_up(table_VD, id_B)
            return jnp.argmax(row_BD, axis=-1).astype(jnp.int32), row_BD

        return jax.lax.scan(step, id_B, length=3)

    table_VD, id_B = jnp.zeros((4096, 64), jnp.bfloat16), jnp.zeros((1,), jnp.int32)
    beside_what_goes_in_and_out = jax.jit(chain).lower(table_VD, id_B).compile().memory_analysis().temp_size_in_bytes
    assert beside_what_goes_in_and_out < table_VD.nbytes / 100
