# SPDX-License-Identifier: Apache-2.0
"""Changes of a window's colours, as models make them, and a synthetic clip to change."""

from collections.abc import Callable

import numpy as np
from PIL import Image

from wanjax.pipelines.colour_match import fit_colours, match_colours, oklab_to_srgb, srgb_to_oklab

WINDOWS, FRAMES = 8, 9
Change = Callable[[np.ndarray, int], np.ndarray]


def synthetic_clip(contrast: float, seed: int = 0) -> np.ndarray:
    """Frames [T H W 3] of soft shapes in many colours that move to the right."""
    random = np.random.default_rng(seed)
    picture = Image.fromarray(random.integers(0, 256, (9, 24, 3), dtype=np.uint8)).resize(
        (256, 96), Image.Resampling.BICUBIC
    )
    wide = 127 + contrast * (np.asarray(picture) - 127.0)
    return np.stack([wide[:, 4 * frame : 4 * frame + 128] for frame in range(FRAMES)]).round().astype(np.uint8)


def gain(frames: np.ndarray, window: int) -> np.ndarray:
    """Brighten by 3 percent."""
    return to_bytes(frames * 1.03)


def hue(frames: np.ndarray, window: int) -> np.ndarray:
    """Rotate hues by 3 degrees."""
    angle = np.deg2rad(3)
    rotation = np.eye(3)
    rotation[1:, 1:] = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    return to_bytes(255 * oklab_to_srgb(srgb_to_oklab(frames / 255) @ rotation))


def moving_gradient(frames: np.ndarray, window: int) -> np.ndarray:
    """Brighten by 0 to 6 percent from one side to the other, from another side in each window."""
    width = frames.shape[2]
    ramp = 0.5 + 0.5 * np.cos(2 * np.pi * (np.arange(width) / width - window / WINDOWS))
    return to_bytes(frames * (1 + 0.06 * ramp[:, None]))


def to_bytes(frames: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(frames), 0, 255).astype(np.uint8)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The root mean square distance of colours in Oklab."""
    return float(np.sqrt(np.square(srgb_to_oklab(a / 255) - srgb_to_oklab(b / 255)).sum(-1).mean()))


def remaining_drift_share(change: Change, contrast: float) -> float:
    """Return the share of the drift of eight windows that is left after matching."""
    frames = unmatched = matched = synthetic_clip(contrast)
    for window in range(WINDOWS):
        unmatched, new_frames = change(unmatched, window), change(matched, window)
        matched = match_colours(new_frames, fit_colours(new_frames[:1], matched[:1]))
    return distance(matched, frames) / distance(unmatched, frames)
