# SPDX-License-Identifier: Apache-2.0
"""Kernels that pass `admission` or fail in different ways; a child process loads them by name."""

import os
import time
from functools import partial

import jax.numpy as jnp
import numpy as np

from wanjax.kernels.admission import Kernel, Trial
from wanjax.kernels.attention import reference

MASKS = {"key_mask": None, "window": None, "bias": None, "scale": 0.25, "config": None}


def right(q, k, v, **options):
    return reference.attention(q, k, v, **options)


def wrong(q, k, v, **options):
    """Attention without the last key, like a kernel that drops a partial tile."""
    return right(q, k[:, :-1], v[:, :-1], **options)


def raising(q, k, v, **options):
    raise ValueError("Mosaic failed to compile the kernel")


def hanging(q, k, v, **options):
    time.sleep(600)


def dying(q, k, v, **options):
    os._exit(134)


def _kernel(name, attend):
    def trials():
        q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(1, 24, 2, 16)), "float32") for i in range(3))
        run, expected = (partial(function, q, k, v, **MASKS) for function in (attend, right))
        yield Trial("a small shape", lambda interpret: run(), expected, 1e-5)

    return Kernel(name, (__name__,), trials)


def _kernels(attend):
    """Return a kernel of `attend` between two correct kernels."""
    return _kernel("heads_apart", right), _kernel("flash_tpu", attend), _kernel("heads_joined", right)


RIGHT, WRONG, RAISING, HANGING, DYING = map(_kernels, (right, wrong, raising, hanging, dying))
