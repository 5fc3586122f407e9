# SPDX-License-Identifier: Apache-2.0
"""libtpu on a machine without a TPU, where JAX still tries it before other devices."""

import os
from glob import glob

TPUS = ("/dev/accel*", "/dev/vfio/*")  # device files, by generation
ENVIRONMENT_DEFAULTS = {
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
}
"""Environment variables that libtpu reports as missing, in a page of messages, on a machine without a TPU."""


def silence() -> bool:
    """Keep libtpu quiet on a machine without a TPU; call it before JAX looks for devices.

    Returns:
        Whether the machine has no TPU.
    """
    if any(map(glob, TPUS)):
        return False
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    return True
