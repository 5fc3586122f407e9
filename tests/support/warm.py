# SPDX-License-Identifier: Apache-2.0
"""The command in new processes, with a folder as their compilation cache."""

import os
import subprocess
import sys
from pathlib import Path


def wanjax(
    folder: Path, *arguments: str, code: str = "from wanjax.cli import main; main()", devices: int | None = None
) -> str:
    """Run the command in a new process with the folder as compilation cache; return its output.

    `devices` are the number into which JAX divides the processor, where it is given.
    """
    here = {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | here | ({"JAX_NUM_CPU_DEVICES": str(devices)} if devices else {}),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stderr


def programs(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache" / "wanjax" / "xla").rglob("*-cache")}
