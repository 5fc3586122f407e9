# SPDX-License-Identifier: Apache-2.0
"""The board on which all requested videos stand: their queue, their changes, and those who watch them.

The worker's thread and the server's event loop share it, under one lock. A watcher is woken and then reads the newest
state, so that a slow one costs no memory.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from threading import Condition
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.figures import quantity
from wanjax.serve.jobs import CANCELLED, COMPLETED, FAILED, QUEUED, RUNNING, Job, Status, cancellation
from wanjax.serve.shelf import Shelf

Watcher = tuple[asyncio.AbstractEventLoop, asyncio.Event]
LOADING, READY, BROKE = "loading", "ready", "failed"
FAILURES = 200  # failed videos that are remembered
REMOVED = 1000  # removed videos of which watchers are told


class FullError(Exception):
    """A queue that takes no further request."""


class UnknownError(LookupError):
    """An id that no video has."""


class ClosedError(Exception):
    """A server that ends, and takes no further request."""


class Videos:
    """All videos by id, in the order of their requests, as those who ask and those who watch see them.

    `running` are those under way, by worker. `state` is "loading" until a worker has its model loaded and compiled,
    then "ready", and "failed" where the only worker ended. `counts` are the videos that came to an end since the server
    began, and `seconds` what they took, by stage. `answers` are those of this process, by status, and `all_answers`
    those of all. `version` grows with each change.
    """

    def __init__(self, jobs: Iterable[Job], most: int):
        """Takes the videos, and how many may wait."""
        self.jobs = {job.id: job for job in jobs}
        self.running: dict[str, Job] = {}
        self.closed = False
        self.state = LOADING
        self.counts = {COMPLETED: 0, FAILED: 0, CANCELLED: 0}
        self.seconds: Counter[str] = Counter()
        self.answers: Counter[int] = Counter()
        self.all_answers: Mapping[int, int] = self.answers
        self._most = most
        self._queue = deque(job for job in self.jobs.values() if job.status == QUEUED)
        self._changed = Condition()
        self.version = int(time.time() * 1000)  # so that it grows from one start of a server to the next
        self._removed: deque[tuple[int, str]] = deque(maxlen=REMOVED)
        self._watchers: set[Watcher] = set()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def queue(self) -> list[str]:
        """The ids of the videos that wait, in their order."""
        return [job.id for job in self._queue]

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def check_room(self) -> None:
        """Raises FullError where the queue takes no further request, ClosedError where the server ends."""
        if self.closed:
            raise ClosedError("this server is ending: ask again when it has started anew")
        if len(self._queue) >= self._most:
            raise FullError(
                f"{quantity(len(self._queue), 'video')} in the queue, as many as this server lets wait: try again later"
            )

    def find(self, id: str) -> Job:
        """Returns a video; raises UnknownError."""
        if (job := self.jobs.get(id)) is None:
            raise UnknownError("there is no video of this id")
        return job

    def renew(self) -> None:
        """Sees to it that what happened before this call is seen."""

    def since(self, version: int, only: str | None = None) -> tuple[int, list[Job], list[str]]:
        """Returns the version, and what changed and what was removed since another version, of all or one."""
        with self._changed:
            asked = self.jobs.values() if only is None else filter(None, [self.jobs.get(only)])
            changed = [job for job in asked if job.version > version]
            gone = [id for at, id in self._removed if at >= version and only in (None, id)]
            return self.version, changed, gone

    def position(self, job: Job) -> int | None:
        """Returns how many videos are made before this one; None for one that does not wait."""
        with self._changed:
            ids = self.queue  # of jobs that a copy may hold anew since this one was found
            return ids.index(job.id) + len(self.running) if job.id in ids else None

    def watch(self) -> Watcher:
        """Returns a watcher on the running loop, whose event every change sets until `leave` is called with it."""
        watcher = (asyncio.get_running_loop(), asyncio.Event())
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def wake(self) -> None:
        """Has all who wait look again."""
        with self._changed:
            self._changed.notify_all()
        for loop, event in list(self._watchers):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)


class Board(Videos):
    """The videos on a shelf, and the queue of those to be made, at most `queue` long.

    Workers that begin with `alive` went on while the board was away, and still make what they were making.
    """

    def __init__(self, shelf: Shelf, queue: int, alive: str | None = None):
        super().__init__(shelf.load(alive), queue)
        self.shelf = shelf
        self.running = {job.worker: job for job in self.jobs.values() if job.status == RUNNING}
        self.state = READY if self.running else LOADING
        for job in self.jobs.values():
            job.version = self.version

    def add(self, job: Job) -> Job:
        """Appends a job, which is on the disk from then on, and returns it; raises FullError and ClosedError."""
        with self._changed:
            if job.id not in self.jobs:  # else it is asked for again, because the answer was lost
                self.check_room()
                self.shelf.add(job)
                self.jobs[job.id] = job
                self._queue.append(job)
                self._tell(job)
            return self.jobs[job.id]

    def take(self, worker: str = "") -> Job | None:
        """Waits for a job and returns it as under way; None when the board is closed."""
        self.state = READY
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._queue)
            return self.begin(worker)

    def begin(self, worker: str = "") -> Job | None:
        """Returns the first job that waits as under way, by a worker; None where there is none."""
        with self._changed:
            if self.closed or not self._queue:
                return None
            job = self.running[worker] = self._queue.popleft()
            job.status, job.worker, job.tries = RUNNING, worker, job.tries + 1
            self._keep(job)
            self._tell(job, *self._queue)
            return job

    def advance(self, job: Job, progress: int, **changes: Any) -> None:
        """Notes how far a job is."""
        with self._changed:
            job.advance(progress, **changes)
            self._tell(job)

    def finish(self, job: Job, status: Status, error: dict[str, str] | None = None) -> None:
        """Notes the end of a job under way. One that was removed meanwhile disappears from the disk."""
        with self._changed:
            self.running.pop(job.worker, None)
            self.seconds.update(job.seconds)
            self._end(job, status, error)
            if job.id not in self.jobs:
                self._clear(job.id)

    def give_back(self, job: Job) -> None:
        """Puts a job under way back to the head of the queue, because the server ends."""
        with self._changed:
            self.running.pop(job.worker, None)
            job.status, job.worker, job.tries = QUEUED, "", job.tries - 1
            self._put_back(job)

    def lose(self, worker: str) -> None:
        """Takes back the job of a worker that died: it waits again, before others, unless it was tried too often."""
        with self._changed:
            if (job := self.running.pop(worker, None)) is None:
                return
            self.shelf.settle(job)
            if job.over:
                self.finish(job, job.status, job.error)
            else:
                self._put_back(job)

    def _put_back(self, job: Job) -> None:
        if job.id not in self.jobs:  # it was removed meanwhile
            self._clear(job.id)
            return
        self._queue.appendleft(job)
        self._keep(job)
        self._tell(*self._queue)

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
            self._removed.append((self.version, id))
            self._tell(job, *self._queue)

    def close(self) -> None:
        """Ends the waiting of the worker and of all watchers."""
        self.closed = True
        with self._changed:
            self._tell()

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
            self._removed.append((self.version, job.id))
            self._clear(job.id)

    def _tell(self, *jobs: Job) -> None:
        self.version += 1
        for job in jobs:
            job.version = self.version
        self.wake()
