# SPDX-License-Identifier: Apache-2.0
"""The errors that wanjax raises on purpose, and its warnings."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the numbers of errors of a disk without room


class WanjaxError(ValueError):
    """An error that the caller can correct. Its message is one sentence: what was wrong, and what would be right.

    The command line prints it without a traceback and exits with 2.
    """


class SettingError(WanjaxError):
    """A value of a setting that is not right, or a setting that there is not; `setting` is its name."""

    def __init__(self, message: str, setting: str):
        super().__init__(message)
        self.setting = setting

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Lets the error go from one process to another, which takes both arguments."""
        return type(self), (str(self), self.setting)


class UnsupportedError(WanjaxError, NotImplementedError):
    """A request that this implementation does not support; another implementation may."""


class WriteError(WanjaxError):
    """A file or a folder that cannot be written."""


class WanjaxWarning(UserWarning):
    """A warning whose message is one sentence, which the command line prints as a note."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, and those from which it was raised, each once: an error that is raised from itself is one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def is_out_of_memory(error: Exception) -> bool:
    """Tells whether the host's memory, or that of a device, was too small."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def is_full(error: BaseException) -> bool:
    """Tells whether a disk had no room."""
    return any(
        getattr(cause, "sqlite_errorname", "") == "SQLITE_FULL" or (isinstance(cause, OSError) and cause.errno in FULL)
        for cause in causes(error)
    )


def reason(error: Exception) -> str:
    """Returns why a file cannot be read or written, in one line without the error's number and the file's name."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is no text in {error.encoding.upper()}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0]


@contextmanager
def written(path: object) -> Iterator[None]:
    """Raises WriteError, which names the path, in place of the block's OSError."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {reason(error)}") from error


def shown(value: object) -> str:
    """Returns a value as a message names it: itself if it is short, else its type."""
    text = repr(value)
    if len(text) <= 40 and "\n" not in text and not text.startswith("<"):
        return text
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
