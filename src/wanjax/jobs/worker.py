# SPDX-License-Identifier: Apache-2.0
"""The worker of a job store: a loop that leases jobs, makes their videos and finishes the jobs.

A heartbeat thread extends the lease, sends progress and receives stop signals, so that computation never waits for the
database. A video is published under its name before its job is finished. If a worker dies in between, the next worker
finds the file and finishes the job.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf
from secrets import token_hex
from threading import Condition, Event, Thread
from time import perf_counter
from typing import Any, NamedTuple, Protocol, runtime_checkable

from wanjax.figures import quantity
from wanjax.jobs.store import CANCELLATION, RUNNING, STOPPED, TTL, Job, JobStore, Signal, Stats, Unavailable
from wanjax.stores.temporary import HOST

HEARTBEAT_INTERVAL, POLL_INTERVAL = 0.5, 0.2  # seconds between two heartbeats, and between two looks at an empty queue
ATTEMPTS = 5  # times that a job may be started by workers that die
SHARES = 4  # leases per worker into which the queue is split, so that all workers end at about the same time
DISK_FULL = "disk_full"  # the code of an error after which no further job can be made
READY, LOADING = "ready", "loading"  # states of a worker
logger = logging.getLogger("wanjax.jobs")


class Interrupted(Exception):
    """Stops a run early: its job was cancelled or lost, or the worker is draining."""


class Failure(NamedTuple):
    """Why a job failed.

    Args:
        code: A word for programs.
        message: A sentence for people.
        is_retryable: Another attempt may succeed.
        ends_worker: The worker can make nothing more, as on a full disk, or out of step with other processes.
        log: What the worker's log has of it, nothing for a mistake of the request.
    """

    code: str
    message: str
    is_retryable: bool = False
    ends_worker: bool = False
    log: str = ""


@runtime_checkable
class Maker(Protocol):
    """Makes the videos of jobs with a loaded model, and publishes them in a folder."""

    @property
    def models(self) -> Sequence[str]:
        """The models whose jobs it makes."""
        ...

    def warm_up(self, should_stop: Callable[[], bool]) -> None:
        """Load the model; return early once `should_stop` returns True.

        Args:
            should_stop: Returns True once the worker is to end.
        """
        ...

    def is_made(self, job: Job) -> bool:
        """Return True if the video of a job is published.

        Args:
            job: The job.
        """
        ...

    def make(self, jobs: Sequence[Job], lease: "Lease") -> Iterator[Job]:
        """Make the videos of jobs of one batch; yield each job, in order, once its video is published.

        Args:
            jobs: The jobs.
            lease: Their lease, which receives their progress.

        Raises:
            Interrupted: `Lease.should_stop` returned True.
        """
        ...

    def explain(self, error: Exception) -> Failure:
        """Return why a job failed with an error.

        Args:
            error: The error.
        """
        ...


class Lease:
    """The jobs that a worker holds, as the thread that makes them sees it.

    Args:
        store: The store of the jobs.
        worker: The worker's name.
        ttl: Seconds without a heartbeat after which the lease is over.
        drained: Returns True once the worker is to end.
    """

    def __init__(self, store: JobStore, worker: str, ttl: float = TTL, drained: Callable[[], bool] = lambda: False):
        self.store, self.worker, self.ttl = store, worker, ttl
        self.lost = False  # until the worker registers again
        self._drained, self._drain, self._closed = drained, False, False
        self._signal = Signal.CONTINUE
        self._job: str | None = None
        self._progress: dict[str, Any] = {}
        self._has_changes = False
        self._changed = Condition()
        self._thread = Thread(target=self._send_heartbeats, name="wanjax-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the heartbeats."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(HEARTBEAT_INTERVAL)  # it may wait for the database

    @property
    def draining(self) -> bool:
        """True once the worker should exit, requested by its own process or through the database."""
        return self._drain or self._drained()

    @property
    def progress(self) -> dict[str, Any]:
        """The progress reported so far."""
        with self._changed:
            return dict(self._progress)

    def begin(self, id: str | None) -> None:
        """Set the job that is running; None for none.

        Args:
            id: The job's id.
        """
        with self._changed:
            self._job, self._progress, self._has_changes, self._signal = id, {}, False, Signal.CONTINUE

    def report(self, **progress: Any) -> None:
        """Send progress with the next heartbeat.

        Args:
            progress: Changed fields. The percentage `progress` never decreases.
        """
        with self._changed:
            done = max(progress.get("progress", 0), self._progress.get("progress", 0))
            self._progress = self._progress | progress | {"progress": done}
            self._has_changes = True
            self._changed.notify()

    def should_stop(self) -> bool:
        """Return True if the job should stop early."""
        return self.lost or self.draining or self._signal in (Signal.CANCEL, Signal.LOST)

    def is_cancelled(self) -> bool:
        """Return True if the job was cancelled and this worker still owns it."""
        return not self.lost and self._signal is Signal.CANCEL

    def _send_heartbeats(self) -> None:
        while not self._closed:
            with self._changed:
                if not self._has_changes:
                    self._changed.wait(HEARTBEAT_INTERVAL if self._job is not None else self.ttl / 6)
                job, progress, self._has_changes = self._job, dict(self._progress), False
            if self._closed:
                return
            try:
                signal = self.store.heartbeat(self.worker, job, progress or None, self.ttl)
            except Unavailable:
                signal = Signal.CONTINUE  # after an outage longer than the lease, the next heartbeat returns LOST
            except Exception:
                if self._closed:  # and so may be the database
                    return
                logger.exception("a heartbeat of %s failed", self.worker)
                signal = Signal.CONTINUE
            with self._changed:
                if signal is Signal.DRAIN:
                    self._drain = True
                elif signal is Signal.LOST and job is None:
                    self.lost = True
                elif job is not None and job == self._job:
                    self._signal = signal
            time.sleep(HEARTBEAT_INTERVAL)


def new_worker_name() -> str:
    """Return a unique name for a worker: its host, process id and a random suffix."""
    return f"{HOST}:{os.getpid()}:{token_hex(3)}"


def work(
    store: JobStore,
    maker: Maker,
    *,
    name: str | None = None,
    max_batch: int = 1,
    retries: int = 0,
    attempts: int = ATTEMPTS,
    drained: Callable[[], bool] = lambda: False,
    until_empty: bool = False,
    join_error: Callable[[JobStore], str] = lambda store: "",
    note: Callable[[str], object] = lambda text: None,
    on_job_end: Callable[[], object] = lambda: None,
    ttl: float = TTL,
) -> None:
    """Make jobs until the worker is drained, cannot go on, or no job is left.

    Args:
        store: The store of the jobs. An outage longer than its `retry_seconds` ends the worker.
        maker: What makes the videos.
        name: The worker's name, a new one for None.
        max_batch: Maximum number of jobs of one batch in a run.
        retries: Times that a failed job is retried, unless the request itself is wrong.
        attempts: Times that a job may be started by workers that die, before it fails.
        drained: Returns True once the worker should exit; its jobs are then requeued.
        until_empty: Whether to exit when the queue is empty.
        join_error: Enters the store's place; returns why the worker may take no job so far, "" where it may.
        note: Receives a line on that.
        on_job_end: Called after each job that was finished or failed.
        ttl: Seconds without a heartbeat after which the worker counts as dead.
    """
    name = name or new_worker_name()
    worker_info = {"host": HOST, "process": os.getpid(), "models": list(maker.models)}
    if why := join_error(store):
        note(why)
    store.register(name, LOADING, worker_info, ttl)
    lease = Lease(store, name, ttl, drained)
    try:
        maker.warm_up(lambda: lease.draining)
        while why and not lease.draining:
            time.sleep(HEARTBEAT_INTERVAL)
            why = join_error(store)
        store.register(name, READY, worker_info, ttl)
        last_check = time.monotonic()
        while not lease.draining:
            if lease.lost:
                store.register(name, READY, worker_info, ttl)
                lease.lost = False
            if time.monotonic() > last_check + ttl / 4:
                last_check = time.monotonic()
                store.requeue_expired()
            lease_size = max_batch if max_batch == 1 else _lease_size(store.stats(), max_batch)
            jobs = store.lease(name, maker.models, limit=lease_size, ttl=ttl)
            if jobs:
                if not _make(store, maker, lease, jobs, retries, attempts, on_job_end):
                    break
            elif not lease.lost and (signal := store.heartbeat(name, None, None, ttl)) is not Signal.CONTINUE:
                lease.lost = signal is Signal.LOST
            elif until_empty:
                break
            else:
                time.sleep(POLL_INTERVAL)
    except BaseException:
        lease.close()
        with suppress(Unavailable):
            store.requeue_lost(name)
        raise
    lease.close()
    store.requeue(name)


def _lease_size(stats: Stats, max_batch: int) -> int:
    """Return how many jobs to lease at once: fewer near the end, so that all workers finish at about the same time."""
    waiting, workers = stats.jobs.get("queued", 0), sum(stats.workers.values())
    return max(1, min(max_batch, waiting if workers <= 1 else -(-waiting // (SHARES * workers))))


def _make(
    store: JobStore,
    maker: Maker,
    lease: Lease,
    jobs: Sequence[Job],
    retries: int,
    attempts: int,
    on_job_end: Callable[[], object],
) -> bool:
    """Make jobs of one batch, and retry each alone if the run fails; return False if the worker has to exit."""
    worker = lease.worker
    queue = deque([[job for job in jobs if not _end_without_making(store, maker, worker, job, attempts)]])
    on_job_end()
    while queue:
        if not (remaining := queue.popleft()):
            continue
        try:
            if _begin(store, lease, remaining):
                start = perf_counter()
                for job in maker.make(list(remaining), lease):
                    assert remaining.pop(0).id == job.id
                    seconds, start = round(perf_counter() - start, 3), perf_counter()
                    completed_progress = {
                        "progress": 100,
                        "stage": "",
                        "seconds": seconds,
                        "worker": f"{HOST}:{os.getpid()}",
                    }
                    store.finish(
                        worker, job.id, lease.progress | completed_progress
                    )  # False: another worker owns it now, and finds the file
                    on_job_end()
                    if remaining and not _begin(store, lease, remaining):
                        break
        except Interrupted:
            if not lease.is_cancelled():
                break
            store.fail(worker, remaining.pop(0).id, CANCELLATION)
        except Exception as error:
            failure = maker.explain(error)
            if len(remaining) > 1 and not failure.ends_worker:
                queue.extendleft([job] for job in reversed(remaining))
                continue
            job = remaining.pop(0)
            if failure.log:
                logger.error("%s failed: %s", job.output, failure.log)
            error_fields = {"code": failure.code, "message": failure.message, "worker": f"{HOST}:{os.getpid()}"}
            store.fail(worker, job.id, error_fields, retries=retries if failure.is_retryable else 0)
            on_job_end()
            if failure.ends_worker:
                return False
        queue.appendleft(remaining)
    lease.begin(None)
    return True


def _end_without_making(store: JobStore, maker: Maker, worker: str, job: Job, attempts: int) -> bool:
    """End a leased job without making it if its video exists or too many workers died while making it."""
    earlier_attempts = job.attempts - (job.status == RUNNING)
    if maker.is_made(job):
        return store.finish(worker, job.id, {"progress": 100})
    if earlier_attempts >= attempts:
        times = quantity(earlier_attempts, "time")
        message = (job.error or {}).get("message") or (
            f"the server or its worker ended {times} while it made this video, so it tries no more"
        )
        return store.fail(worker, job.id, {"code": STOPPED, "message": message})
    return False


def _begin(store: JobStore, lease: Lease, remaining: list[Job]) -> bool:
    """Start the first of the jobs; if it was cancelled or is another worker's, drop it and return False."""
    job = remaining[0]
    lease.begin(job.id)
    if job.status == RUNNING and not job.cancel:  # by the lease
        return True
    signal = store.begin(lease.worker, job.id)
    if signal is Signal.CANCEL:
        store.fail(lease.worker, job.id, CANCELLATION)
    if signal is not Signal.CONTINUE:
        remaining.pop(0)
    return signal is Signal.CONTINUE


class WorkerThread:
    """A worker in a thread of the process that has the model.

    Args:
        store: The store of the jobs; outages are waited out.
        maker: What makes the videos.
        options: Keywords of `work`.
    """

    def __init__(self, store: JobStore, maker: Maker, **options: Any):
        self.store, self.maker, self.options = store.with_retry_seconds(inf), maker, options
        self.is_broken = False
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="wanjax-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the worker to requeue its job and exit; safe to call from a signal handler."""
        self._stopping.set()

    def join(self, seconds: float) -> bool:
        """Wait for the worker; return False if it is still running.

        Args:
            seconds: How long to wait.
        """
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            work(self.store, self.maker, drained=self._stopping.is_set, **self.options)
        except BaseException:
            logger.exception("the worker ended")
            raise
        finally:
            self.is_broken = not self._stopping.is_set()
