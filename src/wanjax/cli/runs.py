# SPDX-License-Identifier: Apache-2.0
"""The folders in the user's cache in which `generate` stores the files of its stages.

A running command locks its folder, so that no other command uses or removes the folder.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from wanjax.errors import WanjaxError, wrap_write_errors
from wanjax.stores.locks import FileLock
from wanjax.stores.temporary import LEFTOVER_PATTERN
from wanjax.stores.user_folders import lasting_cache
from wanjax.stores.writing import check_folder

LOCK_FILE = "run.lock"
STAGE_FILES = re.compile(
    r"generation_config\.json|stage1_embeddings\.safetensors|stage2_(latents|state(_\d+)?(_pass_\d+)?)\.safetensors|preview\.png"
)
"""Patterns of the files that stages write. Only such files are removed."""
MAX_AGE_SECONDS = 14 * 24 * 3600.0  # the files of a stopped run are kept for this many seconds
MAX_TOTAL_BYTES = 20 * 10**9  # the maximum bytes of the files of all runs together
TEMP_PREFIX = "wanjax-run-"


def create_run_folder(names: Callable[[], Iterator[str]]) -> "LockedRun":
    """Create and lock a folder with the first unused name.

    The folder is in the user's cache. If the cache is full, or cannot be written or locked, the folder is a temporary
    folder.
    """
    if (runs := _runs_folder()) is not None:
        with suppress(WanjaxError):
            check_folder(runs)
            return _create_run(runs, names())
    return _create_run(Path(tempfile.mkdtemp(prefix=TEMP_PREFIX)), names())


def _create_run(parent: Path, names: Iterator[str]) -> "LockedRun":
    for name in names:
        folder = parent / name
        with wrap_write_errors(folder), suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            try:
                return LockedRun(folder)
            except WanjaxError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    raise AssertionError("`names` is endless")


def _runs_folder() -> Path | None:
    cache = lasting_cache()
    return cache and (cache / "runs").absolute()


def check_not_removed(folder: Path) -> None:
    """Raise WanjaxError if a folder that the user names was a folder of `generate` in the user's cache, and was
    removed."""
    if folder.absolute().parent == _runs_folder() and not folder.exists():
        raise WanjaxError(
            f"{folder} was removed, because its video is written or the run is older than 14 days: make the video again"
        )


def is_run_folder(folder: Path) -> bool:
    """Whether `generate` created and named the folder, not the user."""
    folder = folder.absolute()
    parent = folder.parent
    temporary = parent.name.startswith(TEMP_PREFIX) and parent.parent == Path(tempfile.gettempdir()).absolute()
    return (parent == _runs_folder() or temporary) and (folder / LOCK_FILE).is_file()


class LockedRun:
    """A run's folder that this process has locked."""

    def __init__(self, folder: Path):
        """Lock the folder; raise WanjaxError if another process has locked it."""
        self.folder = folder
        self._lock = FileLock(folder / LOCK_FILE, "run", "--dir")
        if not (folder / LOCK_FILE).exists():  # another process removed the folder before this process had the lock
            self._lock.close()
            raise WanjaxError(f"{folder} was removed, because its run is complete or too old: make the video again")

    def close(self, *, is_complete: bool) -> None:
        """Unlock the folder. If `is_complete`, remove the files in the folder. Remove the folder if it is then
        empty."""
        if is_complete:
            for file in _list_files(self.folder):
                if _is_stage_file(file.name):
                    with suppress(OSError):
                        file.unlink()
        if all(
            file.name.startswith(LOCK_FILE) for file in _list_files(self.folder)
        ):  # SQLite may have created a file next to the lock
            try:  # removed before unlocking; otherwise another process could lock a removed file
                (self.folder / LOCK_FILE).unlink(missing_ok=True)
            except OSError:  # for example on Windows, which cannot remove open files
                self._lock.close()
                with suppress(OSError):
                    (self.folder / LOCK_FILE).unlink(missing_ok=True)
            self._lock.close()
            with suppress(OSError):
                self.folder.rmdir()
                if self.folder.parent.name.startswith(TEMP_PREFIX):
                    self.folder.parent.rmdir()
        self._lock.close()


def remove_old_runs(*, keep: Path | None = None) -> None:
    """Remove the files of runs that are older than two weeks. If the files of all runs are still too large, remove the
    oldest runs.

    This keeps the files of running commands, files that no stage wrote, and the folder `keep`.
    """
    if (runs := _runs_folder()) is None:
        return
    run_folders = []
    with suppress(OSError):
        for folder in runs.iterdir():
            if folder.is_symlink() or not (folder / LOCK_FILE).is_file():
                continue
            with suppress(OSError):  # another command has removed the folder meanwhile
                stats = [file.stat() for file in _list_files(folder) if _is_stage_file(file.name)]
                last_used = max((stat.st_mtime for stat in stats), default=folder.stat().st_mtime)
                run_folders.append((last_used, sum(stat.st_size for stat in stats), folder))
    kept_folder = keep and keep.absolute()
    total = sum(size for _, size, _ in run_folders)
    for last_used, size, folder in sorted(run_folders):
        if folder != kept_folder and (time.time() - last_used > MAX_AGE_SECONDS or (size and total > MAX_TOTAL_BYTES)):
            with suppress(OSError, WanjaxError):  # the folder is in use, or belongs to another user
                LockedRun(folder).close(is_complete=True)
                total -= size


def _list_files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_symlink() or not path.is_dir()]
    except OSError:
        return []


def _is_stage_file(name: str) -> bool:
    """Whether a file has a name that a stage gives to its files, complete or incomplete."""
    leftover = LEFTOVER_PATTERN.fullmatch(name)
    return STAGE_FILES.fullmatch(leftover["name"] if leftover else name) is not None
