# SPDX-License-Identifier: Apache-2.0
"""The names of the files that the command line makes where none are given."""

from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import NamedTuple

from wanjax.cli import runs
from wanjax.media.texts import slug

VIDEOS = Path("wanjax_videos")


class RunFiles(NamedTuple):
    """The folder of a run's stage files, and the name of its video."""

    folder: Path
    video: str


def own_files(prompt: str, seed: int, out: str | None = None, *, reserve: bool = True) -> RunFiles:
    """Returns names that no other run has, from the prompt, the seed and the time; numbered if they are taken.

    `out` is the video's name if it is given. With `reserve` the folder is made, so that no other run takes its name;
    without it, there is none.
    """
    stem = f"{slug(prompt)}-{seed}-{datetime.now():%Y%m%d-%H%M%S}"
    parent = runs.parent_folder() if reserve else Path()
    for number in count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        files = RunFiles(parent / name, out or str(VIDEOS / f"{name}.mp4"))
        if out is None and Path(files.video).exists():
            continue
        with suppress(FileExistsError):
            if reserve:
                files.folder.mkdir(mode=0o700)
            return files
    raise AssertionError("there is always another number")
