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

from wanjax.errors import WanjaxError, is_full, reason, wrap_write_errors
from wanjax.figures import format_bytes
from wanjax.signals import cleanup_on_exit
from wanjax.stores.paths import AnyPath, RemotePath, upload_after_writing
from wanjax.stores.temporary import sibling_path

MIN_FREE_BYTES = 2**16  # the space for the smallest video and its temporary files


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary file with the suffix of `path`. If the block succeeds, the file replaces `path`.

    If `path` is an object of a store, the file is uploaded instead. An OSError in the block becomes a WriteError.
    """
    if isinstance(path, RemotePath):
        with upload_after_writing(path) as file:
            yield file
        return
    partial_path = sibling_path(path)
    try:
        with cleanup_on_exit(partial_path.unlink), wrap_write_errors(path):
            yield partial_path
            partial_path.replace(path)
    finally:
        with suppress(OSError):
            partial_path.unlink()


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file atomically, with the permissions of the process's umask.

    A failed write leaves no file. Unlike `atomic_write`, this function is safe for threads that write the same cache
    file, and does not list the folder, which may contain thousands of files.
    """
    partial_path = file.with_name(f".{uuid4().hex}.part")  # `tempfile` would make the file unreadable for other users
    try:
        partial_path.write_bytes(content)
        partial_path.replace(file)
    finally:
        with suppress(OSError):
            partial_path.unlink()


def check_free_space(folder: Path, min_bytes: int, item: object) -> None:
    """Raise WanjaxError if a disk has less free space than an item needs."""
    min_bytes = max(min_bytes, MIN_FREE_BYTES)
    if (free_bytes := shutil.disk_usage(folder).free) < min_bytes:
        problem = f"{folder} has {format_bytes(free_bytes)} free, and {item} needs {format_bytes(min_bytes)} or more"
        raise WanjaxError(f"{problem}: free some space, or give another folder") from OSError(
            errno.ENOSPC, os.strerror(errno.ENOSPC)
        )


@contextmanager
def created_output_folder(folder: AnyPath) -> Iterator[None]:
    """Create a folder as `check_folder` does. If the block fails and the folder is empty, remove it."""
    new_folders = [] if isinstance(folder, RemotePath) else [x for x in (folder, *folder.parents) if not x.exists()]
    check_folder(folder)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for new_folder in new_folders:
                new_folder.rmdir()
        raise


def missing_first_folder(folder: Path) -> Path | None:
    """Return the first folder below the root of a path, if this folder is missing. Return None if it exists."""
    top = Path(*folder.absolute().parts[:2])
    return None if os.path.lexists(top) else top


def check_folder(folder: AnyPath, what: str = "one") -> None:
    """Create a folder if it is missing; raise WanjaxError if files cannot be written to it.

    Missing parent folders are created too, except the first folder of an absolute path. A missing first folder is
    probably a typing error.

    Args:
        folder: The folder.
        what: What to give instead, in the message, such as the name of a setting.
    """
    if isinstance(folder, RemotePath):
        folder.check_writable()
        return
    if (top := missing_first_folder(folder)) is not None:
        of_path = "" if top == folder.absolute() else f", the first one of {folder}"
        raise WanjaxError(f"there is no folder {top}{of_path}: check the path, or create {top} first")
    for path in (folder, *folder.parents):
        if os.path.isfile(path):
            raise WanjaxError(f"{path} is a file, not a folder: give another folder, or move the file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        advice = f"free some space, or give another {what}" if is_full(error) else f"give another {what}"
        raise WanjaxError(f"the folder {folder} cannot be written, {reason(error)}: {advice}") from error
