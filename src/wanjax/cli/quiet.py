# SPDX-License-Identifier: Apache-2.0
"""Silence where there is nothing to tell: libtpu, which the extra `plan` brings, on a machine without a TPU.

JAX tries every runtime that is installed, and this one writes a page about machines that it cannot find before JAX goes
on to the next.
"""

import os
from glob import glob

DEVICES = ("/dev/accel*", "/dev/vfio/*")  # as TPUs of one generation or another appear
ANSWERS = {"TPU_ACCELERATOR_TYPE": "v6e-1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_STDERR_LOG_LEVEL": "3"}


def hush_libtpu() -> None:
    """Answers in the environment what libtpu would complain of; to be called before JAX looks for devices."""
    if not any(map(glob, DEVICES)):
        for name, value in ANSWERS.items():
            os.environ.setdefault(name, value)
