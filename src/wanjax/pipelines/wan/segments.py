# SPDX-License-Identifier: Apache-2.0
"""Videos that follow a clip, in segments. Each segment starts from the last frames of the previous one.

    for each segment:
        encode the segment's part of the clip and the last frames of the previous segment, both with bars
        denoise and decode the segment
        yield the segment's new frames, without bars
        pass the last frames to the next segment, as floats and with bars

The clip is extended by playing it backwards and forwards, so that it fills the last segment. Animate follows diffusers'
pipelines/wan/pipeline_wan_animate.py, and has no bars. Animate 2 follows modular_pipelines/wan_animate_2 of diffusers,
or the authors' code, by the setting `follow`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int, UInt8

from wanjax.errors import SettingError
from wanjax.media.ffmpeg import probe
from wanjax.media.pictures import Clip, Pictures, is_picture_name
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.wan.letterbox import video_size, visible_box
from wanjax.pipelines.windows import MAX_WINDOWS, Window, Windowing

MIN_NEW_FRAMES = 28  # the authors' last segment adds at least this many frames
OVERLAPS = (1, 5)
Frames = Float[np.ndarray, "_T _H _W 3"]


def segments(count: int, settings: Settings) -> list[Int[np.ndarray, " _T"]]:
    """Return the indices of the clip's frames in each segment. The setting `windows` limits the number of segments.

    diffusers fills the last segment. The authors' code shortens the last segment to a few frames more than the clip
    has.

    Args:
        count: The number of frames of the clip.
        settings: The settings of the video.
    """
    step, follows_diffusers = settings.frames - settings.overlap, settings.follow == "diffusers"
    num_full, remainder = divmod(max(count - settings.overlap, 1), step)
    last = step if follows_diffusers else min(step, max(MIN_NEW_FRAMES, remainder + 4 - remainder % 4))
    lengths = [*[step] * num_full, *[last] * bool(remainder)][: settings.windows]
    indices = ping_pong_indices(count, settings.overlap + sum(lengths), repeats_ends=follows_diffusers)
    return [indices[i * step : i * step + settings.overlap + length] for i, length in enumerate(lengths)]


def ping_pong_indices(count: int, total: int, *, repeats_ends: bool) -> Int[np.ndarray, " _T"]:
    """Return `total` indices below `count` that run up and down. `repeats_ends` repeats the first and last index, as in
    diffusers."""
    period = 2 * count if repeats_ends else max(2 * count - 2, 1)
    indices = np.arange(total) % period
    return np.where(indices < count, indices, period - repeats_ends - indices)


def full_segments(count: int, clip_frames: int, settings: Settings) -> list[Int[np.ndarray, " _T"]]:
    """Return the indices of a clip's frames in each segment, if all segments are full.

    Args:
        count: The number of frames of the video.
        clip_frames: The number of frames of the clip. At its ends the clip reverses without repeating a frame.
        settings: The settings of the video.
    """
    step = settings.frames - settings.overlap
    number = min(max(math.ceil((count - settings.overlap) / step), 1), settings.windows)
    indices = ping_pong_indices(clip_frames, settings.overlap + number * step, repeats_ends=False)
    return [indices[i * step : i * step + settings.frames] for i in range(number)]


@dataclass(frozen=True)
class Segments(Windowing):
    """Windows that are the segments of the clip `video`. The video is as long as the clip."""

    follows_clip: ClassVar[bool] = True
    dtype: ClassVar[Any] = np.float32

    def check(self, settings: Settings, continuation_input: str | None) -> None:
        super().check(settings, continuation_input)
        if settings.match != "none":
            raise SettingError(
                f"{settings.model} does not match the {settings.match} of segments: leave match out", "match"
            )
        if settings.resize != "pad":
            raise SettingError(
                f"{settings.model} only pads pictures, got {settings.resize}: set resize to pad", "resize"
            )
        if settings.overlap not in OVERLAPS or settings.overlap >= settings.frames:
            problem = f"segments of {settings.frames} frames cannot have an overlap of {settings.overlap}"
            raise SettingError(f"{problem}: give an overlap of {' or '.join(map(str, OVERLAPS))}", "overlap")

    def clip_frames(self, settings: Settings, continuation_input: str | None, *, is_limited: bool) -> int:
        return settings.length if is_limited else replace(settings, windows=MAX_WINDOWS).length

    def match_frame_rate(self, pictures: Pictures, sources: Mapping[str, Any], settings: Settings) -> Pictures:
        """Repeat frames of video files with a lower frame rate, by the nearest frame. Other clips have no frame
        rate."""
        files = {
            name: source
            for name, source in sources.items()
            if isinstance(source, str | Path) and Path(source).is_file() and not is_picture_name(Path(source))
        }
        rates = {name: probe(file).min_fps for name, file in files.items()}
        slow_clips = {name: rate for name, rate in rates.items() if 0 < rate < settings.fps}
        return pictures.with_inputs(
            **{name: _match_frame_rate(pictures[name], rate, settings.fps) for name, rate in slow_clips.items()}
        )

    def video_shape(self, pictures: Pictures, settings: Settings, *, is_limited: bool) -> Mapping[str, int]:
        limit = settings.windows if is_limited else MAX_WINDOWS
        return {"windows": len(self.segments(pictures, replace(settings, windows=limit)))}

    def segments(self, pictures: Pictures, settings: Settings) -> list[Int[np.ndarray, " _T"]]:
        """Return the indices of the clip's frames in each segment."""
        count = _length(pictures)
        return full_segments(count, count, settings)

    def size(self, settings: Settings, pictures: Pictures) -> tuple[int, int]:
        """Return the (height, width) of the decoded frames."""
        return settings.size

    def remove_bars(self, frames: Frames, settings: Settings, pictures: Pictures) -> Frames:
        """Return the part of decoded frames that the video shows."""
        return frames

    def windows(self, settings: Settings, pictures: Pictures) -> list[Window]:
        indices = self.segments(pictures, settings)
        height, width = self.size(settings, pictures)
        windows = super().windows(replace(settings, windows=len(indices)), pictures)
        return [
            window._replace(settings=replace(window.settings, frames=len(frames), height=height, width=width))
            for window, frames in zip(windows, indices, strict=True)
        ]

    def finish(
        self, window: Window, settings: Settings, pictures: Pictures, frames: Frames, previous_frames: Any
    ) -> tuple[Clip, Any, None]:
        start = window.index * (settings.frames - settings.overlap)
        new_frames = frames[0 if previous_frames is None else settings.overlap : _length(pictures) - start]
        visible = self.remove_bars(new_frames, window.settings, pictures)
        return np.rint(visible * np.float32(255)).astype(np.uint8), frames[-settings.overlap :], None


@dataclass(frozen=True)
class ClipSegments(Segments):
    """The segments of a raw driving clip. The size in the settings is an area, and the picture has bars.

    Args:
        size_multiple: Height and width are multiples of this number of pixels.
    """

    size_multiple: int

    def segments(self, pictures: Pictures, settings: Settings) -> list[Int[np.ndarray, " _T"]]:
        return segments(_length(pictures), settings)

    def size(self, settings: Settings, pictures: Pictures) -> tuple[int, int]:
        area = settings.height * settings.width
        return video_size(_picture_sides(pictures), area, self.size_multiple, settings.follow)

    def pictures(
        self,
        window: Window,
        settings: Settings,
        pictures: Pictures,
        previous_frames: Any,
        continuation_input: str | None,
    ) -> Pictures:
        clip: Any = pictures.clip("video")
        frames = clip[self.segments(pictures, settings)[window.index]]
        first = clip[0] if settings.follow == "diffusers" else frames[0]
        return pictures.with_inputs(video=frames, clip_image=first, previous_frames=previous_frames)

    def remove_bars(self, frames: Frames, settings: Settings, pictures: Pictures) -> Frames:
        sides = _picture_sides(pictures)
        top, left, height, width = visible_box(sides, settings.size, self.size_multiple, settings.follow)
        return frames[:, top : top + height, left : left + width]


def _match_frame_rate(clip: Clip, rate: float, fps: float) -> UInt8[np.ndarray, "_T _H _W 3"]:
    """Repeat frames of a clip with `rate` frames per second, so that it has `fps` frames per second."""
    times = np.arange(int(len(clip) / rate * fps)) / fps
    return clip[np.minimum(np.round(times * rate).astype(int), len(clip) - 1)]


def _length(pictures: Pictures) -> int:
    return len(pictures["video"])


def _picture_sides(pictures: Pictures) -> tuple[int, int]:
    height, width, _ = pictures["image"].shape
    return height, width
