# SPDX-License-Identifier: Apache-2.0
"""Streams of events: each change of one video, or of all, as soon as the store has it.

A thread looks for changes as long as somebody follows them, and wakes all streams; each reads what is new to it, so
that a slow client costs no memory.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from threading import Condition, Thread
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from wanjax.jobs.store import REMOVED, Job, JobStore, Unavailable

LOOK = 0.1  # seconds between two looks for changes
HEARTBEAT = 15.0  # seconds between signs of life of an idle stream
Watcher = tuple[asyncio.AbstractEventLoop, asyncio.Event]
logger = logging.getLogger("wanjax.serve")


class Changes:
    """Wakes those who watch when the jobs of a store change. `queue` has those that wait, with their places.

    Args:
        store: The store.
        video_of: Returns a job as clients see it.
    """

    def __init__(self, store: JobStore, video_of: Callable[[Job], dict[str, Any]]):
        self.store, self.video_of = store, video_of
        self.queue: list[Job] = []
        self.closed = False
        self._watchers: set[Watcher] = set()
        self._changed = Condition()
        self._thread: Thread | None = None

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def watch(self) -> Watcher:
        """Return a watcher on the running loop, whose event changes set until `leave` is called with it."""
        watcher = (asyncio.get_running_loop(), asyncio.Event())
        with self._changed:
            self._watchers.add(watcher)
            if self._thread is None:
                self._thread = Thread(target=self._look, name="wanjax-changes", daemon=True)
                self._thread.start()
            self._changed.notify()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def close(self) -> None:
        """End all streams."""
        with self._changed:
            self.closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(10)

    def _wake(self) -> None:
        for loop, event in list(self._watchers):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def _look(self) -> None:
        seen = -1
        while not self.closed:
            try:
                if (version := self.store.version()) != seen:
                    self.queue = self.store.queue()
                    seen = version
                    self._wake()
            except Unavailable as error:
                logger.warning("%s", error)
            except Exception:
                logger.exception("a look for changes failed")
            with self._changed:
                self._changed.wait_for(lambda: self.closed, LOOK)
                self._changed.wait_for(lambda: self.closed or self._watchers)
        self._wake()

    def _event(self, job: Job) -> dict[str, Any]:
        if job.status == REMOVED:
            return {"id": job.id, "object": "video.deleted", "deleted": True}
        return self.video_of(job)

    async def stream(self, only: str | None, woken: asyncio.Event) -> AsyncIterator[str]:
        """Yield each change of a video until its end, or of all videos."""
        since = 0 if only is not None else await run_in_threadpool(self.store.version)
        places: dict[str, int | None] = {}  # of those that wait, as they were told
        yield "retry: 2000\n\n"
        while not self.closed:
            woken.clear()
            try:
                changed = await run_in_threadpool(self.store.changes, since, only=only)
            except Unavailable:
                return  # a client asks again
            since = changed[-1].version if changed else since
            ids = {job.id for job in changed}
            moved = [
                job for job in self.queue if job.id in places and job.id not in ids and job.jobs_ahead != places[job.id]
            ]
            for job in [*changed, *moved]:
                places[job.id] = job.jobs_ahead
                if job.jobs_ahead is None:
                    del places[job.id]
                yield f"data: {json.dumps(self._event(job))}\n\n"
            if only is not None and changed and changed[-1].is_over:
                return
            try:
                await asyncio.wait_for(woken.wait(), HEARTBEAT)
            except TimeoutError:
                yield ": still here\n\n"


class Events(StreamingResponse):
    """A stream of events, which frees the place of its watcher at its end."""

    def __init__(self, content: AsyncIterator[str], leave: Callable[[], None]):
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # the latter is for nginx
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()
