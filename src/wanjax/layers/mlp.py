# SPDX-License-Identifier: Apache-2.0
"""Two-layer perceptrons."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.kernels.autodiff import save_for_backward
from wanjax.kernels.quantized_matmul import quantized_mlp
from wanjax.layers.linear import Axes, are_tokens, default_kernel_init, linear
from wanjax.layers.quantized import QuantizedLinear
from wanjax.layers.residual import NormedTokens, Residual, compute_norm, quantizes_tokens, run_fused
from wanjax.sharding import constrain

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
        """Create the MLP. `features` and `axes` have the widths and the logical axes of the input, the hidden layer and
        the output."""
        width_in, hidden, width_out = features
        self.up = linear(width_in, hidden, axes[:2], dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.down = linear(hidden, width_out, axes[1:], dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.activation = activation

    @jax.named_scope("mlp")
    def __call__(
        self, inputs: Float[Array, "*B E"] | NormedTokens, residual: Residual | None = None
    ) -> Float[Array, "*B _E"]:
        """Compute the MLP, including the norm of its input. If `residual` is not None, add the result to its tokens."""
        if self.activation is gelu_tanh and quantizes_tokens(self.up) and quantizes_tokens(self.down):
            return run_fused(self._quantized, inputs, residual)
        y = save_for_backward(self.down(self.activation(self.up(compute_norm(inputs)))))
        return y if residual is None else residual.add(y)

    def _quantized(self, x: Float[Array, "*B E"], **fused: Any) -> Float[Array, "*B _E"]:
        """Compute both projections by one call. On TPUs, it quantizes the hidden layer before writing it to memory."""
        up, down, gathers = self.up, self.down, are_tokens(x)
        assert isinstance(up, QuantizedLinear)
        assert isinstance(down, QuantizedLinear)
        options = up.options | {"hadamard_sizes": (up.hadamard_size, down.hadamard_size)}
        y = quantized_mlp(x, up.operands(gathers), down.operands(gathers), **options, **fused)
        return constrain(y, ("batch", "length", down.axis)) if gathers else y


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
        """Create the MLP. `inits` is a pair: the initializer of `gate` and `up`, and the initializer of `down`."""
        up_init, down_init = inits
        self.gate = linear(width, hidden, ("embed", "mlp"), bias=False, kernel_init=up_init, **kw)
        self.up = linear(width, hidden, ("embed", "mlp"), bias=False, kernel_init=up_init, **kw)
        self.down = linear(hidden, width, ("mlp", "embed"), bias=False, kernel_init=down_init, **kw)
        self.activation = activation

    def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        return self.down(self.activation(self.gate(x)) * self.up(x))
