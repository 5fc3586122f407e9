# SPDX-License-Identifier: Apache-2.0
"""Requested videos, and the folder in which each keeps its request, its pictures and its result.

A video's folder is named by its id. `job.json` is written whole or not at all, and after the video, so that a killed
server finds each finished video again.
"""

import json
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from wanjax.checkpoints.files import check_folder, writing
from wanjax.errors import WanjaxError

QUEUED, RUNNING, COMPLETED, FAILED = "queued", "in_progress", "completed", "failed"
JOB, VIDEO, THUMBNAIL, PREVIEW = "job.json", "video.mp4", "thumbnail.webp", "preview.png"
CANCELLED, MISTAKE, BROKEN, STOPPED = "cancelled", "invalid_request", "server_error", "server_stopped"
TRIES = 2  # times that a request may be under way when the server ends before it is given up


@dataclass
class Job:
    """A requested video: complete settings, the names of its pictures' files, and what has become of it.

    `done` of `total` counts the steps or the chunks of `stage`; `preview` the steps that had been taken when the last
    preview was made, 0 where there is none; `seconds` are those of the stages. `tries` counts how
    often it was begun. `version` is the number of its last change on the board.
    """

    id: str
    settings: dict[str, Any]
    pictures: dict[str, str | list[str]] = field(default_factory=dict)
    created_at: float = field(default_factory=time.time)
    status: str = QUEUED
    progress: int = 0
    stage: str = ""
    done: int = 0
    total: int = 0
    preview: int = 0
    tries: int = 0
    completed_at: float | None = None
    error: dict[str, str] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    version: int = 0
    cancelled: bool = False

    @property
    def over(self) -> bool:
        return self.status in (COMPLETED, FAILED)

    def to_json(self) -> dict[str, Any]:
        """Returns the video as OpenAI's videos API shows one, and beside that all its settings and its progress."""
        made = self.settings
        return {
            "id": self.id,
            "object": "video",
            "model": made["model"],
            "status": self.status,
            "progress": self.progress,
            "created_at": int(self.created_at),
            "completed_at": self.completed_at and int(self.completed_at),
            "expires_at": None,
            "prompt": made["prompt"],
            "size": f"{made['width']}x{made['height']}",
            "seconds": f"{made['frames'] / made['fps']:g}",
            "error": self.error,
            "remixed_from_video_id": None,
            "settings": made,
            "pictures": sorted(self.pictures),
            "stage": self.stage,
            "stage_done": self.done,
            "stage_total": self.total,
            "stage_seconds": self.seconds,
            "preview": self.preview,
            "notes": self.notes,
        }


def new_id() -> str:
    return f"video_{secrets.token_hex(12)}"


class Shelf:
    """The folder of all videos, each in a folder of its own."""

    def __init__(self, folder: Path):
        """Makes the folder if need be; raises WanjaxError if it cannot be written."""
        self.folder = folder.expanduser().absolute()
        check_folder(self.folder)

    def place(self, id: str) -> Path:
        return self.folder / id

    def files(self, job: Job) -> dict[str, Any]:
        """Returns the paths of a job's pictures by name."""
        place = self.place(job.id)
        return {
            name: [place / one for one in file] if isinstance(file, list) else place / file
            for name, file in job.pictures.items()
        }

    def save(self, job: Job) -> None:
        """Writes job.json."""
        with writing(self.place(job.id) / JOB) as beside:
            beside.write_text(json.dumps(asdict(job)), encoding="utf-8")

    def remove(self, id: str) -> None:
        shutil.rmtree(self.place(id), ignore_errors=True)

    def load(self) -> list[Job]:
        """Returns the jobs by age; removes folders of requests that were never accepted.

        Those under way when the server ended are complete if their video is, and else wait again.
        """
        found = []
        for place in self.folder.glob("video_*"):
            job = _read(place / JOB)
            if job is None and not (place / VIDEO).exists():
                shutil.rmtree(place, ignore_errors=True)
            elif job is not None:
                job.version, job.cancelled = 1, False
                self._settle(job, place)
                found.append(job)
        return sorted(found, key=lambda job: job.created_at)

    def _settle(self, job: Job, place: Path) -> None:
        """Writes down what became of a job that was under way when the server ended."""
        if job.over:
            return
        if (video := place / VIDEO).exists():
            job.status, job.progress, job.completed_at = COMPLETED, 100, video.stat().st_mtime
        elif job.tries >= TRIES:
            job.status, job.completed_at = FAILED, time.time()
            told = f"the server ended {job.tries} times while it made this video, so it does not try again"
            job.error = {"code": STOPPED, "message": told}
        else:
            job.status, job.progress, job.stage, job.done, job.total = QUEUED, 0, "", 0, 0
        self.save(job)


def _read(file: Path) -> Job | None:
    """Returns the job in a file; None where there is none or it cannot be read."""
    with suppress(OSError, ValueError, TypeError, WanjaxError):
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, Mapping):
            known = {x.name for x in fields(Job)}
            return Job(**{name: value for name, value in found.items() if name in known})
    return None
