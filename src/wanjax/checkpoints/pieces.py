# SPDX-License-Identifier: Apache-2.0
"""Convert weights of at most 8 bits to float32, a few rows at a time.

A few rows stay in a core's cache while several operations change them. Casting 8-bit floats is slow in NumPy, so this
module looks up two numbers at a time in a table.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache

import ml_dtypes
import numpy as np

PIECE_VALUES = 1 << 18
FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))


def row_pieces(shape: Sequence[int]) -> Iterator[slice]:
    """Yield ranges of the first axis, each of about `PIECE_VALUES` numbers."""
    step = max(1, PIECE_VALUES // max(1, math.prod(shape[1:])))
    return (slice(start, start + step) for start in range(0, shape[0] if shape else 0, step))


def widen(x: np.ndarray, out: np.ndarray) -> None:
    """Cast numbers to float32.

    Args:
        x: The numbers, in rows.
        out: The array for the result: float32, of the same shape, with contiguous rows.
    """
    if x.dtype not in FLOAT8 or x.size % 2 or not x.flags.c_contiguous:
        np.copyto(out, x, casting="unsafe")
        return
    pairs = out.reshape(-1).view(np.uint64)
    np.take(_pairs(x.dtype), x.reshape(-1).view(np.uint16), out=pairs, mode="clip")  # other modes copy `out`


@cache
def _pairs(dtype: np.dtype) -> np.ndarray:
    """Return a table with an entry for each pair of 8-bit floats: the two numbers in float32, together as one
    integer."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32).view(np.uint64)
