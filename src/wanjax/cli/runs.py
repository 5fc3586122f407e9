# SPDX-License-Identifier: Apache-2.0
"""The folders of stage files that `generate` keeps in the user's cache, for as long as they are of use.

A run holds a lock on its folder, so that no other command uses or removes it meanwhile.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from wanjax.errors import WanjaxError, write_errors
from wanjax.stores.locks import FileLock
from wanjax.stores.temporary import LEFTOVER
from wanjax.stores.user_folders import lasting_cache
from wanjax.stores.writing import check_folder

LOCK = "run.lock"
FILES = re.compile(
    r"generation_config\.json|stage1_embeddings\.safetensors|stage2_(latents|state(_\d+)?(_pass_\d+)?)\.safetensors|preview\.png"
)
"""The files of a run's stages. No other is removed."""
MAX_AGE = 14 * 24 * 3600.0  # seconds that the files of a stopped run are kept
MAX_TOTAL_BYTES = 20 * 10**9  # bytes of all of them
TEMPORARY = "wanjax-run-"


def create_run(names: Callable[[], Iterator[str]]) -> "HeldRun":
    """Make a folder with the first of the names that is free, and take it.

    It is in the user's cache, or a temporary one where that has no room, or can be neither written nor locked.
    """
    if (runs := _cached_runs()) is not None:
        with suppress(WanjaxError):
            check_folder(runs)
            return _create_run(runs, names())
    return _create_run(Path(tempfile.mkdtemp(prefix=TEMPORARY)), names())


def _create_run(parent: Path, names: Iterator[str]) -> "HeldRun":
    for name in names:
        folder = parent / name
        with write_errors(folder), suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            try:
                return HeldRun(folder)
            except WanjaxError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    raise AssertionError("there is always another name")


def _cached_runs() -> Path | None:
    cache = lasting_cache()
    return cache and (cache / "runs").absolute()


def check_not_past(folder: Path) -> None:
    """Raise WanjaxError for a folder of the user's cache that `generate` made, and that is gone."""
    if folder.absolute().parent == _cached_runs() and not folder.exists():
        raise WanjaxError(f"{folder} is gone: its run has written its video, or was cleaned away after 14 days")


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder was made by `generate`, not named by a user."""
    folder = folder.absolute()
    parent = folder.parent
    temporary = parent.name.startswith(TEMPORARY) and parent.parent == Path(tempfile.gettempdir()).absolute()
    return (parent == _cached_runs() or temporary) and (folder / LOCK).is_file()


class HeldRun:
    """A run's folder, on which this process holds the lock."""

    def __init__(self, folder: Path):
        """Take the lock. Raises WanjaxError if another process has it."""
        self.folder = folder
        self._lock = FileLock(folder / LOCK, "run", "--dir")
        if not (folder / LOCK).exists():  # it went before this process had the lock
            self._lock.close()
            raise WanjaxError(f"{folder} was removed, because its run is complete or too old: make the video again")

    def close(self, *, done: bool) -> None:
        """Let go of the folder, and remove its files if the run is `done`; in any case the folder if it has none."""
        if done:
            for file in _files(self.folder):
                if _is_stage_file(file.name):
                    with suppress(OSError):
                        file.unlink()
        if all(file.name.startswith(LOCK) for file in _files(self.folder)):  # SQLite may have one beside it
            try:  # while it is held, or another process could take the lock of a file that goes
                (self.folder / LOCK).unlink(missing_ok=True)
            except OSError:  # as on Windows, which removes no open file
                self._lock.close()
                with suppress(OSError):
                    (self.folder / LOCK).unlink(missing_ok=True)
            self._lock.close()
            with suppress(OSError):
                self.folder.rmdir()
                if self.folder.parent.name.startswith(TEMPORARY):
                    self.folder.parent.rmdir()
        self._lock.close()


def sweep(*, but: Path | None = None) -> None:
    """Remove the files of stopped runs that are older than two weeks, then the oldest while all are too large.

    Those of a run that goes on stay, and so does everything that is no run's, and the folder `but`.
    """
    if (runs := _cached_runs()) is None:
        return
    stopped = []
    with suppress(OSError):
        for folder in runs.iterdir():
            if folder.is_symlink() or not (folder / LOCK).is_file():
                continue
            with suppress(OSError):  # another command removes it
                stats = [file.stat() for file in _files(folder) if _is_stage_file(file.name)]
                used = max((each.st_mtime for each in stats), default=folder.stat().st_mtime)
                stopped.append((used, sum(each.st_size for each in stats), folder))
    wanted = but and but.absolute()
    total = sum(size for _, size, _ in stopped)
    for used, size, folder in sorted(stopped):
        if folder != wanted and (time.time() - used > MAX_AGE or (size and total > MAX_TOTAL_BYTES)):
            with suppress(OSError, WanjaxError):  # it is in use, or another user's
                HeldRun(folder).close(done=True)
                total -= size


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_symlink() or not path.is_dir()]
    except OSError:
        return []


def _is_stage_file(name: str) -> bool:
    """Return whether a name is that of a stage's file, or of one that a killed process did not complete."""
    left = LEFTOVER.fullmatch(name)
    return FILES.fullmatch(left["name"] if left else name) is not None
