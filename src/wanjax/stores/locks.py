# SPDX-License-Identifier: Apache-2.0
"""Locks on folders that only one process may use at a time."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wanjax.errors import WanjaxError


class FileLock:
    """A lock on a file, released when the process ends in any way. It is SQLite's lock, which every system has."""

    def __init__(self, file: Path, user: str, option: str):
        """Take the lock. Raises WanjaxError, which names the `user` and the `option` of its folder, if it is taken."""
        try:
            self._table = sqlite3.connect(file, timeout=0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise WanjaxError(f"{file} cannot be written: {error}") from error
        try:
            self._table.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            self.close()
            if getattr(error, "sqlite_errorname", "") != "SQLITE_BUSY":
                raise WanjaxError(f"{file} cannot be written: {error}") from error
            message = f"another {user} uses {file.parent}: give another {option}, or wait until it ends"
            raise WanjaxError(message) from error

    def close(self) -> None:
        """Release the lock."""
        self._table.close()


@contextmanager
def locked(file: Path, user: str, option: str) -> Iterator[None]:
    """Hold a lock while the block runs, and leave no file of it. Raises WanjaxError as `FileLock`."""
    while True:
        lock = FileLock(file, user, option)
        if file.exists():
            break
        lock.close()  # another process has removed the file in between, so that it locks nobody out
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()  # while it is held, for the same reason
        lock.close()
