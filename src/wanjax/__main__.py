# SPDX-License-Identifier: Apache-2.0
"""`python -m wanjax` is `wanjax`."""

import signal

from wanjax.signals import stop


def main() -> None:
    """Runs the command line, which Ctrl-C ends from the first moment on."""
    signal.signal(signal.SIGINT, stop)
    from wanjax.cli import main as run

    run(prog_name="wanjax")


if __name__ == "__main__":
    main()
