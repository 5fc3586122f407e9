# SPDX-License-Identifier: Apache-2.0
"""Choose the size of a video of a character, and scale pictures into the centre of a black frame without distortion.

The size in the settings only gives an area. The character's picture gives the proportions. Follows encoders.py and
video_processor.py in modular_pipelines/wan_animate_2 of diffusers. The setting `follow` can select the authors' code
where it differs.
"""

import math
from typing import NamedTuple

import numpy as np
from PIL import Image

from wanjax.errors import SettingError
from wanjax.media.pictures import Picture, PictureOfAnySize

BICUBIC, BILINEAR, LANCZOS = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.LANCZOS


class Box(NamedTuple):
    """A part of a frame, in pixels."""

    top: int
    left: int
    height: int
    width: int


def video_size(picture: tuple[int, int], area: int, multiple: int, reference_impl: str) -> tuple[int, int]:
    """Return the (height, width) of a video of about `area` pixels with the proportions of a picture.

    diffusers rounds the picture's sides down, takes the proportions of the rounded sides, and computes in float64. The
    authors' code takes the proportions of the picture's own sides.

    Args:
        picture: (height, width) of the picture.
        area: The area.
        multiple: Both sides are rounded down to a multiple of this number.
        reference_impl: Which reference implementation to match, as in the settings.

    Raises:
        SettingError: A side would be 0.
    """
    height, width = picture
    if reference_impl == "diffusers":
        height, width = _floored(picture, multiple)
        ratio = height / width if height and width else 0
        sides = (int(math.sqrt(area * ratio)), int(math.sqrt(area / ratio))) if ratio else (0, 0)
    else:
        sides = math.isqrt(area * height // width), math.isqrt(area * width // height)
    size = _floored(sides, multiple)
    if not all(size):
        raise SettingError(
            f"a picture of {picture[1]}x{picture[0]} gives a side below {multiple} pixels: give a larger size, or a "
            "picture with sides of more equal length",
            "size",
        )
    return size


def content_box(picture: tuple[int, int], size: tuple[int, int], *, larger_bar_first: bool = False) -> Box:
    """Return the position of the whole picture in a frame of this (height, width). The two bars are equal, or differ by
    a pixel.

    Args:
        picture: (height, width) of the picture.
        size: (height, width) of the frame.
        larger_bar_first: Whether the top or left bar is the larger one, if the bars differ.
    """
    (height, width), (frame_height, frame_width) = picture, size
    is_wider = frame_width / frame_height < width / height
    inner_width = frame_width if is_wider else max(1, width * frame_height // height)
    inner_height = max(1, height * frame_width // width) if is_wider else frame_height
    top, left = (
        (outer - inner + larger_bar_first) // 2
        for outer, inner in ((frame_height, inner_height), (frame_width, inner_width))
    )
    return Box(top, left, inner_height, inner_width)


def visible_box(picture: tuple[int, int], size: tuple[int, int], multiple: int, reference_impl: str) -> Box:
    """Return the part of a video's frames that the picture covers. diffusers computes this part from rounded sides.

    Args:
        picture: (height, width) of the picture.
        size: (height, width) of the frames.
        multiple: diffusers rounds each side of the picture down to a multiple of this number.
        reference_impl: Which reference implementation to match, as in the settings.
    """
    return content_box(_floored(picture, multiple) if reference_impl == "diffusers" else picture, size)


def letterbox(
    picture: PictureOfAnySize, size: tuple[int, int], resample: Image.Resampling, *, larger_bar_first: bool = False
) -> Picture:
    """Scale a whole picture into the centre of a black frame of this (height, width), by one of Pillow's filters.
    `larger_bar_first` is as in `content_box`.
    """
    height, width, _ = picture.shape
    top, left, inner_height, inner_width = content_box((height, width), size, larger_bar_first=larger_bar_first)
    frame = np.zeros((*size, 3), np.uint8)
    resized = Image.fromarray(picture).resize((inner_width, inner_height), resample)
    frame[top : top + inner_height, left : left + inner_width] = np.asarray(resized)
    return frame


def _floored(sides: tuple[int, int], multiple: int) -> tuple[int, int]:
    height, width = (side // multiple * multiple for side in sides)
    return height, width
