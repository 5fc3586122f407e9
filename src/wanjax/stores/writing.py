# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: files and folders appear under their names only when they are complete."""

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

MIN_FREE_BYTES = 2**16  # for the smallest video and its temporary files


@contextmanager
def writing(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary file with the suffix of `path`, which replaces `path` if the block succeeds.

    For an object of a store the file is uploaded instead. An OSError in the block becomes a WriteError.
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
    """Write a file atomically, with the permissions of the process's umask.

    A failed write leaves no file. Unlike `writing` it is safe for threads that write the same cache file, and it does
    not list the folder, which may hold thousands of files.
    """
    partial_path = file.with_name(f".{uuid4().hex}.part")  # `tempfile` would make it unreadable for other users
    try:
        partial_path.write_bytes(content)
        partial_path.replace(file)
    finally:
        with suppress(OSError):
            partial_path.unlink()


def check_room(folder: Path, min_bytes: int, item: object) -> None:
    """Raise WanjaxError if a disk has less free space than an item needs."""
    min_bytes = max(min_bytes, MIN_FREE_BYTES)
    if (free_bytes := shutil.disk_usage(folder).free) < min_bytes:
        message = f"{folder} has room for {in_bytes(free_bytes)} where {item} needs {in_bytes(min_bytes)} or more"
        raise WanjaxError(message) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def folder_for_output(folder: AnyPath) -> Iterator[None]:
    """Create a folder as `check_folder` does; if the block fails, remove the folder again if it is empty."""
    new_folders = [] if isinstance(folder, RemotePath) else [x for x in (folder, *folder.parents) if not x.exists()]
    check_folder(folder)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for new_folder in new_folders:
                new_folder.rmdir()
        raise


def check_folder(folder: AnyPath) -> None:
    """Create the folder if needed; raise WanjaxError if files cannot be written to it."""
    if isinstance(folder, RemotePath):
        folder.check_writable()
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise WanjaxError(f"the folder {folder} cannot be written, {reason(error)}: give another one") from error
