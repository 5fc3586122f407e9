# SPDX-License-Identifier: Apache-2.0
"""Projections with 8-bit weights, which replace dense projections."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from wanjax.kernels.quantized_matmul import (
    FORMATS,
    QuantizedRows,
    QuantizedWeight,
    RMSNormRotary,
    choose_hadamard_size,
    quantize_tokens,
    quantized_heads,
    quantized_matmul,
)
from wanjax.layers.linear import GatherableProjection, Linear, are_tokens
from wanjax.layers.placement import axes_of
from wanjax.layers.precision import Precision
from wanjax.sharding import constrain, gather_weight

Module = TypeVar("Module", bound=nnx.Module)


class QuantizedLinear(GatherableProjection, nnx.Module):
    """A projection with an 8-bit weight, `values · scale`. Devices that gather the weight send one byte for each
    number.

    A `QuantizedLinear` is built from an abstract `Linear`. It is abstract too, until its weights are loaded. In a stack
    of blocks, the weights have a leading axis.

    Attributes:
        values: The numbers [I O], with the logical axes of the kernel.
        scale: The scale [O] of each output channel, in float32.
        bias: The bias [O], or None.
        number_format: The format of the values.
        activations: The format to which tokens are quantized, or None.
        hadamard_size: The number of input channels that are rotated together; 0 if no channels are rotated.
    """

    weight_name = "values"

    def __init__(self, base: Linear, precision: Precision):
        """Build the quantized projection that replaces `base`.

        Args:
            base: An abstract projection.
            precision: A precision with weights of 8 bits.
        """
        assert precision.weights is not None
        kernel = base.kernel.get_value()
        axes = axes_of(base.kernel) or (None,) * kernel.ndim
        scale = jax.ShapeDtypeStruct((*kernel.shape[:-2], kernel.shape[-1]), jnp.float32)
        self.values = base.kernel.replace(jax.ShapeDtypeStruct(kernel.shape, FORMATS[precision.weights]))
        self.scale = nnx.Param(scale, axes=(*axes[:-2], axes[-1]))
        self.bias = base.bias
        self.number_format = precision.weights
        self.activations = precision.activations
        self.hadamard_size = choose_hadamard_size(kernel.shape[-2]) if precision.rotates else 0
        self.axis = base.axis
        self.dtype = base.dtype

    def __call__(self, inputs: jax.Array | QuantizedRows, **fused: Any) -> jax.Array:
        """Compute the projection. `fused` has the options of `quantized_matmul` for the norm before the product and for
        the gated sum after it."""
        tokens = are_tokens(inputs.values if isinstance(inputs, QuantizedRows) else inputs)
        y = quantized_matmul(inputs, *self.operands(tokens), hadamard_size=self.hadamard_size, **self.options, **fused)
        return constrain(y, ("batch", "length", self.axis)) if tokens else y

    def to_heads(
        self, inputs: jax.Array | QuantizedRows, norm: RMSNormRotary | None = None, norm_eps: float = 0.0, **fused: Any
    ) -> jax.Array:
        """Compute the projection of tokens to queries or keys, with their norm and rotation, or to values."""
        options = self.options | {"hadamard_size": self.hadamard_size, "norm_eps": norm_eps}
        y = quantized_heads(inputs, *self.operands(True), norm, **options, **fused)
        return constrain(y, ("batch", "length", self.axis))

    @property
    def options(self) -> dict[str, Any]:
        """The options that all kernels take."""
        return {"activations": self.activations, "dtype": self.dtype}

    def operands(self, gathers: bool) -> tuple[QuantizedWeight, jax.Array | None]:
        """Return the weight and the bias. If `gathers` is True, gather the weight."""
        values = self.values[...]
        weight = QuantizedWeight(gather_weight(values) if gathers else values, self.scale[...])
        return weight, None if self.bias is None else self.bias[...]

    def quantize_tokens(self, x: jax.Array, **norm: Any) -> QuantizedRows:
        """Quantize tokens for this projection, and for others with the same format and rotation. `norm` has the options
        of `quantize_tokens` for the norm."""
        return quantize_tokens(x, self.operands(False)[0], hadamard_size=self.hadamard_size, **self.options, **norm)

    def sent_weight(self) -> jax.Array:
        """Return the values. Values are sent between devices without a cast."""
        return self.values[...]


def quantize_layers(abstract: Module, precision: Precision, full_precision: Iterable[str]) -> Module:
    """Return a copy of an abstract module, with quantized projections in place of dense projections.

    Args:
        abstract: The module as shapes, which is not changed.
        precision: The precision. If the precision does not quantize weights, the module is returned unchanged.
        full_precision: Patterns with `*` of the dotted paths of projections that are not quantized.
    """
    if not precision.quantizes:
        return abstract
    patterns = tuple(full_precision)
    quantized = nnx.merge(*nnx.split(abstract))
    for path, parent in list(nnx.iter_modules(quantized)):
        for name, layer in list(vars(parent).items()):
            dotted_path = ".".join(map(str, (*path, name)))
            if isinstance(layer, Linear) and not any(fnmatchcase(dotted_path, pattern) for pattern in patterns):
                setattr(parent, name, QuantizedLinear(layer, precision))
    return quantized


def quantized_layers(module: nnx.Module) -> dict[str, QuantizedLinear]:
    """Return the quantized projections of a module by their dotted paths."""
    modules = nnx.iter_modules(module)
    return {".".join(map(str, path)): layer for path, layer in modules if isinstance(layer, QuantizedLinear)}
