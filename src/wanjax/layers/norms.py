# SPDX-License-Identifier: Apache-2.0
"""Norms that compute in float32 whatever the precision around them."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


def along_last(vector: Float[Array, "C"], ndim: int) -> Array:
    """`vector` with leading axes of 1, so that it meets the last axis of an array of `ndim` axes."""
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


class ChannelNorm(nnx.Module):
    """Scales the channels of each cell to a root mean square of `gamma`, as autoencoders of video do."""

    def __init__(self, channels: int, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.ones_init(), ("conv_in",))
        self.gamma = nnx.Param(init(rngs.params(), (channels,), param_dtype))
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        x32 = x.astype(jnp.float32)
        norm = jnp.sqrt(jnp.maximum(jnp.sum(x32 * x32, axis=-1, keepdims=True), 1e-24))
        y = x32 * (x.shape[-1] ** 0.5 / norm) * along_last(self.gamma[...].astype(jnp.float32), x.ndim)
        return y.astype(self.dtype)


def layer_norm(
    features: int, eps: float, *, affine: bool, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.LayerNorm:
    """Layer norm over the last axis; takes any precision and hands over float32.

    Mean and mean square are summed in one pass over what is then scaled: centred squares would take a second one.
    """
    del dtype, param_dtype  # its few weights stay in float32
    return nnx.LayerNorm(
        features,
        epsilon=eps,
        use_bias=affine,
        use_scale=affine,
        scale_init=nnx.with_partitioning(nnx.initializers.ones_init(), ("embed",)),
        bias_init=nnx.with_partitioning(nnx.initializers.zeros_init(), ("embed",)),
        use_fast_variance=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs=rngs,
    )


def rms_norm(
    features: int, eps: float, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs, axis: str = "heads"
) -> nnx.RMSNorm:
    """Root-mean-square norm over the last axis; takes any precision and hands over float32."""
    del dtype, param_dtype  # its few weights stay in float32
    return nnx.RMSNorm(
        features,
        epsilon=eps,
        scale_init=nnx.with_partitioning(nnx.initializers.ones_init(), (axis,)),
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs=rngs,
    )


def inverse_rms(x: Float[Array, "*B E"], eps: float) -> Float32[Array, "*B 1"]:
    """What a root-mean-square norm multiplies by."""
    x32 = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
