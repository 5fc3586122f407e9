# SPDX-License-Identifier: Apache-2.0
"""A pool that keeps as many workers alive as there is work for, in local processes or elsewhere."""

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
from wanjax.figures import quantity
from wanjax.jobs.store import JobStore, Unavailable
from wanjax.jobs.worker import Maker, new_worker_name, work

SCALE_UP_DELAY, SCALE_DOWN_DELAY = (
    5.0,
    300.0,
)  # seconds for which more or fewer workers have to be of use before their number changes
POLL_INTERVAL, STEP_TIMEOUT = (
    0.2,
    60.0,
)  # seconds between two looks, and in which a worker ends the step that is under way
MOST_DEATHS = 10  # consecutive deaths of workers without a finished job
WAITING_NOTE_DELAY = 60.0  # seconds after which it is told that workers wait for a place
NICE = 10  # niceness of workers on CPUs, so that the server stays responsive
GPU_FILES = "/dev/nvidia[0-9]*"
Start = Callable[[JobStore], Maker]
"""Makes the maker of a worker in the worker's own process."""


@runtime_checkable
class Handle(Protocol):
    """A worker that runs elsewhere."""

    name: str

    def exit_reason(self) -> str | None:
        """Return None while the worker runs, "" after a normal exit, otherwise the cause of death."""
        ...

    def terminate(self) -> None:
        """Ask the worker to requeue its jobs and exit."""
        ...

    def kill(self) -> None:
        """Kill the worker and free its resources."""
        ...


class LocalWorker:
    """A worker in a process of this machine, which ends with this one.

    Args:
        store: The store of the jobs.
        start: Returns the maker.
        options: Keywords of `work`.
        number: Of several workers of this machine, which share its graphics cards, the number of this one, from 0.
        nice: By how much the process gives way to others.
        probe: Called with the maker before the first job; `answer` has what it returns.
    """

    def __init__(
        self,
        store: JobStore,
        start: Start,
        options: dict[str, Any],
        *,
        number: int = 0,
        nice: int = 0,
        probe: Callable[[Any], Any] | None = None,
    ):
        self.name = new_worker_name()
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        arguments = store, start, self.name, options, number, nice, probe, child_end
        self._process = context.Process(target=_run, args=arguments, name=self.name, daemon=True)
        self._process.start()
        child_end.close()

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        return self._process.pid

    def answer(self) -> Any:
        """Return the result of `probe`, or None if it is not ready; raise its error, or EOFError if the worker died."""
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
        return "" if code == 0 else f"its process ended with {code}"

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _run(
    store: JobStore,
    start: Start,
    name: str,
    options: dict[str, Any],
    number: int,
    nice: int,
    probe: Callable[[Any], Any] | None,
    pipe: Any,
) -> None:
    """Run a worker in this process until it is asked to exit or its parent process is gone."""
    drained = until_signal(interrupts=False)
    threading.Thread(target=_exit_with_parent, args=(pipe, drained), daemon=True).start()
    if (gpus := len(glob(GPU_FILES))) > 1:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(number % gpus))
    os.nice(nice)
    store = store.with_retry_seconds(inf)
    maker = start(store)
    if probe is not None:
        try:
            answer = probe(maker), None
        except WanjaxError as error:
            answer = None, error
        pipe.send(answer)
    work(store, maker, name=name, drained=drained.is_set, **options)
    store.close()


def until_signal(*, interrupts: bool = True) -> threading.Event:
    """Return an event that SIGTERM sets; a second signal ends the process at once.

    Args:
        interrupts: Whether Ctrl-C sets it too, as by default; else Ctrl-C does nothing.
    """
    signalled = threading.Event()

    def end(number: int, frame: Any) -> None:
        if signalled.is_set():
            os._exit(128 + number)
        signalled.set()

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end if interrupts else signal.SIG_IGN)  # else it is the supervisor's
    return signalled


def _exit_with_parent(pipe: Any, drained: threading.Event) -> None:
    """Drain the worker when the other end of the pipe closes; exit at once if its step takes too long."""
    with suppress(EOFError, OSError):
        pipe.recv()
    drained.set()
    sleep(STEP_TIMEOUT)
    os._exit(1)


@dataclass
class Autoscaler:
    """Decide the number of workers: as many as jobs, within bounds, after a delay against flapping.

    Args:
        least: The least number.
        most: The most.

    Attributes:
        count: The current target.
    """

    least: int
    most: int
    count: int = field(init=False)
    _direction: int = 0
    _since: float = 0.0

    def __post_init__(self) -> None:
        self.count = self.least

    def target(self, jobs: int, now: float) -> int:
        """Return the number of workers for so many jobs.

        Args:
            jobs: How many jobs wait or are under way.
            now: The time in seconds, from any start.
        """
        desired = min(self.most, max(self.least, jobs))
        direction = (desired > self.count) - (desired < self.count)
        if direction != self._direction:
            self._direction, self._since = direction, now
        if direction and now - self._since >= (SCALE_UP_DELAY if direction > 0 else SCALE_DOWN_DELAY):
            self.count, self._direction = desired, 0
        return self.count


class Pool:
    """Keep as many workers alive as there is work for, and replace those that die.

    Args:
        store: The store of the jobs.
        start: Starts the worker of a number, from 0.
        scale: How many there are to be.
        note: Receives lines on workers that died.
    """

    def __init__(
        self, store: JobStore, start: Callable[[int], Handle], scale: Autoscaler, note: Callable[[str], object]
    ):
        self.store, self.scale, self.note = store, scale, note
        self.workers: dict[int, Handle] = {}  # by number
        self._start, self._ending = start, set[str]()
        self._deaths, self._ends = 0, -1.0
        self._waits_since, self._has_noted_waiting = monotonic(), False

    def poll(self) -> None:
        """Replace dead workers, start missing ones, and drain surplus ones.

        Raises:
            WanjaxError: One worker after another dies.
            Unavailable: The database is out of reach.
        """
        for number, worker in list(self.workers.items()):
            if (why := worker.exit_reason()) is not None:
                self._remove(number, worker, why)
        stats = self.store.stats()
        waiting, running = (stats.jobs.get(status, 0) for status in ("queued", "in_progress"))
        self._note_waiting(sum(stats.workers.values()))
        target = self.scale.target(waiting + running, monotonic())
        active = {number for number, worker in self.workers.items() if worker.name not in self._ending}
        for number in [number for number in range(self.scale.most) if number not in self.workers]:
            if len(active) < target:
                self.workers[number] = self._start(number)
                active.add(number)
        if len(active) > target and not waiting:
            for number in sorted(active)[target:]:
                self._ending.add(self.workers[number].name)
                self.workers[number].terminate()

    def _remove(self, number: int, worker: Handle, why: str) -> None:
        """Remove a worker that has exited from the pool."""
        if why and worker.name not in self._ending:
            self.store.requeue_lost(worker.name, why)  # first: where the database is away, this is looked at again
            self._count_death(why)
        worker.kill()
        self._ending.discard(worker.name)
        del self.workers[number]

    def _count_death(self, why: str) -> None:
        counters = self.store.stats().counters
        ends = sum(counters.get(name, 0.0) for name in ("completed", "failed", "cancelled"))
        self._deaths = self._deaths + 1 if ends == self._ends else 1
        self._ends = ends
        if self._deaths >= MOST_DEATHS + self.scale.count - 1:  # as many as there are may die of one cause
            raise WanjaxError(f"{quantity(self._deaths, 'worker')} died one after another: {why}, and the log has more")
        self.note(f"a worker died, {why}: another one takes its place")

    def _note_waiting(self, registered: int) -> None:
        """Report once if workers wait long for cluster resources or for loading."""
        if registered >= len(self.workers):
            self._waits_since, self._has_noted_waiting = monotonic(), False
        elif not self._has_noted_waiting and monotonic() - self._waits_since > WAITING_NOTE_DELAY:
            self._has_noted_waiting = True
            missing = f"{len(self.workers) - registered} of {quantity(len(self.workers), 'worker')}"
            self.note(f"waiting for a place in the cluster, or loading: {missing}")

    def run(self, until: Callable[[], bool]) -> None:
        """Poll the workers until a condition holds, and wait out outages of the database.

        Args:
            until: The condition.
        """
        while not until():
            with suppress(Unavailable):  # the workers wait for it too
                self.poll()
            sleep(POLL_INTERVAL)

    def kill(self) -> None:
        """Kill all workers; for use when no job is left."""
        for worker in self.workers.values():
            worker.kill()
        self.workers.clear()

    def close(self, timeout: float = STEP_TIMEOUT) -> None:
        """Ask all workers to requeue their jobs and exit.

        Args:
            timeout: Seconds for each to end its step; LONGEST by default.
        """
        for worker in self.workers.values():
            worker.terminate()
        end = monotonic() + timeout
        while any(worker.exit_reason() is None for worker in self.workers.values()) and monotonic() < end:
            sleep(0.05)
        for worker in self.workers.values():
            exit_reason = worker.exit_reason()
            worker.kill()
            if exit_reason != "":
                with suppress(Unavailable):
                    self.store.requeue_lost(worker.name)
        self.workers.clear()
