# SPDX-License-Identifier: Apache-2.0
"""Dense projections with logical axes on their weights."""

from collections.abc import Sequence
from math import ceil
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.typing import DTypeLike

from wanjax.kernels.target import multiplies_bfloat16, target
from wanjax.layers.placement import Axes, with_axes
from wanjax.sharding import constrain, current, gather_weight

Projection = TypeVar("Projection", bound=nnx.Module)
default_kernel_init = nnx.initializers.lecun_normal()
TOKEN_BLOCK = 1300  # tokens in a block


class Linear(nnx.Linear):
    """A dense projection. For tokens [B L E] on several devices it gathers its weights and shards its result.

    `axis` is the logical axis of the result's channels.
    """

    def __init__(self, *sizes: int, axis: str | None, **kw):
        super().__init__(*sizes, **kw, promote_dtype=_promote, dot_general=dot_general)
        self.axis = axis

    def __call__(self, inputs: jax.Array, out_sharding: None = None) -> jax.Array:
        y = super().__call__(inputs, out_sharding)
        return constrain(y, ("batch", "length", self.axis)) if _are_tokens(y) else y


def _promote(operands: tuple, /, *, dtype: DTypeLike | None = None, inexact: bool = True) -> Any:
    """Cast the operands of a projection to its dtype, then gather its kernel, so that a narrower dtype is sent."""
    inputs, kernel, bias = promote_dtype(operands, dtype=dtype, inexact=inexact)
    return inputs, gather_weight(kernel) if _are_tokens(inputs) else kernel, bias


def dot_general(x: jax.Array, kernel: jax.Array, dimensions: Any, **options: Any) -> jax.Array:
    """Compute the matrix product of a projection, [... I] by [I O]; on CPUs with a faster custom gradient."""
    if target(x).platform == "cpu":
        return _product(x, kernel)
    return jax.lax.dot_general(x, kernel, dimensions, **options)


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Compute the product on CPUs, where XLA is a quarter slower for a transposed view than for a transposed copy.

    On processors with bfloat16 instructions, a product of bfloat16 is computed with a float32 result and rounded. If it
    has more input than output channels, it is computed in blocks of tokens, which is faster in XLA's matmul library.
    """
    if not multiplies_bfloat16(x):
        return _dot(x, kernel)
    is_narrowing = kernel.shape[0] > kernel.shape[1] and current().single_device
    blocks = ceil(x.shape[-2] / TOKEN_BLOCK) if is_narrowing and x.ndim > 1 else 1
    parts = [_dot(part, kernel, jnp.float32).astype(x.dtype) for part in jnp.array_split(x, blocks, axis=-2)]
    return parts[0] if blocks == 1 else jnp.concatenate(parts, axis=-2)


def _dot(x: jax.Array, kernel: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel), (x, kernel)


def _backward(residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    rows = tuple(range(x.ndim - 1))
    transposed = jax.lax.optimization_barrier(jnp.moveaxis(x, -1, 0))
    dx = jax.lax.dot_general(g, kernel, (((g.ndim - 1,), (1,)), ((), ())))
    return dx, jax.lax.dot_general(transposed, g, ((tuple(row + 1 for row in rows), rows), ((), ())))


_product.defvjp(_forward, _backward)


def _are_tokens(x: jax.Array) -> bool:
    return x.ndim == 3 and x.shape[1] > 1


def gather_kernels(*projections: Projection) -> Sequence[Projection]:
    """Gather the kernels of several projections before any of them is used.

    During an all-gather a TPU does nothing else, unless its SparseCores gather. A later all-gather would compete for
    links with the all-to-all of heads, which should overlap the next projection.
    """
    partitioner, dense = current(), [projection for projection in projections if isinstance(projection, Linear)]
    if partitioner.single_device or not partitioner.rules.gathered or len(dense) < len(projections):
        return projections
    kernels = [gather_weight(projection.kernel[...].astype(projection.dtype)) for projection in dense]
    return list(map(_with_kernel, projections, jax.lax.optimization_barrier(kernels)))


def _with_kernel(projection: Projection, kernel: jax.Array) -> Projection:
    graphdef, state = nnx.split(projection)
    weights: Any = state
    weights["kernel"] = weights["kernel"].replace(kernel)
    return nnx.merge(graphdef, state)


def linear(
    features_in: int,
    features_out: int,
    axes: Axes,
    *,
    bias: bool = True,
    kernel_init: nnx.Initializer = default_kernel_init,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> Linear:
    """Create a dense projection. Its kernel [in, out] has the logical axes `axes`, and its bias the last of them."""
    return Linear(
        features_in,
        features_out,
        axis=axes[-1],
        use_bias=bias,
        kernel_init=with_axes(kernel_init, axes),
        bias_init=with_axes(nnx.initializers.zeros_init(), axes[-1:]),
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
    )
