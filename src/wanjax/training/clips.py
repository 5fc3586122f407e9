# SPDX-License-Identifier: Apache-2.0
"""Cut clips from files at the model's frame rate. Clips have only a few different sizes and lengths, so that few
programs are compiled."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from wanjax.errors import WanjaxError
from wanjax.figures import pluralize
from wanjax.media.pictures import Clip, fit_to_size, read_clip
from wanjax.media.video import VIDEO_ENCODERS

CutMode = Literal["head", "uniform", "windows"]
MAX_FRAMES = 1024  # the maximum number of frames to read from a file, at the model's frame rate
# width / height of the possible sizes, in addition to the default size
ASPECT_RATIOS = (9 / 16, 3 / 4, 1.0, 4 / 3, 16 / 9)
VIDEO_SUFFIXES = (".gif", *VIDEO_ENCODERS)


@dataclass(frozen=True)
class Bucket:
    """The shape of the clips in a batch."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}, {pluralize(self.frames, 'frame')}"


@dataclass(frozen=True)
class Cutting:
    """How clips are cut from files.

    Args:
        sizes: Possible sizes (height, width).
        lengths: Possible numbers of frames, in descending order.
        fps: Frames per second.
        cut: How clips are cut from a long file: the first frames (`head`), frames at equal distances (`uniform`), or
            consecutive clips (`windows`).
        resize: How frames are resized: `crop`, `pad` or `stretch`.
    """

    sizes: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    fps: int
    cut: CutMode
    resize: str

    def clips(self, file: Path) -> Iterator[Clip]:
        """Yield the clips of a file. Each clip has the shape of a bucket. A picture is a clip of one frame.

        Raises WanjaxError if the file cannot be read, or is shorter than the shortest clip.
        """
        longest = self.lengths[0]
        frames = read_clip(file, longest if self.cut == "head" else MAX_FRAMES, self.fps)
        is_video = file.suffix.lower() in VIDEO_SUFFIXES or len(frames) > 1
        lengths = [length for length in self.lengths if length > 1 or not is_video or self.lengths == (1,)]
        usable_lengths = [length for length in lengths if length <= len(frames)]
        if not usable_lengths and is_video:
            raise WanjaxError(
                f"it has {pluralize(len(frames), 'frame')} at {self.fps} frames a second, and the shortest clip has "
                f"{lengths[-1]}"
            )
        if not usable_lengths:  # the file is a picture, but all buckets have several frames
            raise WanjaxError(f"it is a picture, and the shortest clip has {pluralize(lengths[-1], 'frame')}")
        size = nearest_size(frames.shape[1:3], self.sizes)
        for frame_indices in self._clip_frames(len(frames), usable_lengths[0]):
            yield np.stack([fit_to_size(frames[i], size, self.resize) for i in frame_indices])

    def _clip_frames(self, count: int, length: int) -> list[list[int]]:
        """Return the indices of the frames of each clip of `length` frames in a file of `count` frames."""
        if self.cut == "uniform" and length > 1:
            return [[round(i * (count - 1) / (length - 1)) for i in range(length)]]
        if self.cut == "windows" and length > 1:
            return [list(range(start, start + length)) for start in range(0, count - length + 1, length)]
        return [list(range(length))]


def bucket_lengths(frames: int, factor: int, min_frames: int | None = None) -> tuple[int, ...]:
    """List the possible lengths of clips: `frames`, and about a half, a quarter, an eighth and so on of `frames`. All
    lengths have the form `factor` n + 1.

    Raises WanjaxError if no length is at least `min_frames`.
    """
    candidates, chunks = [], (frames - 1) // factor
    while chunks:
        candidates.append(chunks * factor + 1)
        chunks //= 2
    candidates.append(1)
    if min_frames is not None and min_frames > candidates[0]:
        raise WanjaxError(
            f"min_frames is {min_frames}, but the longest clip has {pluralize(candidates[0], 'frame')}: give fewer"
        )
    return tuple(length for length in candidates if length >= (min_frames or 1))


def bucket_sizes(
    size: tuple[int, int], size_for: Callable[[tuple[int, int, int]], tuple[int, int]], use_buckets: bool
) -> tuple[tuple[int, int], ...]:
    """List the possible sizes (height, width) of clips: `size` and, with `use_buckets`, other sizes of about the same
    area."""
    if not use_buckets:
        return (size,)
    other_sizes = [size_for((3600, round(3600 * ratio), 3)) for ratio in ASPECT_RATIOS]
    return tuple(dict.fromkeys([size, *other_sizes]))


def nearest_size(shape: Sequence[int], sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the size with the nearest aspect ratio. Among equally near sizes, return the first."""
    height, width = shape
    return min(sizes, key=lambda size: abs(math.log(size[1] / size[0]) - math.log(width / height)))
