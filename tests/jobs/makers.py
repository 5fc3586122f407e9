# SPDX-License-Identifier: Apache-2.0
"""Makers that write small files in place of videos, fail when a test asks for it, and log the started jobs."""

import errno
import os
import time
from pathlib import Path

from wanjax.errors import WanjaxError, is_full
from wanjax.jobs.worker import Failure, Interrupted

LOG = "made.log"


class FileMaker:
    """Writes a file for each job; the prompt of the job says which failure to simulate.

    Args:
        folder: The folder of the files.
        seconds: How long a file takes.
    """

    models = ("nano",)

    def __init__(self, folder, seconds=0.0):
        self.folder, self.seconds = Path(folder), seconds
        self.runs = []

    def warm_up(self, should_stop):
        pass

    def is_published(self, job):
        return (self.folder / job.output).exists()

    def explain(self, error):
        is_known = isinstance(error, WanjaxError) and not is_full(error)
        return Failure(
            "storage" if is_full(error) else "error", str(error), is_retryable=not is_known, ends_worker=is_full(error)
        )

    def make(self, jobs, lease):
        self.runs.append([job.id for job in jobs])
        for job in jobs:
            with (self.folder / LOG).open("a") as log:  # appends whole lines, also from several processes
                log.write(f"{job.id}\n")
            for step in range(4):
                lease.report(progress=25 * step, stage="denoise", stage_done=step, stage_total=4)
                if lease.should_stop():
                    raise Interrupted
                time.sleep(self.seconds / 4)
            self.fail(job, job.request["settings"]["prompt"])
            path = self.folder / job.output
            path.parent.mkdir(parents=True, exist_ok=True)
            partial_file = path.with_name(f".{os.getpid()}.{path.name}")
            partial_file.write_text(job.id)
            partial_file.replace(path)
            yield job

    def fail(self, job, prompt):
        if prompt == "fail":
            raise RuntimeError("the device is gone")
        if prompt == "fail once" and self.started_ids().count(job.id) == 1:
            raise RuntimeError("the device is gone")
        if prompt == "wrong":
            raise WanjaxError("steps is 0 where 1 is the least")
        if prompt == "full":
            raise WanjaxError("it cannot be written") from OSError(errno.ENOSPC, "No space left on device")
        if prompt == "die":
            raise SystemExit(9)

    def started_ids(self):
        """Return the ids of the started jobs, in order."""
        file = self.folder / LOG
        return file.read_text().split() if file.exists() else []


def make_files(folder, seconds, store):
    """Return a maker for a worker in a new process."""
    return FileMaker(folder, seconds)


def die(store):
    raise SystemExit(9)
