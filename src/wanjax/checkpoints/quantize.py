# SPDX-License-Identifier: Apache-2.0
"""Quantize kernels to 8 bits while they are read. The host does this on all cores, without compiling a program.

The quantization is that of `kernels.quantized_matmul.quantize_weight`. Rows are quantized in pieces of a fixed size.
The result therefore depends only on the kernel: loading and converting give the same numbers, bit for bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from wanjax.checkpoints.arrays import make_array
from wanjax.checkpoints.files import Spec
from wanjax.checkpoints.to_devices import to_device, workers
from wanjax.kernels.hadamard import choose_hadamard_size, regular_hadamard
from wanjax.kernels.quantized_matmul.formats import FORMATS, LARGEST, SMALLEST_ABSMAX
from wanjax.layers.quantized import QuantizedLinear, quantized_layers

PIECE_ROWS = 128
REQUANTIZATION_FACTOR = np.float32(1.04)
"""The factor of the scale of int8 weights that are quantized a second time, after a LoRA changed them.

If the scale did not change, rounding would undo every change of less than half a quantization step. With another scale,
the old numbers lie between the new steps, at all distances. Rounding then preserves the sum of many small changes.
"""


class QuantizedValues(NamedTuple):
    """A kernel that was quantized to 8 bits, with its scales.

    Attributes:
        values: The numbers [I O].
        scale: The scale [O] of each output channel, in float32.
    """

    values: np.ndarray
    scale: np.ndarray


class QuantizedKernel(NamedTuple):
    """A quantized projection, and the names of the two parameters that its kernel fills.

    Attributes:
        layer: The projection.
        values_name: The name of the parameter that contains the numbers.
        scale_name: The name of the parameter that contains the scale.
    """

    layer: QuantizedLinear
    values_name: str
    scale_name: str

    @property
    def specs(self) -> dict[str, Spec]:
        """The shapes and dtypes of the numbers and the scale, by parameter name."""
        pairs = ((self.values_name, self.layer.values), (self.scale_name, self.layer.scale))
        arrays = ((name, variable.get_value()) for name, variable in pairs)
        return {name: Spec(tuple(x.shape), np.dtype(x.dtype)) for name, x in arrays}


def quantized_kernels(module: nnx.Module) -> dict[str, QuantizedKernel]:
    """Return the kernels of a module's quantized projections, by the names of the kernels before quantization."""
    return {
        f"{path}.kernel": QuantizedKernel(layer, f"{path}.values", f"{path}.scale")
        for path, layer in quantized_layers(module).items()
    }


def as_floats(parameters: Mapping[str, Any], kernels: Mapping[str, QuantizedKernel]) -> dict[str, Any]:
    """Return the parameters that the module has before quantization: each kernel replaces its numbers and its scale."""
    targets = dict(parameters)
    for name, kernel in kernels.items():
        del targets[kernel.scale_name]
        targets[name] = jax.ShapeDtypeStruct(targets.pop(kernel.values_name).shape, np.float32)
    return targets


def to_device_quantized(
    tensors: Sequence[AbstractContextManager[np.ndarray]],
    kernel: QuantizedKernel,
    *,
    stacked: bool,
    was_quantized: Sequence[bool] = (),
) -> dict[str, jax.Array]:
    """Read and quantize a kernel. Return the numbers and the scale, with the shardings of the abstract projection.

    Host memory holds the tensor that is being read and one tensor of 8 bits. Each process quantizes whole tensors.

    Args:
        tensors: The tensors of the blocks of a stack, or a single tensor. A tensor is read when its context is entered.
        kernel: The kernel to fill.
        stacked: Whether the tensors are blocks of a stack.
        was_quantized: For each tensor, whether it was quantized before and then changed. By default, none was.
    """
    scales: list[np.ndarray] = []

    @contextmanager
    def quantized(tensor: AbstractContextManager[np.ndarray], was_quantized: bool) -> Iterator[np.ndarray]:
        with tensor as x:
            values, scale = quantize(x, kernel.layer, was_quantized=was_quantized)
        scales.append(scale)
        yield values

    values = to_device(
        [*map(quantized, tensors, was_quantized or [False] * len(tensors))],
        kernel.layer.values.get_value(),
        stacked=stacked,
    )
    scale = np.stack(scales) if stacked else scales[0]
    shards = make_array(lambda part, dtype: scale[part].astype(dtype), kernel.layer.scale.get_value())
    return {kernel.values_name: values, kernel.scale_name: shards}


def quantize(kernel: np.ndarray, layer: QuantizedLinear, *, was_quantized: bool = False) -> QuantizedValues:
    """Quantize a kernel to the format of a quantized projection.

    Args:
        kernel: The kernel [I O], in any float dtype and any memory layout.
        layer: The quantized projection; it has the format and the rotation.
        was_quantized: Whether the kernel was quantized before and then changed.
    """
    widening = REQUANTIZATION_FACTOR if was_quantized and layer.number_format == "int8" else np.float32(1)
    rows = kernel.T  # [O I], as most checkpoints store it
    values, scale = np.empty(rows.shape, FORMATS[layer.number_format]), np.empty(len(rows), np.float32)
    row_ranges = [slice(start, start + PIECE_ROWS) for start in range(0, len(rows), PIECE_ROWS)]

    def quantize_rows(row_range: slice) -> None:
        x = rows[row_range].astype(np.float32)
        if layer.hadamard_size:
            x = (x.reshape(-1, layer.hadamard_size) @ regular_hadamard(layer.hadamard_size)).reshape(x.shape)
        format_max = np.float32(LARGEST[layer.number_format])
        scale[row_range] = np.maximum(np.abs(x).max(axis=1), np.float32(SMALLEST_ABSMAX)) / format_max * widening
        # A row with an infinity or a NaN has a scale that is not finite, so its numbers do not matter
        with np.errstate(invalid="ignore"):
            x /= scale[row_range, None]
            np.clip(x, -format_max, format_max, out=x)
            values[row_range] = np.rint(x) if layer.number_format == "int8" else x

    list(workers().map(quantize_rows, row_ranges))
    return QuantizedValues(values.T, scale)


class FloatKernel:
    """A stored kernel of 8 bits as floats [... I O], without the rotation. Indexing reads a block of a stack.

    Args:
        values: The numbers [... I O].
        scale: The scales [... O].
        rotates: Whether a Hadamard rotation was applied to the input channels before they were quantized.
    """

    def __init__(self, values: Any, scale: Any, *, rotates: bool):
        self._values, self._scale = values, scale
        self.shape, self.dtype = tuple(values.shape), np.dtype(np.float32)
        self._hadamard_size = choose_hadamard_size(self.shape[-2]) if rotates else 0

    def __getitem__(self, index: Any) -> np.ndarray:
        values, scale = self._values[index], self._scale[index]
        rows = np.multiply(np.swapaxes(values, -1, -2), scale[..., None], dtype=np.float32)
        if self._hadamard_size:
            rows = (rows.reshape(-1, self._hadamard_size) @ regular_hadamard(self._hadamard_size)).reshape(rows.shape)
        return np.swapaxes(rows, -1, -2)


def float_kernels(stored: Mapping[str, Any], *, rotates: bool) -> dict[str, Any]:
    """Replace the numbers and scales of 8-bit kernels by kernels in floats, under the kernels' names."""
    kernels = {name.removesuffix(".values"): array for name, array in stored.items() if name.endswith(".values")}
    parts = {f"{path}.{part}" for path in kernels for part in ("values", "scale")}
    floats = {name: array for name, array in stored.items() if name not in parts}
    scales = {path: stored[f"{path}.scale"] for path in kernels}
    return floats | {f"{path}.kernel": FloatKernel(x, scales[path], rotates=rotates) for path, x in kernels.items()}
