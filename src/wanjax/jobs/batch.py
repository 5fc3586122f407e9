# SPDX-License-Identifier: Apache-2.0
"""A batch of many videos: its driver's view of the job store, and the manifest.

A video is made if no file has its name. The manifest has a line of JSON for each video; only the driver writes it, from
the changes of the store. If a driver was killed the last lines may be missing, and the next driver adds them.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.jobs.maker import Task, digest_of
from wanjax.jobs.store import FAILED, Job, JobStore, NewJob
from wanjax.jobs.worker import DISK_FULL
from wanjax.pipelines.request import OWN
from wanjax.stores.paths import AnyPath, read

MANIFEST = "manifest.jsonl"
MAX_RUN_JOBS = 32  # maximum jobs of a run, whose prompts are all encoded before the first video
MANIFEST_INTERVAL = 10.0  # seconds between two manifests in a store
MAX_FIRST_FAILURES = 8  # failures without one success that end a batch


class Batch:
    """The tasks of a batch, each of which ends once: done, or failed after all its attempts.

    Args:
        store: The store of the jobs, to which the tasks are added.
        tasks: The missing videos, in order.
        manifest: Receives a line for each that ends.
        model: The model that makes them.
    """

    def __init__(self, store: JobStore, tasks: Iterable[Task], manifest: "Manifest", model: str = ""):
        self.tasks = {task.output: task for task in tasks}
        self.store, self.manifest = store, manifest
        self.done = 0
        self.failed: list[Job] = []
        self._pending = dict(self.tasks)
        self._version = store.version()
        store.add_all([self._job(task, model) for task in self._pending.values()])

    def _job(self, task: Task, model: str) -> NewJob:
        """Return the job of a task; a task that failed before runs alone, so that it cannot fail others."""
        batch = "" if task.output in self.manifest.failed else digest_of(task.request)
        return NewJob(task.output, task.request.to_json(), model, task.output, batch)

    @property
    def total(self) -> int:
        return len(self.tasks)

    @property
    def ended(self) -> int:
        return self.done + len(self.failed)

    def poll(self) -> Iterator[Job]:
        """Yield each job that ended since the last call, after adding it to the manifest.

        Raises:
            WanjaxError: All of the first jobs failed, or the disk is full.
        """
        while changes := self.store.changes(self._version):
            for job in changes:
                self._version = job.version
                if job.is_over and (task := self._pending.pop(job.id, None)) is not None:
                    self._end(job, task)
                    yield job
                    self._check(task)

    def _end(self, job: Job, task: Task) -> None:
        if job.status != FAILED:
            self.done += 1
            fields = {name: job.progress.get(name) for name in ("seconds", "worker")}
            self.manifest.add(task, **fields)
            return
        error = job.error or {"code": "", "message": ""}
        if error["code"] == DISK_FULL:
            raise WanjaxError(error["message"]) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.failed.append(job)
        self.manifest.add(task, error=error["message"], tries=job.attempts, worker=error.get("worker"))

    def _check(self, task: Task) -> None:
        if not self.done and len(self.failed) == min(MAX_FIRST_FAILURES, self.total):
            error = self.failed[-1].error or {}
            raise task.request.wrong(WanjaxError(error.get("message", "")))

    def close(self) -> None:
        """Cancel the unfinished jobs, so that other workers do not make them."""
        self.store.cancel_all(list(self._pending))


class Manifest:
    """The append-only list of the videos in a folder.

    `done_names` are the names of those that are done, and `failed` of those that failed. In a store, where nothing can
    be added to, it is written anew from time to time, and by `close`.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: AnyPath):
        self.file = folder / MANIFEST
        self._lines = (read(self.file) or b"").splitlines()
        self._written, self._has_unwritten = monotonic(), False
        entries = [entry for line in self._lines if (entry := _entry(line)) is not None]
        self.done_names, self.failed = (
            {str(entry.get("file_name")) for entry in entries if ("error" in entry) is failed}
            for failed in (False, True)
        )

    def add(self, task: Task, **outcome: Any) -> None:
        """Add a task and its outcome, unless it is already listed as done.

        Args:
            task: The task.
            outcome: `seconds` and `worker` of a video that was made; `error` and `tries` of one that failed.
        """
        if "error" not in outcome and task.output in self.done_names:
            return
        row, settings = task.request.row, task.request.settings
        entry = {
            "file_name": task.output,
            **({"row": row} if row else {}),
            **{x: settings[x] for x in OWN if x in settings},
        }
        line = json.dumps(
            entry | {name: value for name, value in outcome.items() if value}, ensure_ascii=False
        ).encode()
        if isinstance(self.file, Path):
            self._append(self.file, line)
        else:
            self._lines.append(line)
            self._has_unwritten = True
            if monotonic() - self._written > MANIFEST_INTERVAL:
                self.close()
        if "error" not in outcome:
            self.done_names.add(task.output)

    def close(self) -> None:
        """Write pending lines to a store."""
        if self._has_unwritten and not isinstance(self.file, Path):
            self.file.write(b"".join(line + b"\n" for line in self._lines))
            self._written, self._has_unwritten = monotonic(), False

    @staticmethod
    def _append(file: Path, line: bytes) -> None:
        """Append a line in one write, so that lines do not mix, and terminate one that a full disk cut off."""
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            end = b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""
            os.write(descriptor, end + line + b"\n")
        finally:
            os.close(descriptor)


def _entry(line: bytes) -> Mapping[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
