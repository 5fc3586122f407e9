# SPDX-License-Identifier: Apache-2.0
"""The relative error of an array."""

import numpy as np


def error(result, expected):
    """Return the L2 norm of the difference, relative to that of `expected`; fail if `result` is not finite."""
    result = np.asarray(result, np.float64)
    assert np.isfinite(result).all()
    return np.linalg.norm(result - expected) / np.linalg.norm(expected)
