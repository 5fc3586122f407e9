# SPDX-License-Identifier: Apache-2.0
"""Long videos of several windows. Each window has the model's usual length, and starts from the last frames before it.

    for each window:
        encode the last frames of the window before, as its first image or as the known part of a control clip
        denoise and decode it, with its own prompt and seed
        return its new frames, with the seam faded

Windows are joined by frames, not by latents: the autoencoders are causal, and encode a window's first frame as a single
image. The autoencoder's loss shows as a faint jump of the whole frame at each seam; `fade_seam` spreads it.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from wanjax.errors import SettingError
from wanjax.figures import quantity
from wanjax.media.pictures import Clip, Pictures, fit
from wanjax.pipelines.settings import SEED_BITS, Settings

PICTURE, CONTROL = "image", "video"  # the input that carries frames over from the window before
GREY = 127  # the colour of unknown frames
FADING = 4  # the number of frames over which the jump at a seam fades
NO_MOTION = 16.0  # of 255: much larger differences are motion


class Window(NamedTuple):
    """A window: its number from 0, the number of windows, and its settings as a video of its own."""

    number: int
    count: int
    settings: Settings

    @property
    def last(self) -> bool:
        return self.number + 1 == self.count


def windows_of(settings: Settings) -> list[Window]:
    """Return the windows of a video, each with its prompt and its own seed, so that no noise repeats."""
    window_settings = replace(settings, windows=1, then="")
    return [
        Window(
            number,
            settings.windows,
            replace(window_settings, prompt=prompt, seed=(settings.seed + number) % 2**SEED_BITS),
        )
        for number, prompt in enumerate(settings.prompts)
    ]


def check_windows(settings: Settings, continued_by: str | None) -> None:
    """Raise WanjaxError if a model cannot make these windows; `continued_by` is `ModelSpec.continued_by`."""
    if (count := 1 + len(settings.then.splitlines())) > settings.windows:
        few = f"{quantity(count, 'prompt')} are given for {quantity(settings.windows, 'window')}"
        raise SettingError(f"{few}: give as many windows, or more", "windows")
    if settings.windows == 1:
        return
    if continued_by is None:
        why = f"{settings.model} makes no windows that go on from each other"
        raise SettingError(f"{why}: a model that takes a first picture alone, or a control clip, does", "windows")
    if settings.overlap > 1 and continued_by == PICTURE:
        why = f"{settings.model} goes on from one picture, and an overlap of {settings.overlap} frames is given"
        raise SettingError(f"{why}: give 1", "overlap")
    if settings.overlap >= settings.frames:
        why = f"windows of {quantity(settings.frames, 'frame')} that overlap by {settings.overlap}"
        raise SettingError(f"{why} add nothing: give more frames, or a smaller overlap", "overlap")


def check_single_window(settings: Settings, what: str) -> None:
    """Raise WanjaxError if a single stage is called with several windows; only a whole run handles them."""
    if settings.windows > 1:
        raise SettingError(
            f"{what} is for one window, and {settings.windows} are asked for: a video of windows is made as a whole",
            "windows",
        )


def pictures_of(window: Window, pictures: Pictures, before: Clip | None, continued_by: str | None) -> Pictures:
    """Return the images and clips of a window, from those of the whole video and the last frames before the window.

    A last image belongs to the last window. Each window gets its part of the control clip and of its mask.
    """
    pictures = pictures if window.last else pictures.with_inputs(last_image=None)
    if before is None:
        return pictures
    if continued_by == PICTURE:
        return pictures.with_inputs(image=before[-1], video=None)
    settings, overlap = window.settings, len(before)
    start = window.number * (settings.frames - overlap)

    def part(clip: Clip | None, fill: int) -> np.ndarray:
        if clip is None:
            return np.full((settings.frames, *settings.size, 3), fill, np.uint8)
        span = clip[start : start + settings.frames]
        return np.stack([fit(frame, settings.size, settings.resize) for frame in span])

    clip, mask = part(pictures.clip("video"), GREY), part(pictures.clip("mask"), 255)
    clip[:overlap], mask[:overlap] = before, 0
    return pictures.with_inputs(video=clip, mask=mask)


def fade_seam(before: UInt8[np.ndarray, "_T H W 3"], frames: Clip) -> Clip:
    """Spread the jump at a seam over the first new frames of a window.

    Differences well below `NO_MOTION` are faded in full, and large ones not at all, so that motion leaves no ghosts.
    """
    difference = before[-1].astype(np.float32) - frames[0]
    difference *= np.exp(-np.square(difference / np.float32(NO_MOTION)))
    frames = frames.copy()
    for number, frame in enumerate(frames[:FADING], 1):
        weight = np.float32(1 - number / (FADING + 1))
        frame[...] = np.clip(np.rint(frame + weight * difference), 0, 255)
    return frames
