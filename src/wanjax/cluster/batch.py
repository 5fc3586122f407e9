# SPDX-License-Identifier: Apache-2.0
"""A batch of many videos: what is left of it, what failed, and the manifest of what is done.

The name of a video, and whether a file has it, decide what there is to make. The manifest, a line of JSON for each
video, tells of it, and may lack its last lines where a run was killed: the next run adds them.
"""

import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from wanjax.cluster.worker import Job, Outcome
from wanjax.errors import WanjaxError
from wanjax.pipelines.request import OWN
from wanjax.stores.places import Place, read

MANIFEST = "manifest.jsonl"
TOGETHER = 32  # jobs that a worker is given at most: as many prompts are encoded before the first video is made
EVERY = 10.0  # seconds between two manifests in a store
HOPELESS = 8  # failures without one success that end a batch
DIED = "the worker that made it died"


class Batch:
    """The jobs of a batch, each of which ends once: done, or failed after `retries` more tries."""

    def __init__(self, jobs: Iterable[Job], retries: int, manifest: "Manifest"):
        self.jobs = {job.name: job for job in jobs}
        self.retries, self.manifest = retries, manifest
        self.done = 0
        self.failed: list[Outcome] = []
        self._left = deque(self.jobs.values())
        self._again: deque[Job] = deque()
        self._tries: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return len(self.jobs)

    @property
    def ended(self) -> int:
        return self.done + len(self.failed)

    def take(self, workers: int, most: int = TOGETHER) -> list[Job]:
        """Returns at most so many jobs for one of several workers; none where all are under way.

        A job that is tried again is alone. Towards the end they are fewer, so that the workers end together.
        """
        if not self._left:
            return [self._again.popleft()] if self._again else []
        share = TOGETHER if workers == 1 else -(-len(self._left) // (4 * workers))
        return [self._left.popleft() for _ in range(min(most, share, len(self._left)))]

    def finish(self, outcome: Outcome) -> Outcome | None:
        """Counts the outcome of a job and returns it; None where it is tried again.

        Raises WanjaxError, with the error of the last one, where all of the first jobs have failed.
        """
        job = self.jobs[outcome.name]
        self._tries[job.name] += 1
        if outcome.error is None:
            self.done += 1
            self.manifest.add(job, seconds=outcome.seconds, worker=outcome.worker)
            return outcome
        if outcome.again and self._tries[job.name] <= self.retries:
            self._again.append(job)
            return None
        self.failed.append(outcome)
        self.manifest.add(job, error=outcome.error, tries=self._tries[job.name], worker=outcome.worker)
        if not self.done and len(self.failed) == min(HOPELESS, self.total):
            raise job.request.wrong(WanjaxError(outcome.error))
        return outcome

    def lost(self, jobs: Sequence[Job], why: str = "") -> Outcome | None:
        """Gives back the jobs of a worker that died; the first of them was under way, and counts as tried.

        `why` is what failed in the worker, where that is known.
        """
        self.give_back(jobs[1:])
        return self.finish(Outcome(jobs[0].name, error=why or DIED, again=True)) if jobs else None

    def give_back(self, jobs: Sequence[Job]) -> None:
        """Takes back jobs that were not tried."""
        self._left.extendleft(reversed(jobs))


class Manifest:
    """The file in a folder of videos that lists them, to which lines are added.

    `listed` are the names of those that are done, and `failed` of those that failed. In a store, where nothing can be
    added to, it is written anew from time to time, and by `close`.
    """

    def __init__(self, folder: Place):
        self.file = folder / MANIFEST
        self._lines = (read(self.file) or b"").splitlines()
        self._written, self._new = monotonic(), False
        entries = [entry for line in self._lines if (entry := _entry(line)) is not None]
        self.listed, self.failed = (
            {str(entry.get("file_name")) for entry in entries if ("error" in entry) is failed}
            for failed in (False, True)
        )

    def add(self, job: Job, **told: Any) -> None:
        """Adds a job with what came of it; one that is listed as done is not listed again."""
        if "error" not in told and job.name in self.listed:
            return
        row, given = job.request.row, job.request.settings
        entry = {"file_name": job.name, **({"row": row} if row else {}), **{x: given[x] for x in OWN if x in given}}
        line = json.dumps(entry | {name: value for name, value in told.items() if value}, ensure_ascii=False).encode()
        if isinstance(self.file, Path):
            self._append(self.file, line)
        else:
            self._lines.append(line)
            self._new = True
            if monotonic() - self._written > EVERY:
                self.close()
        if "error" not in told:
            self.listed.add(job.name)

    def close(self) -> None:
        """Writes what a store does not hold yet."""
        if self._new and not isinstance(self.file, Path):
            self.file.write(b"".join(line + b"\n" for line in self._lines))
            self._written, self._new = monotonic(), False

    @staticmethod
    def _append(file: Path, line: bytes) -> None:
        """Adds a line at once, so that no two mix, and ends one that was cut off, as by a full disk."""
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            end = b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""
            os.write(descriptor, end + line + b"\n")
        finally:
            os.close(descriptor)


def _entry(line: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
