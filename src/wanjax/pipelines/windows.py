# SPDX-License-Identifier: Apache-2.0
"""A long video of windows. Each is a video of the model's own length, which begins from the last frames of that before.

    for each window:
        encode the last frames of the window before, as its first picture or as the known part of a control clip
        denoise and decode it, by its own prompt and seed
        deliver the frames after those that it was given, the seam faded

Frames join the windows, and not latents: the autoencoders are causal, so a window's first latent frame is that of a
picture. What an autoencoder loses is a faint jump of the whole frame at each seam, which `fade_seam` spreads.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from wanjax.errors import SettingError
from wanjax.figures import quantity
from wanjax.media.pictures import Clip, Pictures, fit
from wanjax.pipelines.settings import SEED_BITS, Settings

PICTURE, CONTROL = "image", "video"  # what a window is given of the one before
GREY = 127  # the colour of unknown frames
FADING = 4  # frames of a window in which what is left of the seam before it fades
NO_MOTION = 16.0  # of 255: differences much larger than this are motion


class Window(NamedTuple):
    """A window: its number from 0, of how many, and its settings, as those of a video that it is alone."""

    number: int
    count: int
    settings: Settings

    @property
    def last(self) -> bool:
        return self.number + 1 == self.count


def windows_of(settings: Settings) -> list[Window]:
    """Return the windows of a video, each with its prompt, and with a seed of its own so that no noise is repeated."""
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
    """Raise WanjaxError where a model makes no video of these windows; `continued_by` is `ModelSpec.continued_by`."""
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
    """Raise WanjaxError where a stage alone is asked for a video of windows, which go through all of them in turn."""
    if settings.windows > 1:
        raise SettingError(
            f"{what} is for one window, and {settings.windows} are asked for: a video of windows is made as a whole",
            "windows",
        )


def pictures_of(window: Window, pictures: Pictures, before: Clip | None, continued_by: str | None) -> Pictures:
    """Return the pictures of a window, from those of the whole video and the last frames of the window before.

    A last picture is the last window's. Each window has its part of a control clip and its mask.
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
    """Return a window's new frames, among whose first the jump from the frame before them is spread.

    Differences that are small beside `NO_MOTION` count whole, and those that are large not at all: motion leaves no
    ghost.
    """
    difference = before[-1].astype(np.float32) - frames[0]
    difference *= np.exp(-np.square(difference / np.float32(NO_MOTION)))
    frames = frames.copy()
    for number, frame in enumerate(frames[:FADING], 1):
        weight = np.float32(1 - number / (FADING + 1))
        frame[...] = np.clip(np.rint(frame + weight * difference), 0, 255)
    return frames
