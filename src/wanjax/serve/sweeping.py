# SPDX-License-Identifier: Apache-2.0
"""Delete the files of removed videos, and requeue jobs whose workers stopped sending heartbeats."""

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from wanjax.errors import WanjaxError
from wanjax.jobs.store import REMOVED, Job, JobStore, NotFound, Unavailable
from wanjax.stores.paths import AnyPath

INTERVAL, RETRY_INTERVAL = 1.0, 30.0  # seconds after a sweep, and after a sweep that failed to delete a file
logger = logging.getLogger("wanjax.serve")


class Sweeper:
    """A thread that deletes the files of removed videos from a folder, local or in a store.

    Several servers may sweep for one database. Files that another server has deleted are skipped.
    """

    def __init__(self, store: JobStore, folder: AnyPath):
        self.store, self.folder = store, folder
        self._wake_event, self._closed = Event(), False
        self._thread = Thread(target=self._run, name="wanjax-sweeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Start the next sweep now."""
        self._wake_event.set()

    def close(self) -> None:
        self._closed = True
        self._wake_event.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def sweep(self) -> bool:
        """Do one sweep. Return False if some files could not be deleted."""
        self.store.requeue_expired()
        removed_all = True
        for job in self.store.deletable_jobs():
            if job.status != REMOVED:
                with suppress(NotFound):
                    self.store.remove(job.id)
            removed_all &= self.remove_files(job)
        return removed_all

    def remove_files(self, job: Job) -> bool:
        """Delete the files of a removed job. Return False if they cannot be deleted now."""
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
            removed_all = False
            try:
                removed_all = self.sweep()
            except Unavailable as error:
                logger.warning("%s", error)
            except Exception:
                logger.exception("a sweep failed")
            self._wake_event.wait(INTERVAL if removed_all else RETRY_INTERVAL)
            self._wake_event.clear()
