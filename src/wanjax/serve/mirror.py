# SPDX-License-Identifier: Apache-2.0
"""The board as a front sees it, which answers requests and makes no video.

It reads from a copy that follows the owner's board by some hundredths of a second, and goes on doing so while the owner
is away. What it changes, it asks of the owner, and then waits until the copy shows it.
"""

import logging
import time
from collections import Counter, deque
from threading import Thread
from typing import Any
from uuid import uuid4

from wanjax.serve.board import UnknownError, Videos
from wanjax.serve.jobs import Job, VideoFolders
from wanjax.serve.owner import AwayError, Call, News
from wanjax.stores.places import Place

LAG = 5.0  # seconds for which a change is waited for
PAUSE = 0.5  # seconds until an owner that is away is asked again
logger = logging.getLogger("wanjax.serve")


class Entrance(VideoFolders):
    """The places of videos, made and removed by the owner."""

    def __init__(self, call: Call, folder: Place):
        super().__init__(folder)
        self.call = call

    def make_place(self) -> Place:
        """Makes the folder of a new video; the folder's name is the id."""
        return self.place(self.call("make_place"))

    def remove(self, id: str) -> None:
        """Removes the folder of a video that was refused."""
        self.call("discard", id)


class Mirror(Videos):
    """A copy of the owner's board, and the ways to change that."""

    def __init__(self, call: Call, folder: Place, queue: int):
        """Takes the way to the owner, the folder of the videos, and how many may wait."""
        super().__init__([], queue)
        self.version = 0
        self.call, self.shelf = call, Entrance(call, folder)
        self._name = uuid4().hex

    def follow(self) -> None:
        """Reads the whole board, then follows it from a thread; raises AwayError where the owner is."""
        self._apply(self._news())
        Thread(target=self._follow, name="wanjax-mirror", daemon=True).start()

    def _follow(self) -> None:
        while True:
            try:
                self._apply(self._news())
            except AwayError:
                time.sleep(PAUSE)
            except Exception:
                logger.exception("the board cannot be followed")
                time.sleep(PAUSE)

    def _news(self) -> News:
        return self.call("since", self.version, self._name, dict(self.answers))

    def _apply(self, news: News) -> None:
        with self._changed:
            gone = self.jobs.keys() - {job.id for job in news.changed} if news.whole else news.removed
            for id in gone:
                if self.jobs.pop(id, None) is not None:
                    self._removed.append((news.version - 1, id))
            self.jobs.update({job.id: job for job in news.changed})
            self._queue = deque(self.jobs[id] for id in news.queue if id in self.jobs)
            self.running = {worker: self.jobs[id] for worker, id in news.running.items() if id in self.jobs}
            self.counts, self.seconds, self.all_answers = dict(news.counts), Counter(news.seconds), news.answers
            self.state, self.closed, self.version = news.state, news.closed, news.version
            self.wake()

    def add(self, job: Job) -> Job:
        """Appends a job, which is on the owner's disk from then on, and returns it; raises as `Board.add`."""
        self._change("add", job)
        return self.jobs.get(job.id, job)

    def cancel(self, id: str) -> Job:
        """Cancels a job that waits or is under way, and returns it; raises UnknownError."""
        self._change("cancel", id)
        return self.find(id)

    def remove(self, id: str) -> None:
        """Removes a video; raises UnknownError."""
        known = id in self.jobs
        try:
            self._change("remove", id)
        except UnknownError:
            if not known:
                raise
            self.renew()  # it was removed, and the answer was lost

    def renew(self) -> None:
        self._change("renew")

    def _change(self, method: str, *given: Any) -> None:
        """Calls a method of the owner's board, and waits until the copy shows what it changed."""
        version = self.call("change", method, *given)
        with self._changed:
            self._changed.wait_for(lambda: self.version >= version, LAG)
