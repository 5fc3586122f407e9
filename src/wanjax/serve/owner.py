# SPDX-License-Identifier: Apache-2.0
"""The one process that owns the table of a server whose videos several workers make.

All calls run on one event loop, so each is whole before the next begins. A call whose answer was lost, because this
process died and was started anew, is sent again: so every method is idempotent. What is under way goes on meanwhile,
and its workers are known by their names.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from wanjax.serve.board import READY, Board
from wanjax.serve.jobs import Job, Status
from wanjax.serve.shelf import Shelf
from wanjax.stores.places import Place

TRIES = 5  # times that a video may be begun whose workers die
WAIT = 10.0  # seconds for which a call waits for news
TOGETHER = 0.05  # seconds in which changes are gathered
MADE = ("settings", "seconds", "notes", "window", "stage", "done", "total", "preview")  # what a worker tells of a job

Call = Callable[..., Any]
"""Calls a method of the owner, wherever that is; raises what it raises, or AwayError where it is out of reach."""


class AwayError(Exception):
    """An owner that does not answer: it is started anew, or its service has ended."""


class Orders(NamedTuple):
    """What a worker is told: a job to begin, whether to end the one that it has, and whether to end itself."""

    job: Job | None = None
    cancelled: bool = False
    closed: bool = False


class News(NamedTuple):
    """What has changed since a version of the board, or all there is where `whole`."""

    version: int
    whole: bool
    changed: list[Job]
    removed: list[str]
    queue: list[str]
    """The ids of the videos that wait, in their order."""
    running: dict[str, str]
    """The ids of the videos under way, by worker."""
    counts: dict[str, int]
    seconds: dict[str, float]
    """Those of all videos so far, by stage."""
    answers: dict[int, int]
    """Those of all fronts, by status."""
    state: str
    closed: bool


class Load(NamedTuple):
    """How many videos wait, and are under way."""

    waiting: int
    running: int


class Owner:
    """The shelf and the board of a server, for fronts, which answer requests, and for workers.

    `service` begins the names of its workers; those of another service are gone.
    """

    def __init__(self, folder: Place, table: Path | None, queue: int, service: str):
        """Opens the folder and the table, as `Shelf` does, and raises as that; at most `queue` videos wait."""
        self.shelf = Shelf(folder, table, TRIES)
        self.board = Board(self.shelf, queue, alive=service)
        self.answers: dict[str, dict[int, int]] = {}
        self._began = self.board.version
        self._known = {*self.board.running}  # workers that were ready
        self._at_work: set[str] = set()  # workers that have told of the job that they were given
        self._idle: set[str] = set()
        self._dismissed: set[str] = set()

    async def strange(self) -> list[str]:
        """Returns what the folder holds beside this server's videos."""
        return self.shelf.strange

    # Workers

    async def take(self, worker: str) -> Orders:
        """Returns a job for a worker; none where there is none for a while."""
        self._known.add(worker)
        if self.board.state != READY:
            self.board.state = READY
            self.board.wake()
        self._idle.add(worker)
        watcher = self.board.watch()
        try:
            async with asyncio.timeout(WAIT):
                while (orders := self._orders(worker)) == Orders():
                    watcher[1].clear()
                    await watcher[1].wait()
            return orders
        except TimeoutError:
            return Orders()
        finally:
            self._idle.discard(worker)
            self.board.leave(watcher)

    def _orders(self, worker: str) -> Orders:
        self._at_work.discard(worker)
        dismissed = self.board.closed or worker in self._dismissed
        job = self.board.running.get(worker)  # one that it was given before, where the answer was lost
        return Orders(None if dismissed else job or self.board.begin(worker), closed=dismissed)

    async def advance(self, worker: str, id: str, progress: int, made: dict[str, Any]) -> Orders:
        """Notes how far a worker is with a job; returns whether it is to go on."""
        if (job := self._held(worker, id)) is None:
            return Orders(cancelled=True)
        self._at_work.add(worker)
        if progress > job.progress or any(getattr(job, name) != value for name, value in made.items()):
            self.board.advance(job, progress, **made)
        return Orders(cancelled=job.cancelled, closed=self.board.closed)

    async def finish(
        self, worker: str, id: str, made: dict[str, Any], status: Status, error: dict[str, str] | None
    ) -> None:
        """Notes the end of a job, unless that was noted before, or another worker has it."""
        if (job := self._held(worker, id)) is not None:
            job.advance(job.progress, **made)
            self.board.finish(job, status, error)

    async def give_back(self, worker: str, id: str) -> None:
        """Lets the job of a worker wait again, because the server ends."""
        if (job := self._held(worker, id)) is not None:
            self.board.give_back(job)

    def _held(self, worker: str, id: str) -> Job | None:
        """Returns the job that a worker has, if it is the one of this id."""
        job = self.board.running.get(worker)
        return job if job is not None and job.id == id else None

    async def lose(self, worker: str) -> bool:
        """Takes back the job of a worker that died; tells whether it was ever ready."""
        self._dismissed.add(worker)  # a call of it may still be waiting
        if worker not in self._at_work and (job := self.board.running.get(worker)) is not None:
            job.tries -= 1  # it was given to a worker that was dead already
        self.board.lose(worker)
        return worker in self._known

    async def dismiss(self, count: int) -> list[str]:
        """Ends at most so many workers that have nothing to do, and returns their names."""
        chosen = [] if self.board.waiting else sorted(self._idle - self._dismissed)[:count]
        self._dismissed.update(chosen)
        self.board.wake()
        return chosen

    async def load(self) -> Load:
        return Load(self.board.waiting, len(self.board.running))

    # Fronts

    async def since(self, version: int, front: str, answers: dict[int, int]) -> News:
        """Returns what has changed since a version, as soon as something has; `answers` are those of a front so far."""
        self.answers[front] = answers
        watcher = self.board.watch()
        try:
            if version == self.board.version:
                async with asyncio.timeout(WAIT):
                    await watcher[1].wait()
                await asyncio.sleep(TOGETHER)
        except TimeoutError:
            pass
        finally:
            self.board.leave(watcher)
        return self._news(version)

    def _news(self, version: int) -> News:
        board, whole = self.board, not self._began <= version <= self.board.version  # it may be another owner's
        now, changed, removed = board.since(0 if whole else version)
        return News(
            now,
            whole,
            changed,
            [] if whole else removed,
            board.queue,
            {worker: job.id for worker, job in board.running.items()},
            dict(board.counts),
            dict(board.seconds),
            dict(sum(map(Counter, self.answers.values()), Counter())),
            board.state,
            board.closed,
        )

    async def make_place(self) -> str:
        """Makes the folder of a new video, and returns its id."""
        return self.shelf.make_place().name

    async def discard(self, id: str) -> None:
        """Removes the folder of a video that was refused."""
        if id in self.board.jobs:  # it was added, and the answer was lost
            self.board.remove(id)
        else:
            self.shelf.remove(id)

    async def change(self, method: str, *given: Any) -> int:
        """Calls a method of the board, raises as that, and returns the version of the board that shows what it did."""
        getattr(self.board, method)(*given)
        return self.board.version

    async def close(self) -> None:
        """Takes no more requests, and has workers give back what they are making."""
        self.board.close()
