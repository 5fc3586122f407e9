# SPDX-License-Identifier: Apache-2.0
"""The names of the files that the command line makes where none are given, and of a variable that it reads."""

from collections.abc import Iterator
from datetime import datetime
from itertools import count
from pathlib import Path

from wanjax.media.text_files import slug
from wanjax.stores.paths import AnyPath, parse_path

VIDEOS = Path("wanjax_videos")
TOKEN = "WANJAX_TOKEN"  # the variable with what a server wants to be shown


def free_names(prompt: str, seed: int) -> Iterator[str]:
    """Yield names that no video has, from the prompt, the seed and the time; numbered if they are taken."""
    stem = f"{slug(prompt)}-{seed}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        if not video_named(name).exists():
            yield name


def videos_folder(out: str | None) -> AnyPath:
    """Return the folder of several videos, which may be in a store."""
    return VIDEOS if out is None else parse_path(out)


def video_named(name: str) -> Path:
    """Return the video of a name."""
    return VIDEOS / f"{name}.mp4"
