# SPDX-License-Identifier: Apache-2.0
"""Products with 8-bit weights, and with 8-bit inputs, are compared with their formula in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention import normal
from tests.support.compare import error
from tests.support.quantized import DTYPE_OF, LARGEST, formula, outliers, rotated
from wanjax.errors import UnsupportedError, WanjaxError
from wanjax.kernels.hadamard import regular_hadamard
from wanjax.kernels.quantized_matmul import (
    QuantizedWeight,
    choose_hadamard_size,
    quantize_tokens,
    quantize_weight,
    quantized_matmul,
    reference,
)

BOUND = {"float32": 1e-6, "bfloat16": 3e-3}


def test_the_rotation_is_orthonormal_and_symmetric():
    for size in (4, 16, 64, 256):
        matrix = np.asarray(regular_hadamard(size), np.float64)
        assert (matrix @ matrix.T == np.eye(size)).all()
        assert (matrix == matrix.T).all()
        assert (np.abs(matrix) == size**-0.5).all()


def test_the_rotation_size_divides_the_channels():
    assert [choose_hadamard_size(features) for features in (5120, 13824, 192, 48, 100)] == [256, 256, 64, 16, 0]


@pytest.mark.parametrize("hadamard_size", [0, 16, 64])
@pytest.mark.parametrize("number_format", ["int8", "fp8"])
def test_a_weight_is_rounded_by_output_channel(number_format, hadamard_size):
    kernel = normal(0, 192, 40)
    values, scale = jax.jit(partial(quantize_weight, number_format=number_format, hadamard_size=hadamard_size))(kernel)
    assert (values.dtype, values.shape, scale.dtype, scale.shape) == (
        DTYPE_OF[number_format],
        (192, 40),
        np.float32,
        (40,),
    )
    columns = rotated(np.asarray(kernel, np.float64).T, hadamard_size)
    np.testing.assert_allclose(scale, np.abs(columns).max(axis=1) / LARGEST[number_format], rtol=1e-6)
    scaled = columns / np.asarray(scale, np.float64)[:, None]
    step_size = np.maximum(2.0 ** (np.floor(np.log2(np.abs(scaled))) - 3), 2.0**-9) if number_format == "fp8" else 1
    assert (np.abs(np.asarray(values, np.float64).T - scaled) <= step_size * 0.5001).all()
    assert np.abs(np.asarray(values, np.float64)).max() == LARGEST[number_format]


def test_rounding_is_to_even_and_keeps_zeros():
    kernel = jnp.asarray([[127.0, 0.0], [0.5, 0.0], [1.5, 0.0], [-2.5, 0.0]])
    values, scale = quantize_weight(kernel, number_format="int8", hadamard_size=0)
    np.testing.assert_array_equal(values, [[127, 0], [0, 0], [2, 0], [-2, 0]])
    assert (np.asarray(scale) > 0).all()


def test_a_rotation_that_does_not_divide_is_refused():
    for hadamard_size in (64, 32):
        with pytest.raises(WanjaxError, match="power of 4"):
            quantize_weight(normal(0, 96, 8), number_format="int8", hadamard_size=hadamard_size)


CALLS = [
    (number_format, activations, hadamard_size)
    for number_format in ("int8", "fp8")
    for activations in (None, number_format)
    for hadamard_size in (0, 64)
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("number_format", "activations", "hadamard_size"), CALLS)
def test_products_are_near_the_formula(number_format, activations, hadamard_size, dtype):
    x, bias = outliers(1, 2, 9, 128, dtype=dtype), normal(2, 24)
    weight = quantize_weight(normal(0, 128, 24), number_format=number_format, hadamard_size=hadamard_size)
    options = {"hadamard_size": hadamard_size, "activations": activations, "dtype": jnp.dtype(dtype)}
    y = jax.jit(partial(quantized_matmul, **options))(x, weight, bias)
    exact = formula(x, weight, bias, hadamard_size, activations)
    assert (y.dtype, y.shape) == (dtype, (2, 9, 24))
    assert error(y.astype(jnp.float32), exact) <= BOUND[dtype]
    assert error(reference.quantized_matmul(x, weight, bias, **options).astype(jnp.float32), exact) <= BOUND[dtype]


def test_a_single_row_and_a_single_scale_are_multiplied():
    x, values = normal(0, 64), jnp.asarray(np.random.default_rng(1).integers(-127, 128, (64, 8)), jnp.int8)
    weight = QuantizedWeight(values, jnp.full(1, 0.01, jnp.float32))
    for activations in (None, "int8"):
        y = quantized_matmul(x, weight, None, hadamard_size=0, activations=activations, dtype="float32")
        assert error(y, formula(x, weight, None, 0, activations)) <= 1e-6


def test_qwix_multiplies_the_same_numbers():
    """Google's library multiplies and scales the same 8-bit numbers to the same bits."""
    qwix = pytest.importorskip("qwix")
    x = outliers(0, 9, 128)
    options: Any = {"hadamard_size": 64, "activations": "int8", "dtype": "float32"}
    weight = quantize_weight(normal(1, 128, 24), number_format="int8", hadamard_size=64)
    rows = quantize_tokens(x, weight, **options)
    operands = (rows.values, rows.scale), (weight.values, weight.scale[None])
    tokens, kernel = (qwix.QArray(qvalue=values, scale=scale) for values, scale in operands)
    with jax.numpy_dtype_promotion("standard"):
        expected = qwix.dot_general(tokens, kernel, (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(quantized_matmul(rows, weight, None, **options), expected)


def test_rows_of_zeros_give_the_bias():
    weight, bias = quantize_weight(normal(0, 64, 8), number_format="int8", hadamard_size=16), normal(1, 8)
    y = quantized_matmul(jnp.zeros((3, 64)), weight, bias, hadamard_size=16, activations="int8", dtype="float32")
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (3, 8)))


def test_rotation_keeps_outliers_from_harming_other_channels():
    """The error of rounding is measured against the product of the original weight."""
    x, kernel = outliers(0, 64, 512), normal(1, 512, 96)
    exact, errors = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64), []
    for hadamard_size in (0, 256):
        weight = quantize_weight(kernel, number_format="int8", hadamard_size=hadamard_size)
        y = quantized_matmul(x, weight, None, hadamard_size=hadamard_size, activations="int8", dtype="float32")
        errors.append(error(y, exact))
    assert errors[1] < 0.02 < 3 * errors[1] < errors[0]


@pytest.mark.parametrize("hadamard_size", [0, 64])
@pytest.mark.parametrize("number_format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_and_bias_have_gradients_and_the_weight_has_none(number_format, hadamard_size, dtype):
    x, bias, g = normal(1, 2, 5, 128, dtype=dtype), normal(2, 24, dtype=dtype), normal(3, 2, 5, 24, dtype=dtype)
    weight = quantize_weight(normal(0, 128, 24), number_format=number_format, hadamard_size=hadamard_size)
    product = partial(quantized_matmul, hadamard_size=hadamard_size, activations=None, dtype=dtype)
    dx, db = jax.jit(lambda x, bias: jax.vjp(lambda x, bias: product(x, weight, bias), x, bias)[1](g))(x, bias)
    assert (dx.dtype, db.dtype) == (dtype, dtype)
    kernel = np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)
    expected = np.asarray(g, np.float64) @ rotated(kernel.T, hadamard_size)
    assert error(dx.astype(jnp.float32), expected) <= 2 * BOUND[dtype]
    assert error(db.astype(jnp.float32), np.asarray(g, np.float64).sum((0, 1))) <= BOUND[dtype]
    scale_gradient = jax.grad(lambda scale: product(x, weight._replace(scale=scale), bias).astype(jnp.float32).sum())
    assert not np.any(scale_gradient(weight.scale))


def test_the_backward_pass_saves_the_weight_in_8_bits():
    """A scan over blocks would otherwise save every weight in 16 bits."""
    weight = quantize_weight(normal(0, 128, 64), number_format="int8", hadamard_size=64)
    product = partial(quantized_matmul, weight=weight, bias=None, hadamard_size=64, activations=None, dtype="bfloat16")
    residuals = jax.tree.leaves(jax.vjp(product, normal(1, 4, 128, dtype="bfloat16"))[1])
    assert {x.dtype.name for x in residuals if x.size >= 128 * 64} == {"int8"}


def test_a_gradient_of_rounded_inputs_is_refused():
    weight = quantize_weight(normal(0, 64, 8), number_format="int8", hadamard_size=0)

    def loss(x):
        return quantized_matmul(x, weight, None, hadamard_size=0, activations="int8", dtype="float32").sum()

    with pytest.raises(UnsupportedError, match="activations=None"):
        jax.grad(loss)(normal(1, 3, 64))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": jnp.zeros((2, 32))}, r"\[I O\]"),
        ({"bias": jnp.zeros(3)}, "bias"),
        ({"weight": QuantizedWeight(jnp.zeros((64, 8), jnp.int8), jnp.ones(2))}, "output channels"),
        ({"weight": QuantizedWeight(jnp.zeros((64, 8), jnp.int16), jnp.ones(8))}, "int16"),
        ({"hadamard_size": 256}, "power of 4"),
        ({"dtype": "int8"}, "float32"),
        ({"activations": "fp8"}, "fp8"),
    ],
    ids=str,
)
def test_a_mismatch_of_operands_is_refused(change, words):
    weight = QuantizedWeight(jnp.zeros((64, 8), jnp.int8), jnp.ones(8))
    call = {"x": jnp.zeros((2, 64)), "weight": weight, "bias": None, "hadamard_size": 64}
    with pytest.raises(WanjaxError, match=words):
        quantized_matmul(**call | {"activations": None, "dtype": "float32"} | change)
