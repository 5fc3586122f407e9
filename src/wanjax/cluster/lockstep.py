# SPDX-License-Identifier: Apache-2.0
"""A worker of several processes, as on a TPU slice of several hosts: the first leads, and the others follow.

The leader is a worker like any other: it is given requests, checks and names them, and writes videos and outcomes. It
hands the jobs of each run to the others, and all make that run at once, each with its own devices.

Before a run the processes agree that each of them can make it. What fails later fails alone: the others may already
wait for that process in a collective, so it has to end, and with it all of them (`wanjax.jobs.processes`).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from wanjax.cluster.worker import Job, Outcome, Worker, told_of
from wanjax.errors import WanjaxError
from wanjax.jobs.processes import Others
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.run import Run

COLOURS = "colours"  # a message that asks for no jobs


class Leader(Worker):
    """The worker in the first process, whose runs the others make too."""

    def __init__(self, *given: Any, others: Others | None = None, **more: Any):
        super().__init__(*given, **more)
        self.others = others or Others()

    def fit_colours(self) -> None:
        self.in_step = False
        self.others.broadcast(COLOURS)
        super().fit_colours()
        self.in_step = True

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        run = self.prepared(jobs)
        self.in_step = False
        self.others.broadcast([(job.name, asdict(job.request)) for job in jobs])
        faults = self.others.gather("")
        if told := next(filter(None, faults), ""):
            self.in_step = True
            where = f"process {faults.index(told)} of {len(faults)}, from 0, cannot make it"
            raise WanjaxError(f"{where}: {told}") from OSError(told)  # as one of the system, it may not come again
        yield from self.made(jobs, run)
        self.in_step = True

    def dismiss(self) -> bool:
        """Lets the others go, unless they wait for this process elsewhere; returns whether it has."""
        if self.in_step:
            self.others.broadcast(None)
        return self.in_step


def follow(worker: Worker, others: Others | None = None) -> None:
    """Makes each run that the leader makes, until it lets this process go; raises what fails within a run."""
    others = others or Others()
    while (asked := others.broadcast()) is not None:
        if asked == COLOURS:
            worker.fit_colours()
            continue
        jobs = [Job(name, VideoRequest(**request)) for name, request in asked]
        run, fault = _prepared(worker, jobs)
        if not any(others.gather(fault)):
            assert run is not None
            deque(worker.made(jobs, run), maxlen=0)


def _prepared(worker: Worker, jobs: Sequence[Job]) -> tuple[Run | None, str]:
    """Returns the run of jobs, or why this process cannot make it."""
    try:
        return worker.prepared(jobs), ""
    except Exception as error:  # of whatever kind: the leader tells of it
        return None, told_of(error)
