# SPDX-License-Identifier: Apache-2.0
"""Projections of a transformer block, with the norm before them and the residual sum after them.

If tokens are not quantized, the norm, the projection and the residual sum are three separate operations. If tokens are
quantized, one kernel computes all three.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wanjax.kernels.quantized_matmul import GatedSum, QuantizedRows, RMSNormRotary
from wanjax.kernels.quantized_matmul import Modulation as NormModulation
from wanjax.kernels.rotary_heads import pack_for_all_to_all
from wanjax.layers.heads import join_heads, split_heads
from wanjax.layers.modulation import SecondMask, gated_add, modulate
from wanjax.layers.norms import expand_to_rank
from wanjax.layers.quantized import QuantizedLinear
from wanjax.layers.rope import Rope, head_norm_and_rope, norm_and_rope

Tokens = Float[Array, "B L E"]
Vectors = Float[Array, "*B _E"]  # tokens, or one vector for each video
Inputs = Vectors | QuantizedRows
Input = TypeVar("Input")


class NormedTokens(NamedTuple):
    """Tokens, and a layer norm with a modulation that is applied to them before a projection.

    Attributes:
        x: The tokens before the norm.
        norm: The layer norm.
        dtype: The dtype of the normed tokens.
        shift: The shift of the modulation, [B T E]; None for a norm without a modulation.
        scale: The scale of the modulation, [B T E]; None for a norm without a modulation.
        second_mask: The mask of the tokens that use the second of two modulations.
    """

    x: Tokens
    norm: nnx.LayerNorm
    dtype: DTypeLike
    shift: Float32[Array, "B T E"] | None = None
    scale: Float32[Array, "B T E"] | None = None
    second_mask: SecondMask = None

    def compute(self) -> Tokens:
        """Compute the normed tokens."""
        y = self.norm(self.x)
        if self.shift is not None and self.scale is not None:
            y = modulate(y, self.shift, self.scale, self.second_mask)
        return y.astype(self.dtype)

    def kernel_input(self) -> tuple[Tokens, dict[str, Any]]:
        """Return the tokens, and the options with which a kernel computes the norm."""
        ones = jnp.ones((len(self.x), 1, self.x.shape[-1]), jnp.float32)
        second_mask = None if self.scale is None else self.second_mask
        factor = ones if self.scale is None else 1.0 + self.scale
        shift = jnp.zeros_like(ones) if self.shift is None else self.shift
        if self.norm.bias is not None:
            shift = shift + factor * expand_to_rank(self.norm.bias[...], 3)
        if self.norm.scale is not None:
            factor = factor * expand_to_rank(self.norm.scale[...], 3)
        return self.x, {"modulation": NormModulation(shift, factor - 1.0, second_mask), "eps": self.norm.epsilon}


class Residual(NamedTuple):
    """The tokens to which a sub-layer adds its result.

    Attributes:
        x: The tokens.
        gate: The factor of the result, [B T E]; None for 1.
        second_mask: The mask of the tokens that use the second of two gates.
    """

    x: Tokens
    gate: Float32[Array, "B T E"] | None = None
    second_mask: SecondMask = None

    def add(self, y: Tokens) -> Tokens:
        """Return `x + gate · y`."""
        if self.gate is None:
            return self.x + y.astype(self.x.dtype)
        return gated_add(self.x, y, self.gate, self.second_mask)

    def kernel_sum(self) -> GatedSum:
        """Return the tokens and the gate as a kernel's argument `gated_sum`."""
        if self.gate is None:
            return GatedSum(self.x, jnp.ones((len(self.x), 1, self.x.shape[-1]), jnp.float32))
        return GatedSum(self.x, self.gate, self.second_mask)


def compute_norm(inputs: Input | NormedTokens) -> Input | Tokens:
    """Return the input of a dense projection: if `inputs` has a norm, the normed tokens, else `inputs`."""
    return inputs.compute() if isinstance(inputs, NormedTokens) else inputs


def shared_input(inputs: Vectors | NormedTokens, *projections: nnx.Module) -> Vectors | QuantizedRows:
    """Prepare the common input of several projections. The norm is computed only once. If all projections quantize
    tokens, the tokens are also quantized only once.

    Args:
        inputs: The tokens.
        projections: The projections of these tokens.
    """
    if not quantizes_tokens(*projections):
        return compute_norm(inputs)
    first: Any = projections[0]
    return run_fused(first.quantize_tokens, inputs, None)


def project(projection: nnx.Module, inputs: Vectors | NormedTokens, residual: Residual | None = None) -> Vectors:
    """Compute a projection, with the norm of its input and the residual sum.

    Args:
        projection: The projection.
        inputs: The tokens.
        residual: The tokens to which the result is added; None for no sum.
    """
    layer: Any = projection
    if quantizes_tokens(projection):
        return run_fused(layer, inputs, residual)
    y = layer(compute_norm(inputs))
    return y if residual is None else residual.add(y)


def project_heads(
    projection: nnx.Module, inputs: Inputs | NormedTokens, norm: nnx.RMSNorm, rope: Rope | None = None
) -> Tokens:
    """Compute queries or keys: a projection, its norm, and the rotation by position.

    Args:
        projection: The projection.
        inputs: The tokens, or the result of `shared_input`.
        norm: The norm, over all heads together or over each head.
        rope: The tables of RoPE; None for no rotation.
    """
    layer: Any = projection
    assert norm.scale is not None
    if quantizes_tokens(projection):
        tables = () if rope is None else (rope.cos, rope.sin)
        norm_rotary = RMSNormRotary(norm.scale[...], *tables)
        return run_fused(partial(layer.to_heads, norm=norm_rotary, norm_eps=norm.epsilon), inputs, None)
    y = layer(compute_norm(inputs))
    if norm.scale.shape[-1] == y.shape[-1]:
        return norm(y) if rope is None else norm_and_rope(y, norm, rope)
    if rope is not None:
        return head_norm_and_rope(y, norm, rope)
    return join_heads(norm(split_heads(y, y.shape[-1] // norm.scale.shape[-1])))


def project_values(projection: nnx.Module, inputs: Inputs | NormedTokens) -> Tokens:
    """Compute values. If an all-to-all will send their heads, order them in memory by destination device.

    Args:
        projection: The projection.
        inputs: The tokens, or the result of `shared_input`.
    """
    layer: Any = projection
    if quantizes_tokens(projection):
        return run_fused(layer.to_heads, inputs, None)
    return pack_for_all_to_all(layer(compute_norm(inputs)))


def run_fused(kernel: Callable[..., Any], inputs: Inputs | NormedTokens, residual: Residual | None) -> Any:
    """Run a kernel together with the norm of its input and the sum with the residual.

    Args:
        kernel: A function of tokens, with the options `modulation`, `eps` and `gated_sum` of `quantized_matmul`.
        inputs: The tokens.
        residual: The tokens to which the result is added; None for no sum.
    """
    x, norm = inputs.kernel_input() if isinstance(inputs, NormedTokens) else (inputs, {})
    if residual is None:
        return kernel(x, **norm)
    return kernel(x, **norm, gated_sum=residual.kernel_sum())


def quantizes_tokens(*projections: nnx.Module) -> bool:
    """Return True if all projections quantize their tokens to 8 bits in the same format."""
    quantizations = {
        (layer.activations, layer.hadamard_size) if isinstance(layer, QuantizedLinear) else (None, 0)
        for layer in projections
    }
    return len(quantizations) == 1 and quantizations.pop()[0] is not None
