# SPDX-License-Identifier: Apache-2.0
"""A worker in a thread of this process."""

import logging
from math import inf
from threading import Event, Thread
from typing import Any

from wanjax.jobs.store import JobStore
from wanjax.jobs.worker import Maker, work

logger = logging.getLogger("wanjax.jobs")


class WorkerThread:
    """A worker in a thread, for whoever has the model in this process.

    Args:
        store: The store of the jobs; one that is away is waited for.
        maker: What makes the videos.
        options: Keywords of `work`.
    """

    def __init__(self, store: JobStore, maker: Maker, **options: Any):
        self.store, self.maker, self.options = store.with_patience(inf), maker, options
        self.is_broken = False
        self._asked = Event()
        self._thread = Thread(target=self._run, name="wanjax-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask it to give its job back and to end; may be called in a handler of signals."""
        self._asked.set()

    def join(self, seconds: float) -> bool:
        """Wait for its end; return False if it is still at work."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            work(self.store, self.maker, drained=self._asked.is_set, **self.options)
        except BaseException:
            logger.exception("the worker ended")
            raise
        finally:
            self.is_broken = not self._asked.is_set()
