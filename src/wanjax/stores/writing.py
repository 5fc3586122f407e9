# SPDX-License-Identifier: Apache-2.0
"""Files and folders that appear under their names when they are complete, and what a process that is gone has left."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from uuid import uuid4

from psutil import pid_exists

from wanjax.errors import WanjaxError, reason, written
from wanjax.signals import abandoned_by
from wanjax.stores.places import Place, Remote, publishing

HOST = re.sub(r"[^\w-]", "-", gethostname())[:40]  # whose processes can be looked up
LEFT = re.compile(r"\.(?P<pid>\d{1,10})@(?P<host>[\w-]+)\.(?P<kind>partial|old)\.(?P<name>.+)", re.DOTALL)


@contextmanager
def writing(path: Place) -> Iterator[Path]:
    """Yields a file beside `path`, with the same suffix, which becomes `path` if the block succeeds, else is removed.

    For an object of a store the file is among the temporary ones, and is published. Raises WriteError in place of the
    block's OSError.
    """
    if isinstance(path, Remote):
        with publishing(path) as file:
            yield file
        return
    beside = name_beside(path)
    try:
        with abandoned_by(beside.unlink), written(path):
            yield beside
            beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink()


def write_whole(file: Path, content: bytes) -> None:
    """Writes a file of a folder, which appears when all of it is there, for all whom the process's umask lets read it.

    Of a write that fails nothing is left. Unlike `writing` it serves threads that write one file of a cache, and does
    not look through the folder, which may hold thousands.
    """
    beside = file.with_name(f".{uuid4().hex}.part")  # by its name, as temporary files are closed to others
    try:
        beside.write_bytes(content)
        beside.replace(file)
    finally:
        with suppress(OSError):
            beside.unlink()


def name_beside(path: Path, kind: str = "partial") -> Path:
    """Returns a name beside `path` of this process's own: `partial` for what is not complete, `old` for what was there.

    Removes what processes of this machine that are gone left. What was there, and is not replaced, gets its name back.
    """
    with suppress(OSError):
        for left in list(path.parent.glob(".*")):
            if (found := LEFT.fullmatch(left.name)) and found["host"] == HOST and not pid_exists(int(found["pid"])):
                if found["kind"] == "old" and not left.with_name(found["name"]).exists():
                    left.rename(left.with_name(found["name"]))
                elif left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
    return path.with_name(f".{os.getpid()}@{HOST}.{kind}.{path.name}")


def check_folder(folder: Place) -> None:
    """Makes the folder if need be; raises WanjaxError if files cannot be written to it."""
    if isinstance(folder, Remote):
        folder.check_writable()
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise WanjaxError(f"the folder {folder} cannot be written, {reason(error)}: another one is needed") from error
