# SPDX-License-Identifier: Apache-2.0
"""Silence libtpu on a machine without a TPU, where JAX still tries to load it first."""

import os
from glob import glob

TPUS = ("/dev/accel*", "/dev/vfio/*")  # device files of older and newer TPUs
ENVIRONMENT_DEFAULTS = {
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
}
"""Environment variables that stop libtpu from printing a page of warnings on a machine without a TPU."""


def has_tpu() -> bool:
    """Return whether the machine has a TPU."""
    return any(map(glob, TPUS))


def silence() -> None:
    """Silence libtpu on a machine without a TPU. Call this before JAX looks for devices."""
    if not has_tpu():
        for name, value in ENVIRONMENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
