# SPDX-License-Identifier: Apache-2.0
"""A batch of videos. One process, the driver, watches the batch's jobs in the store, and writes the manifest.

A batch makes each video whose file does not exist yet. The manifest has one line of JSON for each video. Only the
driver writes the manifest. It reads the outcomes from the store. If the driver is killed, the last lines may be
missing. The next driver adds these lines.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from wanjax.errors import RequestError, WanjaxError
from wanjax.jobs.maker import Task, batch_key
from wanjax.jobs.store import FAILED, Job, JobStore, NewJob
from wanjax.jobs.worker import DISK_FULL, INVALID_REQUEST
from wanjax.pipelines.request import PER_VIDEO
from wanjax.stores.paths import AnyPath, read_if_exists

MANIFEST = "manifest.jsonl"
MAX_RUN_JOBS = 32  # the maximum number of jobs in a run; a run encodes all prompts before it makes the first video
MANIFEST_INTERVAL = 10.0  # seconds between two writes of a manifest to a remote store
MAX_FIRST_FAILURES = 8  # a batch ends after this many failures without a success


class Batch:
    """The tasks of a batch. Each task ends exactly once: its video is made, or its last attempt failed.

    Args:
        store: The job store, to which a job is added for each task.
        tasks: The videos to make, in order.
        manifest: Receives a line for each task that ends.
        model: Name of the model that makes the videos.
    """

    def __init__(self, store: JobStore, tasks: Iterable[Task], manifest: "Manifest", model: str = ""):
        self.tasks = {task.output: task for task in tasks}
        self.store, self.manifest = store, manifest
        self.done_count = 0
        self.failed: list[Job] = []
        self._unfinished = dict(self.tasks)
        self._version = store.version()
        store.add_all([self._new_job(task, model) for task in self._unfinished.values()])

    def _new_job(self, task: Task, model: str) -> NewJob:
        """Return the job of a task. A task that failed before is made in a separate run, so that it cannot make other
        tasks fail."""
        batch = "" if task.output in self.manifest.failed else batch_key(task.request)
        return NewJob(task.output, task.request.to_json(), model, task.output, batch)

    @property
    def total(self) -> int:
        """The number of tasks."""
        return len(self.tasks)

    @property
    def ended_count(self) -> int:
        """The number of tasks whose video was made or that failed."""
        return self.done_count + len(self.failed)

    @property
    def only_wrong_requests(self) -> bool:
        """Whether every failed job had an invalid request. A retry of such a job fails again."""
        return all((job.error or {}).get("code") == INVALID_REQUEST and job.attempts <= 1 for job in self.failed)

    def poll(self) -> Iterator[Job]:
        """Yield each job that ended since the last call. Each job is added to the manifest first.

        Raises:
            WanjaxError: The first MAX_FIRST_FAILURES jobs all failed, or the disk is full.
        """
        while changes := self.store.changes(self._version):
            for job in changes:
                self._version = job.version
                if job.is_over and (task := self._unfinished.pop(job.id, None)) is not None:
                    self._record_end(job, task)
                    yield job
                    self._raise_if_all_failed(task)

    def _record_end(self, job: Job, task: Task) -> None:
        if job.status != FAILED:
            self.done_count += 1
            fields = {name: job.progress.get(name) for name in ("seconds", "worker")}
            self.manifest.add(task, **fields)
            return
        error = job.error or {"code": "", "message": ""}
        if error["code"] == DISK_FULL:
            raise WanjaxError(error["message"]) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.failed.append(job)
        self.manifest.add(task, error=error["message"], tries=job.attempts, worker=error.get("worker"))

    def _raise_if_all_failed(self, task: Task) -> None:
        if not self.done_count and len(self.failed) == min(MAX_FIRST_FAILURES, self.total):
            error = self.failed[-1].error or {}
            error_type = RequestError if self.only_wrong_requests else WanjaxError
            raise task.request.add_row_number(error_type(error.get("message", "")))

    def close(self) -> None:
        """Cancel the unfinished jobs, so that no worker makes them."""
        self.store.cancel_all(list(self._unfinished))


class Manifest:
    """The list of a batch's videos, a file in the folder of the videos.

    Each outcome is appended to a local file. A remote store cannot append to a file, so the whole file is written again
    every MANIFEST_INTERVAL seconds, and by `close`.

    Args:
        folder: The folder of the videos.

    Attributes:
        done_names: File names of the videos that are made.
        failed: File names of the videos that failed.
    """

    def __init__(self, folder: AnyPath):
        self.file = folder / MANIFEST
        self._lines = (read_if_exists(self.file) or b"").splitlines()
        self._written_at, self._has_unwritten = monotonic(), False
        entries = [entry for line in self._lines if (entry := _parse_line(line)) is not None]
        self.done_names, self.failed = (
            {str(entry.get("file_name")) for entry in entries if ("error" in entry) is failed}
            for failed in (False, True)
        )

    def add(self, task: Task, **outcome: Any) -> None:
        """Add a task with its outcome, unless it is already listed as done.

        Args:
            task: The task.
            outcome: `seconds` and `worker` of a video that was made; `error`, `tries` and `worker` of one that failed.
        """
        if "error" not in outcome and task.output in self.done_names:
            return
        row, settings = task.request.row, task.request.settings
        entry = {
            "file_name": task.output,
            **({"row": row} if row else {}),
            **{setting: settings[setting] for setting in PER_VIDEO if setting in settings},
        }
        line = json.dumps(
            entry | {name: value for name, value in outcome.items() if value}, ensure_ascii=False
        ).encode()
        if isinstance(self.file, Path):
            self._append_line(self.file, line)
        else:
            self._lines.append(line)
            self._has_unwritten = True
            if monotonic() - self._written_at > MANIFEST_INTERVAL:
                self.close()
        if "error" not in outcome:
            self.done_names.add(task.output)

    def close(self) -> None:
        """Write the lines that are not yet in a remote store."""
        if self._has_unwritten and not isinstance(self.file, Path):
            self.file.write(b"".join(line + b"\n" for line in self._lines))
            self._written_at, self._has_unwritten = monotonic(), False

    @staticmethod
    def _append_line(file: Path, line: bytes) -> None:
        """Append a line in one write, so that the lines of several processes do not mix. If a full disk cut off the
        last line, end that line first."""
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            separator = b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""
            os.write(descriptor, separator + line + b"\n")
        finally:
            os.close(descriptor)


def _parse_line(line: bytes) -> Mapping[str, Any] | None:
    """Return the entry of a line, or None if the line is damaged."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
