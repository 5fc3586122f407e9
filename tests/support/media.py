# SPDX-License-Identifier: Apache-2.0
"""Settings, folders and a picture for the tests of media files."""

import io
from pathlib import Path

from PIL import Image

SETTINGS = {
    "model": "nano",
    "prompt": 'a "red" circle; 红 = #1 \\ 100%\nnew line\x00',
    "negative_prompt": "",
    "height": 32,
    "width": 64,
    "frames": 5,
    "fps": 16,
    "steps": 4,
    "guidance_scale": 5.0,
    "seed": 7,
}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def picture(size: tuple[int, int] = (40, 30), kind: str = "PNG") -> bytes:
    """Return a red picture as a file."""
    file = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(file, kind)
    return file.getvalue()
