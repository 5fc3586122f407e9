# SPDX-License-Identifier: Apache-2.0
"""Weights of 8 bits and fewer with their scales multiplied in.

A scale is a tensor beside its weight: `scale_weight` in ComfyUI's older files, musubi-tuner's and what LightX2V writes
for ComfyUI, `weight_scale` in ComfyUI's newer ones (its QUANTIZATION.md) and those of compressed-tensors and LightX2V
(tools/convert/converter.py), `weight_scale_inv` in DeepSeek's and transformers', which is multiplied too, in spite of
its name. Its shape tells what each of its numbers is for. By the first two names the weight is 8-bit floats or
integers, of which compressed-tensors may have the one that stands for 0 too.
thu-ml/TurboDiffusion (turbodiffusion/ops/core.py), quanto (tensor/weights/qbytes.py) and torchao
(prototype/safetensors/safetensors_support.py) have another name in place of `weight`; torchao may have the integer that
stands for 0 too. In bitsandbytes the scale is the size of 127 (functional.int8_vectorwise_dequant).
ComfyUI's other formats are in `layer_formats.py`.
"""

import math
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from wanjax.checkpoints.files import Reader, Spec
from wanjax.checkpoints.layer_formats import (
    LayerFormat,
    formats_in_metadata,
    parse_format,
    rotate,
    unpack_float4,
    untile,
)
from wanjax.checkpoints.readers import View
from wanjax.errors import WanjaxError


class Spelling(NamedTuple):
    """The names, in a module, of the numbers of an 8-bit weight, of their scale, and of their zero, if it has one.

    The weight is (numbers - zero) · scale / steps. `whole` tells whether the numbers are integers; None is either.
    `dtype` is that of the weight: the one from which it was rounded, if that is known.
    """

    numbers: str
    scale: str
    zero: str = ""
    whole: bool | None = False
    steps: int = 1
    dtype: Any = np.float32


SPELLINGS = (
    Spelling("weight", "scale_weight", whole=None),
    Spelling("weight", "weight_scale", "weight_zero_point", whole=None),
    Spelling("weight", "weight_scale_inv"),
    Spelling("weight", "SCB", whole=True, steps=127),
    Spelling("int8_weight", "scale", whole=True, dtype=jnp.bfloat16),
    Spelling("weight._data", "weight._scale", whole=None),
    Spelling("_weight_qdata", "_weight_scale", "_weight_zero_point", whole=None),
    Spelling("weight_qdata", "weight_scale", "weight_zero_point", whole=None),
    Spelling("weight:qdata", "weight:scale", "weight:zero_point", whole=None),
)
OTHERS = {  # parts of weights that are not read, by patterns of their names in a module
    "quanto's, of 4 bits or 2": r"weight\._data\._data|weight\._shift",
    "bitsandbytes', of 4 bits": r"weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)",
    "torchao's, of fewer bits or another format": r"_?weight[_:](packed_weights?|scale_and_zero|per_tensor_scale|"
    r"sparse_metadata|qdata_and_metadata|act_pre_scale)",
    "one of 4 bits": r"qweight|qzeros|weight_packed",
}
INPUTS = re.compile(
    r"scale_input|input_scale(_ub)?|output_scale|_?weight[_:]act_quant_\w+"
)  # inputs are not rounded here
MARK = "scaled_fp8"  # of ComfyUI's older files
ORDER = "weight_format"  # the order of bitsandbytes' integers, 0 for row by row
QUANTISED = "comfy_quant"  # a layer's format in ComfyUI's newer files, as JSON
TENSOR_SCALE = "weight_scale_2"  # in NVFP4 the scale of the whole tensor, beside those of its blocks
BLOCK = 128  # rows and columns of a block in DeepSeek's files, whose last ones may be smaller
JSON_BYTES = 4096
EIGHT_BITS = (
    "8-bit floats, and 8-bit integers with their scale, are read: save it as those, or get the weights as floats"
)


class _Parts(NamedTuple):
    """The names of a weight's tensors in the files, and how they are spelled."""

    numbers: str
    scale: str
    zero: str | None
    spelling: Spelling


class Dequantized(View):
    """A checkpoint whose 8-bit weights are multiplied by their scales; the scales themselves are left out.

    Floats become float32, and so do integers, unless it is known that they were rounded from bfloat16. Raises
    WanjaxError, from the headers alone, where a scale has a shape or a weight a format that is not known.
    """

    def __init__(self, reader: Reader):
        super().__init__(reader)
        keys = set(reader.specs)
        for key in reader.specs:
            _check_known(key)
        self._parts = _found(keys)
        self._formats: dict[str, LayerFormat] = {}  # of weights whose format is named beside them
        surplus, weights = set[str](), keys | self._parts.keys()
        for layer, value in formats_in_metadata(getattr(reader, "metadata", {})).items():
            if (weight := f"{layer}.weight") in weights:
                self._formats[weight] = parse_format(value, f"the file's entry for {layer}", self._stored_dtype(weight))
        for key in keys:
            module, last = _split(key)
            weight = f"{module}weight"
            if weight not in weights:
                surplus |= {key} if last == MARK else set()
                continue
            if last == QUANTISED:
                text = reader.read(key).tobytes() if reader.specs[key].nbytes <= JSON_BYTES else b""
                self._formats[weight] = parse_format(text, key, self._stored_dtype(weight))
            if last == ORDER and not (reader.specs[key].nbytes == 1 and reader.read(key).tobytes() == bytes(1)):
                raise WanjaxError(f"{key} is not 0, so the integers of {weight} are in another order: {EIGHT_BITS}")
            if last in (MARK, ORDER, QUANTISED) or INPUTS.fullmatch(last):
                surplus.add(key)
        for weight, layer_format in self._formats.items():
            if weight not in self._parts and (layer_format.scale_block or layer_format.dtype == np.int8):
                raise WanjaxError(f"{weight} is in {layer_format.name}, without {weight}_scale: get the file again")
        for weight, parts in self._parts.items():
            surplus |= {parts.scale, *([parts.zero] if parts.zero else [])}
            zero = reader.specs[parts.zero] if parts.zero else None
            layer_format = self._formats.get(weight)
            if layer_format is None or not layer_format.scale_block:
                _check(parts, self._stored(weight), reader.specs[parts.scale], zero)
                _check_rotation(weight, self._stored(weight), layer_format)
            else:
                surplus |= self._check_blocks(weight, layer_format)
        of_numbers = {parts.numbers: weight for weight, parts in self._parts.items()}
        names = [of_numbers.get(key, key) for key in reader.specs if key not in surplus]
        self.specs = {key: self._spec(key) for key in names}
        for key, (_, dtype) in self.specs.items():
            if _split(key)[1] == "weight" and np.issubdtype(dtype, np.integer):
                raise WanjaxError(f"{key} is {dtype}, and no scale that is known stands beside it: {EIGHT_BITS}")

    def _stored(self, key: str) -> Spec:
        """Return the shape and dtype of a tensor without its scale."""
        shape, dtype = self._reader.specs[self._names(key)]
        layer_format = self._formats.get(key)
        return Spec(layer_format.shape(shape), layer_format.dtype) if layer_format else Spec(shape, dtype)

    def _stored_dtype(self, key: str) -> np.dtype:
        return self._reader.specs[self._names(key)].dtype

    def _spec(self, key: str) -> Spec:
        shape, dtype = self._stored(key)
        return Spec(shape, np.dtype(self._parts[key].spelling.dtype) if key in self._parts else dtype)

    def _names(self, key: str) -> str:
        """Return the name in the files of a tensor, or of a weight's numbers."""
        return self._parts[key].numbers if key in self._parts else key

    def read(self, key: str) -> np.ndarray:
        x = self._reader.read(self._names(key))
        layer_format = self._formats.get(key)
        x = x if layer_format is None else x.view(layer_format.dtype)
        if (parts := self._parts.get(key)) is None:
            return x
        if layer_format and layer_format.scale_block:
            return self._read_blocks(x, parts, layer_format)
        numbers = x.astype(np.float32)
        if parts.zero:
            numbers -= self._spread(parts.zero, x.shape)
        numbers *= self._spread(parts.scale, x.shape) / parts.spelling.steps
        if layer_format and layer_format.rotated_group:
            numbers = rotate(numbers, layer_format.rotated_group)
        return numbers.astype(self.specs[key].dtype, copy=False)

    def _read_blocks(self, x: np.ndarray, parts: _Parts, layer_format: LayerFormat) -> np.ndarray:
        """Return a weight that has a scale for each block of its rows, in the order of the tensor cores."""
        numbers = unpack_float4(x) if layer_format.packed else x.astype(np.float32)
        (rows, columns), block = numbers.shape, layer_format.scale_block
        scales = untile(self._reader.read(parts.scale), rows, columns // block)
        kind = ml_dtypes.float8_e4m3fn if layer_format.packed else ml_dtypes.float8_e8m0fnu
        scales = scales.view(kind).astype(np.float32)
        if layer_format.packed:
            scales = scales * self._reader.read(_tensor_scale(parts)).astype(np.float32).reshape(())
        if not np.isfinite(scales).all():
            raise WanjaxError(f"{parts.scale} has numbers that are not finite: get the file again")
        blocks = numbers.reshape(rows, -1, block)
        blocks *= scales[..., None]
        return numbers

    def _check_blocks(self, weight: str, layer_format: LayerFormat) -> set[str]:
        """Raise WanjaxError unless a weight has a scale for each block of its rows; return the names of its scales."""
        parts, shape = self._parts[weight], self._stored(weight).shape
        scale = self._reader.specs[parts.scale]
        if len(shape) != 2 or 0 in shape or shape[1] % layer_format.scale_block:
            raise WanjaxError(
                f"{parts.numbers} is {list(shape)} in {layer_format.name}: rows of whole blocks of "
                f"{layer_format.scale_block} numbers are read"
            )
        wanted = layer_format.scale_shape(shape)
        if math.prod(scale.shape) != math.prod(wanted) or scale.dtype.itemsize != 1:
            raise WanjaxError(
                f"{parts.scale} is {scale.dtype} {list(scale.shape)} where {parts.numbers} is {layer_format.name} of "
                f"{list(shape)}, whose scales are {list(wanted)} of one byte"
            )
        if not layer_format.packed:
            return {parts.scale}
        tensor_scale = _tensor_scale(parts)
        if (spec := self._reader.specs.get(tensor_scale)) is None or math.prod(spec.shape) != 1:
            raise WanjaxError(f"{weight} is in {layer_format.name}, without the one {tensor_scale}: get the file again")
        return {parts.scale, tensor_scale}

    def _spread(self, key: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a tensor that has a number for each part of a weight, with axes of the weight's sizes or 1."""
        x = self._reader.read(key).astype(np.float32)
        if not np.isfinite(x).all():
            raise WanjaxError(f"{key} has numbers that are not finite: get the file again")
        grid, block = _places(shape, x.shape) or ((1,), (1,))
        x = x.reshape(grid)
        for axis, size in enumerate(block):
            if x.shape[axis] > 1:  # else it is the same along the axis
                x = np.repeat(x, size, axis)
        return x[tuple(map(slice, shape))]


def _split(key: str) -> tuple[str, str]:
    """Return the name of a tensor's module, with its dot, and the rest of the tensor's name."""
    module, dot, last = key.rpartition(".")
    return module + dot, last


def _tensor_scale(parts: _Parts) -> str:
    """Return the name of the scale of a whole tensor in NVFP4."""
    return f"{_split(parts.scale)[0]}{TENSOR_SCALE}"


def _check_rotation(weight: str, stored: Spec, layer_format: LayerFormat | None) -> None:
    """Raise WanjaxError unless a weight's rows consist of whole groups that were rotated together."""
    group = layer_format.rotated_group if layer_format else 0
    if group and (len(stored.shape) != 2 or stored.shape[1] % group):
        raise WanjaxError(f"{weight} is {list(stored.shape)}: it cannot have been rotated in groups of {group}")


def _check_known(key: str) -> None:
    """Raise WanjaxError for a tensor of a format that is not read."""
    for whose, pattern in OTHERS.items():
        if re.fullmatch(rf"(.+\.)?({pattern})", key):
            raise WanjaxError(f"{key} is a part of a quantised weight, {whose}, which is not read: {EIGHT_BITS}")


def _found(keys: set[str]) -> dict[str, _Parts]:
    """Return the parts of each weight that has a scale; raise WanjaxError where one is missing or there are more."""
    parts: dict[str, _Parts] = {}
    for spelling in SPELLINGS:
        for key in keys:
            module = key.removesuffix(spelling.numbers)
            if key == module or (module and not module.endswith(".")):
                continue
            weight, scale, zero = (f"{module}{part}" for part in ("weight", spelling.scale, spelling.zero))
            if scale in keys and weight in parts:
                raise WanjaxError(f"{weight} has both {parts[weight].scale} and {scale}: leave one of them out")
            if spelling.numbers != "weight" and (weight in keys or scale not in keys):
                why = f"stands beside {weight}" if weight in keys else f"has no {scale} beside it"
                raise WanjaxError(f"{key} {why}: 8-bit numbers come with their scale, in place of the weight")
            if scale in keys:
                parts[weight] = _Parts(key, scale, zero if spelling.zero and zero in keys else None, spelling)
    return parts


def _places(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the grid of a weight's scales, with its axes, and the sizes of a block; None where the shape is unknown.

    There is one scale, or one for each row, for each of equal parts of a row, or for each square block.
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
    (rows, columns), (down, across) = shape, scales
    if down == rows and columns % across == 0:
        return scales, (1, columns // across)
    if scales == (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)):
        return scales, (BLOCK, BLOCK)
    square = rows % down == 0 and columns % across == 0 and rows // down == columns // across
    return (scales, (rows // down, columns // across)) if square else None


def _check(parts: _Parts, stored: Spec, scale: Spec, zero: Spec | None) -> None:
    """Raise WanjaxError unless scale and zero fit the numbers, and each is of a dtype that its spelling has."""
    whole = parts.spelling.whole
    floating = jnp.issubdtype(stored.dtype, jnp.floating)
    supported = (floating and not whole) or (stored.dtype == np.int8 and whole is not False)
    if not supported or not jnp.issubdtype(scale.dtype, jnp.floating):
        right = {True: "8-bit integers", False: "8-bit floats", None: "8-bit floats or integers"}[whole]
        problem = f"{parts.numbers} is {stored.dtype}, with the {scale.dtype} {parts.scale}"
        raise WanjaxError(f"{problem}: {right} with a scale of floats are read, not others")
    if zero and (floating or zero.shape != scale.shape or not jnp.issubdtype(zero.dtype, jnp.integer)):
        problem = f"{parts.zero} is {zero.dtype} {list(zero.shape)} beside {parts.numbers}, {stored.dtype}"
        raise WanjaxError(f"{problem}: integers of the scale's shape, {list(scale.shape)}, for 8-bit integers are read")
    if 0 in scale.shape or _places(stored.shape, scale.shape) is None:
        right = "one scale, or one for each row, each equal part of a row or each square block"
        numbers = f"{parts.numbers}, {list(stored.shape)},"
        raise WanjaxError(f"{parts.scale} has the shape {list(scale.shape)} where {numbers} has {right}")
