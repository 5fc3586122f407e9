# SPDX-License-Identifier: Apache-2.0
"""The errors that wanjax raises on purpose, and its warnings."""

import errno
import socket
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the numbers of errors of a disk without room

NAMES = (
    errno.ENOENT,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
)
"""Errors of the system that follow from the name of a file."""
MOST_NAMES = 8  # in a message
OUT_OF_REACH = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)  # of a network


class WanjaxError(ValueError):
    """An error that the caller can correct. Its message is one sentence: what is wrong, then what to do.

    The command line prints it without a traceback and exits with 2, or with 1 where `is_failure` holds.
    """


class SettingError(WanjaxError):
    """A setting with an impossible value, or one that there is not; `setting` is its name."""

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
    """A network or a server that is out of reach, or fails; `is_failure` holds."""


class WanjaxWarning(UserWarning):
    """A warning whose message is one sentence, which the command line prints as a note."""


def causes(error: BaseException | None, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error and its causes, each once, even if an error was raised from itself.

    With `contexts`, also yield the errors that were being handled when another was raised, as network libraries do.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if contexts and not error.__suppress_context__ else None)


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether the memory of the host or of a device was too small."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def is_full(error: BaseException) -> bool:
    """Tell whether a disk had no room."""
    return any(
        getattr(cause, "sqlite_errorname", "") == "SQLITE_FULL" or (isinstance(cause, OSError) and cause.errno in FULL)
        for cause in causes(error)
    )


def is_failure(error: BaseException) -> bool:
    """Tell whether an error is not the user's mistake: a full or broken disk, or a network or server out of reach."""
    return is_full(error) or any(
        getattr(cause, "sqlite_errorname", "").startswith("SQLITE_IOERR")  # as of a full disk, while it makes its files
        or isinstance(cause, NetworkError | ConnectionError | TimeoutError | socket.gaierror)
        or (isinstance(cause, OSError) and cause.errno in OUT_OF_REACH)
        for cause in causes(error, contexts=True)
    )


def reason(error: Exception) -> str:
    """Return why a file cannot be read or written, in one line without the error's number and the file's name."""
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
    """Return a value as messages show it: itself if it is short, else its type."""
    text = repr(value)
    if len(text) <= 40 and "\n" not in text and not text.startswith("<"):
        return text
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def near_names(name: str, choices: Iterable[str], limit: int = 4) -> list[str]:
    """Return the choices that are near a mistyped name, at most so many: those that begin with it before others."""
    names, word = list(choices), name[:40].lower()  # a name may be a stranger's, and long
    prefixed = [name for name in names if word and name.lower().startswith(word)]
    return prefixed[:limit] or get_close_matches(word, names, n=limit, cutoff=0.6)


def unknown_model(name: str, names: Iterable[str]) -> str:
    """Return the sentence that no model has a name, with the near ones of the names that there are."""
    near = near_names(name, names)
    hint = (
        f"{' or '.join(near)} {'is' if len(near) == 1 else 'are'} near" if near else "`wanjax models` lists the names"
    )
    return f"no model is named {name!r}, nor is there such a folder or file: {hint}, and a hub id is OWNER/NAME"


def no_checkpoint(name: object, more: str = "") -> str:
    """Return the sentence for a folder that is not a checkpoint; `more` follows what it lacks."""
    return f"{name} holds no model_index.json{more}: give a whole checkpoint, as diffusers or its authors lay it out"


def listed(names: Collection[str]) -> str:
    """Return names as a list, of many the first ones and how many more there are."""
    first = list(names)[:MOST_NAMES]
    more = len(names) - len(first)
    return ", ".join([*first, f"and {more} more"] if more else first)


def choice(name: object, choices: Collection[str]) -> str:
    """Return what to give in place of a name: the near one and then the others, or all where none is near."""
    near = near_names(name, choices, 1) if isinstance(name, str) else []
    rest = listed([name for name in choices if name not in near])
    return f"did you mean {near[0]}, or one of {rest}?" if near and rest else f"give {rest or near[0]}"
