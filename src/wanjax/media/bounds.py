# SPDX-License-Identifier: Apache-2.0
"""Limits on the size of the pictures and clips that this process reads with Pillow or ffmpeg."""

import math
from dataclasses import dataclass


@dataclass
class MediaLimits:
    """Limits that are checked before a file is decoded, because a small file may expand to gigabytes.

    Args:
        max_pixels: The maximum number of pixels of one picture or frame.
        clip_factor: All frames of a clip together may have `clip_factor` times `max_pixels` pixels.
        max_side: The largest width or height in pixels.
        max_animation_frames: The maximum number of frames of an animation.
    """

    max_pixels: int = 60_000_000
    clip_factor: int = 16
    max_side: int = 32_768
    max_animation_frames: int = 4_000

    @property
    def max_clip_pixels(self) -> int:
        """The maximum number of pixels of all frames of a clip together."""
        return self.clip_factor * self.max_pixels


def largest_size(width: int, height: int, pixels: int) -> str:
    """Format the largest allowed size WIDTHxHEIGHT with these proportions and at most `pixels` pixels.

    Args:
        width: The width of a picture in pixels.
        height: The height of the picture in pixels.
        pixels: The maximum number of pixels.
    """
    ratio = min(1.0, math.sqrt(pixels / (width * height)), MEDIA_LIMITS.max_side / max(width, height))
    return f"{max(1, int(width * ratio))}x{max(1, int(height * ratio))}"


MEDIA_LIMITS = MediaLimits()  # `wanjax generate --max-picture` changes `max_pixels` in this object
