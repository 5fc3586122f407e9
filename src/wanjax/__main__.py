# SPDX-License-Identifier: Apache-2.0
"""`python -m wanjax` is `wanjax`."""

import atexit
import gc
import os
import signal
import sys

from wanjax.signals import stop

# new objects before a garbage collection; with Python's default of 700, collections take a tenth of a short command
NEW_OBJECTS = 100_000


def main() -> None:
    """Run the command line. Ctrl-C ends the command even while modules are imported."""
    signal.signal(signal.SIGINT, stop)
    gc.set_threshold(NEW_OBJECTS, 50, 50)
    sys.modules.setdefault("IPython", None)  # pyright: ignore[reportArgumentType]  # else Flax imports it in vain
    from wanjax.cli import main as run

    try:
        run(prog_name="wanjax")
    except SystemExit as ended:
        if isinstance(ended.code, int | None) and not _has_running_threads():
            _end_process(ended.code or 0)
        raise


def _has_running_threads() -> bool:
    """Return whether Python would wait for running threads at its exit."""
    import threading  # imported late, so that Ctrl-C works sooner

    return any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate())


def _end_process(status: int) -> None:
    """Run the exit functions, flush the streams, and end the process without Python's slow clean-up of modules."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # the remaining output cannot be written
            status = status or 1
    os._exit(status)


if __name__ == "__main__":
    main()
