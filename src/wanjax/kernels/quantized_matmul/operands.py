# SPDX-License-Identifier: Apache-2.0
"""The operations before and after a quantized product in a transformer block, in plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.quantized_matmul.formats import as_row
from wanjax.kernels.rotary_heads import apply_rotary, normed_rotary


class Modulation(NamedTuple):
    """A layer norm without weights, then the modulation `norm(x) (1 + scale) + shift`, both in float32.

    Attributes:
        shift: The shifts [B T I] of T modulations, 1 or 2.
        scale: The scales [B T I].
        second_mask: A mask [L] of the tokens that use the second of two modulations.
    """

    shift: jax.Array
    scale: jax.Array
    second_mask: jax.Array | None = None


class GatedSum(NamedTuple):
    """The sum `residual + gate · y` of a product y, in float32, rounded once to the residual's dtype.

    Attributes:
        residual: The residual [B L O].
        gate: The gates [B T O] in float32; T is 1 or 2.
        second_mask: A mask [L] of the tokens that use the second of two gates.
    """

    residual: jax.Array
    gate: jax.Array
    second_mask: jax.Array | None = None


class RMSNormRotary(NamedTuple):
    """An RMS norm of queries or keys, then their rotary position embedding, both in float32.

    Attributes:
        scale: The weights [O] of a norm over all channels, or [D] of a norm over each head.
        cos: The cosines [L P] of the angles of a head's 2 P channels; None for no rotation.
        sin: The sines [L P]; None for no rotation.
    """

    scale: jax.Array
    cos: jax.Array | None = None
    sin: jax.Array | None = None


def modulated_norm(x: Float[Array, "B L E"], modulation: Modulation, eps: float) -> Float32[Array, "B L E"]:
    """Return the modulated layer norm of x, in float32. The variance is the mean of the squares minus the squared
    mean."""
    x32 = x.astype(jnp.float32)
    mean = x32.mean(axis=-1, keepdims=True)
    variance = jnp.maximum((x32 * x32).mean(axis=-1, keepdims=True) - mean * mean, 0.0)
    normed = (x32 - mean) * jax.lax.rsqrt(variance + eps)
    shift, scale = (_by_token(vectors, modulation.second_mask) for vectors in modulation[:2])
    return normed * (1.0 + scale) + shift


def _by_token(vectors: Float[Array, "B T E"], second_mask: Bool[Array, " L"] | None) -> Float32[Array, "B _L E"]:
    """Select the first or the second vector for each token. If there is only one vector, return it."""
    vectors = vectors.astype(jnp.float32)
    return vectors if second_mask is None else jnp.where(second_mask[None, :, None], vectors[:, 1:], vectors[:, :1])


def norm_and_rotate(y: Float[Array, "B L E"], norm: RMSNormRotary, eps: float) -> Float[Array, "B L E"]:
    """Apply an RMS norm over all channels or over each head, then rotate the heads. Round once to y's dtype."""
    y32, size = y.astype(jnp.float32), len(norm.scale)
    if size < y.shape[-1]:
        heads = y32.reshape(*y.shape[:2], -1, size)
        heads = heads * jax.lax.rsqrt((heads * heads).mean(axis=-1, keepdims=True) + eps)
        heads = heads * as_row(norm.scale, heads.ndim)
        if norm.cos is not None and norm.sin is not None:
            heads = apply_rotary(heads, norm.cos, norm.sin)
        return heads.astype(y.dtype).reshape(y.shape)
    inverse_rms = jax.lax.rsqrt((y32 * y32).mean(axis=-1, keepdims=True) + eps)
    if norm.cos is None or norm.sin is None:
        return (y32 * inverse_rms * as_row(norm.scale, y.ndim)).astype(y.dtype)
    return normed_rotary(y, inverse_rms, norm.scale, norm.cos, norm.sin)


def add_gated(y: Float[Array, "B L E"], gated_sum: GatedSum) -> Float[Array, "B L E"]:
    """Return `residual + gate · y`."""
    gate = _by_token(gated_sum.gate, gated_sum.second_mask)
    total = gated_sum.residual.astype(jnp.float32) + gate * y.astype(jnp.float32)
    return total.astype(gated_sum.residual.dtype)


def apply_norm(
    x: Float[Array, "*B E"], modulation: Modulation | None, eps: float, dtype: jnp.dtype
) -> Float[Array, "*B E"]:
    """Apply the norm and its modulation to x. Without a modulation, only cast x to `dtype`."""
    return (x if modulation is None else modulated_norm(x, modulation, eps)).astype(dtype)


def apply_epilogue(
    y: Float32[Array, "*B E"],
    bias: Float[Array, " E"] | None,
    gelu: bool,
    gated_sum: GatedSum | None,
    dtype: jnp.dtype,
) -> Float[Array, "*B E"]:
    """Add the bias to a product, apply GELU, and round the result to `dtype`. The result of a gated sum has the
    residual's dtype."""
    y = y if bias is None else y + as_row(bias, y.ndim)
    y = jax.nn.gelu(y, approximate=True) if gelu else y
    return y.astype(dtype) if gated_sum is None else add_gated(y, gated_sum)
