# SPDX-License-Identifier: Apache-2.0
"""The kernel of a norm and SiLU, run by Pallas' interpreter, is compared with the formula in float64."""

from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.support.attention import normal
from tests.support.compare import error
from wanjax.kernels.normed_silu import BLOCK_BYTES, normed_silu, reference
from wanjax.pricing.chips import abstract_mesh, find_slice
from wanjax.pricing.compile import compile_program
from wanjax.pricing.lowering import AbstractCall
from wanjax.pricing.pallas_kernels import kernel_calls


def exact_output(x, gamma):
    x, gamma = np.asarray(x, np.float64), np.asarray(gamma, np.float64)
    y = x / np.maximum(np.sqrt(np.square(x).sum(axis=-1, keepdims=True)), 1e-12) * np.sqrt(x.shape[-1]) * gamma
    return y / (1 + np.exp(-y))


@pytest.mark.parametrize(
    ("shape", "dtype", "bound"),
    [
        ((1, 8, 3, 5, 96), "float32", 2e-6),  # lanes that channels do not fill
        ((2, 8, 4, 4, 192), "bfloat16", 4e-3),  # two videos, and a tile of lanes and a half
        ((1, 8, 20, 37, 384), "float32", 2e-6),  # several blocks, the last of them cut off
    ],
    ids=str,
)
def test_the_kernel_computes_the_norm_and_silu(shape, dtype, bound):
    cells = BLOCK_BYTES // (4 * 8 * 384)
    assert 0 < (20 * 37) % cells < 20 * 37
    x, gamma = 3 * normal(0, *shape, dtype=dtype), normal(1, shape[-1])
    x = x.at[0, 0, 0, 0].set(0)  # a cell without a direction stays zero
    y = jax.jit(partial(normed_silu, dtype=dtype, interpret=True))(x, gamma)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert error(y, exact_output(x, gamma)) <= bound
    assert error(reference(x, gamma, dtype), exact_output(x, gamma)) <= bound
    assert not np.any(y[0, 0, 0, 0])


def test_float32_is_rounded_once():
    """The bfloat16 result is the rounded float32 result; no factor is rounded before."""
    x, gamma = normal(0, 1, 8, 2, 3, 96), normal(1, 96)
    out = normed_silu(x, gamma, "bfloat16", interpret=True).astype(jnp.float32)
    expected = exact_output(x, gamma)
    assert np.all(np.abs(out - expected) <= 2**-8 * np.abs(expected) + 1e-7)


def test_the_gradient_equals_that_of_the_reference():
    x, gamma, g = normal(0, 1, 8, 2, 3, 96), normal(1, 96), normal(2, 1, 8, 2, 3, 96)
    functions = (partial(normed_silu, interpret=True), reference)
    result_gradients, expected_gradients = (
        jax.vjp(partial(function, dtype="float32"), x, gamma)[1](g) for function in functions
    )
    for gradient, expected in zip(result_gradients, expected_gradients, strict=True):
        assert error(gradient, np.asarray(expected, np.float64)) <= 1e-6


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize("chip", ["v5e-1", "v6e-1"])
def test_a_chip_s_compiler_accepts_the_kernel(chip):
    replicated = NamedSharding(abstract_mesh(find_slice(chip), {"dp": 1, "sp": 1, "tp": 1}), PartitionSpec())
    shapes = (jax.ShapeDtypeStruct(shape, "float32", sharding=replicated) for shape in ((1, 8, 30, 52, 96), (96,)))
    result = compile_program(AbstractCall(partial(normed_silu, dtype="bfloat16"), tuple(shapes)), chip)
    assert [call.name for call in kernel_calls(result).values()] == ["normed_silu"]
