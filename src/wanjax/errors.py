# SPDX-License-Identifier: Apache-2.0
"""The errors that wanjax raises on purpose, and its warnings."""

import errno
import socket
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

FILE_NAME_ERRNOS = (
    errno.ENOENT,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
)
"""Errors of the operating system that are caused by a file's name or its permissions."""
MAX_LISTED_NAMES = 8  # in a message
SHORTEST_HINT = 3  # letters at the start of a name that tell which one is meant
NEAR = 0.72  # the least similarity, from 0 to 1, of a mistyped name and a hint: "mesh" and "frames" have 0.6
UNREACHABLE_ERRNOS = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


class WanjaxError(ValueError):
    """An error that the caller can correct. Its message is one sentence that says what is wrong, then what to do.

    The command line prints it without a traceback. The exit status is 2, or 1 if `is_failure` holds.
    """


class SettingError(WanjaxError):
    """A setting that has an invalid value or does not exist; `setting` is its name."""

    def __init__(self, message: str, setting: str):
        super().__init__(message)
        self.setting = setting

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Pickle the error with both arguments."""
        return type(self), (str(self), self.setting)


class UnsupportedError(WanjaxError, NotImplementedError):
    """A request that this implementation does not support; another implementation may."""


class WriteError(WanjaxError):
    """A file or a folder that cannot be written."""


class NetworkError(WanjaxError):
    """A network or a server that cannot be reached or fails; `is_failure` holds."""


class WanjaxWarning(UserWarning):
    """A warning with a message of one sentence, which the command line prints as a note."""


def causes(error: BaseException | None, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error and its causes, each once, even if an error is its own cause.

    With `contexts`, also yield errors that were being handled when the next was raised, as network libraries do.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if contexts and not error.__suppress_context__ else None)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the host or a device ran out of memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def is_full(error: BaseException) -> bool:
    """Return True if a disk was full."""
    return any(
        getattr(cause, "sqlite_errorname", "") == "SQLITE_FULL"
        or (isinstance(cause, OSError) and cause.errno in DISK_FULL_ERRNOS)
        for cause in causes(error)
    )


def is_failure(error: BaseException) -> bool:
    """Return True if an error is not the user's mistake: a full or broken disk, or an unreachable network or server."""
    return is_full(error) or any(
        getattr(cause, "sqlite_errorname", "").startswith(
            "SQLITE_IOERR"
        )  # SQLite's error if the disk is full when it creates a file
        or isinstance(cause, NetworkError | ConnectionError | TimeoutError | socket.gaierror)
        or (isinstance(cause, OSError) and cause.errno in UNREACHABLE_ERRNOS)
        for cause in causes(error, contexts=True)
    )


def reason(error: Exception) -> str:
    """Return why a file cannot be read or written, in one line without the errno and the file's name."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is no text in {error.encoding.upper()}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0]


@contextmanager
def write_errors(path: object) -> Iterator[None]:
    """Within the block, turn an OSError into a WriteError that names the path."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {reason(error)}") from error


def repr_short(value: object) -> str:
    """Format a value for a message: its `repr` if that is short, else its type."""
    text = repr(value)
    if len(text) <= 40 and "\n" not in text and not text.startswith("<"):
        return text
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def near_names(name: str, choices: Iterable[str], limit: int = 4) -> list[str]:
    """Return at most `limit` choices that start with a mistyped name; if there are none, those that resemble it."""
    names, word = list(choices), name[:40].lower()  # a client's name may be very long
    prefixed = [name for name in names if len(word) >= SHORTEST_HINT and name.lower().startswith(word)]
    return prefixed[:limit] or get_close_matches(word, names, n=limit, cutoff=NEAR)


def unknown_model(name: str, names: Iterable[str]) -> str:
    """Return a message for an unknown model, with similar names."""
    similar = near_names(name, names)
    advice = f"did you mean {' or '.join(similar)}?" if similar else "`wanjax models` lists the names"
    return f"no model is named {name!r}, nor is there such a folder or file (a hub id is OWNER/NAME): {advice}"


def no_checkpoint(name: object, more: str = "") -> str:
    """Return the sentence for a folder that is not a checkpoint; `more` follows what it lacks."""
    return f"{name} holds no model_index.json{more}: give a whole checkpoint, as diffusers or its authors lay it out"


def listed(names: Collection[str]) -> str:
    """Join names with commas; of a long list print the first names and the number of the others."""
    first_names = list(names)[:MAX_LISTED_NAMES]
    hidden = len(names) - len(first_names)
    return ", ".join([*first_names, f"and {hidden} more"] if hidden else first_names)


def choice(name: object, choices: Collection[str]) -> str:
    """Return advice in place of a wrong name: the most similar choice and then the others, or all choices."""
    similar = near_names(name, choices, 1) if isinstance(name, str) else []
    others = listed([name for name in choices if name not in similar])
    return f"did you mean {similar[0]}, or one of {others}?" if similar and others else f"give {others or similar[0]}"
