# SPDX-License-Identifier: Apache-2.0
"""Quantized products by their formula in float64."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.support.attention import normal
from wanjax.kernels.hadamard import regular_hadamard

DTYPE_OF = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}
LARGEST = {"int8": 127, "fp8": 448}


def rotated(x, group):
    """Rotate the last axis in float64."""
    return (
        (x.reshape(*x.shape[:-1], -1, group) @ np.asarray(regular_hadamard(group), np.float64)).reshape(x.shape)
        if group
        else x
    )


def rounded(x, number_format):
    """Round rows to 8 bits in float64; return the dequantized rows."""
    scale = np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-30) / LARGEST[number_format]
    steps = np.float32(x / scale)
    return (np.round(steps) if number_format == "int8" else steps).astype(DTYPE_OF[number_format]).astype(
        np.float64
    ) * scale


def formula(x, weight, bias, hadamard_size, activations):
    x = rotated(np.asarray(x, np.float64), hadamard_size)
    x = x if activations is None else rounded(x, activations)
    y = x @ (np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64))
    return y if bias is None else y + np.asarray(bias, np.float64)


def outliers(seed, *shape, dtype="float32"):
    """Return inputs with a few channels of large values, as in transformers."""
    x = np.array(normal(seed, *shape))
    x[..., np.arange(shape[-1]) % 101 == 7] *= 40
    return jnp.asarray(x, dtype)
