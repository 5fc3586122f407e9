# SPDX-License-Identifier: Apache-2.0
"""Long videos of several windows.

Each window has the model's usual length, and starts from the last frames of the previous window.

    for each window:
        encode the last frames of the previous window, as its first image or as the known part of a control clip
        denoise and decode it, with its own prompt and seed
        match its colours to the previous window, if the setting `match` asks for it
        yield its new frames, with the seam faded

Windows share frames, not latents: the autoencoders are causal, and encode the first frame of a window as a single
image. The autoencoder's loss shows as a faint jump of the whole frame at each seam. `fade_seam` spreads the jump over
several frames.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8

from wanjax.errors import SettingError
from wanjax.figures import pluralize
from wanjax.media.pictures import Clip, Pictures, fit_to_size
from wanjax.pipelines.colour_match import Drift, fit_colours, match_colours, measure_drift
from wanjax.pipelines.settings import MATCH_COLOUR, SEED_BITS, Settings, check_prompt_count

IMAGE_INPUT, CONTROL_INPUT = "image", "video"  # the input that receives the last frames of the previous window
GREY = 127  # the colour of unknown frames
FADE_FRAMES = 4  # the number of frames over which the jump at a seam fades
MAX_WINDOWS = 1000
MAX_FADED_DIFFERENCE = 16.0  # in pixel values from 0 to 255; much larger differences are motion, which is not faded


class Seam(NamedTuple):
    """The seam of a window and the previous one.

    Attributes:
        window: The window's number, from 0.
        drift: The change of colours in the frames that the window repeats.
    """

    window: int
    drift: Drift


class Window(NamedTuple):
    """A window: its index from 0, the number of windows, and the settings for the window as a video of its own."""

    index: int
    count: int
    settings: Settings

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.count


@dataclass(frozen=True)
class Windowing:
    """How a model makes long videos. By default, windows share frames, and the jump at a seam is faded.

    A family overrides the methods if its windows follow a clip.
    """

    follows_clip: ClassVar[bool] = False
    """True if the clip `video` decides the number of windows, and the frames of each window."""
    dtype: ClassVar[Any] = np.uint8
    """The type of decoded frames."""

    def check(self, settings: Settings, continuation_input: str | None) -> None:
        """Raise WanjaxError if the model cannot make these windows."""
        check_windows(settings, continuation_input)

    def clip_frames(self, settings: Settings, continuation_input: str | None, *, is_limited: bool) -> int:
        """Count the frames of a clip that a video uses. `is_limited` is True if the user gives the number of
        windows."""
        return settings.length if continuation_input == CONTROL_INPUT else settings.frames

    def match_frame_rate(self, pictures: Pictures, sources: Mapping[str, Any], settings: Settings) -> Pictures:
        """If windows follow the clip, repeat frames of a clip with a lower frame rate than the video."""
        return pictures

    def video_shape(self, pictures: Pictures, settings: Settings, *, is_limited: bool) -> Mapping[str, int]:
        """Return the settings that follow from the clip, if windows follow a clip."""
        return {}

    def windows(self, settings: Settings, pictures: Pictures) -> list[Window]:
        """Return the windows of a video."""
        return windows_of(settings)

    def pictures(
        self,
        window: Window,
        settings: Settings,
        pictures: Pictures,
        previous_frames: Any,
        continuation_input: str | None,
    ) -> Pictures:
        """Select the pictures of a window. `previous_frames` is the second result of `finish` for the previous
        window."""
        return window_pictures(window, pictures, previous_frames, continuation_input)

    def finish(
        self,
        window: Window,
        settings: Settings,
        pictures: Pictures,
        frames: Shaped[np.ndarray, "_T _H _W 3"],
        previous_frames: Any,
    ) -> tuple[Clip, Any, Drift | None]:
        """Return the new frames of a window, the frames that the next window starts from, and the drift of colours."""
        if previous_frames is None:
            return frames, frames[-settings.overlap :], None
        new_frames, drift = join_window(previous_frames, frames, settings.match)
        return new_frames, np.concatenate([previous_frames, new_frames])[-settings.overlap :], drift


def windows_of(settings: Settings) -> list[Window]:
    """Return the windows of a video. Each window has its own prompt and its own seed, so that no noise repeats."""
    window_settings = replace(settings, windows=1, then="")
    return [
        Window(
            index,
            settings.windows,
            replace(window_settings, prompt=prompt, seed=(settings.seed + index) % 2**SEED_BITS),
        )
        for index, prompt in enumerate(settings.prompts)
    ]


def check_windows(settings: Settings, continuation_input: str | None) -> None:
    """Raise WanjaxError if a model cannot make these windows, given its `ModelSpec.continuation_input`."""
    check_prompt_count(settings.then, settings.windows)
    if settings.windows == 1:
        return
    if continuation_input is None:
        problem = f"{settings.model} cannot continue a video in several windows"
        raise SettingError(f"{problem}: choose a model that takes a first picture or a control clip", "windows")
    if settings.overlap > 1 and continuation_input == IMAGE_INPUT:
        problem = f"{settings.model} continues from one picture, got an overlap of {settings.overlap} frames"
        raise SettingError(f"{problem}: give an overlap of 1", "overlap")
    if settings.overlap >= settings.frames:
        problem = f"windows of {pluralize(settings.frames, 'frame')} with an overlap of {settings.overlap}"
        advice = "give more frames" + (", or a smaller overlap" if settings.frames > 1 else "")
        raise SettingError(f"{problem} add no frames: {advice}", "overlap")


def check_single_window(settings: Settings, feature: str, advice: str) -> None:
    """Raise WanjaxError for several windows with a feature that supports only one."""
    if settings.windows > 1:
        raise SettingError(f"{feature} supports one window, and windows is {settings.windows}: {advice}", "windows")


def window_pictures(
    window: Window, pictures: Pictures, previous_frames: Clip | None, continuation_input: str | None
) -> Pictures:
    """Select the images and clips of a window, and add the last frames of the previous window.

    A last image belongs to the last window. Each window gets its part of the control clip and of its mask.

    Args:
        window: The window.
        pictures: The images and clips of the whole video.
        previous_frames: The last frames of the previous window; None for the first window.
        continuation_input: The input that receives these frames, `ModelSpec.continuation_input`.
    """
    pictures = pictures if window.is_last else pictures.with_inputs(last_image=None)
    if previous_frames is None:
        return pictures
    if continuation_input == IMAGE_INPUT:
        return pictures.with_inputs(image=previous_frames[-1], video=None)
    settings, overlap = window.settings, len(previous_frames)
    start = window.index * (settings.frames - overlap)

    def window_clip(clip: Clip | None, fill: int) -> np.ndarray:
        if clip is None:
            return np.full((settings.frames, *settings.size, 3), fill, np.uint8)
        frames = clip[start : start + settings.frames]
        return np.stack([fit_to_size(frame, settings.size, settings.resize) for frame in frames])

    clip, mask = window_clip(pictures.clip("video"), GREY), window_clip(pictures.clip("mask"), 255)
    clip[:overlap], mask[:overlap] = previous_frames, 0
    return pictures.with_inputs(image=None, video=clip, mask=mask)


def join_window(
    previous_frames: UInt8[np.ndarray, "P H W 3"], frames: Clip, match: str
) -> tuple[UInt8[np.ndarray, "N H W 3"], Drift]:
    """Join a window to the previous one; return its new frames, and the drift of its colours.

    Args:
        previous_frames: The last frames of the previous window, which the window repeats.
        frames: All frames of the window.
        match: What the window matches to the previous one, `Settings.match`.
    """
    overlap, matched = len(previous_frames), None
    repeated = frames[:overlap]
    if match == MATCH_COLOUR:
        frames = match_colours(frames, fit_colours(repeated, previous_frames))
        matched = frames[:overlap]
    return fade_seam(previous_frames, frames[overlap:]), measure_drift(repeated, previous_frames, matched)


def fade_seam(previous_frames: UInt8[np.ndarray, "_T H W 3"], frames: Clip) -> Clip:
    """Spread the jump at a seam over the first new frames of a window.

    Differences well below `MAX_FADED_DIFFERENCE` are faded completely. Large differences are not faded, so that motion
    leaves no ghosts.
    """
    difference = previous_frames[-1].astype(np.float32) - frames[0]
    difference *= np.exp(-np.square(difference / np.float32(MAX_FADED_DIFFERENCE)))
    frames = frames.copy()
    for number, frame in enumerate(frames[:FADE_FRAMES], 1):
        weight = np.float32(1 - number / (FADE_FRAMES + 1))
        frame[...] = np.clip(np.rint(frame + weight * difference), 0, 255)
    return frames
