# SPDX-License-Identifier: Apache-2.0
"""Requested videos: a table with a row for each, and a folder of each one's pictures and result.

What was answered is on the disk: a row is committed before a request is, and a server that was killed goes on from its
table. What cannot be trusted is left alone: rows that do not read as videos, and folders that no row names.
"""

import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from wanjax.checkpoints.files import check_folder
from wanjax.checkpoints.holding import Hold
from wanjax.errors import WanjaxError
from wanjax.pipelines.settings import Settings, length_of, schema
from wanjax.serve.faults import StorageError, is_full, storing

QUEUED: Literal["queued"] = "queued"
RUNNING: Literal["in_progress"] = "in_progress"
COMPLETED: Literal["completed"] = "completed"
FAILED: Literal["failed"] = "failed"
TABLE, LOCK, FORMER = "videos.sqlite", "serving.lock", "job.json"  # the last was a row before there was a table
VIDEO, THUMBNAIL, PREVIEW = "video.mp4", "thumbnail.webp", "preview.png"
CANCELLED, STOPPED = "cancelled", "server_stopped"
Status = Literal["queued", "in_progress", "completed", "failed"]
TRIES = 2  # times that a request may be under way when the server, or its worker, ends before it is given up
ID = re.compile(r"video_\w{1,64}", re.ASCII)
FILE = re.compile(r"\w{1,64}\.\w{1,8}", re.ASCII)
VERSION = 1  # of the table
SCHEMA = """
CREATE TABLE videos (
    number INTEGER PRIMARY KEY,  -- in the order of their requests
    id TEXT NOT NULL UNIQUE,
    stays INTEGER NOT NULL,      -- 0 while its folder is made or removed: what is left of it goes at the next start
    job TEXT NOT NULL            -- as JSON
)
"""


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
        """Returns the video as OpenAI's videos API shows one, and beside that all its settings and its progress."""
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


def new_id() -> str:
    return f"video_{secrets.token_hex(12)}"


class Places:
    """The folder in which each video has one of its own."""

    def __init__(self, folder: Path):
        self.folder = folder.expanduser().absolute()

    def place(self, id: str) -> Path:
        return self.folder / id

    def files(self, job: Job) -> dict[str, Any]:
        """Returns the paths of a job's pictures by name."""
        place = self.place(job.id)
        return {
            name: [place / one for one in file] if isinstance(file, list) else place / file
            for name, file in job.pictures.items()
        }


class Shelf(Places):
    """The table of all videos, and their places.

    `strange` lists what was found and left alone: folders of videos that no row names, and rows that do not read.
    """

    def __init__(self, folder: Path, table: Path | None = None, tries: int = TRIES):
        """Opens the folder and its table, which are made if need be; of a server before there were tables, once.

        `table` is the folder of the table, None for the same. `tries` is how often a video may be begun. Raises
        WanjaxError if they cannot be written, if another server uses them, or if the table is a newer one.
        """
        super().__init__(folder)
        self.table = (self.folder if table is None else table.expanduser().absolute()) / TABLE
        self.tries = tries
        self.strange: list[str] = []
        check_folder(self.folder)
        check_folder(self.table.parent)
        options: Any = {"isolation_level": None, "check_same_thread": False}  # the board has a lock of its own
        self._lock = Hold(self.table.parent / LOCK, "server", "--dir")
        self._table = sqlite3.connect(self.table, **options)
        self._table.text_factory = partial(str, encoding="utf-8", errors="replace")
        try:
            with self._writing():
                self._table.execute("PRAGMA journal_mode = WAL")
                self._table.execute("PRAGMA synchronous = FULL")  # what is committed is on the disk
                [version] = self._table.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    self._begin()
            if version > VERSION:
                raise WanjaxError(f"{self.table} is of a newer wanjax, version {version}: another --dir would do")
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Makes the table, with a row for each video of a server that kept each in a file."""
        former = [(place, self._read(place.name, _text(place / FORMER))) for place in self.folder.glob("video_*")]
        jobs = [job for place, job in former if job is not None and job.id == place.name]
        self._table.execute("BEGIN IMMEDIATE")
        self._table.execute(SCHEMA)
        for job in sorted(jobs, key=lambda job: job.created_at):
            self._table.execute("INSERT INTO videos (id, stays, job) VALUES (?, 1, ?)", (job.id, _to_text(job)))
        self._table.execute(f"PRAGMA user_version = {VERSION}")
        self._table.execute("COMMIT")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises StorageError where the table cannot be written or read."""
        try:
            yield
        except sqlite3.Error as error:
            if self._table.in_transaction:
                self._table.rollback()
            raise StorageError(f"{self.table} cannot be written: {error}") from error

    def close(self) -> None:
        """Leaves the folder to another server."""
        self._table.close()
        self._lock.close()

    def make_place(self) -> Path:
        """Makes the folder of a new video, which stays once its job is saved; the folder's name is the id."""
        place = self.place(new_id())
        with self._writing():
            self._table.execute("INSERT INTO videos (id, stays, job) VALUES (?, 0, '')", (place.name,))
        place.mkdir()
        return place

    def add(self, job: Job) -> None:
        """Writes the row of a job whose folder is made, and which stays from then on; raises StorageError."""
        with self._writing():
            self._table.execute(
                "INSERT INTO videos (id, stays, job) VALUES (?1, 1, ?2) "
                "ON CONFLICT (id) DO UPDATE SET stays = 1, job = ?2",
                (job.id, _to_text(job)),
            )

    def save(self, job: Job) -> None:
        """Writes what has become of a job; raises StorageError."""
        with self._writing():
            self._table.execute("UPDATE videos SET job = ? WHERE id = ?", (_to_text(job), job.id))

    def leave(self, id: str) -> None:
        """Notes that a video is removed, so that it does not come back; its files may still be in use.

        A full disk may have no room for the note: that of the video is then taken.
        """
        gone = "UPDATE videos SET stays = 0 WHERE id = ?", (id,)
        try:
            with self._writing():
                self._table.execute(*gone)
        except StorageError as error:
            if not is_full(error):
                raise
            with storing(), suppress(FileNotFoundError):
                (self.place(id) / VIDEO).unlink()
            with self._writing():
                self._table.execute(*gone)

    def remove(self, id: str) -> None:
        """Removes a video's row and its files."""
        self.leave(id)
        shutil.rmtree(self.place(id), ignore_errors=True)
        if not self.place(id).exists():  # else the next start tries again
            with self._writing():
                self._table.execute("DELETE FROM videos WHERE id = ?", (id,))

    def load(self, alive: str | None = None) -> list[Job]:
        """Returns the jobs in the order of their requests; removes what was not to stay.

        Those under way when the server ended are complete if their video is, and else wait again; but for those of
        workers that begin with `alive`.
        """
        with self._writing():
            rows = self._table.execute("SELECT id, stays, job FROM videos ORDER BY number").fetchall()
        found = []
        for id, stays, text in rows:
            if not isinstance(id, str) or not ID.fullmatch(id):
                self.strange.append(f"a row named {str(id)[:80]!r}")
            elif not stays:
                self.remove(id)
            elif (job := self._read(id, text)) is None:
                self.strange.append(f"the row of {id}")
            else:
                if not job.over and (alive is None or not job.worker.startswith(alive)):
                    self.settle(job)
                    self.save(job)
                found.append(job)
        named = {id for id, _, _ in rows}
        self.strange += sorted(place.name for place in self.folder.glob("video_*") if place.name not in named)
        return found

    def _read(self, id: str, text: str | bytes) -> Job | None:
        """Returns the job in a text; None where it is none whose files are its own."""
        with suppress(ValueError, TypeError, KeyError, ArithmeticError):
            job = JOBS.validate_json(text, strict=True)
            for name, known in schema(Settings).items():
                if job.settings.get(name) is not None:
                    known.read(job.settings[name])
            job.to_json()  # which needs some of them
            if job.id == id and all(map(FILE.fullmatch, job.files)):
                return job
        return None

    def settle(self, job: Job) -> None:
        """Decides what becomes of a job that was under way when the server, or its worker, ended."""
        job.worker = ""
        if (video := self.place(job.id) / VIDEO).exists():
            job.status, job.progress, job.completed_at = COMPLETED, 100, video.stat().st_mtime
        elif job.cancelled:
            job.status, job.completed_at, job.error = FAILED, time.time(), cancellation()
        elif job.status == RUNNING and job.tries >= self.tries:
            job.status, job.completed_at = FAILED, time.time()
            told = f"the server or its worker ended {job.tries} times while it made this video, so it tries no more"
            job.error = {"code": STOPPED, "message": told}
        else:
            job.status, job.progress, job.stage, job.done, job.total = QUEUED, 0, "", 0, 0


def cancellation() -> dict[str, str]:
    return {"code": CANCELLED, "message": "the video was cancelled"}


def _to_text(job: Job) -> str:
    return JOBS.dump_json(job).decode()


def _text(file: Path) -> bytes:
    """Returns the contents of a file, or nothing where there is none."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
