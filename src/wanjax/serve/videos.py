# SPDX-License-Identifier: Apache-2.0
"""The videos of a server: ids, files of each video, and the JSON that clients receive."""

import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wanjax.jobs.store import COMPLETED, FAILED, QUEUED, Job
from wanjax.pipelines.settings import total_frames
from wanjax.stores.paths import AnyPath
from wanjax.stores.temporary import temp_dir

VIDEO, THUMBNAIL, PREVIEW = "video.mp4", "thumbnail.webp", "preview.png"
NOTES = "notes"  # in the request of a job: the notes that the server made when the request arrived
FILE_NAME = re.compile(r"\w{1,64}\.\w{1,8}", re.ASCII)
Inputs = Mapping[str, str | list[str]]
"""File names by input."""


def new_id() -> str:
    return f"video_{secrets.token_hex(12)}"


def output_path(id: str) -> str:
    """Return the path of a video, relative to the folder of all videos."""
    return f"{id}/{VIDEO}"


def file_names(inputs: Inputs) -> list[str]:
    """Return the names of all files in `inputs`."""
    return [name for value in inputs.values() for name in (value if isinstance(value, list) else [value])]


def file_paths(inputs: Inputs, folder: AnyPath) -> dict[str, Any]:
    """Return the paths of the files in `inputs`, by input."""
    return {
        name: [folder / file for file in value] if isinstance(value, list) else folder / value
        for name, value in inputs.items()
    }


@contextmanager
def new_folder(folder: AnyPath) -> Iterator[Path]:
    """Create a folder, local or in a store.

    Yield a local folder; for a store, its files are uploaded after the block.
    """
    if isinstance(folder, Path):
        folder.mkdir()
        yield folder
        return
    with temp_dir() as local_folder:
        yield local_folder
        folder.upload_all({file.name: file for file in local_folder.iterdir()})


@contextmanager
def local_files(folder: AnyPath, names: list[str]) -> Iterator[Path]:
    """Yield a local folder that contains some files of a folder. Files in a store are downloaded for the block."""
    if isinstance(folder, Path):
        yield folder
        return
    with temp_dir() as local_folder:
        folder.download_all(names, local_folder)
        yield local_folder


def video_json(job: Job, load_settings: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return a job in the format of OpenAI's videos API, with additional fields for settings and progress.

    Args:
        job: The job.
        load_settings: The settings with which the model was loaded. Settings that the worker reports override them.
    """
    progress = {} if job.status == QUEUED else job.progress
    settings = {**load_settings, **job.request["settings"], **progress.get("settings", {})}
    frames = total_frames(settings["frames"], settings.get("windows", 1), settings.get("overlap", 1))
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
        "inputs": job.request["inputs"],
        "pictures": [Path(file).stem for file in file_names(job.request["inputs"])],
        "window": progress.get("window", 1),
        "stage": "" if job.is_over else progress.get("stage", ""),
        "stage_done": progress.get("stage_done", 0),
        "stage_total": progress.get("stage_total", 0),
        "stage_seconds": progress.get("stage_seconds", {}),
        "preview": progress.get("preview", 0),
        "notes": progress.get("notes", job.request.get(NOTES, [])),
        "version": job.version,
        "queue_position": job.jobs_ahead,
    }
