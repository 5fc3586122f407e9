# SPDX-License-Identifier: Apache-2.0
"""A server's videos: their names, the files of each in a folder of its own, and what clients are told of them."""

import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wanjax.jobs.store import COMPLETED, FAILED, QUEUED, Job
from wanjax.pipelines.settings import length_of
from wanjax.stores.paths import AnyPath
from wanjax.stores.temporary import temp_dir

VIDEO, THUMBNAIL, PREVIEW = "video.mp4", "thumbnail.webp", "preview.png"
FILE = re.compile(r"\w{1,64}\.\w{1,8}", re.ASCII)
Inputs = Mapping[str, str | list[str]]
"""The names of files by input."""


def new_id() -> str:
    return f"video_{secrets.token_hex(12)}"


def output_of(id: str) -> str:
    """Return the name of a video below the folder of all."""
    return f"{id}/{VIDEO}"


def names_of(inputs: Inputs) -> list[str]:
    """Return the names of all files of inputs."""
    return [one for file in inputs.values() for one in (file if isinstance(file, list) else [file])]


def paths_of(inputs: Inputs, folder: AnyPath) -> dict[str, Any]:
    """Return the files of inputs in a folder, by input."""
    return {
        name: [folder / one for one in file] if isinstance(file, list) else folder / file
        for name, file in inputs.items()
    }


@contextmanager
def new_folder(folder: AnyPath) -> Iterator[Path]:
    """Yield a folder here, whose files are those of a new one, here or in a store, once the block has ended."""
    if isinstance(folder, Path):
        folder.mkdir()
        yield folder
        return
    with temp_dir() as here:
        yield here
        folder.upload_all({file.name: file for file in here.iterdir()})


@contextmanager
def local_files(folder: AnyPath, names: list[str]) -> Iterator[Path]:
    """Yield a folder here that has these files of a folder, which may be in a store, as long as the block runs."""
    if isinstance(folder, Path):
        yield folder
        return
    with temp_dir() as here:
        folder.download_all(names, here)
        yield here


def video_of(job: Job, loaded: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return a job in the shape of OpenAI's videos API, and beside that all its settings and its progress.

    `loaded` are the settings that its model was loaded with, unless its worker tells of others.
    """
    progress = {} if job.status == QUEUED else job.progress
    settings = {**loaded, **job.request["settings"], **progress.get("settings", {})}
    frames = length_of(settings["frames"], settings.get("windows", 1), settings.get("overlap", 1))
    error = job.error if job.status == FAILED else None
    return {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "status": job.status,
        "progress": 100 if job.status == COMPLETED else progress.get("progress", 0),
        "created_at": int(job.created_at),
        "completed_at": job.completed_at and int(job.completed_at),
        "expires_at": None,
        "prompt": settings["prompt"],
        "size": f"{settings['width']}x{settings['height']}",
        "seconds": f"{frames / settings['fps']:g}",
        "error": error and {"code": error["code"], "message": error["message"]},
        "remixed_from_video_id": None,
        "settings": settings,
        "scheduler": job.request["scheduler"],
        "lora": [{"name": name, "strength": strength} for name, strength in job.request["lora"].items()],
        "cancelled": job.cancel,
        "pictures": [Path(file).stem for file in names_of(job.request["inputs"])],
        "window": progress.get("window", 1),
        "stage": "" if job.is_over else progress.get("stage", ""),
        "stage_done": progress.get("stage_done", 0),
        "stage_total": progress.get("stage_total", 0),
        "stage_seconds": progress.get("stage_seconds", {}),
        "preview": progress.get("preview", 0),
        "notes": progress.get("notes", []),
        "version": job.version,
        "queue_position": job.jobs_ahead,
    }
