# SPDX-License-Identifier: Apache-2.0
"""Stacked blocks as a trunk: all of them, those before the last, and the last."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from wanjax.kernels.attention import attention
from wanjax.layers.linear import linear
from wanjax.layers.stack import block_at, scan_blocks, stack, trunk_of

LAYERS, WIDTH = 4, 8


@pytest.fixture(scope="module")
def blocks() -> nnx.Module:
    kw = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    return stack(lambda rngs: linear(WIDTH, WIDTH, ("embed", "mlp"), **kw, rngs=rngs), LAYERS, nnx.Rngs(0))


def test_a_trunk_in_two_parts(blocks):
    """Two streams and an array for each block; the stacks may be several."""
    x, y = jnp.ones((1, 3, WIDTH)), jnp.full((1, 2, WIDTH), 2.0)
    added = jnp.arange(LAYERS * WIDTH, dtype=jnp.float32).reshape(LAYERS, 1, 1, WIDTH)

    def apply(pair, streams, shift):
        (first, second), (x, y) = pair, streams
        return jnp.tanh(first(x) + shift), y + second(x).mean(axis=1, keepdims=True)

    trunk = trunk_of((blocks, blocks), apply, added)
    streams, before = (x, y), None
    for index in range(LAYERS):
        before = streams
        block = block_at(blocks, index)
        streams = apply((block, block), streams, added[index])
    for got, wanted in (
        (trunk.all((x, y)), streams),
        (trunk.before_last((x, y)), before),
        (trunk.last(before), streams),
    ):
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_backward_pass_does_not_attend_again(blocks):
    """Blocks are computed again from their inputs, but not their softmax."""

    def apply(block, x):
        heads = block(x)[:, :, None]
        return x + attention(heads, heads, heads, implementation="chunked")[:, :, 0]

    def loss(x):
        return jnp.sum(jnp.sin(scan_blocks(blocks, apply, x)))

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((1, 5, WIDTH))).compile().as_text()
    assert len(re.findall(r" exponential\(", text)) == 2  # of the forward pass, and of the gradient
