# SPDX-License-Identifier: Apache-2.0
"""Temporary files and folders of this process, and the removal of leftovers of dead processes."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from socket import gethostname

from psutil import pid_exists

from wanjax.signals import cleanup_on_exit

HOST_NAME = re.sub(r"[^\w-]", "-", gethostname())[:40]  # only processes of this host can be looked up
LEFTOVER_PATTERN = re.compile(r"\.(?P<pid>\d{1,10})@(?P<host>[\w-]+)\.(?P<kind>partial|old)\.(?P<name>.+)", re.DOTALL)


@contextmanager
def temp_dir(within: Path | None = None) -> Iterator[Path]:
    """Yield a new temporary folder, which is removed after the block or when the process is terminated.

    The folder is in `within`, or in the system's temporary folder. `sibling_path` removes leftovers of dead processes.
    """
    partial_path = sibling_path((within or Path(tempfile.gettempdir())) / "wanjax-")
    directory = tempfile.TemporaryDirectory(prefix=partial_path.name, dir=partial_path.parent)
    with directory as name, cleanup_on_exit(partial(shutil.rmtree, name)):
        yield Path(name)


def sibling_path(path: Path, kind: str = "partial") -> Path:
    """Return a path for this process in the folder of `path`. The `kind` is `partial` for an incomplete file, or `old`
    for a replaced file.

    Leftovers of dead processes of this machine are removed. An `old` file whose replacement is missing gets its
    original name back.
    """
    with suppress(OSError):
        for leftover in list(path.parent.glob(".*")):
            if (
                (match := LEFTOVER_PATTERN.fullmatch(leftover.name))
                and match["host"] == HOST_NAME
                and not pid_exists(int(match["pid"]))
            ):
                with suppress(OSError):  # the file may belong to another user, or may be gone already
                    _remove_leftover(leftover, match["kind"], leftover.with_name(match["name"]))
    return path.with_name(f".{os.getpid()}@{HOST_NAME}.{kind}.{path.name}")


def _remove_leftover(leftover: Path, kind: str, target: Path) -> None:
    if kind == "old" and not target.exists():
        leftover.rename(target)
    elif leftover.is_dir():
        shutil.rmtree(leftover)
    else:
        leftover.unlink()
