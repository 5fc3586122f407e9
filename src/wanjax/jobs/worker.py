# SPDX-License-Identifier: Apache-2.0
"""A worker: a loop that leases jobs from the store, makes their videos and marks the jobs as finished.

A separate thread sends heartbeats, which extend the lease, send progress and receive stop signals. Computation
therefore never waits for the database. A worker publishes a video before it marks the job as finished. If the worker
dies in between, the next worker finds the file and only marks the job as finished.
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

from wanjax.figures import pluralize
from wanjax.jobs.store import CANCELLATION, RUNNING, STOPPED, TTL, Job, JobStore, Signal, Stats, Unavailable
from wanjax.stores.temporary import HOST_NAME

HEARTBEAT_INTERVAL, POLL_INTERVAL = 0.5, 0.2  # seconds between heartbeats, and between polls of an empty queue
ATTEMPTS = 5  # a job fails after this many workers died while making it
# at the end of the queue, each worker takes its share in this many leases, so that all finish at the same time
LEASES_PER_WORKER = 4
DISK_FULL = "disk_full"  # an error code after which the worker exits
INVALID_REQUEST = "invalid_request"  # an error code of a request that would fail again
READY, LOADING = "ready", "loading"  # a worker's states
logger = logging.getLogger("wanjax.jobs")


class Interrupted(Exception):
    """Raised to stop a run early, because its job was cancelled or lost, or the worker is draining."""


class Failure(NamedTuple):
    """Why a job failed.

    Args:
        code: A machine-readable error code.
        message: A sentence for the user.
        is_retryable: Whether a retry may succeed.
        ends_worker: Whether the worker has to exit, because the disk is full or it is out of sync with its peers.
        log: The text for the worker's log, such as a traceback; "" for an invalid request.
    """

    code: str
    message: str
    is_retryable: bool = False
    ends_worker: bool = False
    log: str = ""


@runtime_checkable
class Maker(Protocol):
    """Makes the videos of jobs with a model, and publishes them in a folder."""

    @property
    def models(self) -> Sequence[str]:
        """Names of the models whose jobs this maker can make."""
        ...

    def warm_up(self, should_stop: Callable[[], bool]) -> None:
        """Load the model. Return early if `should_stop` returns True.

        Args:
            should_stop: Returns True once the worker has to exit.
        """
        ...

    def is_published(self, job: Job) -> bool:
        """Return True if the video of a job is published.

        Args:
            job: The job.
        """
        ...

    def make(self, jobs: Sequence[Job], lease: "Lease") -> Iterator[Job]:
        """Make the videos of jobs in one run; yield each job, in order, once its video is published.

        Args:
            jobs: The jobs, which have the same `batch`.
            lease: The lease of their worker, which receives their progress.

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
    """A worker's lease on its jobs. The thread that makes the videos uses it.

    A second thread sends heartbeats until `close`.

    Args:
        store: The store of the jobs.
        worker: The worker's name.
        ttl: Seconds without a heartbeat after which the lease expires.
        exit_requested: Returns True once the worker has to exit.
    """

    def __init__(
        self, store: JobStore, worker: str, ttl: float = TTL, exit_requested: Callable[[], bool] = lambda: False
    ):
        self.store, self.worker, self.ttl = store, worker, ttl
        self.is_lost = False  # True after the lease expired, until the worker is registered again
        self._exit_requested, self._drain_signalled, self._is_closed = exit_requested, False, False
        self._signal = Signal.CONTINUE
        self._job_id: str | None = None
        self._progress: dict[str, Any] = {}
        self._has_changes = False
        self._condition = Condition()
        self._thread = Thread(target=self._send_heartbeats, name="wanjax-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeats."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join(HEARTBEAT_INTERVAL)  # the time is limited, because the thread may wait for the database

    @property
    def draining(self) -> bool:
        """Whether the worker's process or the database has asked the worker to exit."""
        return self._drain_signalled or self._exit_requested()

    @property
    def progress(self) -> dict[str, Any]:
        """The progress that was reported for the running job."""
        with self._condition:
            return dict(self._progress)

    def begin(self, id: str | None) -> None:
        """Set the running job, and reset its progress.

        Args:
            id: The job's id; None for no job.
        """
        with self._condition:
            self._job_id, self._progress, self._has_changes, self._signal = id, {}, False, Signal.CONTINUE

    def report(self, **progress: Any) -> None:
        """Send progress with the next heartbeat.

        Args:
            progress: The changed fields. The percentage `progress` never decreases.
        """
        with self._condition:
            percent = max(progress.get("progress", 0), self._progress.get("progress", 0))
            self._progress = self._progress | progress | {"progress": percent}
            self._has_changes = True
            self._condition.notify()

    def should_stop(self) -> bool:
        """Return True if the run should stop early."""
        return self.is_lost or self.draining or self._signal in (Signal.CANCEL, Signal.LOST)

    def is_cancelled(self) -> bool:
        """Return True if the job was cancelled and this worker still owns the job."""
        return not self.is_lost and self._signal is Signal.CANCEL

    def _send_heartbeats(self) -> None:
        while not self._is_closed:
            with self._condition:
                if not self._has_changes:
                    self._condition.wait(HEARTBEAT_INTERVAL if self._job_id is not None else self.ttl / 6)
                job_id, progress, self._has_changes = self._job_id, dict(self._progress), False
            if self._is_closed:
                return
            try:
                signal = self.store.heartbeat(self.worker, job_id, progress or None, self.ttl)
            except Unavailable:
                signal = Signal.CONTINUE  # if the lease has expired, the next heartbeat returns LOST
            except Exception:
                if self._is_closed:  # the database may already be closed
                    return
                logger.exception("worker %s could not send a heartbeat", self.worker)
                signal = Signal.CONTINUE
            with self._condition:
                if signal is Signal.DRAIN:
                    self._drain_signalled = True
                elif signal is Signal.LOST and job_id is None:
                    self.is_lost = True
                elif job_id is not None and job_id == self._job_id:
                    self._signal = signal
            time.sleep(HEARTBEAT_INTERVAL)


def new_worker_name() -> str:
    """Return a unique name for a worker: host name, process id and a random suffix."""
    return f"{HOST_NAME}:{os.getpid()}:{token_hex(3)}"


def work(
    store: JobStore,
    maker: Maker,
    *,
    name: str | None = None,
    max_batch: int = 1,
    retries: int = 0,
    attempts: int = ATTEMPTS,
    exit_requested: Callable[[], bool] = lambda: False,
    until_empty: bool = False,
    try_join_namespace: Callable[[JobStore], str] = lambda store: "",
    note: Callable[[str], object] = lambda text: None,
    on_job_end: Callable[[], object] = lambda: None,
    ttl: float = TTL,
) -> None:
    """Lease and make jobs until the worker has to exit, or until the queue is empty if `until_empty`.

    Args:
        store: The job store. If the store is unavailable for longer than its `retry_seconds`, the worker ends.
        maker: The maker of the videos.
        name: The worker's name; None for a new name.
        max_batch: Maximum number of jobs in a run.
        retries: How often a failed job is retried. Invalid requests are not retried.
        attempts: A job fails after this many workers died while making it.
        exit_requested: Returns True once the worker has to exit. The jobs of the worker are then requeued.
        until_empty: Whether to exit when the queue is empty.
        try_join_namespace: Switches the store to the worker's namespace, and returns "". If this is impossible, it
            returns the reason, and the worker calls it again later.
        note: Called once with this reason, to show it to the user.
        on_job_end: Called after each job that finished or failed.
        ttl: Seconds without a heartbeat after which the worker counts as dead.
    """
    name = name or new_worker_name()
    worker_info = {"host": HOST_NAME, "process": os.getpid(), "models": list(maker.models)}
    if blocked_reason := try_join_namespace(store):
        note(blocked_reason)
    store.register(name, LOADING, worker_info, ttl)
    lease = Lease(store, name, ttl, exit_requested)
    try:
        maker.warm_up(lambda: lease.draining)
        while blocked_reason and not lease.draining:
            time.sleep(HEARTBEAT_INTERVAL)
            blocked_reason = try_join_namespace(store)
        store.register(name, READY, worker_info, ttl)
        last_check = time.monotonic()
        while not lease.draining:
            if lease.is_lost:
                store.register(name, READY, worker_info, ttl)
                lease.is_lost = False
            if time.monotonic() > last_check + ttl / 4:
                last_check = time.monotonic()
                store.requeue_expired()
            lease_size = max_batch if max_batch == 1 else _lease_size(store.stats(), max_batch)
            jobs = store.lease(name, maker.models, limit=lease_size, ttl=ttl)
            if jobs:
                if not _make_jobs(store, maker, lease, jobs, retries, attempts, on_job_end):
                    break
            elif not lease.is_lost and (signal := store.heartbeat(name, None, None, ttl)) is not Signal.CONTINUE:
                lease.is_lost = signal is Signal.LOST
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
    """Return how many jobs to lease at once. At the end of the queue the number is lower, so that all workers finish at
    the same time."""
    num_waiting, workers = stats.jobs.get("queued", 0), sum(stats.workers.values())
    return max(1, min(max_batch, num_waiting if workers <= 1 else -(-num_waiting // (LEASES_PER_WORKER * workers))))


def _make_jobs(
    store: JobStore,
    maker: Maker,
    lease: Lease,
    jobs: Sequence[Job],
    retries: int,
    attempts: int,
    on_job_end: Callable[[], object],
) -> bool:
    """Make leased jobs in one run. If the run fails, make each job in its own run. Return False if the worker has to
    exit."""
    worker = lease.worker
    pending_runs = deque([[job for job in jobs if not _end_without_making(store, maker, worker, job, attempts)]])
    on_job_end()
    while pending_runs:
        if not (remaining_jobs := pending_runs.popleft()):
            continue
        try:
            if _start_job(store, lease, remaining_jobs):
                start = perf_counter()
                for job in maker.make(list(remaining_jobs), lease):
                    assert remaining_jobs.pop(0).id == job.id
                    seconds, start = round(perf_counter() - start, 3), perf_counter()
                    completed_progress = {
                        "progress": 100,
                        "stage": "",
                        "seconds": seconds,
                        "worker": f"{HOST_NAME}:{os.getpid()}",
                    }
                    store.finish(
                        worker, job.id, lease.progress | completed_progress
                    )  # if another worker owns the job now, that worker finds the file
                    on_job_end()
                    if remaining_jobs and not _start_job(store, lease, remaining_jobs):
                        break
        except Interrupted:
            if not lease.is_cancelled():
                break
            store.fail(worker, remaining_jobs.pop(0).id, CANCELLATION)
        except Exception as error:
            failure = maker.explain(error)
            if len(remaining_jobs) > 1 and not failure.ends_worker:
                pending_runs.extendleft([job] for job in reversed(remaining_jobs))
                continue
            job = remaining_jobs.pop(0)
            if failure.log:
                logger.error("%s failed: %s", job.output, failure.log)
            error_fields = {"code": failure.code, "message": failure.message, "worker": f"{HOST_NAME}:{os.getpid()}"}
            store.fail(worker, job.id, error_fields, retries=retries if failure.is_retryable else 0)
            on_job_end()
            if failure.ends_worker:
                return False
        pending_runs.appendleft(remaining_jobs)
    lease.begin(None)
    return True


def _end_without_making(store: JobStore, maker: Maker, worker: str, job: Job, attempts: int) -> bool:
    """End a leased job without making it, if its video exists or too many workers died while making it. Return whether
    the job ended."""
    earlier_attempts = job.attempts - (job.status == RUNNING)
    if maker.is_published(job):
        return store.finish(worker, job.id, {"progress": 100})
    if earlier_attempts >= attempts:
        times = pluralize(earlier_attempts, "time")
        message = (job.error or {}).get("message") or (
            f"the server or its worker died {times} while it made this video: request the video again to retry"
        )
        return store.fail(worker, job.id, {"code": STOPPED, "message": message})
    return False


def _start_job(store: JobStore, lease: Lease, remaining_jobs: list[Job]) -> bool:
    """Start the first job. If the job was cancelled or another worker owns it, drop the job and return False."""
    job = remaining_jobs[0]
    lease.begin(job.id)
    if job.status == RUNNING and not job.cancel:  # `lease` has already started this job
        return True
    signal = store.begin(lease.worker, job.id)
    if signal is Signal.CANCEL:
        store.fail(lease.worker, job.id, CANCELLATION)
    if signal is not Signal.CONTINUE:
        remaining_jobs.pop(0)
    return signal is Signal.CONTINUE


class WorkerThread:
    """A worker in a thread of this process.

    Args:
        store: The job store. During an outage of its database, the worker waits.
        maker: The maker of the videos.
        options: Keyword arguments of `work`.

    Attributes:
        is_broken: Whether the worker ended without `stop`.
    """

    def __init__(self, store: JobStore, maker: Maker, **options: Any):
        self.store, self.maker, self.options = store.with_retry_seconds(inf), maker, options
        self.is_broken = False
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="wanjax-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the worker to requeue its job and exit. Safe to call from a signal handler."""
        self._stopping.set()

    def join(self, seconds: float) -> bool:
        """Wait for the worker; return False if it is still running.

        Args:
            seconds: Maximum time to wait.
        """
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            work(self.store, self.maker, exit_requested=self._stopping.is_set, **self.options)
        except BaseException:
            logger.exception("the worker failed")
            raise
        finally:
            self.is_broken = not self._stopping.is_set()
