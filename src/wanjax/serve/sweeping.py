# SPDX-License-Identifier: Apache-2.0
"""The removal of files that nobody needs, and the return of jobs whose workers are not heard of."""

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from wanjax.errors import WanjaxError
from wanjax.jobs.store import REMOVED, Job, JobStore, NotFound, Unavailable
from wanjax.stores.paths import AnyPath

EVERY, LATER = 1.0, 30.0  # seconds between two looks, and after one that could not remove all
logger = logging.getLogger("wanjax.serve")


class Sweeper:
    """A thread that removes what is left of videos below a folder, here or in a store.

    Several servers of one database may sweep: what one has removed, another finds gone.
    """

    def __init__(self, store: JobStore, folder: AnyPath):
        self.store, self.folder = store, folder
        self._woken, self._closed = Event(), False
        self._thread = Thread(target=self._run, name="wanjax-sweeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Have it look at once."""
        self._woken.set()

    def close(self) -> None:
        self._closed = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def sweep(self) -> bool:
        """Look once; return False where something could not be removed."""
        self.store.requeue_expired()
        whole = True
        for job in self.store.leftovers():
            if job.status != REMOVED:
                with suppress(NotFound):
                    self.store.remove(job.id)
            whole &= self.clear(job)
        return whole

    def clear(self, job: Job) -> bool:
        """Remove the files of a removed job; return False where they cannot be removed now."""
        folder = self.folder / job.id
        try:
            if isinstance(folder, Path):
                shutil.rmtree(folder, ignore_errors=True)
                if folder.exists():
                    return False
            else:
                folder.remove_all()
            self.store.purge(job.id)
        except WanjaxError as error:
            logger.warning("%s", error)
            return False
        return True

    def _run(self) -> None:
        while not self._closed:
            whole = False
            try:
                whole = self.sweep()
            except Unavailable as error:
                logger.warning("%s", error)
            except Exception:
                logger.exception("a sweep failed")
            self._woken.wait(EVERY if whole else LATER)
            self._woken.clear()
