# SPDX-License-Identifier: Apache-2.0
"""Clips cut from files: of the model's rate, of few sizes and few lengths, so that few programs are compiled."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from wanjax.errors import WanjaxError
from wanjax.figures import quantity
from wanjax.media.pictures import Clip, fit, read_clip
from wanjax.media.video import FILMS

Cut = Literal["head", "uniform", "windows"]
LONGEST = 1024  # frames of a file that are read, at the model's rate
PROPORTIONS = (9 / 16, 3 / 4, 1.0, 4 / 3, 16 / 9)  # width to height, beside those of the model's default size
VIDEO_SUFFIXES = (".gif", *FILMS)


@dataclass(frozen=True)
class Bucket:
    """The shape of the clips that are trained on together."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}, {quantity(self.frames, 'frame')}"


@dataclass(frozen=True)
class Cutting:
    """The way in which clips are cut: the sizes and lengths, the frames a second, and the frames that are taken.

    `head` takes the first frames of a file, `uniform` frames from all of it, and `windows` all of it in pieces.
    `sizes` are (height, width), and `lengths` fall.
    """

    sizes: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    fps: int
    cut: Cut
    resize: str

    def __post_init__(self):
        if self.cut not in get_args(Cut):
            raise WanjaxError(f"clips cannot be cut by {self.cut!r}: give {', '.join(get_args(Cut))}")

    def clips(self, file: Path) -> Iterator[Clip]:
        """Yield the clips of a file, each of the shape of a bucket; a picture is a clip of one frame.

        Raises WanjaxError where the file cannot be read, or is shorter than the shortest clip.
        """
        longest = self.lengths[0]
        frames = read_clip(file, longest if self.cut == "head" else LONGEST, self.fps)
        is_video = file.suffix.lower() in VIDEO_SUFFIXES or len(frames) > 1
        lengths = [n for n in self.lengths if n > 1 or not is_video or self.lengths == (1,)]
        usable = [n for n in lengths if n <= len(frames)]
        if not usable and is_video:
            raise WanjaxError(
                f"it has {quantity(len(frames), 'frame')} at {self.fps} a second where {lengths[-1]} are the least"
            )
        if not usable:  # a picture, where only clips are trained on
            raise WanjaxError(f"it is a picture where clips of {quantity(lengths[-1], 'frame')} are the least")
        size = nearest(frames.shape[1:3], self.sizes)
        for frame_indices in self._clip_frames(len(frames), usable[0]):
            yield np.stack([fit(frames[i], size, self.resize) for i in frame_indices])

    def _clip_frames(self, count: int, length: int) -> list[list[int]]:
        """Return the frames of each clip of `length`, of `count` frames."""
        if self.cut == "uniform" and length > 1:
            return [[round(i * (count - 1) / (length - 1)) for i in range(length)]]
        if self.cut == "windows" and length > 1:
            return [list(range(start, start + length)) for start in range(0, count - length + 1, length)]
        return [list(range(length))]


def lengths(frames: int, factor: int, min_frames: int | None = None) -> tuple[int, ...]:
    """Return the lengths of clips: `frames`, about half of it and so on, of the form `factor` n + 1, and 1.

    Raises WanjaxError where none of them is at least `min_frames`.
    """
    candidates, units = [], (frames - 1) // factor
    while units:
        candidates.append(units * factor + 1)
        units //= 2
    candidates.append(1)
    if min_frames is not None and min_frames > candidates[0]:
        raise WanjaxError(
            f"the shortest clip has {quantity(min_frames, 'frame')} and the longest {candidates[0]}: give fewer"
        )
    return tuple(n for n in candidates if n >= (min_frames or 1))


def sizes(
    size: tuple[int, int], size_for: Callable[[tuple[int, int, int]], tuple[int, int]], buckets: bool
) -> tuple[tuple[int, int], ...]:
    """Return the sizes of clips (height, width), about as large as the one asked for, which is the first."""
    if not buckets:
        return (size,)
    others = [size_for((3600, round(3600 * ratio), 3)) for ratio in PROPORTIONS]
    return tuple(dict.fromkeys([size, *others]))


def nearest(shape: Sequence[int], sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the size with the nearest proportions; the first of several."""
    height, width = shape
    return min(sizes, key=lambda size: abs(math.log(size[1] / size[0]) - math.log(width / height)))
