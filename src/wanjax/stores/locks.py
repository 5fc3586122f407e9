# SPDX-License-Identifier: Apache-2.0
"""Locks on folders that only one process may use at a time."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wanjax.errors import WanjaxError


class FileLock:
    """A lock on a file, released however the process ends. The lock is SQLite's, which works on all systems."""

    def __init__(self, file: Path, user: str, option: str):
        """Acquire the lock.

        Raises WanjaxError if another process has the lock. For the message, `user` is the noun for that process, such
        as "server", and `option` is the option that selects another folder.
        """
        try:
            self._connection = sqlite3.connect(file, timeout=0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise WanjaxError(f"{file} cannot be written, {error}: give another {option}") from error
        try:
            self._connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            self.close()
            if getattr(error, "sqlite_errorname", "") != "SQLITE_BUSY":
                raise WanjaxError(f"{file} cannot be written, {error}: give another {option}") from error
            message = f"another {user} uses {file.parent}: give another {option}, or wait until it ends"
            raise WanjaxError(message) from error

    def close(self) -> None:
        """Release the lock."""
        self._connection.close()


@contextmanager
def locked(file: Path, user: str, option: str) -> Iterator[None]:
    """Hold a lock within the block, and delete its file afterwards. Raises the errors of `FileLock`."""
    while True:
        lock = FileLock(file, user, option)
        if file.exists():
            break
        lock.close()  # another process has deleted the file, so this lock would not exclude other processes
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()  # delete before the release, so that no process locks a deleted file
        lock.close()
