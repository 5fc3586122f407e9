# SPDX-License-Identifier: Apache-2.0
"""8-bit weights with their scales multiplied in.

A scale is a tensor beside its weight: `scale_weight` in ComfyUI's older files and musubi-tuner's, `weight_scale` in its
newer ones (QUANTIZATION.md of ComfyUI) and those of compressed-tensors and LightX2V, `weight_scale_inv` in DeepSeek's
and transformers', which is multiplied too, in spite of its name. Its shape tells what each of its numbers is for.
Integers are those of thu-ml/TurboDiffusion, turbodiffusion/ops/core.py: `int8_weight` and `scale` in place of `weight`.
"""

import json
import math
import re
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from wanjax.checkpoints.files import Reader, Spec
from wanjax.checkpoints.readers import View
from wanjax.errors import WanjaxError, shown

SCALES = ("scale_weight", "weight_scale", "weight_scale_inv")
INTEGERS, SCALE_OF_INTEGERS = "int8_weight", "scale"
INPUTS = ("scale_input", "input_scale", "input_scale_ub")  # inputs are not rounded here
MARK = "scaled_fp8"  # of ComfyUI's older files
QUANTISED = "comfy_quant"  # a layer's format in ComfyUI's newer files, as JSON
PLAIN = {"format", "full_precision_matrix_mult", "group_size", "block_size"}  # entries that change no number
FORMAT = re.compile(r"(float8_e4m3fn|float8_e5m2)(?:_(?:tensor|row|block)\w*)?")  # the shape tells what a scale is for
BLOCK = 128  # rows and columns of a block in DeepSeek's files, whose last ones may be smaller
JSON_BYTES = 4096


class Descaled(View):
    """A checkpoint with the scales of its weights multiplied in, and without what else belongs to them.

    Floats become float32. Integers become bfloat16, from which they were rounded. Raises WanjaxError, from the headers
    alone, where a scale has a shape or a weight a format that is not known.
    """

    def __init__(self, reader: Reader):
        super().__init__(reader)
        keys = set(reader.keys())
        self._scales: dict[str, str] = {}
        self._formats: dict[str, Any] = {}  # of weights that are stored as plain bytes
        self._integers = {_weight_of(key): key for key in keys if key.rpartition(".")[2] == INTEGERS}
        surplus, weights = {key for key in keys if key.rpartition(".")[2] == MARK}, keys | self._integers.keys()
        for key in keys:
            last, weight = key.rpartition(".")[2], _weight_of(key)
            scales = (SCALE_OF_INTEGERS,) if weight in self._integers else SCALES
            if weight not in weights:
                continue
            if last in scales:
                if weight in self._scales:
                    raise WanjaxError(f"{weight} has both {self._scales[weight]} and {key}: one of them is right")
                self._scales[weight] = key
            elif last == QUANTISED:
                self._formats[weight] = _format(reader, key, reader.spec(self._names(weight)).dtype)
            if last in (*scales, *INPUTS, QUANTISED):
                surplus.add(key)
        for weight, key in self._integers.items():
            if weight in keys or weight not in self._scales:
                why = f"stands beside {weight}" if weight in keys else f"has no {SCALE_OF_INTEGERS} beside it"
                raise WanjaxError(f"{key} {why}: 8-bit integers come with their scale, in place of the weight")
        for weight, scale in self._scales.items():
            _check(self._names(weight), self.stored(weight), scale, reader.spec(scale))
        of_integers = {key: weight for weight, key in self._integers.items()}
        self._keys = [of_integers.get(key, key) for key in reader.keys() if key not in surplus]  # noqa: SIM118

    def keys(self) -> tuple[str, ...]:
        return tuple(self._keys)

    def stored(self, key: str) -> Spec:
        """Returns the shape and dtype of a tensor without its scale."""
        shape, dtype = self._reader.spec(self._names(key))
        return Spec(shape, np.dtype(self._formats.get(key, dtype)))

    def spec(self, key: str) -> Spec:
        shape, dtype = self.stored(key)
        made = jnp.bfloat16 if key in self._integers else np.float32
        return Spec(shape, np.dtype(made) if key in self._scales else dtype)

    def _names(self, key: str) -> str:
        """Returns a tensor's name in the files."""
        return self._integers.get(key, key)

    def read(self, key: str) -> np.ndarray:
        x = self._reader.read(self._names(key))
        x = x.view(self._formats[key]) if key in self._formats else x
        if key not in self._scales:
            return x
        scale = self._reader.read(self._scales[key]).astype(np.float32)
        if not np.isfinite(scale).all():
            raise WanjaxError(f"{self._scales[key]} has numbers that are not finite: get the file again")
        grid, block = _places(x.shape, scale.shape) or ((1,), (1,))
        scale = scale.reshape(grid)
        for axis, size in enumerate(block):
            if scale.shape[axis] > 1:  # else it is the same along the axis
                scale = np.repeat(scale, size, axis)
        return (x.astype(np.float32) * scale[tuple(map(slice, x.shape))]).astype(self.spec(key).dtype, copy=False)


def _weight_of(key: str) -> str:
    """Returns the name of the weight of a tensor's module."""
    module, dot, _ = key.rpartition(".")
    return f"{module}{dot}weight"


def _places(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the grid of a weight's scales, with its axes, and the sizes of a block; None where the shape is unknown.

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


def _check(weight: str, stored: Spec, key: str, scale: Spec) -> None:
    """Raises WanjaxError unless the scale fits the weight, both are floating, and integers are called so."""
    whole = weight.rpartition(".")[2] == INTEGERS
    known = stored.dtype == np.int8 if whole else jnp.issubdtype(stored.dtype, jnp.floating)
    if not known or not jnp.issubdtype(scale.dtype, jnp.floating):
        right = "8-bit integers with a scale of floats" if whole else "8-bit floats"
        raise WanjaxError(f"{weight} is {stored.dtype}, with the {scale.dtype} {key}: {right} are read, not others")
    if 0 in scale.shape or _places(stored.shape, scale.shape) is None:
        right = "one scale, or one for each row, each equal part of a row or each square block"
        raise WanjaxError(f"{key} has the shape {list(scale.shape)} where {weight}, {list(stored.shape)}, has {right}")


def _format(reader: Reader, key: str, dtype: np.dtype) -> Any:
    """Returns the dtype that a layer's JSON tells; raises WanjaxError unless its weight is an 8-bit float of it."""
    spec = reader.spec(key)
    try:
        told = json.loads(reader.read(key).tobytes() if spec.nbytes <= JSON_BYTES else b"")
        name, more = str(told["format"]), sorted(entry for entry in told if told[entry] and entry not in PLAIN)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WanjaxError(f"{key} is no JSON object with a format of the weight: get the file again") from error
    found = FORMAT.fullmatch(name)
    kind = getattr(ml_dtypes, found[1]) if found else None
    if kind is None or more or dtype not in (np.dtype(kind), np.dtype(np.uint8)):
        what = f"{shown(name)}{f' with {shown(more[0])}' if more else ''}, and the weight is {dtype}"
        raise WanjaxError(
            f"{key} says {what}: of the formats of 8 bits and fewer, float8_e4m3fn and float8_e5m2 are read"
        )
    return kind
