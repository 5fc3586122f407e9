# SPDX-License-Identifier: Apache-2.0
"""End a process immediately on a signal such as Ctrl-C, and discard output that no process reads any more.

The module imports little, so that the handlers can be installed early.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

INTERRUPTED = 130  # the exit status
_cleanups: list[Callable[[], Any]] = []


def stop(number: int, frame: object) -> None:
    """Handle a signal by ending the process. This handler is replaced when the command starts its work."""
    with suppress(OSError):  # the pipe may be closed
        os.write(2, b"\nwanjax: stopped\n")
    os._exit(INTERRUPTED)


def discard_output(stream: IO[Any] | None) -> None:
    """Discard all further output to a stream, because the process that read its pipe has ended."""
    with suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())  # pyright: ignore[reportOptionalMemberAccess]
        os.close(null)


class cleanup_on_exit:
    """Call `clean_up` if the process ends immediately within the block. In this case no `finally` clause runs."""

    def __init__(self, clean_up: Callable[[], Any]):
        self.clean_up = clean_up

    def __enter__(self) -> None:
        _cleanups.append(self.clean_up)

    def __exit__(self, *error: object) -> None:
        _cleanups.remove(self.clean_up)


def run_cleanups() -> None:
    """Call the registered clean-up functions before the process ends immediately."""
    for clean_up in reversed(_cleanups):
        try:
            clean_up()
        except OSError:  # an error must not prevent the other clean-ups
            continue
