# SPDX-License-Identifier: Apache-2.0
"""Two-layer perceptrons."""

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.kernels.autodiff import save_for_backward
from wanjax.layers.linear import Axes, default_kernel_init, linear

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
        """Create the MLP; `features` and their logical `axes` are those of input, hidden layer and output."""
        width_in, hidden, width_out = features
        self.up = linear(width_in, hidden, axes[:2], dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.down = linear(hidden, width_out, axes[1:], dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.activation = activation

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "*B E"]) -> Float[Array, "*B _E"]:
        return save_for_backward(self.down(self.activation(self.up(x))))


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`, without biases."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Callable[[jax.Array], jax.Array],
        *,
        inits: tuple[nnx.Initializer, nnx.Initializer] = (default_kernel_init, default_kernel_init),
        **kw,
    ):
        """Create the MLP; `inits` initialize the kernels of `gate` and `up`, and that of `down`."""
        up_init, down_init = inits
        self.gate = linear(width, hidden, ("embed", "mlp"), bias=False, kernel_init=up_init, **kw)
        self.up = linear(width, hidden, ("embed", "mlp"), bias=False, kernel_init=up_init, **kw)
        self.down = linear(hidden, width, ("mlp", "embed"), bias=False, kernel_init=down_init, **kw)
        self.activation = activation

    def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        return self.down(self.activation(self.gate(x)) * self.up(x))
