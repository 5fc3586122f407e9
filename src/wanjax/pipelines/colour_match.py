# SPDX-License-Identifier: Apache-2.0
"""Match the colours of a window of a long video to the window before it.

A window repeats the last frames of the previous window, but not exactly: the model and its autoencoder change
brightness, contrast or hue a little, and the changes of many windows add up. The repeated frames show the change. An
affine map of colours in Oklab undoes the change. In Oklab, a change of exposure is a factor, and a change of hue is a
rotation (B. Ottosson, "A perceptual color space for image processing", 2020).

    fit the map from the repeated frames to the shown frames, by least squares in both directions
    apply it to all frames of the window, as a table of colours
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageFilter

from wanjax.media.pictures import Clip

SAMPLES_PER_SIDE = 48  # the fit averages squares of pixels, so that sharpness and noise do not influence it
DARKEST, BRIGHTEST = 4, 251  # the channels of a sample lie between them: clipped channels say little about a change
MIN_SAMPLES = 64
SMALL_SPREAD = 0.007  # of colours in Oklab: a smaller spread, as of the hues of grey pictures, may be noise
MAX_FACTOR = 1.25  # of the map: the drift of a single window is far smaller
TABLE_SIZE = 33  # colours on each side of the table
LINEAR_TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
LMS_TO_OKLAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


class ColourMap(NamedTuple):
    """An affine map of colours in Oklab: `colour @ matrix + offset`.

    Attributes:
        matrix: The linear part.
        offset: The offset.
    """

    matrix: Float[np.ndarray, "3 3"]
    offset: Float[np.ndarray, "3"]

    def __call__(self, colours: Float[np.ndarray, "*B 3"]) -> Float[np.ndarray, "*B 3"]:
        return colours @ self.matrix + self.offset


class Drift(NamedTuple):
    """The difference between the frames that a window repeats and the frames that were shown.

    Attributes:
        lightness: The mean change of lightness, in hundredths of the range from black to white.
        colour: The distance between the mean colours, in hundredths of that range; it includes the lightness.
        remaining: The distance between the mean colours after the colours were matched; None without matching.
    """

    lightness: float
    colour: float
    remaining: float | None = None


def srgb_to_oklab(colours: Float[np.ndarray, "*B 3"]) -> Float[np.ndarray, "*B 3"]:
    """Convert colours from sRGB, 0 to 1, to Oklab."""
    linear = np.where(colours <= 0.04045, colours / 12.92, np.power((np.maximum(colours, 0) + 0.055) / 1.055, 2.4))
    return np.cbrt(linear @ LINEAR_TO_LMS.T) @ LMS_TO_OKLAB.T


def oklab_to_srgb(colours: Float[np.ndarray, "*B 3"]) -> Float[np.ndarray, "*B 3"]:
    """Convert colours from Oklab to sRGB. Colours outside sRGB are clipped to its range, 0 to 1."""
    linear = np.clip((colours @ np.linalg.inv(LMS_TO_OKLAB).T) ** 3 @ np.linalg.inv(LINEAR_TO_LMS).T, 0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * np.power(linear, 1 / 2.4) - 0.055)


def measure_drift(repeated: Clip, shown: Clip, matched: Clip | None = None) -> Drift:
    """Measure how the frames that a window repeats differ from the frames that were shown.

    Args:
        repeated: The frames as the window has them.
        shown: The same frames as the previous window has them.
        matched: The repeated frames after `match_colours`.
    """
    repeated_mean, shown_mean = (srgb_to_oklab(_samples(frames)).mean(0) for frames in (repeated, shown))
    remaining = None if matched is None else _distance(srgb_to_oklab(_samples(matched)).mean(0), shown_mean)
    return Drift(100 * float(repeated_mean[0] - shown_mean[0]), _distance(repeated_mean, shown_mean), remaining)


def fit_colours(repeated: Clip, shown: Clip) -> ColourMap:
    """Fit the map from the colours of the repeated frames to the colours of the shown frames.

    A least-squares fit reduces contrast if its inputs have errors. The fit therefore averages the fits in both
    directions, whose errors are opposite.

    Args:
        repeated: The frames as a window has them.
        shown: The same frames as the previous window has them.
    """
    pairs = np.stack([_samples(repeated), _samples(shown)])
    is_valid = ((pairs >= DARKEST / 255) & (pairs <= BRIGHTEST / 255)).all((0, 2))
    if is_valid.sum() >= MIN_SAMPLES:
        pairs = pairs[:, is_valid]
    source, target = srgb_to_oklab(pairs)
    means = source.mean(0), target.mean(0)
    centred = source - means[0], target - means[1]
    matrix = (_fit(*centred) + np.linalg.inv(_fit(*reversed(centred)))) / 2
    left, factors, right = np.linalg.svd(matrix)
    matrix = left @ np.diag(np.clip(factors, 1 / MAX_FACTOR, MAX_FACTOR)) @ right
    return ColourMap(matrix, means[1] - means[0] @ matrix)


def match_colours(frames: Clip, colour_map: ColourMap) -> Clip:
    """Apply a map to the colours of all frames.

    Args:
        frames: The frames.
        colour_map: The map.
    """
    levels = np.linspace(0, 1, TABLE_SIZE)
    blue, green, red = np.meshgrid(levels, levels, levels, indexing="ij")  # the table's red varies fastest
    colours = oklab_to_srgb(colour_map(srgb_to_oklab(np.stack([red, green, blue], -1))))
    table = ImageFilter.Color3DLUT(TABLE_SIZE, colours.astype(np.float32).ravel().tolist())
    return np.stack([np.asarray(Image.fromarray(frame).filter(table)) for frame in frames])


def _fit(source: Float[np.ndarray, "N 3"], target: Float[np.ndarray, "N 3"]) -> Float[np.ndarray, "3 3"]:
    """Fit a matrix by least squares. Directions in which the colours hardly vary stay unchanged."""
    penalty = len(source) * SMALL_SPREAD**2 * np.eye(3)
    return np.linalg.solve(source.T @ source + penalty, source.T @ target + penalty)


def _samples(frames: UInt8[np.ndarray, "T H W 3"]) -> Float[np.ndarray, "N 3"]:
    """Average squares of pixels of each frame; return colours from 0 to 1."""
    block = max(1, min(frames.shape[1:3]) // SAMPLES_PER_SIDE)
    means = [np.asarray(Image.fromarray(frame).reduce(block)) for frame in frames]
    return np.stack(means).reshape(-1, 3) / 255.0


def _distance(a: Float[np.ndarray, "3"], b: Float[np.ndarray, "3"]) -> float:
    return 100 * float(np.linalg.norm(a - b))
