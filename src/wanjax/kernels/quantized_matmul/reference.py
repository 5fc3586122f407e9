# SPDX-License-Identifier: Apache-2.0
"""The quantized product by its formula, in float32. This reference specifies what the other implementations compute."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from wanjax.kernels.quantized_matmul.formats import NumberFormat, QuantizedWeight, quantize_rows, rotate
from wanjax.kernels.quantized_matmul.operands import (
    GatedSum,
    Modulation,
    RMSNormRotary,
    apply_epilogue,
    apply_norm,
    norm_and_rotate,
)


def quantized_matmul(
    x: Float[Array, "*B E"],
    weight: QuantizedWeight,
    bias: Float[Array, " _E"] | None,
    *,
    hadamard_size: int,
    activations: NumberFormat | None,
    dtype: jnp.dtype,
    modulation: Modulation | None = None,
    eps: float = 0.0,
    gelu: bool = False,
    gated_sum: GatedSum | None = None,
) -> Float[Array, "*B _E"]:
    """Return x · weight + bias. With `activations`, the rotated rows of x are first quantized to 8 bits.

    The computation is in float32, except that x is cast to `dtype` after its norm. The result is rounded once, to
    `dtype` or to the dtype of the gated sum.
    """
    rows = rotate(apply_norm(x, modulation, eps, dtype), hadamard_size, jnp.float32)
    if activations is not None:
        values, scale = quantize_rows(rows, activations)
        rows = values.astype(jnp.float32) * scale
    kernel = weight.values.astype(jnp.float32) * weight.scale[None]
    y = jnp.matmul(rows, kernel, precision="highest")
    return apply_epilogue(y, bias, gelu, gated_sum, dtype)


def quantized_heads(
    x: Float[Array, "B L E"],
    weight: QuantizedWeight,
    bias: Float[Array, " _E"] | None,
    norm: RMSNormRotary | None,
    *,
    norm_eps: float = 0.0,
    hadamard_size: int,
    activations: NumberFormat | None,
    dtype: jnp.dtype,
    modulation: Modulation | None = None,
    eps: float = 0.0,
) -> Float[Array, "B L _E"]:
    """Return x · weight + bias, normed over all channels, with rotated heads. Without a norm, return the product.

    The product is rounded to `dtype` before the norm. The result is rounded to `dtype` too.
    """
    options = {"hadamard_size": hadamard_size, "activations": activations, "modulation": modulation, "eps": eps}
    y = quantized_matmul(x, weight, bias, dtype=dtype, **options)
    return y if norm is None else norm_and_rotate(y, norm, norm_eps)
