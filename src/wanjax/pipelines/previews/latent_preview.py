# SPDX-License-Identifier: Apache-2.0
"""Previews: small pictures of a video that is not finished, by a linear map from latents to colours.

A pixel of a preview is a cell of the latents, and a picture a latent frame. The map is the least-squares fit of the
colours of a drawn clip to its latents, so it needs nothing but the model's own autoencoder.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, UInt8
from PIL import Image

Picture = UInt8[np.ndarray, "H W 3"]

CELLS = 24  # the clip's height and width, in cells of the latents
PATCHES = (1, 3, 6, 12)  # squares of one colour along a side, of several sizes
SHIFT = 0.5  # cells that the clip's pictures move by, from one to the next
MOST = 6  # pictures in a strip
SIDE = 96  # pixels, at least, of a strip's height


@runtime_checkable
class LatentPreview(Protocol):
    """A way to see latents."""

    def pictures(self, latents: Float[Array | np.ndarray, "B C T H W"]) -> UInt8[np.ndarray, "B T _H _W 3"]:
        """Return a picture of each latent frame of each video."""
        ...


class Colours(NamedTuple):
    """The linear map from latents to colours in [0, 1]: one of the first latent frame, and one of the later ones.

    They differ because the first latent frame stands for one frame, and a later one for several.
    """

    weights: Float[np.ndarray, "2 _C 3"]
    bias: Float[np.ndarray, "2 3"]

    def pictures(self, latents: Float[Array | np.ndarray, "B C T H W"]) -> UInt8[np.ndarray, "B T H W 3"]:
        """Return a small picture of each latent frame of each video."""
        x = np.moveaxis(np.asarray(latents, np.float32), 1, -1)
        parts = [
            x[:, part] @ weights + bias
            for part, weights, bias in zip((slice(1), slice(1, None)), self.weights, self.bias, strict=True)
        ]
        return np.round(255 * np.clip(np.concatenate(parts, axis=1), 0, 1)).astype(np.uint8)


def fitted(encode: Callable[[Any], Any], spatial: int, temporal: int) -> Colours:
    """Return the colours of an autoencoder's latents.

    `encode` returns the latents [1 C T H W] of frames. A cell has `spatial` × `spatial` pixels, and a later latent
    frame stands for `temporal` frames.
    """
    clip = drawn_clip(1 + 2 * temporal, spatial)
    latents = np.moveaxis(np.asarray(encode(clip), np.float32)[0], 0, -1)
    count, height, width, _ = latents.shape
    seen = clip.reshape(len(clip), height, spatial, width, spatial, 3).mean((2, 4)) / 255
    first, later = seen[:1], seen[1:].reshape(count - 1, temporal, height, width, 3).mean(1)
    maps = [_least_squares(latents[:1], first), _least_squares(latents[1:], later)]
    return Colours(np.stack([solution[:-1] for solution in maps]), np.stack([solution[-1] for solution in maps]))


def _least_squares(
    latents: Float[np.ndarray, "T H W _C"], colours: Float[np.ndarray, "T H W 3"]
) -> Float[np.ndarray, "_C 3"]:
    """Return the weights that map latents to colours, and a last row that is added."""
    x = latents.reshape(-1, latents.shape[-1])
    with_one = np.concatenate([x, np.ones_like(x[:, :1])], axis=1)
    return np.linalg.lstsq(with_one, colours.reshape(-1, 3), rcond=None)[0].astype(np.float32)


def drawn_clip(frames: int, cell: int) -> UInt8[np.ndarray, "T H W 3"]:
    """Return a clip of squares in random colours, of several sizes on top of each other, which move."""
    random, side = np.random.default_rng(0), CELLS * cell
    page = np.zeros((side, side, 3))
    for patches in PATCHES:
        colours, shown = random.random((patches, patches, 3)), random.random((patches, patches, 1)) < 0.5
        square = (side // patches, side // patches, 1)
        page = np.where(np.kron(shown, np.ones(square, bool)), np.kron(colours, np.ones(square)), page)
    moved = [np.roll(page, round(frame * SHIFT * cell), axis=1) for frame in range(frames)]
    return np.round(255 * np.stack(moved)).astype(np.uint8)


def strip(videos: UInt8[np.ndarray, "B T H W 3"]) -> UInt8[np.ndarray, "_H _W 3"]:
    """Return some pictures of each video side by side, enlarged, with a row for each video."""
    frames, height = videos.shape[1:3]
    chosen = np.unique(np.linspace(0, frames - 1, min(frames, MOST)).round().astype(int))
    page = np.concatenate([np.concatenate(list(video[chosen]), axis=1) for video in videos])
    times = max(1, -(-SIDE // height))
    size = times * page.shape[1], times * page.shape[0]
    return np.asarray(Image.fromarray(page).resize(size, Image.Resampling.NEAREST))
