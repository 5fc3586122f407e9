# SPDX-License-Identifier: Apache-2.0
"""Matrix products with 8-bit weights. The inputs may also be quantized to 8 bits."""

from wanjax.kernels.hadamard import choose_hadamard_size
from wanjax.kernels.quantized_matmul.api import quantize_tokens, quantized_heads, quantized_matmul, quantized_mlp
from wanjax.kernels.quantized_matmul.formats import FORMATS, QuantizedRows, QuantizedWeight, quantize_weight
from wanjax.kernels.quantized_matmul.operands import GatedSum, Modulation, RMSNormRotary
from wanjax.kernels.quantized_matmul.tpu import MATMUL_SCOPE

__all__ = [
    "FORMATS",
    "MATMUL_SCOPE",
    "GatedSum",
    "Modulation",
    "QuantizedRows",
    "QuantizedWeight",
    "RMSNormRotary",
    "choose_hadamard_size",
    "quantize_tokens",
    "quantize_weight",
    "quantized_heads",
    "quantized_matmul",
    "quantized_mlp",
]
