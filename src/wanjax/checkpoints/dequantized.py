# SPDX-License-Identifier: Apache-2.0
"""Read weights of at most 8 bits, and multiply them by their scales.

A quantised weight is stored as numbers and as a scale, in separate tensors of the same module. The shape of the scale
shows which numbers each value of the scale applies to. Some weights also have a zero point: the integer that stands for
0. The names of these tensors depend on the program that wrote the file (`TENSOR_NAMES`):

- `scale_weight`: ComfyUI's older files, musubi-tuner, and LightX2V's files for ComfyUI.
- `weight_scale`: ComfyUI's newer files (QUANTIZATION.md in ComfyUI), LightX2V (tools/convert/converter.py) and
  compressed-tensors, which may add a zero point.
- `weight_scale_inv`: DeepSeek and transformers. Despite this name, the weight is multiplied by the scale.
- `SCB`: bitsandbytes. The scale is the value of the number 127 (functional.int8_vectorwise_dequant).
- TurboDiffusion (turbodiffusion/ops/core.py), quanto (tensor/weights/qbytes.py) and torchao
  (prototype/safetensors/safetensors_support.py) also rename the numbers. torchao may add a zero point.

`layer_formats.py` has ComfyUI's other formats, and ModelOpt's NVFP4.
"""

import math
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from wanjax.checkpoints.files import Spec, TensorReader
from wanjax.checkpoints.layer_formats import (
    MODELOPT_NVFP4,
    LayerFormat,
    formats_in_metadata,
    parse_format,
    rotate,
    unpack_float4,
    untile,
)
from wanjax.checkpoints.pieces import row_pieces, widen
from wanjax.checkpoints.readers import TensorReaderView
from wanjax.errors import WanjaxError


class TensorNames(NamedTuple):
    """The names that a program gives to the tensors of an 8-bit weight, within its module.

    The weight is (numbers - zero point) · scale / divisor. `zero_point_name` is "" if the program writes no zero point.
    `is_integer` says whether the numbers are integers; None means integers or floats. `dtype` is the dtype of the
    dequantised weight.
    """

    numbers_name: str
    scale_name: str
    zero_point_name: str = ""
    is_integer: bool | None = False
    divisor: int = 1
    dtype: Any = np.float32


TENSOR_NAMES = (
    TensorNames("weight", "scale_weight", is_integer=None),
    TensorNames("weight", "weight_scale", "weight_zero_point", is_integer=None),
    TensorNames("weight", "weight_scale_inv"),
    TensorNames("weight", "SCB", is_integer=True, divisor=127),
    TensorNames("int8_weight", "scale", is_integer=True, dtype=jnp.bfloat16),
    TensorNames("weight._data", "weight._scale", is_integer=None),
    TensorNames("_weight_qdata", "_weight_scale", "_weight_zero_point", is_integer=None),
    TensorNames("weight_qdata", "weight_scale", "weight_zero_point", is_integer=None),
    TensorNames("weight:qdata", "weight:scale", "weight:zero_point", is_integer=None),
)
UNSUPPORTED_FORMATS = {  # unsupported formats, and patterns for the names of their tensors in a module
    "quanto with 4 or 2 bits": r"weight\._data\._data|weight\._shift",
    "bitsandbytes with 4 bits": r"weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)",
    "torchao with fewer than 8 bits or another format": r"_?weight[_:](packed_weights?|scale_and_zero|per_tensor_scale|"
    r"sparse_metadata|qdata_and_metadata|act_pre_scale)",
    "4 bits": r"qweight|qzeros|weight_packed",
    "ModelOpt with smoothed inputs or SVDQuant": r"pre_quant_scale|svdquant_lora_[ab]",
}
INPUT_SCALES = re.compile(
    r"scale_input|input_scale(_ub)?|output_scale|_?weight[_:]act_quant_\w+"
)  # scales of a layer's inputs, which wanjax does not quantize
FP8_MARKER_TENSOR = "scaled_fp8"  # a tensor that marks ComfyUI's older files
ORDER_TENSOR = "weight_format"  # the tensor with the order of bitsandbytes' integers; 0 means row by row
FORMAT_TENSOR = "comfy_quant"  # the tensor with a layer's format as JSON, in ComfyUI's newer files
TENSOR_SCALE = "weight_scale_2"  # NVFP4's scale for the whole tensor, in addition to its scales for blocks
DEEPSEEK_BLOCK = 128  # the rows and columns of a block in DeepSeek's files; the last blocks may be smaller
MAX_JSON_BYTES = 4096
QUANTIZATION_ADVICE = "save the weights as floats, as 8-bit floats, or as 8-bit integers with their scale"


class _Parts(NamedTuple):
    """The names of a quantised weight's tensors in the files, and the entry of `TENSOR_NAMES` that they match."""

    numbers_name: str
    scale_name: str
    zero_point_name: str | None
    tensor_names: TensorNames


class DequantizedReader(TensorReaderView):
    """A reader that multiplies 8-bit weights by their scales, and omits the scales.

    Weights become float32, or the dtype of their entry in `TENSOR_NAMES`. Raises WanjaxError if the headers show a
    scale of an unknown shape, or a weight of an unknown format.
    """

    def __init__(self, reader: TensorReader):
        super().__init__(reader)
        keys = set(reader.specs)
        for key in reader.specs:
            _reject_unsupported_format(key)
        self._parts = _group_tensors(keys)
        self._formats: dict[str, LayerFormat] = {}  # the formats of weights, by weight, that ComfyUI's files name
        unread_keys, weights = set[str](), keys | self._parts.keys()
        for layer, value in formats_in_metadata(getattr(reader, "metadata", {})).items():
            if (weight := f"{layer}.weight") in weights:
                self._formats[weight] = parse_format(value, f"the file's entry for {layer}", self._stored_dtype(weight))
        for key in keys:
            module, last = _split(key)
            weight = f"{module}weight"
            if weight not in weights:
                unread_keys |= {key} if last == FP8_MARKER_TENSOR else set()
                continue
            if last == FORMAT_TENSOR:
                text = reader.read(key).tobytes() if reader.specs[key].nbytes <= MAX_JSON_BYTES else b""
                self._formats[weight] = parse_format(text, key, self._stored_dtype(weight))
            if last == ORDER_TENSOR and not (reader.specs[key].nbytes == 1 and reader.read(key).tobytes() == bytes(1)):
                raise WanjaxError(f"{key} is not 0, so {weight} was not quantized row by row: {QUANTIZATION_ADVICE}")
            if last in (FP8_MARKER_TENSOR, ORDER_TENSOR, FORMAT_TENSOR) or INPUT_SCALES.fullmatch(last):
                unread_keys.add(key)
        for weight, parts in self._parts.items():
            if weight not in self._formats and self._is_modelopt_nvfp4(parts):
                self._formats[weight] = MODELOPT_NVFP4
        for weight, layer_format in self._formats.items():
            if weight not in self._parts and (layer_format.scale_block or layer_format.dtype == np.int8):
                raise WanjaxError(f"{weight} is in {layer_format.name} but has no {weight}_scale: get the file again")
        for weight, parts in self._parts.items():
            unread_keys |= {parts.scale_name, *([parts.zero_point_name] if parts.zero_point_name else [])}
            zero_point = reader.specs[parts.zero_point_name] if parts.zero_point_name else None
            layer_format = self._formats.get(weight)
            if layer_format is None or not layer_format.scale_block:
                _check_parts(parts, self._stored(weight), reader.specs[parts.scale_name], zero_point)
                _check_rotation(weight, self._stored(weight), layer_format)
            else:
                unread_keys |= self._checked_scale_names(weight, layer_format)
        weight_by_numbers = {parts.numbers_name: weight for weight, parts in self._parts.items()}
        names = [weight_by_numbers.get(key, key) for key in reader.specs if key not in unread_keys]
        self.specs = {key: self._spec(key) for key in names}
        for key, (_, dtype) in self.specs.items():
            if _split(key)[1] == "weight" and np.issubdtype(dtype, np.integer):
                raise WanjaxError(f"{key} is {dtype} and has no known scale: {QUANTIZATION_ADVICE}")

    @property
    def is_quantized(self) -> bool:
        return super().is_quantized or any(
            self._reader.specs[x.numbers_name].dtype == np.int8 for x in self._parts.values()
        )

    def _is_modelopt_nvfp4(self, parts: _Parts) -> bool:
        """Return whether a weight is in ModelOpt's NVFP4: bytes, 8-bit scales of blocks, and a scale of the tensor."""
        specs = self._reader.specs
        is_packed = (
            specs[parts.numbers_name].dtype == np.uint8 and specs[parts.scale_name].dtype == ml_dtypes.float8_e4m3fn
        )
        return is_packed and _tensor_scale(parts) in specs

    def _stored(self, key: str) -> Spec:
        """Return the shape and dtype of a tensor's numbers, before the scale is applied."""
        shape, dtype = self._reader.specs[self._names(key)]
        layer_format = self._formats.get(key)
        return Spec(layer_format.shape(shape), layer_format.dtype) if layer_format else Spec(shape, dtype)

    def _stored_dtype(self, key: str) -> np.dtype:
        return self._reader.specs[self._names(key)].dtype

    def _spec(self, key: str) -> Spec:
        shape, dtype = self._stored(key)
        return Spec(shape, np.dtype(self._parts[key].tensor_names.dtype) if key in self._parts else dtype)

    def _names(self, key: str) -> str:
        """Return the name in the files of a tensor, or of the numbers of a quantised weight."""
        return self._parts[key].numbers_name if key in self._parts else key

    def read(self, key: str) -> np.ndarray:
        x = self._reader.read(self._names(key))
        layer_format = self._formats.get(key)
        x = x if layer_format is None else x.view(layer_format.dtype)
        if (parts := self._parts.get(key)) is None:
            return x
        if layer_format and layer_format.scale_block:
            return self._read_blocks(x, parts, layer_format)
        scale = self._expand_scale(parts.scale_name, x.shape) / parts.tensor_names.divisor
        zero_point = self._expand_scale(parts.zero_point_name, x.shape) if parts.zero_point_name else None
        numbers = np.empty(x.shape, np.float32)
        for piece in row_pieces(x.shape):
            widen(x[piece], numbers[piece])
            if zero_point is not None:
                numbers[piece] -= _rows(zero_point, piece)
            numbers[piece] *= _rows(scale, piece)
        if layer_format and layer_format.hadamard_size:
            numbers = rotate(numbers, layer_format.hadamard_size)
        return numbers.astype(self.specs[key].dtype, copy=False)

    def _read_blocks(self, x: np.ndarray, parts: _Parts, layer_format: LayerFormat) -> np.ndarray:
        """Dequantise a weight with a scale for each block of a row."""
        (rows, columns), block = layer_format.shape(x.shape), layer_format.scale_block
        scales = self._reader.read(parts.scale_name)
        if not layer_format.row_by_row:
            scales = untile(scales, rows, columns // block)
        scale_dtype = ml_dtypes.float8_e4m3fn if layer_format.packed else ml_dtypes.float8_e8m0fnu
        scales = scales.view(scale_dtype).astype(np.float32)
        if layer_format.packed:
            scales = scales * self._reader.read(_tensor_scale(parts)).astype(np.float32).reshape(())
        if not np.isfinite(scales).all():
            raise WanjaxError(f"{parts.scale_name} has numbers that are not finite: get the file again")
        numbers = np.empty((rows, columns), np.float32)
        for piece in row_pieces(numbers.shape):
            if layer_format.packed:
                unpack_float4(x[piece], numbers[piece], layer_format)
            else:
                widen(x[piece], numbers[piece])
            blocks = numbers[piece].reshape(-1, columns // block, block)
            blocks *= scales[piece][..., None]
        return numbers

    def _checked_scale_names(self, weight: str, layer_format: LayerFormat) -> set[str]:
        """Raise WanjaxError unless a weight has a scale for each block of its rows; return the names of its scales."""
        parts, shape = self._parts[weight], self._stored(weight).shape
        scale = self._reader.specs[parts.scale_name]
        if len(shape) != 2 or 0 in shape or shape[1] % layer_format.scale_block:
            raise WanjaxError(
                f"{parts.numbers_name} is {list(shape)} in {layer_format.name}, but rows must consist of whole blocks "
                f"of {layer_format.scale_block} numbers: get the file again"
            )
        expected_shape = layer_format.scale_shape(shape)
        if math.prod(scale.shape) != math.prod(expected_shape) or scale.dtype.itemsize != 1:
            raise WanjaxError(
                f"{parts.scale_name} is {scale.dtype} {list(scale.shape)}, but {parts.numbers_name} is "
                f"{layer_format.name} of {list(shape)}, which needs scales {list(expected_shape)} of one byte: get the "
                "file again"
            )
        if not layer_format.packed:
            return {parts.scale_name}
        tensor_scale = _tensor_scale(parts)
        if (spec := self._reader.specs.get(tensor_scale)) is None or math.prod(spec.shape) != 1:
            raise WanjaxError(
                f"{weight} is in {layer_format.name} but has no {tensor_scale} with one number: get the file again"
            )
        return {parts.scale_name, tensor_scale}

    def _expand_scale(self, key: str, shape: tuple[int, ...]) -> np.ndarray:
        """Read the scales or zero points of a weight, and repeat them so that they broadcast to its `shape`."""
        x = self._reader.read(key).astype(np.float32)
        if not np.isfinite(x).all():
            raise WanjaxError(f"{key} has numbers that are not finite: get the file again")
        grid, block = _scale_grid(shape, x.shape) or ((1,), (1,))
        x = x.reshape(grid)
        for axis, size in enumerate(block):
            if x.shape[axis] > 1:  # an axis of size 1 broadcasts
                x = np.repeat(x, size, axis)
        return x[tuple(map(slice, shape))]


def _rows(x: np.ndarray, piece: slice) -> np.ndarray:
    """Return the rows `piece` of an array that broadcasts to a weight."""
    return x[piece] if len(x) > 1 else x


def _split(key: str) -> tuple[str, str]:
    """Split a tensor's name into its module, with the dot, and the name within the module."""
    module, dot, tensor_name = key.rpartition(".")
    return module + dot, tensor_name


def _tensor_scale(parts: _Parts) -> str:
    """Return the name of NVFP4's scale for the whole tensor."""
    return f"{_split(parts.scale_name)[0]}{TENSOR_SCALE}"


def _check_rotation(weight: str, spec: Spec, layer_format: LayerFormat | None) -> None:
    """Raise WanjaxError unless the rows of a rotated weight consist of whole rotation groups."""
    group = layer_format.hadamard_size if layer_format else 0
    if group and (len(spec.shape) != 2 or spec.shape[1] % group):
        raise WanjaxError(
            f"{weight} is {list(spec.shape)}, but rows must consist of whole rotation groups of {group} numbers: get "
            "the file again"
        )


def _reject_unsupported_format(key: str) -> None:
    """Raise WanjaxError if a tensor belongs to an unsupported format."""
    for format_name, pattern in UNSUPPORTED_FORMATS.items():
        if re.fullmatch(rf"(.+\.)?({pattern})", key):
            raise WanjaxError(f"{key} belongs to an unsupported quantised format, {format_name}: {QUANTIZATION_ADVICE}")


def _group_tensors(keys: set[str]) -> dict[str, _Parts]:
    """Find the tensors of each weight with a scale; raise WanjaxError if a scale is missing or a weight has two."""
    parts: dict[str, _Parts] = {}
    for tensor_names in TENSOR_NAMES:
        for key in keys:
            module = key.removesuffix(tensor_names.numbers_name)
            if key == module or (module and not module.endswith(".")):
                continue
            weight, scale, zero_point = (
                f"{module}{part}" for part in ("weight", tensor_names.scale_name, tensor_names.zero_point_name)
            )
            if scale in keys and weight in parts:
                raise WanjaxError(f"{weight} has both {parts[weight].scale_name} and {scale}: remove one of them")
            if tensor_names.numbers_name != "weight" and (weight in keys or scale not in keys):
                problem = f"contradicts {weight}: remove one of them" if weight in keys else f"has no {scale}: add it"
                raise WanjaxError(f"{key} {problem}")
            if scale in keys:
                parts[weight] = _Parts(
                    key,
                    scale,
                    zero_point if tensor_names.zero_point_name and zero_point in keys else None,
                    tensor_names,
                )
    return parts


def _scale_grid(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the grid of a weight's scales, with as many axes as the weight, and the shape of the block of each scale.

    A weight has one scale, or one for each row, each equal part of a row, or each square block. Returns None for any
    other shape of scales.
    """
    ones = (1,) * len(shape)
    if math.prod(scales) == 1:
        return ones, ones
    while scales[2:] and scales[-1] == 1:
        scales = scales[:-1]
    if scales in (shape[:1], (*shape[:1], 1)):
        return (*shape[:1], *ones[1:]), ones
    if len(shape) != 2 or len(scales) != 2:
        return None
    (rows, columns), (scale_rows, scale_columns) = shape, scales
    if scale_rows == rows and columns % scale_columns == 0:
        return scales, (1, columns // scale_columns)
    if scales == (math.ceil(rows / DEEPSEEK_BLOCK), math.ceil(columns / DEEPSEEK_BLOCK)):
        return scales, (DEEPSEEK_BLOCK, DEEPSEEK_BLOCK)
    is_square = (
        rows % scale_rows == 0 and columns % scale_columns == 0 and rows // scale_rows == columns // scale_columns
    )
    return (scales, (rows // scale_rows, columns // scale_columns)) if is_square else None


def _check_parts(parts: _Parts, spec: Spec, scale: Spec, zero_point: Spec | None) -> None:
    """Raise WanjaxError unless scale and zero point fit the numbers, and all dtypes fit `parts.tensor_names`."""
    is_integer = parts.tensor_names.is_integer
    is_float = jnp.issubdtype(spec.dtype, jnp.floating)
    supported = (is_float and not is_integer) or (spec.dtype == np.int8 and is_integer is not False)
    if not supported or not jnp.issubdtype(scale.dtype, jnp.floating):
        expected_text = {True: "8-bit integers", False: "8-bit floats", None: "8-bit floats or integers"}[is_integer]
        problem = f"{parts.numbers_name} is {spec.dtype}, with the {scale.dtype} {parts.scale_name}"
        raise WanjaxError(f"{problem}: give {expected_text} with a scale of floats")
    if zero_point and (
        is_float or zero_point.shape != scale.shape or not jnp.issubdtype(zero_point.dtype, jnp.integer)
    ):
        zero_point_text = f"{parts.zero_point_name} is {zero_point.dtype} {list(zero_point.shape)}"
        problem = f"{zero_point_text}, for {parts.numbers_name} of {spec.dtype}"
        raise WanjaxError(f"{problem}: give integers of the shape {list(scale.shape)}, for weights of 8-bit integers")
    if 0 in scale.shape or _scale_grid(spec.shape, scale.shape) is None:
        expected_text = "one scale, or one for each row, each equal part of a row or each square block"
        numbers = f"{parts.numbers_name}, {list(spec.shape)},"
        raise WanjaxError(
            f"{parts.scale_name} has the shape {list(scale.shape)}, but {numbers} needs {expected_text}: "
            "get the file again"
        )
