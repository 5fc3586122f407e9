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


def silence() -> bool:
    """Silence libtpu on a machine without a TPU. Call this before JAX looks for devices.

    Returns:
        Whether the machine has no TPU.
    """
    if any(map(glob, TPUS)):
        return False
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    return True
