# SPDX-License-Identifier: Apache-2.0
"""Norms that always compute in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wanjax.kernels.normed_silu import channel_norm, normed_silu
from wanjax.kernels.target import operand_dtype
from wanjax.layers.placement import param, with_axes


def expand_to_rank(vector: Float[Array, " C"], ndim: int) -> Float[Array, "... C"]:
    """Add leading axes to a vector, so that it has `ndim` axes. Under strict rank promotion, vectors do not
    broadcast."""
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


class ChannelNorm(nnx.Module):
    """Scale the channels of each pixel to a root mean square of `gamma`. Video autoencoders use this norm."""

    def __init__(self, channels: int, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        ones = nnx.initializers.ones_init()
        self.gamma = param(ones, (channels,), ("conv_in",), dtype=param_dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        return channel_norm(x, self.gamma[...], self.dtype)

    def silu(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B T H W C"]:
        """Apply the norm, then SiLU. The result has the dtype of a convolution's operands."""
        return normed_silu(x, self.gamma[...], operand_dtype(x, self.dtype))


class GroupNorm(nnx.Module):
    """Normalise each group of channels over all frames of a chunk, from any float dtype to float32.

    The mean and the mean square are computed in one pass. Each channel is averaged over rows and frames first, then
    over columns. These short sums lose little precision.
    """

    def __init__(
        self, channels: int, groups: int, eps: float, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs
    ):
        del dtype, param_dtype  # the weights stay in float32, because they are few
        ones, zeros = nnx.initializers.ones_init(), nnx.initializers.zeros_init()
        self.scale = param(ones, (channels,), ("conv_in",), dtype=jnp.float32, rngs=rngs)
        self.bias = param(zeros, (channels,), ("conv_in",), dtype=jnp.float32, rngs=rngs)
        self.groups = groups
        self.eps = eps

    def __call__(self, x: Float[Array, "B T H W C"]) -> Float32[Array, "B T H W C"]:
        x32 = x.astype(jnp.float32)
        mean, square = self._mean(x32), self._mean(x32 * x32)
        variance = jnp.maximum(square - mean * mean, 0.0)  # rounding could make the variance of equal values negative
        factor = jax.lax.rsqrt(variance + self.eps) * expand_to_rank(self.scale[...], x.ndim)
        return (x32 - mean) * factor + expand_to_rank(self.bias[...], x.ndim)

    def _mean(self, x: Float32[Array, "B T H W C"]) -> Float32[Array, "B 1 1 1 C"]:
        """Compute the mean of each group of channels, repeated for each channel of the group."""
        mean = x.mean(axis=(1, 2)).mean(axis=1)  # [B C]
        mean = mean.reshape(len(x), self.groups, -1).mean(axis=2)
        return mean.repeat(x.shape[-1] // self.groups, axis=1)[:, None, None, None, :]


def layer_norm(
    features: int, eps: float, *, affine: bool, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.LayerNorm:
    """Create a layer norm over the last axis. The norm takes any float dtype and returns float32.

    The mean and the mean square are computed in one pass over x. A sum of squared deviations would need a second pass.
    """
    del dtype, param_dtype  # the weights stay in float32, because they are few
    return nnx.LayerNorm(
        features,
        epsilon=eps,
        use_bias=affine,
        use_scale=affine,
        scale_init=with_axes(nnx.initializers.ones_init(), ("embed",)),
        bias_init=with_axes(nnx.initializers.zeros_init(), ("embed",)),
        use_fast_variance=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs=rngs,
    )


def rms_norm(
    features: int, eps: float, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs, axis: str = "heads"
) -> nnx.RMSNorm:
    """Create a root-mean-square norm over the last axis. The norm takes any float dtype and returns float32."""
    del dtype, param_dtype  # the weights stay in float32, because they are few
    return nnx.RMSNorm(
        features,
        epsilon=eps,
        scale_init=with_axes(nnx.initializers.ones_init(), (axis,)),
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs=rngs,
    )


def inverse_rms(x: Float[Array, "*B E"], eps: float) -> Float32[Array, "*B 1"]:
    """Return 1 / root mean square over the last axis."""
    x32 = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
