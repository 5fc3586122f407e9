# SPDX-License-Identifier: Apache-2.0
"""The end of a process at once, as by Ctrl-C. Nothing else is imported here, so that it counts from the start on."""

import os
from collections.abc import Callable
from typing import Any

INTERRUPTED = 130  # the exit status
_cleanups: list[Callable[[], Any]] = []


def stop(number: int, frame: object) -> None:
    """End the process, as a handler of a signal, before anything is begun."""
    os.write(2, b"\nwanjax: stopped\n")
    os._exit(INTERRUPTED)


class cleanup_on_exit:
    """Calls `clean_up` if the process is ended while the `with` block runs, when no `finally` would run."""

    def __init__(self, clean_up: Callable[[], Any]):
        self.clean_up = clean_up

    def __enter__(self) -> None:
        _cleanups.append(self.clean_up)

    def __exit__(self, *error: object) -> None:
        _cleanups.remove(self.clean_up)


def run_cleanups() -> None:
    """Cleans up what is under way, because the process ends at once."""
    for clean_up in reversed(_cleanups):
        try:
            clean_up()
        except OSError:  # the next is cleaned up nevertheless
            continue
