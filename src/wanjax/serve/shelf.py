# SPDX-License-Identifier: Apache-2.0
"""The shelf of all requested videos: a table with a row for each, and a folder of each one's files.

What was answered is on the disk: a row is committed before a request is, and a server that was killed goes on from its
table. What cannot be trusted is left alone: rows that do not read as videos, and folders that no row names.

The folders may be in a store. The table may not, since it is a file of SQLite. What a row tells of is there before.
"""

import logging
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from wanjax.errors import WanjaxError, is_full
from wanjax.figures import quantity
from wanjax.pipelines.settings import Settings, schema
from wanjax.serve.faults import StorageError, storing
from wanjax.serve.jobs import COMPLETED, FAILED, JOBS, QUEUED, RUNNING, STOPPED, VIDEO, Job, VideoFolders, cancellation
from wanjax.stores.holding import Hold
from wanjax.stores.places import Place, Remote, StoreError
from wanjax.stores.writing import check_folder

TABLE, LOCK, FORMER = "videos.sqlite", "serving.lock", "job.json"  # the last was a row before there was a table
TRIES = 2  # times that a request may be under way when the server, or its worker, ends before it is given up
ID = re.compile(r"video_\w{1,64}", re.ASCII)
FILE = re.compile(r"\w{1,64}\.\w{1,8}", re.ASCII)
VERSION = 1  # of the table
NETWORKS = re.compile(r"nfs\d?|cifs|smb\w*|(fuse\.)?(ceph|glusterfs|sshfs|s3fs|gcsfuse|juicefs|lustre)|beegfs|gpfs|afs")
"""Kinds of file systems on which SQLite's locks do not hold."""
TABLE_HERE = "--table FOLDER, on a disk of this machine, keeps it"
SCHEMA = """
CREATE TABLE videos (
    number INTEGER PRIMARY KEY,  -- in the order of their requests
    id TEXT NOT NULL UNIQUE,
    stays INTEGER NOT NULL,      -- 0 while its folder is made or removed: what is left of it goes at the next start
    job TEXT NOT NULL            -- as JSON
)
"""
logger = logging.getLogger("wanjax.serve")


def new_id() -> str:
    return f"video_{secrets.token_hex(12)}"


class Shelf(VideoFolders):
    """The table of all videos, and their places.

    `strange` lists what was found and left alone: folders of videos that no row names, and rows that do not read.
    """

    def __init__(self, folder: Place, table: Path | None = None, tries: int = TRIES):
        """Opens the folder and its table, which are made if need be; of a server before there were tables, once.

        `table` is the folder of the table, None for the same, where that is no store's. `tries` is how often a video
        may be begun. Raises WanjaxError if they cannot be written, if another server uses them, or if the table is a
        newer one. A store is not asked, since the table of one that is away for a while is of use nevertheless.
        """
        super().__init__(folder)
        own = self.folder if table is None else table.expanduser().absolute()
        if not isinstance(own, Path):
            raise WanjaxError(f"{own} is a store, which can keep no table: {TABLE_HERE}")
        _check_disk(own)
        self.table, option = own / TABLE, "--dir" if own == self.folder else "--table"
        self.tries = tries
        self.strange: list[str] = []
        self._removal = ThreadPoolExecutor(1, "wanjax-removal")  # so that nobody waits for a store
        if isinstance(self.folder, Path):
            check_folder(self.folder)
        check_folder(own)
        options: Any = {"isolation_level": None, "check_same_thread": False}  # the board has a lock of its own
        self._lock = Hold(own / LOCK, "server", option)
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
                raise WanjaxError(f"{self.table} is of a newer wanjax, version {version}: another {option} would do")
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Makes the table, with a row for each video of a server that kept each in a file."""
        former = [(place, self._read(place.name, _text(place / FORMER))) for place in self._folders()]
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
        self._removal.shutdown(cancel_futures=True)
        self._table.close()
        self._lock.close()

    def make_place(self) -> Place:
        """Makes the folder of a new video, which stays once its job is saved; the folder's name is the id."""
        place = self.place(new_id())
        with self._writing():
            self._table.execute("INSERT INTO videos (id, stays, job) VALUES (?, 0, '')", (place.name,))
        if isinstance(place, Path):
            place.mkdir()
        return place

    def add(self, job: Job) -> None:
        """Writes the row of a job whose folder is made, and which stays from then on; raises StorageError.

        It is the last row, whenever its folder was made: a large picture takes longer to arrive than a later request.
        """
        with self._writing():
            self._table.execute(
                "INSERT INTO videos (id, stays, job) VALUES (?1, 1, ?2) "
                "ON CONFLICT (id) DO UPDATE SET stays = 1, job = ?2, number = (SELECT max(number) + 1 FROM videos)",
                (job.id, _to_text(job)),
            )

    def save(self, job: Job) -> None:
        """Writes what has become of a job; raises StorageError."""
        with self._writing():
            self._table.execute("UPDATE videos SET job = ? WHERE id = ?", (_to_text(job), job.id))

    def leave(self, id: str) -> None:
        """Notes that a video is removed, so that it does not come back; its files may still be in use.

        A full disk may have no room for the note: that of the video, if it is there too, is then taken.
        """
        gone = "UPDATE videos SET stays = 0 WHERE id = ?", (id,)
        try:
            with self._writing():
                self._table.execute(*gone)
        except StorageError as error:
            place = self.place(id)
            if not is_full(error) or not isinstance(place, Path):
                raise
            with storing(), suppress(FileNotFoundError):
                (place / VIDEO).unlink()
            with self._writing():
                self._table.execute(*gone)

    def remove(self, id: str) -> None:
        """Removes a video's row and its files, those in a store a moment later."""
        self.leave(id)
        if isinstance(place := self.place(id), Path):
            shutil.rmtree(place, ignore_errors=True)
            if not place.exists():  # else the next start tries again
                self._strike(id)
        else:
            self._removal.submit(self._remove_objects, id, place)

    def _remove_objects(self, id: str, place: Remote) -> None:
        """Removes a video's objects and then its row; what cannot be removed now goes at the next start."""
        try:
            place.remove_all()
            self._strike(id)
        except WanjaxError as error:
            logger.warning("%s", error)

    def _strike(self, id: str) -> None:
        """Removes a row."""
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
        self.strange += sorted(place.name for place in self._folders() if place.name not in named)
        return found

    def _folders(self) -> list[Path]:
        """Returns the folders of videos; none of a store, in which other servers may keep theirs."""
        return list(self.folder.glob("video_*")) if isinstance(self.folder, Path) else []

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
        if (completed := self._completed_at(job.id)) is not None:
            job.status, job.progress, job.completed_at = COMPLETED, 100, completed
        elif job.cancelled:
            job.status, job.completed_at, job.error = FAILED, time.time(), cancellation()
        elif job.status == RUNNING and job.tries >= self.tries:
            job.status, job.completed_at = FAILED, time.time()
            ends = quantity(job.tries, "time")
            told = f"the server or its worker ended {ends} while it made this video, so it tries no more"
            job.error = {"code": STOPPED, "message": told}
        else:
            job.status, job.progress, job.stage, job.done, job.total = QUEUED, 0, "", 0, 0

    def _completed_at(self, id: str) -> float | None:
        """Returns when a video was whole, for one in a store the present time; None for one that is not.

        One in a store that is out of reach counts as one that is not: it is made again.
        """
        video = self.place(id) / VIDEO
        if isinstance(video, Path):
            return video.stat().st_mtime if video.exists() else None
        with suppress(StoreError):
            return time.time() if video.is_file() else None
        return None


def _check_disk(folder: Path) -> None:
    """Raises WanjaxError where a table's folder is on a network file system."""
    parts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    nearest = max(parts, key=lambda part: len(part.mountpoint), default=None)
    if nearest is not None and NETWORKS.fullmatch(nearest.fstype):
        told = f"{folder} is on a network file system, {nearest.fstype}, where a table of SQLite is not safe"
        raise WanjaxError(f"{told}: {TABLE_HERE}")


def _to_text(job: Job) -> str:
    return JOBS.dump_json(job).decode()


def _text(file: Path) -> bytes:
    """Returns the contents of a file, or nothing where there is none."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
