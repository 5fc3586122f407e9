# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a stage runs: the first asks the run to stop, the second ends the process.

Inside XLA, which may compile or compute for minutes, Python runs no handler of a signal. The interpreter writes each
signal's number to a socket at once, though, and a thread reads it there.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED = 130  # the exit status
OVER = b"\0"
SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def watched(pressed: Callable[[], None]) -> Iterator[None]:
    """Calls `pressed` from a thread at each Ctrl-C, in place of raising KeyboardInterrupt.

    Does nothing outside the main thread, which alone may handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while (received := reader.recv(1)) not in (b"", OVER):
            if received[0] == signal.SIGINT:
                pressed()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGINT, before)
        writer.send(OVER)
        thread.join()
        reader.close()
        writer.close()


def end(told: str, terminal: bool) -> NoReturn:
    """Ends the process at once; cleans up what is under way, prints a text, and shows a terminal's cursor again."""
    from wanjax.checkpoints.files import abandon  # imported late for a quick --help

    abandon()
    os.write(2, f"{SHOW_CURSOR if terminal else ''}{told}".encode())
    os._exit(INTERRUPTED)
