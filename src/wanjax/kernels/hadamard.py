# SPDX-License-Identifier: Apache-2.0
"""The regular Hadamard matrix by which ConvRot (arXiv:2512.03673) rotates groups of channels before it quantizes
them."""

from functools import cache

import numpy as np

# possible numbers of channels in a group that is rotated together, the best number first
HADAMARD_SIZES = (256, 64, 16)


@cache
def regular_hadamard(size: int) -> np.ndarray:
    """Return the regular Hadamard matrix in float32. The size must be a power of 4.

    The matrix is a Kronecker power of the matrix of size 4. It is orthonormal and symmetric, so it is its own inverse.
    Its entries are ±1 / sqrt(size), which every floating-point dtype represents exactly.
    """
    hadamard_4 = (np.ones((4, 4)) - 2 * np.eye(4)[::-1]) / 2
    return (hadamard_4 if size == 4 else np.kron(regular_hadamard(size // 4), hadamard_4)).astype(np.float32)


def choose_hadamard_size(features: int) -> int:
    """Return how many channels to rotate together. Return 0 if no size in `HADAMARD_SIZES` divides the number of input
    channels."""
    return next((group for group in HADAMARD_SIZES if features % group == 0), 0)
