# SPDX-License-Identifier: Apache-2.0
"""Quantize weights and tokens to 8-bit numbers. A weight has a scale for each output channel, and a token has one
scale.

Before the quantization, each group of input channels may be rotated by a regular Hadamard matrix (ConvRot,
arXiv:2512.03673). The rotation spreads a channel with large numbers over its group. Without the rotation, such a
channel would make the quantization of the whole row coarse. The rotation is orthonormal: a rotated input times a
rotated weight equals the original input times the original weight.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wanjax.errors import WanjaxError
from wanjax.kernels.hadamard import regular_hadamard

NumberFormat = Literal["int8", "fp8"]
FORMATS: dict[str, jnp.dtype] = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}
"""The dtype of the numbers of each format."""
# The largest number of each format. Int8 leaves -128 out, so that its range is symmetric
LARGEST = {"int8": 127.0, "fp8": 448.0}
SMALLEST_ABSMAX = 1e-30  # a lower bound of a row's maximum, so that the scale of a row of zeros is not zero


class QuantizedWeight(NamedTuple):
    """An 8-bit weight, which represents `values · scale`. The input channels of the weight may be rotated.

    Attributes:
        values: Numbers [I O] of input and output channels, int8 or float8_e4m3fn.
        scale: Factors [O] in float32, one for each output channel, or [1] for all of them.
    """

    values: jax.Array
    scale: jax.Array


class QuantizedRows(NamedTuple):
    """Rows of 8-bit numbers, which represent `values · scale`.

    Attributes:
        values: Numbers [... I], int8 or float8_e4m3fn.
        scale: Factors [... 1] in float32, one for each row.
    """

    values: jax.Array
    scale: jax.Array


def quantize_weight(
    kernel: Float[Array, "E _E"], *, number_format: NumberFormat, hadamard_size: int
) -> QuantizedWeight:
    """Quantize a weight to 8 bits. The largest number of each output channel determines the channel's scale.

    Args:
        kernel: The weight [I O] of input and output channels. The computation is in float32.
        number_format: `int8`, or `fp8` for float8_e4m3fn.
        hadamard_size: How many input channels are rotated together; 0 for no rotation.

    Raises:
        WanjaxError: `hadamard_size` does not divide the number of input channels.
    """
    columns = rotate(kernel.astype(jnp.float32).T, hadamard_size, jnp.float32)
    values, scale = quantize_rows(columns, number_format)
    return QuantizedWeight(values.T, scale[:, 0])


def quantize_rows(x: Float32[Array, "*B E"], number_format: NumberFormat) -> QuantizedRows:
    """Quantize rows to 8 bits. The largest number of each row determines the row's scale. Halves round to even."""
    scale = jnp.maximum(jnp.abs(x).max(axis=-1, keepdims=True), SMALLEST_ABSMAX) / LARGEST[number_format]
    values = jnp.clip(x / scale, -LARGEST[number_format], LARGEST[number_format])
    return QuantizedRows(
        (jnp.round(values) if number_format == "int8" else values).astype(FORMATS[number_format]), scale
    )


def rotate(x: Float[Array, "*B E"], hadamard_size: int, dtype: DTypeLike) -> Float32[Array, "*B E"]:
    """Rotate each group of `hadamard_size` channels. With 0, do nothing.

    Args:
        x: The input; its last axis has the channels.
        hadamard_size: The size of a group, a power of 4.
        dtype: The dtype of the operands. Sums are in float32.

    Raises:
        WanjaxError: `hadamard_size` does not divide the number of channels.
    """
    if not hadamard_size:
        return x.astype(jnp.float32)
    check_hadamard_size(x.shape[-1], hadamard_size)
    groups = x.astype(dtype).reshape(*x.shape[:-1], -1, hadamard_size)
    matrix = jnp.asarray(regular_hadamard(hadamard_size), dtype)
    precision = "highest" if dtype == jnp.float32 else None
    y = jnp.matmul(groups, matrix, precision=precision, preferred_element_type=jnp.float32)
    return y.reshape(x.shape)


def as_row(vector: Float[Array, " E"], ndim: int) -> Float32[Array, "... E"]:
    """Add leading axes to a vector of channels, so that it has `ndim` axes, in float32."""
    return vector.astype(jnp.float32).reshape((1,) * (ndim - 1) + vector.shape)


def check_hadamard_size(features: int, hadamard_size: int) -> None:
    """Raise WanjaxError unless `hadamard_size` is 0 or a power of 4 that divides the number of input channels."""
    is_power = hadamard_size in (4**power for power in range(1, 7))
    if hadamard_size and not (is_power and features % hadamard_size == 0):
        raise WanjaxError(
            f"a rotation of {hadamard_size} channels does not fit {features} channels: give a power of 4 that divides "
            f"{features}, or 0"
        )
