# SPDX-License-Identifier: Apache-2.0
"""Projections, dense and in 8 bits with the same weights."""

import jax.numpy as jnp

from wanjax.kernels.quantized_matmul import quantize_weight
from wanjax.layers.linear import linear
from wanjax.layers.placement import as_shapes
from wanjax.layers.quantized import QuantizedLinear

F32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}
SIZES = 192, 80  # nano's width, which is rotated in groups of 64


def dense(rngs, sizes=SIZES, **kw):
    return linear(*sizes, ("embed", "mlp"), **{**F32, **kw}, rngs=rngs)


def quantized(base, precision):
    """Return a projection with the weights of a dense one."""
    layer = QuantizedLinear(as_shapes(lambda rngs: dense(rngs, base.kernel.shape)), precision)
    weight = quantize_weight(base.kernel[...], number_format=layer.number_format, hadamard_size=layer.hadamard_size)
    layer.values.set_value(weight.values)
    layer.scale.set_value(weight.scale)
    layer.bias.set_value(base.bias[...])
    return layer
