# SPDX-License-Identifier: Apache-2.0
"""The board on which all requested videos stand: their queue, their changes, and those who watch them.

The worker's thread and the server's event loop share it, under one lock. A watcher is woken and then reads the newest
state, so that a slow one costs no memory.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from threading import Condition
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.serve.jobs import CANCELLED, COMPLETED, FAILED, QUEUED, RUNNING, Job, Shelf, Status, cancellation

Watcher = tuple[asyncio.AbstractEventLoop, asyncio.Event]
FAILURES = 200  # failed videos that are remembered
REMOVED = 1000  # removed videos of which watchers are told


class FullError(Exception):
    """A queue that takes no further request."""


class UnknownError(LookupError):
    """An id that no video has."""


class Board:
    """All videos by id in the order of their requests, and the queue of those to be made, at most `queue` long."""

    def __init__(self, shelf: Shelf, queue: int):
        self.shelf = shelf
        self.jobs = {job.id: job for job in shelf.load()}
        self.running: Job | None = None
        self.closed = False
        self.counts = {COMPLETED: 0, FAILED: 0, CANCELLED: 0}  # since the server began
        self._most = queue
        self._queue = deque(job for job in self.jobs.values() if job.status == QUEUED)
        self._changed = Condition()
        self._version = int(time.time() * 1000)  # so that it grows from one start of a server to the next
        for job in self.jobs.values():
            job.version = self._version
        self._removed: deque[tuple[int, str]] = deque(maxlen=REMOVED)
        self._watchers: set[Watcher] = set()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def check_room(self) -> None:
        """Raises FullError where the queue takes no further request."""
        if len(self._queue) >= self._most:
            raise FullError(
                f"{len(self._queue)} videos wait already, as many as this server lets wait: try again later"
            )

    def add(self, job: Job) -> None:
        """Appends a job, which is on the disk from then on; raises FullError."""
        with self._changed:
            self.check_room()
            self.shelf.add(job)
            self.jobs[job.id] = job
            self._queue.append(job)
            self._tell(job)

    def take(self) -> Job | None:
        """Waits for a job and returns it as under way; None when the board is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._queue)
            if self.closed:
                return None
            job = self.running = self._queue.popleft()
            job.status, job.tries = RUNNING, job.tries + 1
            self._keep(job)
            self._tell(job, *self._queue)
            return job

    def advance(self, job: Job, progress: int, **changes: Any) -> None:
        """Notes how far a job is."""
        with self._changed:
            job.progress = max(job.progress, progress)
            for name, value in changes.items():
                setattr(job, name, value)
            self._tell(job)

    def finish(self, job: Job, status: Status, error: dict[str, str] | None = None) -> None:
        """Notes the end of the job under way. One that was removed meanwhile disappears from the disk."""
        with self._changed:
            self.running = None
            self._end(job, status, error)
            if job.id not in self.jobs:
                self._clear(job.id)

    def give_back(self, job: Job) -> None:
        """Puts the job under way back to the head of the queue, because the server ends."""
        with self._changed:
            self.running, job.status, job.tries = None, QUEUED, job.tries - 1
            self._queue.appendleft(job)
            if job.id in self.jobs:
                self._keep(job)
            else:
                self._clear(job.id)

    def cancel(self, id: str) -> Job:
        """Cancels a job that waits or is under way, and returns it; raises UnknownError."""
        with self._changed:
            job = self.find(id)
            if not job.over and not job.cancelled:
                job.cancelled = True
                self._save(job)  # before the answer
                self._tell(job)
            if job.status == QUEUED:
                self._queue.remove(job)
                self._end(job, FAILED, cancellation())
            return job

    def _save(self, job: Job) -> None:
        """Writes a wish to end a job, which is none where it cannot be written."""
        try:
            self.shelf.save(job)
        except WanjaxError:
            job.cancelled = False
            raise

    def remove(self, id: str) -> None:
        """Removes a video, and its files as soon as no one works on them; raises UnknownError."""
        with self._changed:
            self.find(id)
            self.shelf.leave(id)  # before the answer
            job = self.cancel(id)
            del self.jobs[id]
            if job.status != RUNNING:
                self._clear(id)
            self._removed.append((self._version, id))
            self._tell(job, *self._queue)

    def close(self) -> None:
        """Ends the waiting of the worker and of all watchers."""
        self.closed = True
        with self._changed:
            self._tell()

    def find(self, id: str) -> Job:
        """Returns a video; raises UnknownError."""
        if (job := self.jobs.get(id)) is None:
            raise UnknownError("there is no video of this id")
        return job

    def since(self, version: int, only: str | None = None) -> tuple[int, list[Job], list[str]]:
        """Returns the board's version, and what changed and what was removed since another version, of all or one."""
        with self._changed:
            asked = self.jobs.values() if only is None else filter(None, [self.jobs.get(only)])
            changed = [job for job in asked if job.version > version]
            gone = [id for at, id in self._removed if at >= version and only in (None, id)]
            return self._version, changed, gone

    def position(self, job: Job) -> int | None:
        """Returns how many videos are made before this one; None for one that does not wait."""
        with self._changed:
            return self._queue.index(job) + (self.running is not None) if job in self._queue else None

    def watch(self) -> Watcher:
        """Returns a watcher on the running loop, whose event every change sets until `leave` is called with it."""
        watcher = (asyncio.get_running_loop(), asyncio.Event())
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def _end(self, job: Job, status: Status, error: dict[str, str] | None) -> None:
        job.status, job.error, job.completed_at, job.stage = status, error, time.time(), ""
        job.progress = 100 if status == COMPLETED else job.progress
        code = CANCELLED if error is not None and error["code"] == CANCELLED else status
        self.counts[code] += 1
        if job.id in self.jobs:
            self._keep(job)
        self._forget(one for one in self.jobs.values() if one.status == FAILED)
        self._tell(job, *self._queue)

    def _keep(self, job: Job) -> None:
        """Writes a job's state; a disk that takes no more must not end the worker."""
        with suppress(WanjaxError):
            self.shelf.save(job)

    def _clear(self, id: str) -> None:
        """Removes the files of a video; what cannot be removed now goes at the next start."""
        with suppress(WanjaxError):
            self.shelf.remove(id)

    def _forget(self, failed: Iterable[Job]) -> None:
        """Removes the oldest failed videos, beyond those that are remembered."""
        for job in list(failed)[:-FAILURES]:
            del self.jobs[job.id]
            self._clear(job.id)

    def _tell(self, *jobs: Job) -> None:
        self._version += 1
        for job in jobs:
            job.version = self._version
        self._changed.notify_all()
        for loop, event in list(self._watchers):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)
