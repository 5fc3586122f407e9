# SPDX-License-Identifier: Apache-2.0
"""Describe errors for clients.

A description says whether the client or the server caused the error, and contains no paths of the server.
"""

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

INVALID_REQUEST, SERVER_ERROR, STORAGE = "invalid_request", "server_error", "storage"
STATUS_BY_ERRNO = {
    **dict.fromkeys((*DISK_FULL_ERRNOS, errno.EROFS, errno.EACCES, errno.EPERM), 507),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), 503),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.ESTALE, errno.ENOMEM), 500),
}
"""HTTP statuses of file errors. The server is the cause of all of them, because no request can name a file of the
server.
"""
DISK_FULL_MESSAGE = "the server's disk is full: delete videos, then try again"
OUT_OF_MEMORY = "this video does not fit into the memory of the devices: use a smaller size or fewer frames"
STORE_MESSAGE = "the server cannot access its remote store: see the server's log"
UNEXPECTED = "the server failed: see its log"
ROUTE = r"/(?:v1/(?:videos|models|events|requests)|health|metrics|login|openapi\.json)(?![\w.-])"
"""Matches a path of the HTTP interface."""
# matches the folder of an absolute path
FOLDER_PATTERN = re.compile(rf"(?<![\w.:/~-])(?!{ROUTE})~?/(?:[^\s/'\"]+/)*(?=[^\s/])")


class ErrorDetails(NamedTuple):
    """The description of an error for a client.

    Args:
        status: The HTTP status.
        code: The error code.
        message: The message.
        is_server_error: Whether the server caused the error. The server's log then contains the details.
    """

    status: int
    code: str
    message: str
    is_server_error: bool = True


class StorageError(WanjaxError):
    """A file of the server cannot be used, for example because the disk is full."""


@contextmanager
def raising_storage_errors() -> Iterator[None]:
    """Within the block, convert an OSError about the server's files to a StorageError."""
    try:
        yield
    except OSError as error:
        if error.errno not in STATUS_BY_ERRNO:
            raise
        raise StorageError(f"{error.filename or 'a file'} cannot be used: {reason(error)}") from error


def describe_error(error: Exception, folders: Iterable[AnyPath]) -> ErrorDetails:
    """Describe an error for a client.

    Args:
        error: The error.
        folders: Folders of the server, which are removed from the message.
    """
    for cause in causes(error):
        if isinstance(cause, StoreError):
            return ErrorDetails(502, STORAGE, STORE_MESSAGE)
        if isinstance(cause, DatabaseError):
            message = DISK_FULL_MESSAGE if cause.is_full else "the server's database failed: see the server's log"
            return ErrorDetails(507, STORAGE, message)
        if isinstance(cause, OSError) and cause.errno in STATUS_BY_ERRNO:
            message = DISK_FULL_MESSAGE if is_full(cause) else f"the server cannot access its files: {reason(cause)}"
            return ErrorDetails(STATUS_BY_ERRNO[cause.errno], STORAGE, message)
    if isinstance(error, WanjaxError):
        return ErrorDetails(422, INVALID_REQUEST, strip_folders(str(error), folders), is_server_error=False)
    return ErrorDetails(500, SERVER_ERROR, OUT_OF_MEMORY if is_out_of_memory(error) else UNEXPECTED)


def strip_folders(text: str, folders: Iterable[AnyPath]) -> str:
    """Remove the folders from absolute paths in a text, and keep the file names.

    Args:
        text: The text.
        folders: Folders to remove even if their names contain spaces.
    """
    prefixes = {*map(str, folders), str(home() or "/"), str(Path.cwd()), tempfile.gettempdir()} - {"/"}
    for folder in sorted(prefixes, key=len, reverse=True):
        text = text.replace(f"{folder}/", "/")
    return FOLDER_PATTERN.sub("", text)
