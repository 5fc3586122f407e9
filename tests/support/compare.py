# SPDX-License-Identifier: Apache-2.0
"""The relative error of an array."""

import numpy as np


def error(got, expected):
    """Return the L2 norm of the difference, relative to that of `expected`; fails unless `got` is finite."""
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)
