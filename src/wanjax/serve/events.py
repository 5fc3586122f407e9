# SPDX-License-Identifier: Apache-2.0
"""Event streams that send each change of one video, or of all videos.

One thread polls the store while streams are open, and wakes all of them. Each stream then reads the changes that it has
not sent yet, so a slow client needs no buffer.
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

POLL_INTERVAL = 0.1  # seconds between two polls of the store
KEEPALIVE_INTERVAL = 15.0  # seconds between comments that keep an idle stream open
Watcher = tuple[asyncio.AbstractEventLoop, asyncio.Event]
logger = logging.getLogger("wanjax.serve")


class ChangeFeed:
    """Polls the store for changes and wakes the event streams.

    Args:
        store: The store.
        video_json: Converts a job to the JSON that clients receive.
    """

    def __init__(self, store: JobStore, video_json: Callable[[Job], dict[str, Any]]):
        self.store, self.video_json = store, video_json
        self.queue: list[Job] = []
        self.closed = False
        self._watchers: set[Watcher] = set()
        self._condition = Condition()
        self._thread: Thread | None = None

    @property
    def watcher_count(self) -> int:
        return len(self._watchers)

    def add_watcher(self) -> Watcher:
        """Register a watcher on the running event loop.

        The watcher's event is set after each change, until `remove_watcher` is called.
        """
        watcher = (asyncio.get_running_loop(), asyncio.Event())
        with self._condition:
            self._watchers.add(watcher)
            if self._thread is None:
                self._thread = Thread(target=self._poll, name="wanjax-changes", daemon=True)
                self._thread.start()
            self._condition.notify()
        return watcher

    def remove_watcher(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def close(self) -> None:
        """End all streams and the thread."""
        with self._condition:
            self.closed = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(10)

    def _wake(self) -> None:
        for loop, event in list(self._watchers):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def _poll(self) -> None:
        polled_version = -1
        while not self.closed:
            try:
                if (version := self.store.version()) != polled_version:
                    self.queue = self.store.queue()
                    polled_version = version
                    self._wake()
            except Unavailable as error:
                logger.warning("%s", error)
            except Exception:
                logger.exception("polling the store for changes failed")
            with self._condition:
                self._condition.wait_for(lambda: self.closed, POLL_INTERVAL)
                self._condition.wait_for(lambda: self.closed or self._watchers)
        self._wake()

    def _event_json(self, job: Job) -> dict[str, Any]:
        if job.status == REMOVED:
            return {"id": job.id, "object": "video.deleted", "deleted": True}
        return self.video_json(job)

    async def stream(self, video_id: str | None, wake_event: asyncio.Event) -> AsyncIterator[str]:
        """Yield the changes of one video until it ends, or of all videos if `video_id` is None."""
        sent_version = 0 if video_id is not None else await run_in_threadpool(self.store.version)
        sent_positions: dict[str, int | None] = {}  # the last queue position that was sent for each waiting video
        yield "retry: 2000\n\n"
        while not self.closed:
            wake_event.clear()
            try:
                changed_jobs = await run_in_threadpool(self.store.changes, sent_version, job_id=video_id)
            except Unavailable:
                return  # the client reconnects
            sent_version = changed_jobs[-1].version if changed_jobs else sent_version
            changed_ids = {job.id for job in changed_jobs}
            waiting_jobs = [job for job in self.queue if job.id in sent_positions and job.id not in changed_ids]
            moved_jobs = [job for job in waiting_jobs if job.jobs_ahead != sent_positions[job.id]]
            for job in [*changed_jobs, *moved_jobs]:
                sent_positions[job.id] = job.jobs_ahead
                if job.jobs_ahead is None:
                    del sent_positions[job.id]
                yield f"data: {json.dumps(self._event_json(job))}\n\n"
            if video_id is not None and changed_jobs and changed_jobs[-1].is_over:
                return
            try:
                await asyncio.wait_for(wake_event.wait(), KEEPALIVE_INTERVAL)
            except TimeoutError:
                yield ": still here\n\n"


class EventStreamResponse(StreamingResponse):
    """A response that streams events, and calls `on_end` when it ends."""

    def __init__(self, content: AsyncIterator[str], on_end: Callable[[], None]):
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # the last header tells nginx not to buffer
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
