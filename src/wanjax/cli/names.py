# SPDX-License-Identifier: Apache-2.0
"""Default names of the files that the command line writes, and the environment variable of a server's token."""

from collections.abc import Iterator
from datetime import datetime
from itertools import count
from pathlib import Path

from wanjax.media.text_files import slug
from wanjax.stores.paths import AnyPath, parse_path

DEFAULT_FOLDER = Path("wanjax_videos")
TOKEN_VARIABLE = "WANJAX_TOKEN"  # the environment variable of a server's token


def unused_names(prompt: str, seed: int) -> Iterator[str]:
    """Yield unused names for a video. The first name has the prompt, the seed and the time; the next names add a
    number."""
    stem = f"{slug(prompt)}-{seed}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        if not video_path(name).exists():
            yield name


def videos_folder(out: str | None) -> AnyPath:
    """Choose the folder for several videos. The folder may be in a store."""
    return DEFAULT_FOLDER if out is None else parse_path(out)


def video_path(name: str) -> Path:
    """Build the path of a video in the default folder."""
    return DEFAULT_FOLDER / f"{name}.mp4"
