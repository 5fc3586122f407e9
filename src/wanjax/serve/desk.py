# SPDX-License-Identifier: Apache-2.0
"""A worker's place, away from the board: what it is to make, and how far it is with it."""

import logging
import time
from threading import Condition, Thread
from typing import Any

from wanjax.serve.board import LOADING
from wanjax.serve.jobs import Job, Status, VideoFolders
from wanjax.serve.owner import MADE, AwayError, Call, Orders
from wanjax.stores.places import Place

BEAT = 0.5  # seconds between two questions whether to go on
PAUSE = 0.2  # seconds between two messages at the least
logger = logging.getLogger("wanjax.serve")


class Desk:
    """One worker's view of the board, with what of it a `Worker` calls and sets.

    How far it is is told by a thread, the newest state alone, so that nothing that is computed waits for an answer.
    """

    def __init__(self, call: Call, worker: str, folder: Place):
        """Takes the way to the owner, the worker's name, and the folder of the videos."""
        self.call, self.worker = call, worker
        self.shelf = VideoFolders(folder)
        self.closed, self.state = False, LOADING
        self._job: Job | None = None
        self._changed = Condition()
        Thread(target=self._tell, name="wanjax-desk", daemon=True).start()

    def take(self) -> Job | None:
        """Waits for a job and returns it as under way; None where the worker is to end."""
        while not self.closed:
            orders: Orders = self._ask("take", self.worker)
            self.closed = orders.closed
            if orders.job is not None:
                with self._changed:
                    self._job = orders.job
                self._ask("advance", self.worker, orders.job.id, 0, {})  # before anything that may end this process
                return orders.job
        return None

    def advance(self, job: Job, progress: int, **changes: Any) -> None:
        """Notes how far a job is."""
        with self._changed:
            job.advance(progress, **changes)
            self._changed.notify()

    def finish(self, job: Job, status: Status, error: dict[str, str] | None = None) -> None:
        """Tells the end of a job."""
        self._leave()
        self._ask("finish", self.worker, job.id, _made(job), status, error)

    def give_back(self, job: Job) -> None:
        """Tells that a job is to wait again, because the server ends."""
        self._leave()
        self._ask("give_back", self.worker, job.id)

    def _ask(self, method: str, *given: Any) -> Any:
        """Calls a method of the owner, again where it is away: the work that is done is worth the waiting."""
        while True:
            try:
                return self.call(method, *given)
            except AwayError:
                time.sleep(BEAT)

    def _leave(self) -> None:
        with self._changed:
            self._job = None

    def _tell(self) -> None:
        """Tells the owner how far the job is, and hears whether to go on."""
        while True:
            with self._changed:
                self._changed.wait(BEAT)
                job = self._job
                told = job and (job.id, job.progress, _made(job))
            if job is None or told is None:
                continue
            try:
                orders: Orders = self.call("advance", self.worker, *told)
            except AwayError:
                continue
            except Exception:
                logger.exception("how far %s is cannot be told", job.id)
                time.sleep(BEAT)
                continue
            job.cancelled |= orders.cancelled
            self.closed |= orders.closed
            with self._changed:
                self._changed.wait(PAUSE)


def _made(job: Job) -> dict[str, Any]:
    """Returns what a worker knows of a job."""
    return {name: getattr(job, name) for name in MADE}
