# SPDX-License-Identifier: Apache-2.0
"""Run the command in a new process, with a compile cache in a folder."""

import os
import subprocess
import sys
from pathlib import Path


def wanjax(
    folder: Path, *arguments: str, code: str = "from wanjax.cli import main; main()", devices: int | None = None
) -> str:
    """Run the command in a new process with a compile cache in the folder; return its stderr.

    `devices` is the number of CPU devices of JAX; None for the default.
    """
    variables = {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | variables | ({"JAX_NUM_CPU_DEVICES": str(devices)} if devices else {}),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stderr


def cached_program_names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache" / "wanjax" / "xla").rglob("*-cache")}
