# SPDX-License-Identifier: Apache-2.0
"""Videos that follow a driving clip, in segments. Each segment starts from the last frames of the previous one.

    for each segment:
        encode its part of the clip and the carried frames, both with bars
        denoise and decode it
        yield its new frames, without bars
        carry its last frames, as floats and with bars

The clip is extended to and fro, so that it fills the last segment. This follows modular_pipelines/wan_animate_2 of
diffusers, and where the authors' code differs, that code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from wanjax.errors import SettingError
from wanjax.media.ffmpeg import probe
from wanjax.media.pictures import Clip, Pictures, is_picture_name
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.wan.letterbox import video_size, visible_box
from wanjax.pipelines.windows import MAX_WINDOWS, Window, Windowing

MIN_NEW_FRAMES = 28  # the authors' last segment adds at least this many frames
OVERLAPS = (1, 5)


def segments(count: int, settings: Settings) -> list[Int[np.ndarray, " _T"]]:
    """Return the numbers of the clip's frames in each segment; the setting `windows` limits the number of segments.

    diffusers fills the last segment. The authors shorten it to a few frames more than the clip has.

    Args:
        count: The number of frames of the clip.
        settings: The settings of the video.
    """
    step, follows_diffusers = settings.frames - settings.overlap, settings.follow == "diffusers"
    full, rest = divmod(max(count - settings.overlap, 1), step)
    last = step if follows_diffusers else min(step, max(MIN_NEW_FRAMES, rest + 4 - rest % 4))
    lengths = [*[step] * full, *[last] * bool(rest)][: settings.windows]
    numbers = to_and_fro(count, settings.overlap + sum(lengths), repeats_ends=follows_diffusers)
    return [numbers[i * step : i * step + settings.overlap + length] for i, length in enumerate(lengths)]


def to_and_fro(count: int, total: int, *, repeats_ends: bool) -> Int[np.ndarray, " _T"]:
    """Return `total` numbers below `count` that go up and down; the ends are repeated, as in diffusers, or not."""
    period = 2 * count if repeats_ends else max(2 * count - 2, 1)
    numbers = np.arange(total) % period
    return np.where(numbers < count, numbers, period - repeats_ends - numbers)


@dataclass(frozen=True)
class ClipSegments(Windowing):
    """Windows that are the segments of the clip `video`. The size in the settings is an area.

    Args:
        size_multiple: Height and width are multiples of this number of pixels.
    """

    follows_clip: ClassVar[bool] = True
    dtype: ClassVar[Any] = np.float32
    size_multiple: int

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

    def at_rate(self, pictures: Pictures, sources: Mapping[str, Any], settings: Settings) -> Pictures:
        """Repeat frames of a slower video file, by the nearest frame. Other clips have no rate."""
        clip, source = pictures.clip("video"), sources["video"]
        is_file = isinstance(source, str | Path) and Path(source).is_file() and not is_picture_name(Path(source))
        rate = probe(source).min_fps if is_file else 0
        if clip is None or not 0 < rate < settings.fps:
            return pictures
        times = np.arange(int(len(clip) / rate * settings.fps)) / settings.fps
        return pictures.with_inputs(video=clip[np.minimum(np.round(times * rate).astype(int), len(clip) - 1)])

    def video_shape(self, pictures: Pictures, settings: Settings, *, is_limited: bool) -> Mapping[str, int]:
        clip: Any = pictures.clip("video")
        limit = settings.windows if is_limited else MAX_WINDOWS
        return {"windows": len(segments(len(clip), replace(settings, windows=limit)))}

    def windows(self, settings: Settings, pictures: Pictures) -> list[Window]:
        clip: Any = pictures.clip("video")
        numbers = segments(len(clip), settings)
        height, width = self._size(settings, pictures)
        windows = super().windows(replace(settings, windows=len(numbers)), pictures)
        return [
            window._replace(settings=replace(window.settings, frames=len(frames), height=height, width=width))
            for window, frames in zip(windows, numbers, strict=True)
        ]

    def pictures(
        self, window: Window, settings: Settings, pictures: Pictures, carried: Any, continuation_input: str | None
    ) -> Pictures:
        clip: Any = pictures.clip("video")
        frames = clip[segments(len(clip), settings)[window.index]]
        first = clip[0] if settings.follow == "diffusers" else frames[0]
        return pictures.with_inputs(video=frames, clip_image=first, carried=carried)

    def finish(
        self,
        window: Window,
        settings: Settings,
        pictures: Pictures,
        frames: Float[np.ndarray, "_T _H _W 3"],
        carried: Any,
    ) -> tuple[Clip, Any, None]:
        clip: Any = pictures.clip("video")
        start = window.index * (settings.frames - settings.overlap)
        new = frames[0 if carried is None else settings.overlap : len(clip) - start]
        multiple, sides = self.size_multiple, self._picture_sides(pictures)
        top, left, height, width = visible_box(sides, window.settings.size, multiple, settings.follow)
        visible = new[:, top : top + height, left : left + width]
        return np.rint(visible * np.float32(255)).astype(np.uint8), frames[-settings.overlap :], None

    def _size(self, settings: Settings, pictures: Pictures) -> tuple[int, int]:
        area = settings.height * settings.width
        return video_size(self._picture_sides(pictures), area, self.size_multiple, settings.follow)

    @staticmethod
    def _picture_sides(pictures: Pictures) -> tuple[int, int]:
        image: Any = pictures.picture("image")
        height, width, _ = image.shape
        return height, width
