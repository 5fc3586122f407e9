# SPDX-License-Identifier: Apache-2.0
"""Recognise a clip's colour, shape and motion with classical computer vision. None stands for an unclear result.

The steps are: fit a plain or linearly shaded background to each frame; take the pixels that differ from it as the
shape; find the nearest colour of the palette; compare the shape with a template of each shape that has the same centre
and area; fit straight lines to its centre and size over time. Nothing is learnt, and the prompt is not used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from clips import COLOURS, SHAPES, STRETCHES, TAUGHT_SHAPE, distance
from jaxtyping import Float, UInt8
from scipy import ndimage

CONTRAST = 0.18  # a pixel further than this from the background, in RGB from 0 to 1, belongs to the shape
MIN_AREA, MAX_AREA = 0.004, 0.35  # fractions of the frame
MIN_READABLE = 0.75  # fraction of the frames that must show one shape
COLOUR_TOLERANCE = 0.25  # distance in RGB from 0 to 1
MIN_OVERLAP, MIN_LEAD = 0.75, 0.03  # of the best template, and over the second best
MIN_TRAVEL, MAX_DRIFT = 0.20, 0.08  # displacement over the clip, as a fraction of the frame
MIN_GROWTH, MAX_GROWTH_STILL = 1.4, 1.2  # ratio of the sizes at the two ends
MAX_DEVIATION = 0.04  # root mean square distance from a straight track, as a fraction of the frame


@dataclass(frozen=True)
class Reading:
    """The recognised names, or None if a result is unclear, and the measurements from which they follow."""

    colour: str | None = None
    shape: str | None = None
    motion: str | None = None
    rgb: tuple[float, float, float] | None = None
    displacement: tuple[float, float] | None = None  # x and y, as fractions of the frame; y increases downwards
    growth: float | None = None  # ratio of the last size to the first
    overlaps: dict[str, float] | None = None  # intersection over union with the template of each shape


@dataclass(frozen=True)
class _Blobs:
    """The shape in the frames that show exactly one."""

    index: Float[np.ndarray, "T"]  # position of the frame in the clip, from 0 to 1
    cover: Float[np.ndarray, "T H W"]  # fraction of each pixel that the shape covers
    area: Float[np.ndarray, "T"]  # in pixels
    x: Float[np.ndarray, "T"]
    y: Float[np.ndarray, "T"]
    rgb: Float[np.ndarray, "T 3"]


def read(
    frames: UInt8[np.ndarray, "T H W 3"],
    colours: Mapping[str, tuple[float, float, float]] = COLOURS,
    shapes: Sequence[str] = SHAPES,
) -> Reading:
    """Name the colour, the shape and the motion of the one shape in a clip."""
    video = np.asarray(frames, np.float32) / 255.0
    blobs = _find_shape(video)
    if blobs is None:
        return Reading()
    motion, displacement, growth = _motion(blobs, video.shape[1:3])
    red, green, blue = (round(float(level), 3) for level in np.median(blobs.rgb, axis=0))
    overlaps = _overlaps(blobs, shapes)
    return Reading(
        colour=_colour(blobs.rgb, colours),
        shape=_shape(overlaps),
        motion=motion,
        rgb=(red, green, blue),
        displacement=displacement,
        growth=growth,
        overlaps=overlaps,
    )


def _background(video: Float[np.ndarray, "T H W 3"], rounds: int = 8) -> Float[np.ndarray, "T H W 3"]:
    """Fit a plane a + b x + c y to each frame and channel, robustly, starting from the frame's rim."""
    frames, height, width, _ = video.shape
    y, x = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    full_basis = np.stack([np.ones_like(x), x, y], axis=-1).astype(np.float32)
    basis = full_basis[::2, ::2].reshape(-1, 3)  # a quarter of the pixels is enough for three numbers
    products = (basis[:, :, None] * basis[:, None, :]).reshape(-1, 9)
    pixels = video[:, ::2, ::2].reshape(frames, -1, 3)
    rim = (np.abs(basis).max(axis=1, where=[False, True, True], initial=0.0) > 0.85).astype(np.float32)
    weights = np.broadcast_to(rim, pixels.shape[:2])
    for _ in range(rounds):
        moments = (weights @ products).reshape(frames, 3, 3) + 1e-4 * np.eye(3, dtype=np.float32)
        plane = np.linalg.solve(moments, basis.T @ (weights[:, :, None] * pixels))
        squared = np.sum((pixels - basis @ plane) ** 2, axis=-1)
        weights = 1.0 / (1.0 + squared / 0.05**2) ** 2  # outliers, such as the shape, hardly count
    return (full_basis.reshape(-1, 3) @ plane).reshape(video.shape)


def _find_shape(video: Float[np.ndarray, "T H W 3"]) -> _Blobs | None:
    """Find the shape in each frame; None if too few frames show exactly one."""
    background = _background(video)
    window: Any = (1, 3, 3, 1)  # SciPy has no types
    smooth = ndimage.uniform_filter(video - background, window)  # suppresses noise in single pixels
    masks = np.linalg.norm(smooth, axis=-1) > CONTRAST
    regions = [_largest_region(mask) for mask in masks]
    has_shape = np.array([mask is not None for mask in regions])
    if has_shape.sum() < max(MIN_READABLE * len(video), 2):
        return None
    masks = np.stack([mask for mask in regions if mask is not None])
    video, background = video[has_shape], background[has_shape]
    rgb = np.stack([np.median(frame[_core(mask)], axis=0) for frame, mask in zip(video, masks, strict=True)])
    contrast = np.median(rgb, axis=0) - background
    cover = np.sum((video - background) * contrast, axis=-1) / np.maximum(np.sum(contrast**2, axis=-1), 1e-6)
    surroundings = np.stack([ndimage.binary_dilation(mask, iterations=3) for mask in masks])
    cover = np.clip(cover, 0.0, 1.0) * surroundings
    area = cover.sum(axis=(1, 2))
    height, width = video.shape[1:3]
    x = np.einsum("thw,w->t", cover, np.arange(width) + 0.5) / area
    y = np.einsum("thw,h->t", cover, np.arange(height) + 0.5) / area
    return _Blobs(np.flatnonzero(has_shape) / (len(has_shape) - 1), cover, area, x, y, rgb)


def _largest_region(mask: np.ndarray) -> np.ndarray | None:
    """Return the largest connected region if it is most of the mask and has a plausible size, else None."""
    labelled: Any = ndimage.label(mask)
    labels, count = labelled
    if count == 0:
        return None
    areas = np.bincount(labels.ravel())[1:]
    largest = areas.max()
    if largest < 0.8 * areas.sum() or not MIN_AREA < largest / mask.size < MAX_AREA:
        return None
    return labels == 1 + int(areas.argmax())


def _core(mask: np.ndarray) -> np.ndarray:
    """Return the mask without its rim, where the shape's colour mixes with the background's."""
    core = ndimage.binary_erosion(mask, iterations=2)
    return core if core.sum() > 4 else mask


def _colour(rgb: Float[np.ndarray, "T 3"], colours: Mapping[str, tuple[float, float, float]]) -> str | None:
    """Return the palette's colour that is nearest and within the tolerance in most frames, else None."""
    distances = np.linalg.norm(rgb[:, None] - np.array(list(colours.values())), axis=-1)
    is_nearest = (distances.argmin(axis=1)[:, None] == np.arange(len(colours))) & (distances < COLOUR_TOLERANCE)
    votes = is_nearest.mean(axis=0)
    return list(colours)[int(votes.argmax())] if votes.max() >= MIN_READABLE else None


def _unit_area(shape: str) -> float:
    """Return the area of the shape of radius 1."""
    grid = (np.arange(400) - 199.5) / 100.0
    return float(np.clip(0.5 - 100.0 * distance(shape, grid[None], grid[:, None], np.ones(1)), 0, 1).sum()) / 1e4


_AREAS = {shape: _unit_area(shape) for shape in (*SHAPES, TAUGHT_SHAPE)}


def _overlaps(blobs: _Blobs, shapes: Sequence[str]) -> dict[str, float]:
    """Return the mean intersection over union with a template of each shape, of equal centre and area.

    For a shape that may be stretched, the best template counts.
    """
    _, height, width = blobs.cover.shape
    x = (np.arange(width) + 0.5 - blobs.x[:, None])[:, None, :]
    y = (np.arange(height) + 0.5 - blobs.y[:, None])[:, :, None]

    def overlap(shape: str, stretch: float) -> float:
        radius = np.sqrt(blobs.area / _AREAS[shape])[:, None, None]
        template = np.clip(0.5 - distance(shape, x, y, radius, stretch), 0.0, 1.0)
        intersection = np.minimum(template, blobs.cover).sum(axis=(1, 2))
        union = np.maximum(template, blobs.cover).sum(axis=(1, 2))
        return round(float(np.mean(intersection / union)), 3)

    return {shape: max(overlap(shape, s) for s in STRETCHES.get(shape, (1.0,))) for shape in shapes}


def _shape(overlaps: dict[str, float]) -> str | None:
    """Return the shape whose template fits best, if it fits well and clearly better than the others; else None."""
    best, second = sorted(overlaps, key=overlaps.__getitem__, reverse=True)[:2]
    is_clear = overlaps[best] >= MIN_OVERLAP and overlaps[best] - overlaps[second] >= MIN_LEAD
    return best if is_clear else None


def _fit_line(index: np.ndarray, track: np.ndarray) -> tuple[float, float, float]:
    """Fit a straight line to a track; return its values at both ends of the clip, and the RMS deviation."""
    slope, start = np.polyfit(index, track, 1)
    deviation = np.sqrt(np.mean((track - start - slope * index) ** 2))
    return float(start), float(start + slope), float(deviation)


def _motion(blobs: _Blobs, size: tuple[int, int]) -> tuple[str | None, tuple[float, float], float]:
    """Return the motion, the displacement of the centre and the ratio of the sizes, over the whole clip."""
    height, width = size
    x0, x1, deviation_x = _fit_line(blobs.index, blobs.x / width)
    y0, y1, deviation_y = _fit_line(blobs.index, blobs.y / height)
    s0, s1, deviation_size = _fit_line(blobs.index, np.sqrt(blobs.area / (height * width)))
    dx, dy = x1 - x0, y1 - y0
    growth = max(s1, 1e-3) / max(s0, 1e-3)
    motion = None
    if max(deviation_x, deviation_y, deviation_size) < MAX_DEVIATION:
        motion = _name_motion(dx, dy, growth)
    return motion, (round(dx, 3), round(dy, 3)), round(growth, 3)


def _name_motion(dx: float, dy: float, growth: float) -> str | None:
    """Return the motion if exactly one is clear, else None."""
    travel, sideways = max(abs(dx), abs(dy)), min(abs(dx), abs(dy))
    keeps_size = 1 / MAX_GROWTH_STILL < growth < MAX_GROWTH_STILL
    if travel > MIN_TRAVEL and sideways < travel / 3 and keeps_size:
        if travel == abs(dx):
            return "right" if dx > 0 else "left"
        return "down" if dy > 0 else "up"
    if travel > MAX_DRIFT:
        return None
    if keeps_size:
        return "stays"
    if growth > MIN_GROWTH:
        return "grows"
    return "shrinks" if growth < 1 / MIN_GROWTH else None
