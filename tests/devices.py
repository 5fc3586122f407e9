# SPDX-License-Identifier: Apache-2.0
"""Code run in a process of its own, where the CPU stands for eight devices."""

import os
import subprocess
import sys
from pathlib import Path

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}


def on_eight_devices(code: str, *arguments: str | Path) -> str:
    """Runs Python code, in which warnings are errors, with arguments; returns what it prints."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        env=os.environ | EIGHT,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
