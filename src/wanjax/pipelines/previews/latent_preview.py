# SPDX-License-Identifier: Apache-2.0
"""Previews: small images of an unfinished video, by a linear map from latents to colours.

A pixel of a preview is one position of the latents, and an image is one latent frame. The map is a least-squares fit
from the latents of a synthetic clip to the colours of the clip. The fit needs only the model's own autoencoder.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, UInt8
from PIL import Image

Picture = UInt8[np.ndarray, "H W 3"]

CLIP_SIZE = 24  # the height and width of the synthetic clip, in latent positions
GRID_SIZES = (1, 3, 6, 12)  # the number of squares along a side of the clip, for each size of squares
MOTION_PER_FRAME = 0.5  # how far the clip moves from frame to frame, in latent positions
MAX_PICTURES = 6  # the maximum number of images in a strip
MIN_HEIGHT = 96  # the minimum height of a filmstrip, in pixels


@runtime_checkable
class LatentPreview(Protocol):
    """Makes preview images from latents."""

    def pictures(self, latents: Float[Array | np.ndarray, "B C T H W"]) -> UInt8[np.ndarray, "B T _H _W 3"]:
        """Return an image of each latent frame of each video."""
        ...


class LatentToRGB(NamedTuple):
    """Two linear maps from latents to colours in [0, 1]: for the first latent frame, and for later frames.

    The maps differ because the first latent frame encodes one frame, and each later latent frame encodes several.
    """

    weights: Float[np.ndarray, "2 _C 3"]
    bias: Float[np.ndarray, "2 3"]

    def pictures(self, latents: Float[Array | np.ndarray, "B C T H W"]) -> UInt8[np.ndarray, "B T H W 3"]:
        """Return a small image of each latent frame of each video."""
        x = np.moveaxis(np.asarray(latents, np.float32), 1, -1)
        frame_colours = [
            x[:, frames] @ weights + bias
            for frames, weights, bias in zip((slice(1), slice(1, None)), self.weights, self.bias, strict=True)
        ]
        return np.round(255 * np.clip(np.concatenate(frame_colours, axis=1), 0, 1)).astype(np.uint8)


def fit_colours(encode: Callable[[Any], Any], spatial: int, temporal: int) -> LatentToRGB:
    """Fit the linear map from an autoencoder's latents to colours.

    `encode` returns the latents [1 C T H W] of frames. A position of the latents covers `spatial` × `spatial` pixels,
    and a latent frame after the first covers `temporal` frames.
    """
    clip = synthetic_clip(1 + 2 * temporal, spatial)
    latents = np.moveaxis(np.asarray(encode(clip), np.float32)[0], 0, -1)
    count, height, width, _ = latents.shape
    targets = clip.reshape(len(clip), height, spatial, width, spatial, 3).mean((2, 4)) / 255
    first_target, later_targets = targets[:1], targets[1:].reshape(count - 1, temporal, height, width, 3).mean(1)
    solutions = [_least_squares(latents[:1], first_target), _least_squares(latents[1:], later_targets)]
    return LatentToRGB(
        np.stack([weights[:-1] for weights in solutions]), np.stack([weights[-1] for weights in solutions])
    )


def _least_squares(
    latents: Float[np.ndarray, "T H W _C"], colours: Float[np.ndarray, "T H W 3"]
) -> Float[np.ndarray, "_C 3"]:
    """Return the weights that map latents to colours, with the bias as the last row."""
    x = latents.reshape(-1, latents.shape[-1])
    with_one = np.concatenate([x, np.ones_like(x[:, :1])], axis=1)
    return np.linalg.lstsq(with_one, colours.reshape(-1, 3), rcond=None)[0].astype(np.float32)


def synthetic_clip(frames: int, position_size: int) -> UInt8[np.ndarray, "T H W 3"]:
    """Draw a clip of moving squares of several sizes in random colours."""
    random, size = np.random.default_rng(0), CLIP_SIZE * position_size
    frame = np.zeros((size, size, 3))
    for num_squares in GRID_SIZES:
        colours, visible = (
            random.random((num_squares, num_squares, 3)),
            random.random((num_squares, num_squares, 1)) < 0.5,
        )
        square_size = (size // num_squares, size // num_squares, 1)
        frame = np.where(np.kron(visible, np.ones(square_size, bool)), np.kron(colours, np.ones(square_size)), frame)
    moved_frames = [np.roll(frame, round(index * MOTION_PER_FRAME * position_size), axis=1) for index in range(frames)]
    return np.round(255 * np.stack(moved_frames)).astype(np.uint8)


def make_filmstrip(videos: UInt8[np.ndarray, "B T H W 3"]) -> UInt8[np.ndarray, "_H _W 3"]:
    """Arrange at most `MAX_PICTURES` images of each video side by side, enlarged, with one row per video."""
    frames, height = videos.shape[1:3]
    indices = np.unique(np.linspace(0, frames - 1, min(frames, MAX_PICTURES)).round().astype(int))
    rows = np.concatenate([np.concatenate(list(video[indices]), axis=1) for video in videos])
    scale = max(1, -(-MIN_HEIGHT // height))
    size = scale * rows.shape[1], scale * rows.shape[0]
    return np.asarray(Image.fromarray(rows).resize(size, Image.Resampling.NEAREST))
