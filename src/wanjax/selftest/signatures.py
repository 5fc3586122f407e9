# SPDX-License-Identifier: Apache-2.0
"""Signatures: a few numbers per array, from which the distance of two arrays can be estimated.

An array x is projected onto random signs r. The mean of (r·x)² over many r is |x|². The distance of two arrays can
therefore be estimated from their projections, without the arrays themselves.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

PROJECTIONS = 16
CHUNK_SIZE = 1 << 20  # the number of elements that are projected at a time


def signature(x: Any) -> list[float]:
    """Project an array of any shape onto random signs. The signs depend only on the array's size."""
    flat = np.asarray(x, np.float64).ravel()
    random = np.random.RandomState(zlib.crc32(str(flat.size).encode()))  # equal in all releases of NumPy
    sums = np.zeros(PROJECTIONS)
    for start in range(0, flat.size, CHUNK_SIZE):
        chunk = flat[start : start + CHUNK_SIZE]
        sums += (2 * random.randint(0, 2, (PROJECTIONS, chunk.size), np.int8) - 1) @ chunk
    return sums.tolist()


def relative_error(values: Sequence[float], expected: Sequence[float]) -> float:
    """Estimate the relative L2 error between two arrays from their signatures. Return inf if the error is not finite.

    With 16 projections the error of the estimate is about a third. This accuracy suffices for bounds that are powers of
    ten.
    """
    squared_error, squared_norm = (
        float(np.sum(np.square(x))) for x in (np.subtract(values, expected), np.asarray(expected))
    )
    return float(np.sqrt(squared_error / max(squared_norm, 1e-30))) if np.isfinite(squared_error) else float("inf")
