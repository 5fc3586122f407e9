# SPDX-License-Identifier: Apache-2.0
"""`python -m wanjax` is `wanjax`."""

import atexit
import gc
import os
import signal
import sys

from wanjax.signals import stop

NEW_OBJECTS = 100_000  # between two collections; with Python's 700 a short command spends a tenth of its time on them


def main() -> None:
    """Run the command line, which Ctrl-C ends from the first moment on."""
    signal.signal(signal.SIGINT, stop)
    gc.set_threshold(NEW_OBJECTS, 50, 50)
    sys.modules.setdefault("IPython", None)  # pyright: ignore[reportArgumentType]  # else Flax imports it in vain
    from wanjax.cli import main as run

    try:
        run(prog_name="wanjax")
    except SystemExit as ended:
        if isinstance(ended.code, int | None) and not _is_awaited():
            _leave(ended.code or 0)
        raise


def _is_awaited() -> bool:
    """Return whether there are threads for which Python would wait."""
    import threading  # imported late, so that Ctrl-C is answered sooner

    return any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate())


def _leave(status: int) -> None:
    """End the process once all is done that was to be done at its end, without taking every module apart."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # what was printed cannot be written
            status = status or 1
    os._exit(status)


if __name__ == "__main__":
    main()
