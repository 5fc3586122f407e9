# SPDX-License-Identifier: Apache-2.0
"""Draw the clips of the bundled model: one coloured shape on a plain background, with antialiasing.

A `Spec` describes a clip. The shape's position, size and speed are random, within bounds that keep it inside the frame
and its motion visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from jaxtyping import Float

COLOURS = {
    "red": (0.88, 0.10, 0.10),
    "orange": (1.00, 0.52, 0.04),
    "yellow": (0.98, 0.90, 0.10),
    "green": (0.08, 0.65, 0.18),
    "cyan": (0.10, 0.86, 0.90),
    "blue": (0.12, 0.22, 0.90),
    "purple": (0.52, 0.12, 0.76),
    "pink": (1.00, 0.45, 0.76),
}
"""The sRGB values of each colour, from 0 to 1."""

TAUGHT_COLOUR, TAUGHT_SHAPE = {"magenta": (0.90, 0.10, 0.60)}, "bar"
"""A colour and a shape that the bundled model has never seen, and that `teach.py` teaches it."""

SHAPES = ("circle", "square", "triangle", "cross")
MOTIONS = ("left", "right", "up", "down", "grows", "shrinks", "stays")
BACKGROUNDS = ("dark", "grey", "light", "vertical gradient", "horizontal gradient")

DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
"""Unit steps (x, y) of the travelling motions; y increases downwards, as in an image."""

COMBINATIONS = tuple(product(COLOURS, SHAPES, MOTIONS))

HELD_OUT = tuple(
    (colour, shape, motion)
    for (c, colour), (s, shape), (m, motion) in product(enumerate(COLOURS), enumerate(SHAPES), enumerate(MOTIONS))
    if (c + 2 * s + 3 * m) % 10 == 0
)
"""The 10 % of the combinations that training never sees. It sees every pair of their words in other clips."""

_TRAINED = tuple(sorted(set(COMBINATIONS) - set(HELD_OUT)))

# Half the width, and the extents above and below the centre, of each shape of radius 1. The areas are nearly equal.
_CIRCUMRADIUS = 1.36  # of the triangle
_EXTENTS = {
    "circle": (1.0, 1.0, 1.0),
    "square": (0.89, 0.89, 0.89),
    "triangle": (_CIRCUMRADIUS * 0.75**0.5, _CIRCUMRADIUS, _CIRCUMRADIUS / 2),
    "cross": (1.12, 1.12, 1.12),
    "bar": (1.15, 0.7, 0.7),
}
_ARM = 0.36  # half the thickness of the cross's arms

STRETCHES = {"bar": (1.0, 1.2, 1.4)}
"""The widths, relative to the drawn one, with which a shape counts as the same. Its area does not change."""


@dataclass(frozen=True)
class Spec:
    """The content of a clip: one name each from `COLOURS`, `SHAPES`, `MOTIONS` and `BACKGROUNDS`."""

    colour: str
    shape: str
    motion: str
    background: str


@dataclass(frozen=True)
class Track:
    """The shape's position in each frame, in pixels: its centre x and y, and its radius."""

    x: Float[np.ndarray, "T"]
    y: Float[np.ndarray, "T"]
    radius: Float[np.ndarray, "T"]


def sample_specs(rng: np.random.Generator, n: int, held_out: bool = False) -> list[Spec]:
    """Draw `n` specs uniformly from the combinations of training, or from those held out."""
    combinations = HELD_OUT if held_out else _TRAINED
    indices = rng.integers(len(combinations), size=n)
    backgrounds = rng.integers(len(BACKGROUNDS), size=n)
    drawn = [(*combinations[i], BACKGROUNDS[j]) for i, j in zip(indices, backgrounds, strict=True)]
    return [Spec(colour, shape, motion, background) for colour, shape, motion, background in drawn]


def draw(specs: Sequence[Spec], frames: int, size: int, rng: np.random.Generator) -> Float[np.ndarray, "B T H W 3"]:
    """Draw one clip per spec, of `frames` frames of `size` by `size` pixels: float32 in [-1, 1]."""
    clips = np.empty((len(specs), frames, size, size, 3), np.float32)
    for clip, spec in zip(clips, specs, strict=True):
        clip[:] = 2.0 * _background(spec.background, size, rng) - 1.0
        _paint(clip, spec, _track(spec, frames, size, rng))
    return clips


def _track(spec: Spec, frames: int, size: int, rng: np.random.Generator) -> Track:
    """Draw a steady motion. Sizes are fractions of the frame's size, so a clip looks the same at any resolution."""
    time = np.linspace(0.0, 1.0, frames) if frames > 1 else np.zeros(1)
    travel = np.zeros(2)
    if spec.motion in DIRECTIONS:
        radius = np.full(frames, rng.uniform(0.13, 0.17))
        travel = rng.uniform(0.40, 0.50) * np.array(DIRECTIONS[spec.motion])
    elif spec.motion == "stays":
        radius = np.full(frames, rng.uniform(0.13, 0.21))
    else:
        small = rng.uniform(0.095, 0.115)
        large = small * rng.uniform(2.0, 2.4)
        radius = small + (large - small) * (time if spec.motion == "grows" else 1.0 - time)
    width, above, below = np.array(_EXTENTS[spec.shape]) * radius.max()
    lowest_start = np.array([width, above]) + np.maximum(-travel, 0.0) + 0.02
    highest_start = 0.98 - np.array([width, below]) - np.maximum(travel, 0.0)
    start = rng.uniform(lowest_start, highest_start)
    x, y = size * (start[:, None] + travel[:, None] * time)
    return Track(x, y, size * radius)


def _background(name: str, size: int, rng: np.random.Generator) -> Float[np.ndarray, "H W 3"]:
    """Draw a plain grey or a soft gradient between two muted colours, from 0 to 1. Height or width may be 1."""
    if name in _GREYS:
        return np.full((1, 1, 3), rng.uniform(*_GREYS[name]))
    middle, half = rng.uniform(0.3, 0.7), rng.uniform(0.08, 0.18) * rng.choice([-1.0, 1.0])
    end_colours = np.array([[middle - half], [middle + half]]) + rng.uniform(-0.05, 0.05, (2, 3))
    blend = (np.arange(size)[:, None] + 0.5) / size
    ramp = end_colours[0] + blend * (end_colours[1] - end_colours[0])
    return ramp[:, None] if name == "vertical gradient" else ramp[None]


_GREYS = {"dark": (0.06, 0.20), "grey": (0.40, 0.58), "light": (0.80, 0.94)}


def _paint(clip: Float[np.ndarray, "T H W 3"], spec: Spec, track: Track) -> None:
    """Blend the shape over the clip in place, within the bounding box of its track."""
    size = clip.shape[1]
    width, above, below = np.outer(_EXTENTS[spec.shape], track.radius) + 1.0
    rows = slice(max(int((track.y - above).min()), 0), min(int((track.y + below).max()) + 1, size))
    columns = slice(max(int((track.x - width).min()), 0), min(int((track.x + width).max()) + 1, size))
    centres = np.arange(size) + 0.5  # of the pixels
    x = (centres[columns] - track.x[:, None]).astype(np.float32)[:, None, :]
    y = (centres[rows] - track.y[:, None]).astype(np.float32)[:, :, None]
    radius = track.radius.astype(np.float32)[:, None, None]
    cover = np.clip(0.5 - distance(spec.shape, x, y, radius), 0.0, 1.0)
    palette = COLOURS | TAUGHT_COLOUR
    for channel, level in enumerate(palette[spec.colour]):  # an axis of three is too short for numpy's inner loop
        plane = clip[:, rows, columns, channel]
        plane += cover * (np.float32(2.0 * level - 1.0) - plane)


def distance(shape: str, x: np.ndarray, y: np.ndarray, radius: np.ndarray, stretch: float = 1.0) -> np.ndarray:
    """Return the signed distance in pixels from the shape's edge, negative inside; corners are mitred outside.

    `stretch` multiplies the width of a bar, and divides its height.
    """
    x = np.abs(x)
    if shape == "bar":
        width, height, _ = _EXTENTS[shape]
        return np.maximum(x - width * stretch * radius, np.abs(y) - height / stretch * radius)
    if shape == "circle":
        return np.hypot(x, y) - radius
    if shape == "square":
        return np.maximum(x, np.abs(y)) - 0.89 * radius
    if shape == "triangle":
        inradius = _CIRCUMRADIUS / 2 * radius
        return np.maximum(0.75**0.5 * x - 0.5 * y, y) - inradius
    y = np.abs(y)
    reach, arm = 1.12 * radius, _ARM * radius
    return np.minimum(np.maximum(x - reach, y - arm), np.maximum(x - arm, y - reach))
