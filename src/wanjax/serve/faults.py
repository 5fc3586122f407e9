# SPDX-License-Identifier: Apache-2.0
"""What a client is told of an error: whose fault it is, and nothing of the server's folders and stores."""

import errno
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from wanjax.errors import DISK_FULL_ERRNOS, WanjaxError, causes, is_full, is_out_of_memory, reason
from wanjax.jobs.databases import DatabaseError
from wanjax.stores.paths import AnyPath, StoreError
from wanjax.stores.user_folders import home

MISTAKE, BROKEN, STORAGE = "invalid_request", "server_error", "storage"
STATUS = {
    **dict.fromkeys((*DISK_FULL_ERRNOS, errno.EROFS, errno.EACCES, errno.EPERM), 507),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), 503),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.ESTALE, errno.ENOMEM), 500),
}
"""Answers by the errors of files, which are all the server's own: no request names a file of it."""
NO_ROOM = "the server's disk is full: it takes requests again when videos are removed"
OUT_OF_MEMORY = "the devices have too little memory for this video: a smaller size or fewer frames need less"
STORE = "the server cannot use its store, and its log has the details"
UNEXPECTED = "the server failed, and its log has the details"
FOLDERS = re.compile(r"(?<![\w.:/~-])~?/(?:[^\s/'\"]+/)*(?=[^\s/])")  # of an absolute path


class Fault(NamedTuple):
    """An error as a client is told of it; `is_ours` where it is the server's own, whose log then has the rest."""

    status: int
    code: str
    message: str
    is_ours: bool = True


class StorageError(WanjaxError):
    """A file of the server's that cannot be used, as on a full disk."""


@contextmanager
def storing() -> Iterator[None]:
    """Raise StorageError in place of an error of the server's files."""
    try:
        yield
    except OSError as error:
        if error.errno not in STATUS:
            raise
        raise StorageError(f"{error.filename or 'a file'} cannot be used: {reason(error)}") from error


def fault_of(error: Exception, folders: Iterable[AnyPath]) -> Fault:
    """Return what a client is told of an error; `folders` are known ones of the server."""
    for cause in causes(error):
        if isinstance(cause, StoreError):
            return Fault(502, STORAGE, STORE)
        if isinstance(cause, DatabaseError):
            why = NO_ROOM if cause.is_full else "the server's database refuses this, and its log has the details"
            return Fault(507, STORAGE, why)
        if isinstance(cause, OSError) and cause.errno in STATUS:
            why = NO_ROOM if is_full(cause) else f"the server cannot use its files: {reason(cause)}"
            return Fault(STATUS[cause.errno], STORAGE, why)
    if isinstance(error, WanjaxError):
        return Fault(422, MISTAKE, without_folders(str(error), folders), is_ours=False)
    return Fault(500, BROKEN, OUT_OF_MEMORY if is_out_of_memory(error) else UNEXPECTED)


def without_folders(text: str, folders: Iterable[AnyPath]) -> str:
    """Return a text in which absolute paths are names alone; those in known folders may have spaces."""
    prefixes = {*map(str, folders), str(home() or "/"), str(Path.cwd()), tempfile.gettempdir()} - {"/"}
    for folder in sorted(prefixes, key=len, reverse=True):
        text = text.replace(f"{folder}/", "/")
    return FOLDERS.sub("", text)
