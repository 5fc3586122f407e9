# SPDX-License-Identifier: Apache-2.0
"""The bounds of the pictures and clips that this process reads, whether by Pillow or by ffmpeg."""

from dataclasses import dataclass


@dataclass
class Bounds:
    """The most that a file with a picture or a clip may hold; a small file may say that it holds gigabytes.

    `pixels` are those of one picture, and `times` as many those of a clip. More is refused before it is decoded.
    """

    pixels: int = 60_000_000
    times: int = 16
    side: int = 32_768
    frames: int = 4_000

    @property
    def together(self) -> int:
        """The pixels of all frames of a clip."""
        return self.times * self.pixels


BOUNDS = Bounds()  # of what this process reads; `wanjax generate --max-picture` raises it
