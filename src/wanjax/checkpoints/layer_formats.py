# SPDX-License-Identifier: Apache-2.0
"""The formats of a layer's weight that ComfyUI's files describe in JSON.

The JSON is a tensor `comfy_quant` in the layer, or an entry of the file's `_quantization_metadata`. Comfy-Org's
comfy-kitchen 0.2.40 writes these formats:

- `float8_e4m3fn`, `float8_e5m2`: 8-bit floats times a scale for the tensor, each row or each block. The shape of the
  scale shows which.
- `int8_tensorwise`: 8-bit integers times a scale for the tensor or for each row. With `convrot`, each group of a row is
  rotated before quantization (ConvRot, arXiv:2512.03673), by a regular Hadamard matrix that is its own inverse.
- `mxfp8`: float8_e4m3fn, with a scale 2^(e - 127) for every 32 numbers of a row.
- `nvfp4`: two float4_e2m1fn in a byte, the first in the upper half. Each number is multiplied by a float8_e4m3fn scale
  for 16 numbers of a row, and by one scale for the tensor.

The scales of `mxfp8` and `nvfp4` are stored in the order of NVIDIA's tensor cores: tiles of 128 rows and 4 columns. In
a tile, row i + 32 follows row i.

NVIDIA's ModelOpt writes NVFP4 too (modelopt/torch/quantization/qtensor/nvfp4_tensor.py), without such JSON. ModelOpt
stores the scales row by row, and the first number of a byte is in the lower half.
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
from wanjax.kernels.hadamard import regular_hadamard

# The end of the name, such as `_row`, is redundant: the shape of the scales shows what each scale applies to.
FLOAT8 = re.compile(r"(float8_e4m3fn|float8_e5m2)(?:_(?:tensor|row|block)\w*)?")
INT8, MXFP8, NVFP4 = "int8_tensorwise", "mxfp8", "nvfp4"
IGNORED_ENTRIES = {"format", "full_precision_matrix_mult", "group_size", "block_size", "per_row", "orig_dtype"}
ROTATION_ENTRIES = {"convrot", "convrot_groupsize"}
METADATA = "_quantization_metadata"  # an entry of a file's metadata that replaces the layers' tensors
DEFAULT_GROUP = 256
TILE_ROWS, TILE_COLUMNS, ROWS_APART = 128, 4, 32
FLOAT4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
SUPPORTED = "float8_e4m3fn, float8_e5m2, int8_tensorwise, mxfp8 or nvfp4"


class LayerFormat(NamedTuple):
    """The format of a layer's weight.

    Attributes:
        name: ComfyUI's name of the format.
        dtype: The dtype of a stored number.
        hadamard_size: The number of values of a row that are rotated together; 0 without rotation.
        scale_block: The number of values of a row that share a scale, if scales are in the tensor cores' order; 0 if
            the shape of the scales determines it.
        packed: Whether a byte contains two numbers.
        row_by_row: Whether scales of blocks lie row by row, and the first number of a byte is in its lower half.
    """

    name: str
    dtype: np.dtype
    hadamard_size: int = 0
    scale_block: int = 0
    packed: bool = False
    row_by_row: bool = False

    def shape(self, stored_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the weight, given the shape of the stored tensor."""
        return (*stored_shape[:-1], 2 * stored_shape[-1]) if self.packed and stored_shape else stored_shape

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a weight [rows, columns]. In tiles, they are padded to whole tiles."""
        rows, columns = shape
        blocks = math.ceil(columns / self.scale_block)
        if self.row_by_row:
            return rows, blocks
        return TILE_ROWS * math.ceil(rows / TILE_ROWS), TILE_COLUMNS * math.ceil(blocks / TILE_COLUMNS)


MODELOPT_NVFP4 = LayerFormat(NVFP4, np.dtype(np.uint8), scale_block=16, packed=True, row_by_row=True)


def parse_format(description: Any, key: str, dtype: np.dtype) -> LayerFormat:
    """Parse the JSON that describes a layer's format.

    Args:
        description: The JSON as bytes, or its parsed value.
        key: The name of the JSON for errors.
        dtype: The dtype of the stored weight.

    Raises:
        WanjaxError: The JSON is not an object with a format, the format is not supported, or it has another dtype.
    """
    try:
        parsed = json.loads(description) if isinstance(description, bytes) else description
        name = str(parsed["format"])
        entries = {entry: parsed[entry] for entry in sorted(parsed) if parsed[entry] and entry not in IGNORED_ENTRIES}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WanjaxError(f"{key} is not a JSON object with the weight's format: get the file again") from error
    layer_format = _named_format(name, entries)
    if layer_format is None or dtype not in (layer_format.dtype, np.dtype(np.uint8)):
        unknown = next((f" with {repr_short(entry)}" for entry in entries if entry not in ROTATION_ENTRIES), "")
        problem = f"{repr_short(name)}{unknown or _rotation(entries)}, which is not supported for a weight of {dtype}"
        raise WanjaxError(f"{key} has the format {problem}: give floats or one of {SUPPORTED}")
    return layer_format


def formats_in_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON values of the layers' formats in a file's metadata, by layer; empty without this entry.

    Raises:
        WanjaxError: The entry is not in ComfyUI's form.
    """
    if METADATA not in metadata:
        return {}
    try:
        return dict(json.loads(metadata[METADATA])["layers"].items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WanjaxError(f"the file's {METADATA} is not a JSON object with layers: get the file again") from error


def rotate(x: np.ndarray, group: int) -> np.ndarray:
    """Rotate each group of `group` numbers in the rows of float32 [rows, columns].

    A second rotation undoes the first.
    """
    return (x.reshape(-1, group) @ regular_hadamard(group)).reshape(x.shape)


def unpack_float4(x: np.ndarray, out: np.ndarray, layer_format: LayerFormat) -> None:
    """Write the two float4_e2m1fn of each byte as float32 [..., 2 · bytes] to `out`, a contiguous array."""
    pairs = out.reshape(-1).view(np.uint64)
    np.take(_float4_pairs(layer_format.row_by_row), x.reshape(-1), out=pairs, mode="clip")


@cache
def _float4_pairs(lower_first: bool) -> np.ndarray:
    """Return a table with an entry for each byte: its two numbers in float32, together as one integer."""
    numbers = np.arange(256, dtype=np.uint8)
    halves = (numbers & 15, numbers >> 4) if lower_first else (numbers >> 4, numbers & 15)
    return FLOAT4[np.stack(halves, axis=-1)].view(np.uint64).reshape(-1)


def untile(scales: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Reorder scales from the order of the tensor cores to [rows, columns], without the padding of the tiles."""
    tile = (TILE_ROWS // ROWS_APART, ROWS_APART, TILE_COLUMNS)
    down, across = math.ceil(rows / TILE_ROWS), math.ceil(columns / TILE_COLUMNS)
    tiles = scales.reshape(down, across, tile[1], tile[0], tile[2])  # a tile's axes: row mod 32, row // 32, column
    return tiles.transpose(0, 3, 2, 1, 4).reshape(down * TILE_ROWS, across * TILE_COLUMNS)[:rows, :columns]


def _named_format(name: str, entries: Mapping[str, Any]) -> LayerFormat | None:
    """Return the format with this name and these other entries of the JSON; None if wanjax does not support it."""
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
    return LayerFormat(name, np.dtype(np.int8), hadamard_size=group) if is_supported else None


def _rotation(entries: Mapping[str, Any]) -> str:
    return "".join(f" with {entry} {repr_short(value)}" for entry, value in entries.items())
