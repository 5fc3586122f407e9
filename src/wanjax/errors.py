# SPDX-License-Identifier: Apache-2.0
"""The exceptions and warnings of wanjax, and helpers for their messages."""

import errno
import json
import socket
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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
"""Error numbers of the operating system that mean a wrong name or wrong permissions of a file."""
MAX_LISTED_NAMES = 8  # the maximum number of names in a message
MIN_PREFIX = 3  # a shorter mistyped name is not treated as the start of a name
# The minimum similarity of a mistyped name and a suggestion, from 0 to 1: "mesh" and "frames" have 0.6
MIN_SIMILARITY = 0.72
COMFY_SOLVERS = {
    "uni_pc": "unipc",
    "uni_pc_bh2": "unipc",
    "euler": "euler",
    "dpmpp_2m": "dpm++",
    "lcm": "consistency",
}
"""ComfyUI's solvers, each with the same or the nearest solver of wanjax."""
OTHER_SOLVER_NAMES = COMFY_SOLVERS | {
    "UniPCMultistepScheduler": "unipc",
    "DPMSolverMultistepScheduler": "dpm++",
    "FlowMatchEulerDiscreteScheduler": "euler",
    "FlowMatchLCMScheduler": "consistency",
    "CogVideoXDDIMScheduler": "ddim",
    "CogVideoXDPMScheduler": "dpm",
}
"""Names of solvers in ComfyUI and diffusers, each with the same or the nearest solver of wanjax, for the advice in
a message."""
LIBRARY = __name__.partition(".")[0]
UNREACHABLE_ERRNOS = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


class WanjaxError(ValueError):
    """An error that the caller can correct. The message of the error is one sentence that says what is wrong, then what
    to do.

    The command line prints the error without a traceback. The exit status is 1 if `is_failure` returns True for the
    error, otherwise 2.
    """


class RequestError(WanjaxError):
    """A wrong request. Running the same command again would repeat the error."""


class SettingError(RequestError):
    """A setting that does not exist or has an invalid value. `setting` is its name."""

    def __init__(self, message: str, setting: str):
        super().__init__(message)
        self.setting = setting

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Pickle the error with both arguments."""
        return type(self), (str(self), self.setting)


class UnsupportedError(WanjaxError, NotImplementedError):
    """A request that this implementation does not support. Another implementation may support the request."""


class WriteError(WanjaxError):
    """A file or a folder that cannot be written."""


class NetworkError(WanjaxError):
    """A network or a server fails or cannot be reached. `is_failure` returns True for this error."""


class WanjaxWarning(UserWarning):
    """A warning with a message of one sentence, which the command line prints as a note."""


def user_stack_level() -> int:
    """Return the `stacklevel` with which a warning in the calling function points to the user's line. This is the first
    caller outside this library."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == LIBRARY:
        frame, level = frame.f_back, level + 1
    return level


def causes(error: BaseException | None, *, follows_contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error and its causes, each only once, even if the causes form a cycle.

    With `follows_contexts`, also follow `__context__`: network libraries often raise an error while they handle another
    error.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if follows_contexts and not error.__suppress_context__ else None)


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


def may_succeed_later(error: WanjaxError) -> bool:
    """Return True if the same command may succeed later, for example when the disk has room."""
    return isinstance(error, WriteError) or is_failure(error)


def is_failure(error: BaseException) -> bool:
    """Return True if an error is not a mistake of the user. Such an error comes from a full or broken disk, or from an
    unreachable network or server."""
    return is_full(error) or any(
        # SQLite raises SQLITE_IOERR if the disk is full when it creates a file
        getattr(cause, "sqlite_errorname", "").startswith("SQLITE_IOERR")
        or isinstance(cause, NetworkError | ConnectionError | TimeoutError | socket.gaierror)
        or (isinstance(cause, OSError) and cause.errno in UNREACHABLE_ERRNOS)
        for cause in causes(error, follows_contexts=True)
    )


def reason(error: Exception) -> str:
    """Return the reason why a file cannot be read or written: one line, without the error number and the file name."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not valid {error.encoding.upper()}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0]


def repr_shape(value: object) -> str:
    """Format an array for a message by its shape, and another value as `repr_short` does."""
    shape = getattr(value, "shape", None)
    return repr_short(value) if shape is None else str(list(shape))


@contextmanager
def wrap_write_errors(path: object) -> Iterator[None]:
    """Within the block, turn an OSError into a WriteError that names the path."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {reason(error)}") from error


JSON_TYPES = {dict: "object", list: "array", float: "number"}
_READS_JSON = ContextVar("_READS_JSON", default=False)


@contextmanager
def json_values() -> Iterator[None]:
    """Within the block, `repr_short` formats values as JSON, such as true, null and Infinity. Use this for values that
    were read from JSON."""
    token = _READS_JSON.set(True)
    try:
        yield
    finally:
        _READS_JSON.reset(token)


def repr_short(value: object) -> str:
    """Format a value for a message: by `repr` if the result is short, otherwise by the type of the value."""
    is_json = _READS_JSON.get() and (value is None or isinstance(value, bool | float | list | dict))
    text = json.dumps(value, ensure_ascii=False) if is_json else repr(value)
    if len(text) <= 40 and "\n" not in text and not text.startswith("<"):
        return text
    kind = JSON_TYPES.get(type(value), type(value).__name__) if is_json else type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def printable(text: str, allowed: str = "") -> str:
    """Replace characters that cannot be printed, such as control characters, by their escapes, such as \\x1b.

    Otherwise a text from a file or a server could control the terminal.

    Args:
        text: The text.
        allowed: Characters that are not replaced.
    """
    return "".join(char if char.isprintable() or char in allowed else repr(char)[1:-1] for char in text)


def near_names(name: str, choices: Iterable[str], limit: int = 4) -> list[str]:
    """Return at most `limit` choices that start with a mistyped name. If no choice does, return similar choices."""
    names, word = list(choices), name[:40].lower()  # a name that a client sends may be very long
    prefixed = [name for name in names if len(word) >= MIN_PREFIX and name.lower().startswith(word)]
    return prefixed[:limit] or get_close_matches(word, names, n=limit, cutoff=MIN_SIMILARITY)


def install_extra(extra: str) -> str:
    """Return advice for a message: the command that installs an extra of this package from a clone."""
    return f"run `pip install '.[{extra}]'` in wanjax's clone"


def unknown_model(name: str, names: Iterable[str]) -> str:
    """Format the message for an unknown model, with similar names."""
    similar = near_names(name, names)
    advice = f"did you mean {' or '.join(similar)}?" if similar else "`wanjax models` lists the names"
    return f"no model is named {name!r}, and no folder or file has this name (a hub id is OWNER/NAME): {advice}"


def no_checkpoint(name: object, details: str = "") -> str:
    """Format the message for a folder that is not a checkpoint. `details` adds more information, such as other missing
    files."""
    return (
        f"{name} has no model_index.json{details}: give a complete checkpoint in the layout of diffusers or its authors"
    )


def comma_list(names: Collection[str]) -> str:
    """Join names with commas. Of a long list, only the first names and the number of other names are included."""
    first_names = list(names)[:MAX_LISTED_NAMES]
    hidden = len(names) - len(first_names)
    return ", ".join([*first_names, f"and {hidden} more"] if hidden else first_names)


def suggest_choice(name: object, choices: Collection[str]) -> str:
    """Format advice for a wrong name: the most similar choice, then the other choices. If no choice is similar, list
    all choices."""
    similar = near_names(name, choices, 1) if isinstance(name, str) else []
    other_choices = [name for name in choices if name not in similar]
    if not similar or not other_choices:
        return f"give {comma_list(other_choices or similar)}"
    return f"did you mean {similar[0]}, or {'one of ' if len(other_choices) > 1 else ''}{comma_list(other_choices)}?"
