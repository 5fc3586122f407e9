# SPDX-License-Identifier: Apache-2.0
"""The public functions of quantized products. They check the arguments and call an implementation that supports
them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.errors import UnsupportedError, WanjaxError
from wanjax.kernels.admitted import is_admitted
from wanjax.kernels.autodiff import with_backward
from wanjax.kernels.quantized_matmul import tpu, xla
from wanjax.kernels.quantized_matmul.formats import (
    FORMATS,
    NumberFormat,
    QuantizedRows,
    QuantizedWeight,
    check_hadamard_size,
)
from wanjax.kernels.quantized_matmul.operands import GatedSum, Modulation, RMSNormRotary, norm_and_rotate
from wanjax.kernels.rotary_heads import pack_for_all_to_all, parts_for_all_to_all
from wanjax.kernels.target import target

KERNEL = "quantized_matmul"  # the name of the kernel in `admitted.is_admitted`
DTYPES = ("float32", "bfloat16", "float16")


def quantized_matmul(
    x: Float[Array, "*B E"] | QuantizedRows,
    weight: QuantizedWeight,
    bias: Float[Array, " _E"] | None,
    *,
    hadamard_size: int,
    activations: NumberFormat | None,
    dtype: DTypeLike,
    modulation: Modulation | None = None,
    eps: float = 1e-6,
    gelu: bool = False,
    gated_sum: GatedSum | None = None,
) -> Float[Array, "*B _E"]:
    """Return the product of x and a weight of 8 bits, plus the bias, rounded once to `dtype`.

    With `activations=None` the product has gradients of x and of the bias, and the weight is frozen. With quantized
    inputs the product has no gradient.

    Args:
        x: The inputs [... I], which are cast to `dtype`, or the result of `quantize_tokens`.
        weight: The weight [I O], from `quantize_weight` or from a file.
        bias: The bias [O], or None.
        hadamard_size: How many input channels of the weight were rotated together; 0 for none.
        activations: The format to which each row of x is quantized after its rotation, equal to the weight's format.
            None does not quantize inputs.
        dtype: The dtype of the result. If inputs are not quantized, it is also the dtype of the operands.
        modulation: A layer norm of x and its modulation, which come first.
        eps: The epsilon of the layer norm.
        gelu: Whether to apply GELU, by its tanh formula.
        gated_sum: A gated sum with a residual, which is computed last. The result then has the residual's dtype.

    Raises:
        WanjaxError: The shapes or dtypes of the operands do not fit each other.
        UnsupportedError: The formats of inputs and weight differ, or the gradient of quantized inputs is taken.
    """
    dtype = jnp.dtype(dtype)
    _check(x, weight, bias, hadamard_size, activations, dtype)
    options: dict[str, Any] = {
        "hadamard_size": hadamard_size,
        "activations": activations,
        "dtype": dtype,
        "eps": eps,
        "gelu": gelu,
    }
    parts = {"modulation": modulation, "gated_sum": gated_sum}
    if activations is None:
        return xla.quantized_matmul(x, weight, bias, **options, **parts)
    module = tpu if uses_kernel(x, weight, hadamard_size, dtype) else xla
    return _without_gradient(partial(module.quantized_matmul, **options), x, weight, bias, **parts)


def quantized_heads(
    x: Float[Array, "B L E"] | QuantizedRows,
    weight: QuantizedWeight,
    bias: Float[Array, " _E"] | None,
    norm: RMSNormRotary | None = None,
    *,
    norm_eps: float = 0.0,
    hadamard_size: int,
    activations: NumberFormat | None,
    dtype: DTypeLike,
    modulation: Modulation | None = None,
    eps: float = 1e-6,
) -> Float[Array, "B L _E"]:
    """Compute queries or keys: a product, its norm over all channels or each head, and the rotation of its heads.
    Without a norm, compute values.

    On TPUs one kernel computes all three steps, and writes the result to memory only once. If an all-to-all will send
    the heads, the kernel orders them by destination device. The product is rounded to `dtype` before the norm, and the
    result is rounded again at the end.

    Args:
        x: The inputs [B L I], as in `quantized_matmul`.
        weight: The weight [I O].
        bias: The bias [O], or None.
        norm: The norm and the rotation, or None.
        norm_eps: The epsilon of `norm`.
        hadamard_size: How many input channels of the weight were rotated together; 0 for none.
        activations: The format of the rows of x, or None.
        dtype: As in `quantized_matmul`.
        modulation: A layer norm of x and its modulation, which come first.
        eps: The epsilon of the layer norm of x.

    Raises:
        WanjaxError: The shapes or dtypes of the operands do not fit each other.
        UnsupportedError: The formats of inputs and weight differ, or the gradient of quantized inputs is taken.
    """
    dtype = jnp.dtype(dtype)
    _check(x, weight, bias, hadamard_size, activations, dtype)
    options: dict[str, Any] = {"hadamard_size": hadamard_size, "activations": activations, "dtype": dtype, "eps": eps}
    is_exchanged = norm is None or norm.cos is not None  # a text's queries and keys have a norm, but no rotation
    parts = parts_for_all_to_all((*_shape(x)[:2], weight.values.shape[1])) if is_exchanged else 1
    uses_tpu_kernel = activations is not None and uses_kernel(x, weight, hadamard_size, dtype)
    if uses_tpu_kernel and (norm is not None or parts > 1) and tpu.fuses_heads(weight, norm, dtype):
        run = partial(tpu.quantized_heads, norm_eps=norm_eps, parts=parts, **options)
        return _without_gradient(run, x, weight, bias, norm, modulation=modulation)
    y = quantized_matmul(x, weight, bias, modulation=modulation, **options)
    return pack_for_all_to_all(y) if norm is None else norm_and_rotate(y, norm, norm_eps)


def quantize_tokens(
    x: Float[Array, "*B E"],
    weight: QuantizedWeight,
    *,
    hadamard_size: int,
    activations: NumberFormat,
    dtype: DTypeLike,
    modulation: Modulation | None = None,
    eps: float = 1e-6,
) -> QuantizedRows:
    """Quantize tokens once for several products, such as those of queries, keys and values.

    Args:
        x: The inputs [... I].
        weight: One of the weights by which the tokens will be multiplied.
        hadamard_size: How many input channels of the weights were rotated together; 0 for none.
        activations: The format of the weights.
        dtype: The dtype to which x is cast before its rotation.
        modulation: A layer norm of x and its modulation, which come first.
        eps: The epsilon of the layer norm.

    Raises:
        WanjaxError: The shapes or dtypes of the operands do not fit each other.
        UnsupportedError: The formats of inputs and weight differ, or the gradient is taken.
    """
    dtype = jnp.dtype(dtype)
    _check(x, weight, None, hadamard_size, activations, dtype)
    options: dict[str, Any] = {"hadamard_size": hadamard_size, "number_format": activations, "dtype": dtype, "eps": eps}
    module = tpu if uses_kernel(x, weight, hadamard_size, dtype) else xla
    return _without_gradient(partial(module.quantize, **options), x, modulation=modulation)


def quantized_mlp(
    x: Float[Array, "*B E"] | QuantizedRows,
    up: tuple[QuantizedWeight, Float[Array, " F"] | None],
    down: tuple[QuantizedWeight, Float[Array, " _E"] | None],
    *,
    hadamard_sizes: tuple[int, int],
    activations: NumberFormat | None,
    dtype: DTypeLike,
    modulation: Modulation | None = None,
    eps: float = 1e-6,
    gated_sum: GatedSum | None = None,
) -> Float[Array, "*B _E"]:
    """Compute an MLP: a product, GELU, and a second product.

    On TPUs the first product quantizes its results before it writes them to memory. Each row of these results is
    divided into parts with their own scales.

    Args:
        x: The inputs [... I].
        up: The first weight [I F] and its bias [F], or None.
        down: The second weight [F O] and its bias [O], or None.
        hadamard_sizes: For each weight, how many input channels were rotated together.
        activations: The format of the rows of both products, or None.
        dtype: As in `quantized_matmul`.
        modulation: A layer norm of x and its modulation, which come first.
        eps: The epsilon of the layer norm.
        gated_sum: A gated sum with a residual, which comes last.

    Raises:
        WanjaxError: The shapes or dtypes of the operands do not fit each other.
        UnsupportedError: The formats of inputs and weight differ, or the gradient of quantized inputs is taken.
    """
    dtype = jnp.dtype(dtype)
    _check(x, *up, hadamard_sizes[0], activations, dtype)
    shared = {"activations": activations, "dtype": dtype, "eps": eps}
    if (
        activations is not None
        and uses_kernel(x, up[0], hadamard_sizes[0], dtype)
        and tpu.fuses_mlp(up[0], down[0], hadamard_sizes[1], dtype)
    ):
        run = partial(tpu.quantized_mlp, hadamard_sizes=hadamard_sizes, **shared)
        return _without_gradient(run, x, up, down, modulation=modulation, gated_sum=gated_sum)
    hidden = quantized_matmul(x, *up, hadamard_size=hadamard_sizes[0], modulation=modulation, gelu=True, **shared)
    return quantized_matmul(hidden, *down, hadamard_size=hadamard_sizes[1], gated_sum=gated_sum, **shared)


def uses_kernel(x: Any, weight: QuantizedWeight, hadamard_size: int, dtype: jnp.dtype) -> bool:
    """Return whether the TPU kernel is used for a product with these quantized inputs."""
    values = x.values if isinstance(x, QuantizedRows) else x
    is_tpu = target(values).platform == "tpu"
    return is_tpu and tpu.unsupported(x, weight, hadamard_size, dtype) is None and is_admitted(KERNEL)


def _shape(x: Array | QuantizedRows) -> tuple[int, ...]:
    return (x.values if isinstance(x, QuantizedRows) else x).shape


def _without_gradient(run: Callable[..., Any], *operands: Any, **parts: Any) -> Any:
    """Return `run(*operands, **parts)`. A gradient raises UnsupportedError."""

    def forward(operands: tuple, parts: dict[str, Any]) -> tuple[Any, None]:
        return run(*operands, **parts), None

    def backward(residuals: None, g: Any) -> tuple:
        raise UnsupportedError(
            "a matrix product with quantized activations has no gradient: train with activations=None"
        )

    return with_backward(forward, backward, operands, parts)


def _check(
    x: Array | QuantizedRows,
    weight: QuantizedWeight,
    bias: Array | None,
    hadamard_size: int,
    activations: NumberFormat | None,
    dtype: jnp.dtype,
) -> None:
    """Raise WanjaxError if the operands do not fit each other, and UnsupportedError if a format is not supported."""
    values, scale = weight
    x, row_dtype = (x.values, x.values.dtype) if isinstance(x, QuantizedRows) else (x, None)
    channels = values.shape[-1:]
    if x.ndim < 1 or values.ndim != 2 or x.shape[-1] != len(values):
        shapes = f"{list(x.shape)} and a weight {list(values.shape)}"
        raise WanjaxError(f"a product of x {shapes}: give [... I] and [I O]")
    if scale.shape not in (channels, (1,)) or (bias is not None and bias.shape != channels):
        shapes = f"{list(scale.shape)}" + ("" if bias is None else f" and a bias {list(bias.shape)}")
        raise WanjaxError(f"a scale {shapes} for {channels[0]} output channels: give a number for each, or one scale")
    check_hadamard_size(len(values), hadamard_size)
    names = {format_dtype: name for name, format_dtype in FORMATS.items()}
    if values.dtype not in names or dtype.name not in DTYPES:
        formats = " or ".join(str(format_dtype) for format_dtype in names)
        raise WanjaxError(
            f"a product in {dtype.name} with a weight in {values.dtype}: give one of {', '.join(DTYPES)}, and {formats}"
        )
    if row_dtype is not None and (activations is None or row_dtype != values.dtype):
        problem = f"rows in {row_dtype} and a weight in {values.dtype}, with activations={activations}"
        raise UnsupportedError(
            f"{problem}: give rows in the weight's format, and the name of this format as activations"
        )
    if activations not in (None, names[values.dtype]):
        raise UnsupportedError(
            f"inputs in {activations} for a weight in {names[values.dtype]}: give activations the weight's format, or "
            "None"
        )
