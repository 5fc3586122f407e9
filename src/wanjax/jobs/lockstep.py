# SPDX-License-Identifier: Apache-2.0
"""A worker of several processes, as on a TPU slice of several hosts: the first leads, and the others follow.

The leader is a maker like any other, and it alone leases jobs, checks and names them, and writes. It hands the tasks
of each run to the others, and all make that run at once, each with its own devices.

Before a run the processes agree that each of them can make it. What fails later fails alone: the others may already
wait for that process in a collective, so it has to end, and with it all of them (`wanjax.jobs.processes`). For the
same reason no run ends before its time but where the worker ends.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.jobs.maker import Task, VideoMaker, sentence_of
from wanjax.jobs.processes import Others
from wanjax.jobs.worker import Failure, Lease
from wanjax.pipelines.observers import Observer
from wanjax.pipelines.request import PreparedRequest, VideoRequest
from wanjax.pipelines.run import Run

FIT_LATENT_PREVIEW = "fit_latent_preview"  # a message that asks for no tasks


class OutOfStep(Exception):
    """An error that leaves the other processes waiting in a collective, so all must end."""


class Leader(VideoMaker):
    """The maker in the first process, whose runs the others make too.

    Args:
        others: The other processes.
        started_again: Whether processes that end out of step are started again, so that another attempt may succeed.
    """

    def __init__(self, *arguments: Any, others: Others | None = None, started_again: bool = False, **more: Any):
        super().__init__(*arguments, **more)
        self.others, self.started_again = others or Others(), started_again
        self.fault: Exception | None = None  # that left the others waiting

    def fit_latent_preview(self) -> None:
        self.in_step = False
        self.others.broadcast(FIT_LATENT_PREVIEW)
        super().fit_latent_preview()
        self.in_step = True

    def stopped(self, lease: Lease) -> Callable[[], bool]:
        return lambda: lease.draining

    def run(self, tasks: Sequence[Task], observers: Sequence[Observer] = ()) -> Iterator[PreparedRequest]:
        run = self.prepared(tasks, observers)
        self.in_step = False
        self.others.broadcast([(task.output, task.request.to_json()) for task in tasks])
        faults = self.others.gather("")
        if fault := next(filter(None, faults), ""):
            self.in_step = True
            where = f"process {faults.index(fault)} of {len(faults)}, from 0, cannot make it"
            raise WanjaxError(f"{where}: {fault}") from OSError(fault)  # as one of the system, it may not come again
        yield from self.made(tasks, run)
        self.in_step = True

    def explain(self, error: Exception) -> Failure:
        failure = super().explain(error)
        if self.in_step:
            return failure
        self.fault = error
        return failure._replace(again=failure.again and self.started_again)

    def dismiss(self) -> bool:
        """Let the others go, unless they wait for this process elsewhere; return whether it has."""
        if self.in_step:
            self.others.broadcast(None)
        return self.in_step


def follow(maker: VideoMaker, others: Others | None = None) -> None:
    """Make each run that the leader makes, until it lets this process go; raises what fails within a run."""
    others = others or Others()
    while (message := others.broadcast()) is not None:
        if message == FIT_LATENT_PREVIEW:
            maker.fit_latent_preview()
            continue
        tasks = [Task(output, VideoRequest.from_json(request)) for output, request in message]
        run, fault = _prepared(maker, tasks)
        if not any(others.gather(fault)):
            assert run is not None
            deque(maker.made(tasks, run), maxlen=0)


def _prepared(maker: VideoMaker, tasks: Sequence[Task]) -> tuple[Run | None, str]:
    """Return the run of tasks, or why this process cannot make it."""
    try:
        return maker.prepared(tasks), ""
    except Exception as error:  # of whatever kind: the leader tells of it
        return None, sentence_of(error)
