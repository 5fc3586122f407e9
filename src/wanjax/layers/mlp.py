# SPDX-License-Identifier: Apache-2.0
"""Two-layer perceptrons."""

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.kernels.saved import saved
from wanjax.layers.linear import Axes, linear

gelu = partial(jax.nn.gelu, approximate=False)
gelu_tanh = partial(jax.nn.gelu, approximate=True)


class MLP(nnx.Module):
    """`down(activation(up(x)))`, both with biases."""

    def __init__(
        self,
        features: tuple[int, int, int],
        axes: Axes,
        activation: Callable[[jax.Array], jax.Array],
        *,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        """`features` and their logical `axes` are those of the input, of the layer between, and of the output."""
        width_in, inside, width_out = features
        self.up = linear(width_in, inside, axes[:2], dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.down = linear(inside, width_out, axes[1:], dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.activation = activation

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "*B E"]) -> Float[Array, "*B _E"]:
        return saved(self.down(self.activation(self.up(x))))
