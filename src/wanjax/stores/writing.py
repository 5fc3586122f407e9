# SPDX-License-Identifier: Apache-2.0
"""Files and folders that appear under their names when they are complete."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from wanjax.errors import WanjaxError, reason, write_errors
from wanjax.figures import in_bytes
from wanjax.signals import cleanup_on_exit
from wanjax.stores.paths import AnyPath, RemotePath, publishing
from wanjax.stores.temporary import sibling_path

MIN_FREE_BYTES = 2**16  # bytes that the smallest video needs on a disk, with what is written beside it


@contextmanager
def writing(path: AnyPath) -> Iterator[Path]:
    """Yield a file beside `path`, with the same suffix, which becomes `path` if the block succeeds, else is removed.

    For an object of a store the file is among the temporary ones, and is published. Raises WriteError in place of the
    block's OSError.
    """
    if isinstance(path, RemotePath):
        with publishing(path) as file:
            yield file
        return
    partial_path = sibling_path(path)
    try:
        with cleanup_on_exit(partial_path.unlink), write_errors(path):
            yield partial_path
            partial_path.replace(path)
    finally:
        with suppress(OSError):
            partial_path.unlink()


def write_whole(file: Path, content: bytes) -> None:
    """Write a file of a folder, which appears when all of it is there, for all whom the process's umask lets read it.

    Of a write that fails nothing is left. Unlike `writing` it serves threads that write one file of a cache, and does
    not look through the folder, which may hold thousands.
    """
    partial_path = file.with_name(f".{uuid4().hex}.part")  # by its name, as temporary files are closed to others
    try:
        partial_path.write_bytes(content)
        partial_path.replace(file)
    finally:
        with suppress(OSError):
            partial_path.unlink()


def check_room(folder: Path, least: int, item: object) -> None:
    """Raise WanjaxError where a disk has less room than something takes at least, or next to none."""
    least = max(least, MIN_FREE_BYTES)
    if (room := shutil.disk_usage(folder).free) < least:
        message = f"{folder} has room for {in_bytes(room)} where {item} needs {in_bytes(least)} or more"
        raise WanjaxError(message) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def folder_for_output(folder: AnyPath) -> Iterator[None]:
    """Make the folder as `check_folder` does, and remove it again if the block fails before there is a file in it."""
    new = [] if isinstance(folder, RemotePath) else [each for each in (folder, *folder.parents) if not each.exists()]
    check_folder(folder)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for each in new:
                each.rmdir()
        raise


def check_folder(folder: AnyPath) -> None:
    """Make the folder if need be; raise WanjaxError if files cannot be written to it."""
    if isinstance(folder, RemotePath):
        folder.check_writable()
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise WanjaxError(f"the folder {folder} cannot be written, {reason(error)}: give another one") from error
