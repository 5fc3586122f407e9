# SPDX-License-Identifier: Apache-2.0
"""Limits on the size of the pictures and clips that this process reads with Pillow or ffmpeg."""

from dataclasses import dataclass


@dataclass
class Bounds:
    """Limits that are checked before a file is decoded, since a small file may expand to gigabytes.

    Args:
        pixels: The most pixels of one picture or frame.
        clip_factor: All frames of a clip together may have this many times `pixels`.
        side: The largest width or height in pixels.
        frames: The most frames of an animation.
    """

    pixels: int = 60_000_000
    clip_factor: int = 16
    side: int = 32_768
    frames: int = 4_000

    @property
    def clip_pixels(self) -> int:
        """The most pixels that all frames of a clip may have together."""
        return self.clip_factor * self.pixels


BOUNDS = Bounds()  # `wanjax generate --max-picture` raises its `pixels`
