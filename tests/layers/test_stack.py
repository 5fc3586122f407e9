# SPDX-License-Identifier: Apache-2.0
"""Stacked blocks run all at once or in parts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from wanjax.kernels.attention import attention
from wanjax.layers.linear import linear
from wanjax.layers.stack import BlockCache, block_at, scan_blocks, stack
from wanjax.pipelines.caching.step_cache import LastBlockCache, ResidualCache

LAYERS, WIDTH = 4, 8


@pytest.fixture(scope="module")
def blocks() -> nnx.Module:
    kw = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    return stack(lambda rngs: linear(WIDTH, WIDTH, ("embed", "mlp"), **kw, rngs=rngs), LAYERS, nnx.Rngs(0))


def test_blocks_run_in_any_part(blocks):
    """Blocks of two stacks share two streams, and each block gets an array of its own."""
    x, y = jnp.ones((1, 3, WIDTH)), jnp.full((1, 2, WIDTH), 2.0)
    added = jnp.arange(LAYERS * WIDTH, dtype=jnp.float32).reshape(LAYERS, 1, 1, WIDTH)

    def apply(pair, streams, shift):
        (first, second), (x, y) = pair, streams
        return jnp.tanh(first(x) + shift), y + second(x).mean(axis=1, keepdims=True)

    expected_outputs = [(x, y)]
    for index in range(LAYERS):
        block = block_at(blocks, index)
        expected_outputs.append(apply((block, block), expected_outputs[-1], added[index]))
    parts = [None, range(LAYERS), range(LAYERS - 1), range(1, LAYERS), range(1, LAYERS - 1), range(1), range(3, LAYERS)]
    for part in parts:
        indices = range(LAYERS) if part is None else part
        outputs = scan_blocks((blocks, blocks), apply, expected_outputs[indices.start], added, part=part)
        for output, expected in zip(outputs, expected_outputs[indices.stop], strict=True):
            np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("cache", "options", "cuts", "parts"),
    [
        (BlockCache, None, (0,), [(0, 4)]),
        (BlockCache, None, (1, 3), [(0, 1), (1, 3), (3, 4)]),
        (LastBlockCache, None, (), [(0, 3), (3, 4)]),
        (LastBlockCache, None, (1, 3), [(0, 1), (1, 3), (3, 4)]),
        (LastBlockCache, (), (1,), [(3, 4)]),
        (ResidualCache, None, (1,), [(0, 1), (1, 4)]),
        (ResidualCache, (), (1,), []),
    ],
)
def test_a_step_cache_runs_its_parts_of_the_blocks(cache, options, cuts, parts):
    assert [(part.start, part.stop) for part in cache(options).parts(LAYERS, *cuts)] == parts


def test_the_backward_pass_does_not_recompute_attention(blocks):
    """The backward pass recomputes blocks from their inputs, but not the softmax of attention."""

    def apply(block, x):
        heads = block(x)[:, :, None]
        return x + attention(heads, heads, heads, implementation="chunked")[:, :, 0]

    def loss(x):
        return jnp.sum(jnp.sin(scan_blocks(blocks, apply, x)))

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((1, 5, WIDTH))).compile().as_text()
    assert len(re.findall(r" exponential\(", text)) == 2  # of the forward pass, and of the gradient
