# SPDX-License-Identifier: Apache-2.0
"""The quantized product by XLA, on any platform and any mesh.

If only the weights are quantized, they are cast to `dtype` before the product. The cast is exact, even to bfloat16. The
scale is applied after the product. If the inputs are quantized too, products of integers are summed in int32, and
products of 8-bit floats in float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wanjax.kernels.autodiff import with_backward
from wanjax.kernels.quantized_matmul.formats import (
    NumberFormat,
    QuantizedRows,
    QuantizedWeight,
    as_row,
    quantize_rows,
    rotate,
)
from wanjax.kernels.quantized_matmul.operands import GatedSum, Modulation, apply_epilogue, apply_norm


def quantized_matmul(
    x: Float[Array, "*B E"] | QuantizedRows,
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
    """Compute the same as the reference, with operands of `dtype` and sums in float32."""
    if isinstance(x, QuantizedRows):
        y = _scaled_product(x, weight)
    elif activations is not None:
        y = _scaled_product(
            quantize(
                x, hadamard_size=hadamard_size, number_format=activations, dtype=dtype, modulation=modulation, eps=eps
            ),
            weight,
        )
    else:
        x = apply_norm(x, modulation, eps, dtype)
        x = rotate(x, hadamard_size, dtype).astype(dtype) if hadamard_size else x
        y = with_backward(_product, partial(_backward, dtype=dtype), x, weight)
    return apply_epilogue(y, bias, gelu, gated_sum, dtype)


def quantize(
    x: Float[Array, "*B E"],
    *,
    hadamard_size: int,
    number_format: NumberFormat,
    dtype: jnp.dtype,
    modulation: Modulation | None = None,
    eps: float = 0.0,
) -> QuantizedRows:
    """Apply the norm and the rotation to the rows of x, and quantize them."""
    return quantize_rows(rotate(apply_norm(x, modulation, eps, dtype), hadamard_size, dtype), number_format)


def _scaled_product(rows: QuantizedRows, weight: QuantizedWeight) -> Float32[Array, "*B _E"]:
    """Return the product of quantized rows and a quantized weight."""
    sum_dtype = jnp.int32 if weight.values.dtype == jnp.int8 else jnp.float32
    y = _contract(rows.values, weight.values, 0, sum_dtype).astype(jnp.float32)
    return y * rows.scale * as_row(weight.scale, y.ndim)


def _product(x: Array, weight: QuantizedWeight) -> tuple[Float32[Array, "*B _E"], QuantizedWeight]:
    """Return the product. The only residual for the backward pass is the weight in 8 bits."""
    y = _contract(x, weight.values.astype(x.dtype), 0, jnp.float32)
    return y * as_row(weight.scale, y.ndim), weight


def _backward(weight: QuantizedWeight, g: Float32[Array, "*B _E"], *, dtype: jnp.dtype) -> tuple[Array, None]:
    """Return the gradient of x; the weight is frozen."""
    g = (g * as_row(weight.scale, g.ndim)).astype(dtype)
    return _contract(g, weight.values.astype(dtype), 1, jnp.float32).astype(dtype), None


def _contract(x: Array, kernel: Array, axis: int, sum_dtype: DTypeLike) -> Array:
    """Return the product over the last axis of x and an axis of the kernel, summed in `sum_dtype`."""
    dimensions = (((x.ndim - 1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, kernel, dimensions, preferred_element_type=sum_dtype)
