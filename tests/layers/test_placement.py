# SPDX-License-Identifier: Apache-2.0
"""Weights name their logical axes."""

import jax
import jax.numpy as jnp
from flax import nnx

from wanjax.layers.linear import linear
from wanjax.layers.placement import axes_of
from wanjax.layers.stack import stack


def make_blocks() -> nnx.Module:
    def block(rngs):
        return linear(3, 4, ("embed", "heads"), dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)

    return stack(block, 2, nnx.Rngs(0))


def test_weights_name_their_axes_and_flax_settings_stay():
    assert nnx.using_eager_sharding()
    blocks = make_blocks()
    assert axes_of(blocks.kernel) == ("layers", "embed", "heads")
    assert axes_of(blocks.bias) == ("layers", "heads")


def test_modules_can_be_built_under_any_mesh():
    """A mesh ignores names of axes that it lacks."""
    with jax.set_mesh(jax.make_mesh((8,), ("chips",))):
        abstract, built = nnx.eval_shape(make_blocks), make_blocks()
    assert axes_of(abstract.kernel) == axes_of(built.kernel) == ("layers", "embed", "heads")
    assert abstract.kernel.shape == built.kernel.shape == (2, 3, 4)
