# SPDX-License-Identifier: Apache-2.0
"""The formats of a layer's weight that ComfyUI names in JSON beside it.

The JSON is a tensor `comfy_quant` in the layer, or an entry of the file's `_quantization_metadata`. The formats, as
Comfy-Org's comfy-kitchen 0.2.40 writes them:

- `float8_e4m3fn`, `float8_e5m2`: numbers times a scale, whose shape tells what it is for.
- `int8_tensorwise`: 8-bit integers times a scale for the tensor or for each row. With `convrot` each group of a row was
  rotated before it was rounded (ConvRot, arXiv:2512.03673), by a regular Hadamard matrix that is its own inverse.
- `mxfp8`: float8_e4m3fn, with a scale 2^(e - 127) for every 32 numbers of a row.
- `nvfp4`: two float4_e2m1fn a byte, the first in the upper half, with a float8_e4m3fn scale for every 16 numbers of a
  row, times one scale of the tensor.

The scales of the last two lie in the order of NVIDIA's tensor cores: tiles of 128 rows and 4 columns, in which rows
that are 32 apart are neighbours.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from wanjax.errors import WanjaxError, repr_short

FLOAT8 = re.compile(r"(float8_e4m3fn|float8_e5m2)(?:_(?:tensor|row|block)\w*)?")  # the shape tells what a scale is for
INT8, MXFP8, NVFP4 = "int8_tensorwise", "mxfp8", "nvfp4"
IGNORED_ENTRIES = {"format", "full_precision_matrix_mult", "group_size", "block_size", "per_row", "orig_dtype"}
ROTATION_ENTRIES = {"convrot", "convrot_groupsize"}
METADATA = "_quantization_metadata"  # of a file, in place of a tensor for each layer
DEFAULT_GROUP = 256
TILE_ROWS, TILE_COLUMNS, ROWS_APART = 128, 4, 32
FLOAT4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
SUPPORTED = "float8_e4m3fn, float8_e5m2, int8_tensorwise, mxfp8 and nvfp4"


class LayerFormat(NamedTuple):
    """The format of a layer's weight.

    Attributes:
        name: As ComfyUI spells it.
        dtype: That of a number.
        rotated_group: How many numbers of a row were rotated together; 0 for none.
        scale_block: How many numbers of a row have a scale in the tensor cores' order; 0 where the shape tells.
        packed: Whether a byte holds two numbers.
    """

    name: str
    dtype: np.dtype
    rotated_group: int = 0
    scale_block: int = 0
    packed: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the weight's shape from that of the stored tensor."""
        return (*stored[:-1], 2 * stored[-1]) if self.packed and stored else stored

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a weight [rows, columns], with the padding of their tiles."""
        rows, columns = shape
        blocks = math.ceil(columns / self.scale_block)
        return TILE_ROWS * math.ceil(rows / TILE_ROWS), TILE_COLUMNS * math.ceil(blocks / TILE_COLUMNS)


def parse_format(layer: Any, key: str, dtype: np.dtype) -> LayerFormat:
    """Parse what is said of a layer.

    Args:
        layer: The JSON as bytes, or its value.
        key: What it is called in an error.
        dtype: That of the stored weight.

    Raises:
        WanjaxError: It is no JSON object with a format, or names a format that is not read or has another dtype.
    """
    try:
        layer = json.loads(layer) if isinstance(layer, bytes) else layer
        name = str(layer["format"])
        entries = {entry: layer[entry] for entry in sorted(layer) if layer[entry] and entry not in IGNORED_ENTRIES}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WanjaxError(f"{key} is no JSON object with a format of the weight: get the file again") from error
    layer_format = _named_format(name, entries)
    if layer_format is None or dtype not in (layer_format.dtype, np.dtype(np.uint8)):
        unknown = next((f" with {repr_short(entry)}" for entry in entries if entry not in ROTATION_ENTRIES), "")
        problem = f"{repr_short(name)}{unknown or _rotation(entries)}, and the weight is {dtype}"
        raise WanjaxError(f"{key} says {problem}: of the formats of 8 bits and fewer, {SUPPORTED} are read")
    return layer_format


def formats_in_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return what a file's metadata say of each layer, by the layer's name.

    Raises:
        WanjaxError: They are not in ComfyUI's form.
    """
    if METADATA not in metadata:
        return {}
    try:
        return dict(json.loads(metadata[METADATA])["layers"].items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WanjaxError(f"{METADATA} of the file is no JSON object with layers: get the file again") from error


def rotate(x: np.ndarray, group: int) -> np.ndarray:
    """Rotate each group of numbers of the rows of float32 [rows, columns]; twice is once back."""
    return (x.reshape(-1, group) @ regular_hadamard(group)).reshape(x.shape)


@cache
def regular_hadamard(size: int) -> np.ndarray:
    """Return the regular Hadamard matrix of a power of 4, orthonormal and symmetric: a Kronecker power of one of 4."""
    four = (np.ones((4, 4)) - 2 * np.eye(4)[::-1]) / 2
    return (four if size == 4 else np.kron(regular_hadamard(size // 4), four)).astype(np.float32)


def unpack_float4(x: np.ndarray) -> np.ndarray:
    """Return the two float4_e2m1fn of each byte as float32, that of the upper half first."""
    return FLOAT4[np.stack([x >> 4, x & 15], axis=-1)].reshape(*x.shape[:-1], -1)


def untile(scales: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return scales [rows, columns] from the order of the tensor cores, without the padding of the tiles."""
    tile = (TILE_ROWS // ROWS_APART, ROWS_APART, TILE_COLUMNS)
    down, across = math.ceil(rows / TILE_ROWS), math.ceil(columns / TILE_COLUMNS)
    tiles = scales.reshape(down, across, tile[1], tile[0], tile[2])  # 32 rows, then those 32, 64 and 96 further down
    return tiles.transpose(0, 3, 2, 1, 4).reshape(down * TILE_ROWS, across * TILE_COLUMNS)[:rows, :columns]


def _named_format(name: str, entries: Mapping[str, Any]) -> LayerFormat | None:
    """Return the format of a name and of the entries beside it; None for one that is not read."""
    match = FLOAT8.fullmatch(name)
    if match and not entries:
        return LayerFormat(name, np.dtype(getattr(ml_dtypes, match[1])))
    if name == MXFP8 and not entries:
        return LayerFormat(name, np.dtype(ml_dtypes.float8_e4m3fn), scale_block=32)
    if name == NVFP4 and not entries:
        return LayerFormat(name, np.dtype(np.uint8), scale_block=16, packed=True)
    if name != INT8 or entries.keys() - ROTATION_ENTRIES:
        return None
    group = entries.get("convrot_groupsize", DEFAULT_GROUP) if entries.get("convrot") else 0
    sizes = {4**power for power in range(1, 7)}
    is_supported = entries.get("convrot") in (None, True) and (group == 0 or (type(group) is int and group in sizes))
    return LayerFormat(name, np.dtype(np.int8), rotated_group=group) if is_supported else None


def _rotation(entries: Mapping[str, Any]) -> str:
    return "".join(f" with {entry} {repr_short(value)}" for entry, value in entries.items())
