# SPDX-License-Identifier: Apache-2.0
"""A pool of workers. The pool starts as many workers as there are jobs, within bounds, and replaces workers that
die."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from glob import glob
from math import inf
from time import monotonic, sleep
from typing import Any, Protocol, runtime_checkable

from wanjax.errors import WanjaxError
from wanjax.figures import pluralize
from wanjax.jobs.store import JobStore, Unavailable
from wanjax.jobs.worker import Maker, new_worker_name, work

SCALE_UP_DELAY, SCALE_DOWN_DELAY = 5.0, 300.0
"""The number of workers changes only after the queue has needed more, or fewer, workers for this many seconds."""
POLL_INTERVAL = 0.2  # seconds between two polls
STEP_TIMEOUT = 60.0  # seconds that a worker may take to end its current step
MAX_DEATHS = 10  # the pool gives up after this many deaths without a finished job
WAITING_NOTE_DELAY = 60.0  # seconds after which a note says that workers have not started yet
CPU_NICENESS = 10  # niceness of workers on CPUs, so that the server stays responsive
GPU_FILES = "/dev/nvidia[0-9]*"
MakerFactory = Callable[[JobStore], Maker]
"""Creates the maker of a worker's videos, in the worker's own process."""


@runtime_checkable
class WorkerHandle(Protocol):
    """The interface through which a pool controls a worker in another process."""

    name: str

    def exit_reason(self) -> str | None:
        """Return None while the worker runs, "" after a normal exit, and the reason after the worker died."""
        ...

    def terminate(self) -> None:
        """Ask the worker to requeue its jobs and exit."""
        ...

    def kill(self) -> None:
        """Kill the worker and free its resources."""
        ...


class LocalWorker:
    """A worker in a child process on this machine. The worker exits when this process exits.

    Args:
        store: The job store.
        make_maker: Creates the maker in the child process.
        options: Keyword arguments of `work`.
        number: Index of the worker on this machine, from 0. If there are several GPUs, the index selects the worker's
            GPU.
        nice: The niceness to add to the process.
        initializer: Called with the maker before the first job. `initializer_result` returns its result.
    """

    def __init__(
        self,
        store: JobStore,
        make_maker: MakerFactory,
        options: dict[str, Any],
        *,
        number: int = 0,
        nice: int = 0,
        initializer: Callable[[Any], Any] | None = None,
    ):
        self.name = new_worker_name()
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        arguments = store, make_maker, self.name, options, number, nice, initializer, child_end
        self._process = context.Process(target=_run, args=arguments, name=self.name, daemon=True)
        self._process.start()
        child_end.close()

    @property
    def pid(self) -> int | None:
        """The id of the child process."""
        return self._process.pid

    def initializer_result(self) -> Any:
        """Return the result of `initializer`, or None before it is ready.

        Raises its error; EOFError if the worker died.
        """
        if not self._pipe.poll():
            return None
        value, error = self._pipe.recv()
        if error is not None:
            raise error
        return value

    def exit_reason(self) -> str | None:
        if self._process.is_alive():
            return None
        code = self._process.exitcode
        return "" if code == 0 else f"its process exited with status {code}"

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _run(
    store: JobStore,
    make_maker: MakerFactory,
    name: str,
    options: dict[str, Any],
    number: int,
    nice: int,
    initializer: Callable[[Any], Any] | None,
    pipe: Any,
) -> None:
    """Run a worker in this process until it is asked to exit or its parent process ends."""
    exit_event = exit_event_on_signals(handles_sigint=False)
    threading.Thread(target=_exit_with_parent, args=(pipe, exit_event), daemon=True).start()
    if (gpus := len(glob(GPU_FILES))) > 1:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(number % gpus))
    os.nice(nice)
    store = store.with_retry_seconds(inf)
    maker = make_maker(store)
    if initializer is not None:
        try:
            initializer_result = initializer(maker), None
        except WanjaxError as error:
            initializer_result = None, error
        pipe.send(initializer_result)
    work(store, maker, name=name, exit_requested=exit_event.is_set, **options)
    store.close()


def exit_event_on_signals(*, handles_sigint: bool = True) -> threading.Event:
    """Return an event that SIGTERM sets. A second signal ends the process at once.

    Args:
        handles_sigint: Whether Ctrl-C sets the event too; if False, Ctrl-C is ignored.
    """
    signal_received = threading.Event()

    def handle_signal(number: int, frame: Any) -> None:
        if signal_received.is_set():
            os._exit(128 + number)
        signal_received.set()

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, handle_signal)
    signal.signal(
        signal.SIGINT, handle_signal if handles_sigint else signal.SIG_IGN
    )  # if this process ignores Ctrl-C, the parent process handles it
    return signal_received


def _exit_with_parent(pipe: Any, exit_event: threading.Event) -> None:
    """Drain the worker when its parent closes the pipe; exit at once if its step takes longer than STEP_TIMEOUT."""
    with suppress(EOFError, OSError):
        pipe.recv()
    exit_event.set()
    sleep(STEP_TIMEOUT)
    os._exit(1)


@dataclass
class Autoscaler:
    """Chooses the number of workers: one worker for each job, within bounds. The autoscaler waits before a change, to
    avoid flapping.

    Args:
        minimum: Minimum number of workers.
        maximum: Maximum number of workers.

    Attributes:
        count: The current target.
    """

    minimum: int
    maximum: int
    count: int = field(init=False)
    _direction: int = 0
    _direction_since: float = 0.0

    def __post_init__(self) -> None:
        self.count = self.minimum

    def target(self, num_jobs: int, now: float) -> int:
        """Update and return the target number of workers.

        Args:
            num_jobs: The number of waiting and running jobs.
            now: The time of a monotonic clock, in seconds.
        """
        desired = min(self.maximum, max(self.minimum, num_jobs))
        direction = (desired > self.count) - (desired < self.count)
        if direction != self._direction:
            self._direction, self._direction_since = direction, now
        if direction and now - self._direction_since >= (SCALE_UP_DELAY if direction > 0 else SCALE_DOWN_DELAY):
            self.count, self._direction = desired, 0
        return self.count


class Pool:
    """Keeps as many workers running as there are jobs, within bounds, and replaces workers that die.

    Args:
        store: The job store.
        start_worker: Starts the worker with an index, from 0.
        scale: Chooses the number of workers.
        note: Called with a message when a worker dies, or when workers do not start for long.
    """

    def __init__(
        self,
        store: JobStore,
        start_worker: Callable[[int], WorkerHandle],
        scale: Autoscaler,
        note: Callable[[str], object],
    ):
        self.store, self.scale, self.note = store, scale, note
        self.workers: dict[int, WorkerHandle] = {}  # by index
        self._start_worker, self._draining = start_worker, set[str]()
        self._consecutive_deaths, self._ended_jobs_at_last_death = 0, -1.0
        self._waiting_since, self._has_reported_waiting = monotonic(), False

    def poll(self) -> None:
        """Replace dead workers, start missing ones, and drain surplus ones.

        Raises:
            WanjaxError: MAX_DEATHS workers died without a finished job.
            Unavailable: The database does not answer.
        """
        for number, worker in list(self.workers.items()):
            if (death_cause := worker.exit_reason()) is not None:
                self._remove(number, worker, death_cause)
        stats = self.store.stats()
        num_waiting, num_running = (stats.jobs.get(status, 0) for status in ("queued", "in_progress"))
        self._note_waiting(sum(stats.workers.values()))
        target = self.scale.target(num_waiting + num_running, monotonic())
        active = {number for number, worker in self.workers.items() if worker.name not in self._draining}
        for number in [number for number in range(self.scale.maximum) if number not in self.workers]:
            if len(active) < target:
                self.workers[number] = self._start_worker(number)
                active.add(number)
        if len(active) > target and not num_waiting:
            for number in sorted(active)[target:]:
                self._draining.add(self.workers[number].name)
                self.workers[number].terminate()

    def _remove(self, number: int, worker: WorkerHandle, death_cause: str) -> None:
        """Remove a worker that has exited from the pool."""
        if death_cause and worker.name not in self._draining:
            self.store.requeue_lost(
                worker.name, death_cause
            )  # before the worker is removed: if the database is unavailable, the next poll repeats this call
            self._count_death(death_cause)
        worker.kill()
        self._draining.discard(worker.name)
        del self.workers[number]

    def _count_death(self, death_cause: str) -> None:
        counters = self.store.stats().counters
        ended_jobs = sum(counters.get(name, 0.0) for name in ("completed", "failed", "cancelled"))
        self._consecutive_deaths = self._consecutive_deaths + 1 if ended_jobs == self._ended_jobs_at_last_death else 1
        self._ended_jobs_at_last_death = ended_jobs
        # after many deaths, the problem may be the same for all workers
        if self._consecutive_deaths >= MAX_DEATHS + self.scale.count - 1:
            raise WanjaxError(
                f"{pluralize(self._consecutive_deaths, 'worker')} died one after another: {death_cause}; see the log"
            )
        self.note(f"a worker died, {death_cause}: starting another one")

    def _note_waiting(self, num_registered: int) -> None:
        """If workers take long to start, report once that they wait for resources of the cluster or load the model."""
        if num_registered >= len(self.workers):
            self._waiting_since, self._has_reported_waiting = monotonic(), False
        elif not self._has_reported_waiting and monotonic() - self._waiting_since > WAITING_NOTE_DELAY:
            self._has_reported_waiting = True
            missing = f"{len(self.workers) - num_registered} of {pluralize(len(self.workers), 'worker')}"
            self.note(f"waiting for the cluster's resources, or loading: {missing}")

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Poll the workers until a condition is true. Continue after outages of the database.

        Args:
            should_stop: Returns True to stop.
        """
        while not should_stop():
            with suppress(Unavailable):  # the workers wait for the database too
                self.poll()
            sleep(POLL_INTERVAL)

    def kill(self) -> None:
        """Kill all workers. Call this only if no job is left, because it does not requeue jobs."""
        for worker in self.workers.values():
            worker.kill()
        self.workers.clear()

    def close(self, timeout: float = STEP_TIMEOUT) -> None:
        """Ask all workers to requeue their jobs and exit.

        Args:
            timeout: Seconds to wait for the workers to end their current step.
        """
        for worker in self.workers.values():
            worker.terminate()
        deadline = monotonic() + timeout
        while any(worker.exit_reason() is None for worker in self.workers.values()) and monotonic() < deadline:
            sleep(0.05)
        for worker in self.workers.values():
            exit_reason = worker.exit_reason()
            worker.kill()
            if exit_reason != "":
                with suppress(Unavailable):
                    self.store.requeue_lost(worker.name)
        self.workers.clear()
