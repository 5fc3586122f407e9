# SPDX-License-Identifier: Apache-2.0
"""How to end a process immediately, such as on Ctrl-C. Few imports, so that the handler is installed early."""

import os
from collections.abc import Callable
from typing import Any

INTERRUPTED = 130  # the exit status
_cleanups: list[Callable[[], Any]] = []


def stop(number: int, frame: object) -> None:
    """Handle a signal by ending the process; used until the command has started its work."""
    os.write(2, b"\nwanjax: stopped\n")
    os._exit(INTERRUPTED)


class cleanup_on_exit:
    """Call `clean_up` if the process ends immediately within the block, when no `finally` clause runs."""

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
        except OSError:  # still run the others
            continue
