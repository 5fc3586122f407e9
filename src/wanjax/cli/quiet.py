# SPDX-License-Identifier: Apache-2.0
"""Suppression of libtpu's messages on machines without a TPU, where the extra `plan` may have installed it.

JAX tries every installed runtime. Without a TPU, libtpu prints a page of messages before JAX tries the next one.
"""

import os
from glob import glob

DEVICES = ("/dev/accel*", "/dev/vfio/*")  # device files of TPUs, by generation
ANSWERS = {"TPU_ACCELERATOR_TYPE": "v6e-1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_STDERR_LOG_LEVEL": "3"}


def hush_libtpu() -> None:
    """Sets the variables that libtpu would otherwise report as missing. Call before JAX looks for devices."""
    if not any(map(glob, DEVICES)):
        for name, value in ANSWERS.items():
            os.environ.setdefault(name, value)
