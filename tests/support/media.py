# SPDX-License-Identifier: Apache-2.0
"""Settings and folders for the tests of media files."""

from pathlib import Path

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


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
