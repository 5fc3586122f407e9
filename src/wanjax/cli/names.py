# SPDX-License-Identifier: Apache-2.0
"""The names of the files that the command line makes where none are given."""

from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import NamedTuple

from wanjax.media.texts import slug
from wanjax.stores.writing import check_folder

VIDEOS, STAGES = Path("wanjax_videos"), Path("stage_outputs")


class RunFiles(NamedTuple):
    """The folder of a run's stage files, and the name of its video."""

    folder: Path
    video: str


def own_files(prompt: str, seed: int, out: str | None = None, *, reserve: bool = True) -> RunFiles:
    """Returns names that no other run has, from the prompt, the seed and the time; numbered if they are taken.

    `out` is the video's name if it is given. With `reserve` the folder is made, so that no other run takes its name.
    """
    stem = f"{slug(prompt)}-{seed}-{datetime.now():%Y%m%d-%H%M%S}"
    if reserve:
        check_folder(STAGES)
    for number in count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        files = RunFiles(STAGES / name, out or str(VIDEOS / f"{name}.mp4"))
        if out is None and Path(files.video).exists():
            continue
        with suppress(FileExistsError):
            if reserve:
                files.folder.mkdir()
            return files
    raise AssertionError("there is always another number")


def release(files: RunFiles) -> None:
    """Removes the folders of a run that are empty, because it kept nothing."""
    for folder in (files.folder, STAGES, VIDEOS):
        with suppress(OSError):  # it holds something
            folder.rmdir()
