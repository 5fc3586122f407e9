# SPDX-License-Identifier: Apache-2.0
"""Signatures: a few numbers that stand for an array, from which the distance to another array is estimated.

An array x is projected onto random signs r; the mean of (r·x)² over many r is |x|². The projections of two arrays
therefore tell how far apart they are, and of one of the two only the few projections need to be kept.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

PROJECTIONS = 16
PART = 1 << 20  # numbers that are projected at a time


def signature(x: Any) -> list[float]:
    """Return the projections of an array of any shape onto random signs that depend on its size alone."""
    flat = np.asarray(x, np.float64).ravel()
    random = np.random.RandomState(zlib.crc32(str(flat.size).encode()))  # whose numbers NumPy never changes
    sums = np.zeros(PROJECTIONS)
    for start in range(0, flat.size, PART):
        part = flat[start : start + PART]
        sums += (2 * random.randint(0, 2, (PROJECTIONS, part.size), np.int8) - 1) @ part
    return sums.tolist()


def distance(values: Sequence[float], expected: Sequence[float]) -> float:
    """Return the estimated relative L2 distance of one array to another, by their signatures; inf if it is not finite.

    Of 16 projections the estimate is right to about a third, which is enough: bounds are powers of ten.
    """
    apart, size = (float(np.sum(np.square(x))) for x in (np.subtract(values, expected), np.asarray(expected)))
    return float(np.sqrt(apart / max(size, 1e-30))) if np.isfinite(apart) else float("inf")
