# SPDX-License-Identifier: Apache-2.0
"""Gradients and rounding of projections, which have rules of their own on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.compare import error
from wanjax.kernels import target
from wanjax.layers.linear import TOKEN_BLOCK, linear


@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 7, 5), (2, 3, 7, 5)])
def test_gradients_of_a_projection_are_exact(shape):
    layer = linear(5, 4, (None, None), dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in (shape, (*shape[:-1], 4)))
    graphdef, weights = nnx.split(layer)
    y, pull_back = jax.vjp(lambda weights, x: nnx.merge(graphdef, weights)(x), weights, x)
    weight_gradients, x_gradient = pull_back(g)
    kernel, rows, g_rows = np.float64(layer.kernel[...]), np.float64(x).reshape(-1, 5), np.float64(g).reshape(-1, 4)
    assert error(y, np.float64(x) @ kernel) <= 1e-6
    assert error(x_gradient, np.float64(g) @ kernel.T) <= 1e-6
    assert error(weight_gradients["kernel"][...], rows.T @ g_rows) <= 1e-6
    assert error(weight_gradients["bias"][...], g_rows.sum(axis=0)) <= 1e-6


def test_no_gradient_of_frozen_weights_is_computed():
    """Only the products that a trained input needs are in the program: the forward one, and one backward."""
    layer = linear(32, 16, (None, None), dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    program = jax.jit(jax.grad(lambda x: (layer(x) ** 2).sum())).lower(jnp.ones((2, 8, 32))).compile()
    assert program.as_text().count(" dot(") == 2


@pytest.mark.parametrize(
    "instructions", [[], ["amx_bf16"], ["avx512_bf16"]], ids=["elsewhere", "with AMX", "with AVX-512"]
)
@pytest.mark.parametrize("tokens", [40, 2 * TOKEN_BLOCK + 7])
def test_products_of_bfloat16_are_rounded_once(monkeypatch, instructions, tokens):
    monkeypatch.setattr(target, "instructions", lambda: frozenset(instructions))
    layer = linear(256, 64, (None, None), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, bias=False, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, tokens, 256)), jnp.bfloat16)
    y, pull_back = jax.vjp(jax.jit(layer), x)
    (x_gradient,) = pull_back(y)
    exact = np.float64(x) @ np.float64(layer.kernel[...])
    assert y.dtype == x_gradient.dtype == jnp.bfloat16
    assert np.all(np.abs(np.float64(y) - exact) <= 2**-8 * np.abs(exact) + 1e-6)  # half a unit in the last place
