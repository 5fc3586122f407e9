# SPDX-License-Identifier: Apache-2.0
"""Dense projections with logical axes on their weights."""

from collections.abc import Sequence
from math import ceil
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.typing import DTypeLike

from wanjax.kernels.target import target, uses_bfloat16_instructions
from wanjax.layers.placement import Axes, with_axes
from wanjax.sharding import constrain, current_partitioner, gather_weight

Projection = TypeVar("Projection", bound=nnx.Module)
default_kernel_init = nnx.initializers.lecun_normal()
TOKEN_BLOCK = 1300  # the maximum number of tokens in one product of a narrowing projection


class GatherableProjection:
    """The base class of projections that gather their weight before use, if the sharding rules require it.

    Attributes:
        weight_name: The name of the parameter that is gathered.
    """

    weight_name: ClassVar[str]

    def sent_weight(self) -> jax.Array:
        """Return the weight in the dtype in which it is sent between devices."""
        raise NotImplementedError


class Linear(GatherableProjection, nnx.Linear):
    """A dense projection. `axis` is the logical axis of the result's channels.

    If tokens [B L E] are sharded over several devices, the projection gathers its weight and constrains the sharding of
    its result.
    """

    weight_name = "kernel"

    def __init__(self, *sizes: int, axis: str | None, **kw):
        super().__init__(*sizes, **kw, promote_dtype=_promote, dot_general=dot_general)
        self.axis = axis

    def __call__(self, inputs: jax.Array, out_sharding: None = None) -> jax.Array:
        y = super().__call__(inputs, out_sharding)
        return constrain(y, ("batch", "length", self.axis)) if are_tokens(y) else y

    def sent_weight(self) -> jax.Array:
        """Return the kernel in the compute dtype, which may be narrower."""
        return self.kernel[...].astype(self.dtype)


def _promote(operands: tuple, /, *, dtype: DTypeLike | None = None, inexact: bool = True) -> Any:
    """Cast the operands of a projection to its dtype, then gather its kernel. Devices then send the narrower dtype."""
    inputs, kernel, bias = promote_dtype(operands, dtype=dtype, inexact=inexact)
    return inputs, gather_weight(kernel) if are_tokens(inputs) else kernel, bias


def dot_general(x: jax.Array, kernel: jax.Array, dimensions: Any, **options: Any) -> jax.Array:
    """Compute the matrix product of a projection, [... I] by [I O]. On CPUs, it has a faster custom gradient."""
    if target(x).platform == "cpu":
        return _product(x, kernel)
    return jax.lax.dot_general(x, kernel, dimensions, **options)


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Compute the product of a projection on CPUs.

    On processors with bfloat16 instructions, a product of bfloat16 is computed with a float32 result and rounded. If
    the projection has more input than output channels, the product is computed in blocks of tokens, which is faster in
    XLA's matmul library. The backward pass copies the transposed input, because XLA is a quarter slower for a
    transposed view than for a copy.
    """
    if not uses_bfloat16_instructions(x):
        return _dot(x, kernel)
    is_narrowing = kernel.shape[0] > kernel.shape[1] and current_partitioner().is_single_device
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


def are_tokens(x: jax.Array) -> bool:
    """Return whether x has several tokens [B L E] for each video, not only one vector."""
    return x.ndim == 3 and x.shape[1] > 1


def gather_kernels(*projections: Projection) -> Sequence[Projection]:
    """Gather the weights of several projections before any of them is used.

    During an all-gather, a TPU does nothing else, unless its SparseCores gather. A later all-gather would use the same
    links as the all-to-all of heads. The all-to-all should overlap with the next projection instead.
    """
    partitioner, gathered = (
        current_partitioner(),
        [projection for projection in projections if isinstance(projection, GatherableProjection)],
    )
    if partitioner.is_single_device or not partitioner.rules.gather_weights or len(gathered) < len(projections):
        return projections
    weights = jax.lax.optimization_barrier([gather_weight(projection.sent_weight()) for projection in gathered])
    names = [projection.weight_name for projection in gathered]
    return list(map(_with_weight, projections, names, weights))


def _with_weight(projection: Projection, name: str, weight: jax.Array) -> Projection:
    graphdef, state = nnx.split(projection)
    weights: Any = state
    weights[name] = weights[name].replace(weight)
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
    """Create a dense projection. `axes` has the logical axes of its kernel [in, out]. The bias has the second of these
    axes."""
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
