# SPDX-License-Identifier: Apache-2.0
"""A TPU kernel for video autoencoders that computes a channel norm and SiLU in one pass over memory.

XLA makes two passes: the first sums the squares of each pixel's channels, and the second scales the channels. Between
the passes, XLA copies the sums to another memory layout and back. The kernel reads each value once.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wanjax.kernels.admitted import is_admitted
from wanjax.kernels.alignment import LANES, ceil_div, round_up
from wanjax.kernels.autodiff import with_gradient
from wanjax.kernels.target import target
from wanjax.sharding import current_partitioner

# A multiple of 8 frames fills whole tiles. XLA then keeps height and width outermost, so a transpose is free
NUM_SUBLANES = 8
# Bytes of a block in float32. Larger blocks are not faster, and smaller blocks make transfers too short
BLOCK_BYTES = 2**20
MIN_SQUARE_SUM = 1e-24  # avoids a division by zero


def normed_silu(
    x: Float[Array, "B T H W C"], gamma: Float[Array, " C"], dtype: DTypeLike, *, interpret: bool = False
) -> Float[Array, "B T H W C"]:
    """Normalise the channels of each pixel to a root mean square of gamma, and apply SiLU. The result has the given
    dtype.

    The computation is in float32, and the result is rounded once. If `interpret` is True, the kernel runs without a
    TPU, slowly, for tests. On several devices the kernel is not used, because XLA would copy its result to the layout
    of the next convolution's halo exchange.
    """
    uses_kernel = target(x).platform == "tpu" and is_admitted("normed_silu")
    is_supported = uses_kernel and x.shape[1] % NUM_SUBLANES == 0 and current_partitioner().is_single_device
    if not interpret and not is_supported:
        return reference(x, gamma, dtype)
    run = partial(call, dtype=jnp.dtype(dtype), interpret=interpret)
    return with_gradient(run, partial(reference, dtype=dtype), x, gamma)


def reference(x: Float[Array, "*B C"], gamma: Float[Array, " C"], dtype: DTypeLike) -> Float[Array, "*B C"]:
    """Compute `normed_silu` in plain JAX. This is the specification of the kernel, and gives its gradient."""
    return jax.nn.silu(channel_norm(x, gamma, jnp.float32)).astype(dtype)


def channel_norm(x: Float[Array, "*B C"], gamma: Float[Array, " C"], dtype: DTypeLike) -> Float[Array, "*B C"]:
    """Scale the channels of each pixel to a root mean square of gamma, in float32."""
    x32, gamma = x.astype(jnp.float32), gamma.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + gamma.shape)
    norm = jnp.sqrt(jnp.maximum(jnp.sum(x32 * x32, axis=-1, keepdims=True), MIN_SQUARE_SUM))
    return (x32 * (x.shape[-1] ** 0.5 / norm) * gamma).astype(dtype)


def call(
    x: Float[Array, "B T H W C"], gamma: Float[Array, " C"], dtype: jnp.dtype, interpret: bool
) -> Float[Array, "B T H W C"]:
    batch, frames, height, width, channels = x.shape
    pixels, num_frames = height * width, batch * frames
    x = jnp.moveaxis(x, (2, 3), (0, 1)).reshape(pixels, num_frames, channels)
    lanes = round_up(channels, LANES)
    block_pixels = min(pixels, max(1, BLOCK_BYTES // (4 * lanes * num_frames)))
    x_spec = pl.BlockSpec((block_pixels, num_frames, channels), lambda i: (i, 0, 0))
    y = pl.pallas_call(
        _normed_silu_kernel,
        grid=(ceil_div(pixels, block_pixels),),
        in_specs=[x_spec, pl.BlockSpec((1, channels), lambda i: (0, 0))],
        out_specs=x_spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="normed_silu",
    )(x, gamma.astype(jnp.float32)[None])
    return jnp.moveaxis(y.reshape(height, width, batch, frames, channels), (0, 1), (2, 3))


def _normed_silu_kernel(x_ref, gamma_ref, y_ref) -> None:
    x: Float32[Array, "_N _T _C"] = x_ref[...].astype(jnp.float32)
    inverse_norm = jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), MIN_SQUARE_SUM))
    y = x * (inverse_norm * x.shape[-1] ** 0.5) * gamma_ref[...][None]
    y_ref[...] = (y * jax.lax.logistic(y)).astype(y_ref.dtype)
