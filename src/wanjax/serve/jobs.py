# SPDX-License-Identifier: Apache-2.0
"""Requested videos, and the folder that each has of its own: of its pictures, and of its result."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from wanjax.pipelines.settings import length_of
from wanjax.stores.own import own_folder
from wanjax.stores.places import Place

QUEUED: Literal["queued"] = "queued"
RUNNING: Literal["in_progress"] = "in_progress"
COMPLETED: Literal["completed"] = "completed"
FAILED: Literal["failed"] = "failed"
VIDEO, THUMBNAIL, PREVIEW = "video.mp4", "thumbnail.webp", "preview.png"
CANCELLED, STOPPED = "cancelled", "server_stopped"
Status = Literal["queued", "in_progress", "completed", "failed"]


@dataclass
class Job:
    """A requested video: complete settings, the names of its pictures' files, and what has become of it.

    `done` of `total` counts the steps or the chunks of `stage`, in the window of that number; `preview` the steps, of
    all windows, that had been taken when the last preview was made, 0 where there is none; `seconds` are those of the
    stages. `tries` counts how often it was begun, and `worker` names the one that makes it where there are several.
    `version` is the number of its last change on the board. `cancelled` asks for its end. `scheduler` is None for the
    model's own, and `lora` has the strength of each LoRA.
    """

    id: str
    settings: dict[str, Any]
    pictures: dict[str, str | list[str]] = field(default_factory=dict)
    created_at: float = field(default_factory=time.time)
    status: Status = QUEUED
    progress: int = 0
    window: int = 1
    stage: str = ""
    done: int = 0
    total: int = 0
    preview: int = 0
    tries: int = 0
    worker: str = ""
    completed_at: float | None = None
    error: dict[str, str] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    version: int = 0
    cancelled: bool = False
    scheduler: str | None = None
    lora: dict[str, float] = field(default_factory=dict)

    def advance(self, progress: int, **changes: Any) -> None:
        """Notes how far the video is, in percent, and what else is new; it never goes back."""
        self.progress = max(self.progress, progress)
        for name, value in changes.items():
            setattr(self, name, value)

    @property
    def over(self) -> bool:
        return self.status in (COMPLETED, FAILED)

    @property
    def files(self) -> list[str]:
        """The names of its pictures' and clips' files."""
        return [one for file in self.pictures.values() for one in (file if isinstance(file, list) else [file])]

    def to_json(self) -> dict[str, Any]:
        """Returns the video in the shape of OpenAI's videos API, and beside that all its settings and its progress."""
        version, made = self.version, self.settings  # read before the rest, which then is of this version or newer
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
            "seconds": f"{length_of(made['frames'], made.get('windows', 1), made.get('overlap', 1)) / made['fps']:g}",
            "error": self.error,
            "remixed_from_video_id": None,
            "settings": made,
            "scheduler": self.scheduler,
            "lora": [{"name": name, "strength": strength} for name, strength in self.lora.items()],
            "cancelled": self.cancelled,
            "pictures": [Path(file).stem for file in self.files],
            "window": self.window,
            "stage": self.stage,
            "stage_done": self.done,
            "stage_total": self.total,
            "stage_seconds": self.seconds,
            "preview": self.preview,
            "notes": self.notes,
            "version": version,
        }


JOBS = TypeAdapter(Job)


def cancellation() -> dict[str, str]:
    return {"code": CANCELLED, "message": "the video was cancelled"}


class VideoFolders:
    """The folder in which each video has one of its own, here or in a store."""

    def __init__(self, folder: Place):
        self.folder: Place = folder.expanduser().absolute() if isinstance(folder, Path) else folder

    def place(self, id: str) -> Place:
        return self.folder / id

    def files(self, job: Job) -> dict[str, Any]:
        """Returns the places of a job's pictures by name."""
        return files_in(self.place(job.id), job)

    @contextmanager
    def filled(self, id: str) -> Iterator[Path]:
        """Yields a folder here, whose files are those of a video once the block has ended."""
        if isinstance(place := self.place(id), Path):
            yield place
            return
        with own_folder() as here:
            yield here
            place.upload_all({file.name: file for file in here.iterdir()})

    @contextmanager
    def fetched(self, job: Job) -> Iterator[Path]:
        """Yields a folder here in which a job's pictures are as long as the block runs."""
        if isinstance(place := self.place(job.id), Path):
            yield place
            return
        with own_folder() as here:
            place.download_all(job.files, here)
            yield here


def files_in(folder: Place, job: Job) -> dict[str, Any]:
    """Returns the files in a folder of a job's pictures by name."""
    return {
        name: [folder / one for one in file] if isinstance(file, list) else folder / file
        for name, file in job.pictures.items()
    }
