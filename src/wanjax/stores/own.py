# SPDX-License-Identifier: Apache-2.0
"""Files and folders of one process's own, and what a process that is gone has left of them."""

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

from wanjax.signals import abandoned_by

HOST = re.sub(r"[^\w-]", "-", gethostname())[:40]  # whose processes can be looked up
LEFT = re.compile(r"\.(?P<pid>\d{1,10})@(?P<host>[\w-]+)\.(?P<kind>partial|old)\.(?P<name>.+)", re.DOTALL)


@contextmanager
def own_folder(within: Path | None = None) -> Iterator[Path]:
    """Yields a new folder of this process's own, which goes with the block, or where the process ends at once.

    It is among the temporary ones, or `within` another. What a killed process left there goes as for `name_beside`.
    """
    own = name_beside((within or Path(tempfile.gettempdir())) / "wanjax-")
    made = tempfile.TemporaryDirectory(prefix=own.name, dir=own.parent)
    with made as name, abandoned_by(partial(shutil.rmtree, name)):
        yield Path(name)


def name_beside(path: Path, kind: str = "partial") -> Path:
    """Returns a name beside `path` of this process's own: `partial` for what is not complete, `old` for what was there.

    Removes what processes of this machine that are gone left. What was there, and is not replaced, gets its name back.
    """
    with suppress(OSError):
        for left in list(path.parent.glob(".*")):
            if (found := LEFT.fullmatch(left.name)) and found["host"] == HOST and not pid_exists(int(found["pid"])):
                with suppress(OSError):  # it may be another user's, or be gone by now
                    _clear(left, found["kind"], left.with_name(found["name"]))
    return path.with_name(f".{os.getpid()}@{HOST}.{kind}.{path.name}")


def _clear(left: Path, kind: str, target: Path) -> None:
    if kind == "old" and not target.exists():
        left.rename(target)
    elif left.is_dir():
        shutil.rmtree(left)
    else:
        left.unlink()
