# SPDX-License-Identifier: Apache-2.0
"""Tiling: an autoencoder processes large frames in overlapping tiles. The overlaps are cross-faded."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from wanjax.errors import WanjaxError, repr_short

Frames = Float[Array, "B _T _H _W _C"]  # an input or an output; their sizes may differ
Pixels = int | tuple[int, int]  # one number for both height and width, or a pair of numbers


class Tiling(NamedTuple):
    """The overlapping tiles in which an autoencoder processes large frames. None means the model's own number.

    Attributes:
        size: Pixels of a tile: one number for height and width, or (height, width).
        stride: Pixels from the start of a tile to the start of the next one, in the same form as `size`. The stride is
            at most the size.
    """

    size: Pixels | None = None
    stride: Pixels | None = None

    def with_defaults(self, default: "Tiling", unit: int = 1) -> "Tiling":
        """Replace each number that is None by the number in `default`.

        Args:
            default: The model's own tiling.
            unit: Every number of pixels must be a multiple of this number.

        Raises:
            WanjaxError: A number is not a positive multiple of `unit`, or a stride is larger than the size.
        """
        full = Tiling(*(fallback if value is None else value for value, fallback in zip(self, default, strict=True)))
        for name, numbers in zip(self._fields, pairs := full.pairs(), strict=True):
            if len(numbers) != 2 or not all(type(n) is int and n > 0 and n % unit == 0 for n in numbers):
                advice = f"a multiple of {unit} pixels, or one for each of height and width"
                raise WanjaxError(f"the {name} of tiles is {repr_short(getattr(full, name))}: give {advice}")
        if any(stride > side for side, stride in zip(*pairs, strict=True)):
            problem = f"tiles of {full.size} pixels, one every {full.stride}, leave gaps"
            raise WanjaxError(f"{problem}: give a stride of at most the size")
        return full

    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """Return the size and the stride, each as (height, width). Size and stride must be set."""
        return tuple(side if isinstance(side, tuple) else (side, side) for side in self if side is not None)

    def sizes_in_latents(self, pixels_per_position: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the size and the stride in latent positions, each as (height, width).

        Args:
            pixels_per_position: The number of pixels along a side of a latent position.
        """
        (height, width), (stride_height, stride_width) = self.pairs()
        size = height // pixels_per_position, width // pixels_per_position
        return size, (stride_height // pixels_per_position, stride_width // pixels_per_position)


class Tile(NamedTuple):
    """The offset and the size of a tile, in latent positions. Tiles at the right and lower edges may be smaller than
    others."""

    top: int
    left: int
    height: int
    width: int


def split_into_tiles(height: int, width: int, tiling: Tiling | None, pixels_per_position: int) -> list[list[Tile]]:
    """Split frames of height × width latent positions into rows of tiles. A position has `pixels_per_position` pixels
    along a side.

    If the frames fit in one tile, or `tiling` is None, there is a single tile. No number of `tiling` may be None.
    """
    single_tile = [[Tile(0, 0, height, width)]]
    if tiling is None:
        return single_tile
    (tile_height, tile_width), (stride_height, stride_width) = tiling.sizes_in_latents(pixels_per_position)
    if height <= tile_height and width <= tile_width:
        return single_tile
    return [
        [
            Tile(top, left, min(tile_height, height - top), min(tile_width, width - left))
            for left in range(0, width, stride_width)
        ]
        for top in range(0, height, stride_height)
    ]


def blend_tiles(rows: Sequence[Sequence[Frames]], tiling: Tiling | None, pixels_per_position: int) -> Frames:
    """Join rows of decoded or encoded tiles into full frames. A latent position has `pixels_per_position` pixels along
    a side.

    As in the reference implementations, a tile is blended with its upper neighbour and then with its left neighbour.
    Both neighbours are already blended with their neighbours. Then the tile is cropped to its stride.
    """
    if len(rows) == len(rows[0]) == 1 or tiling is None:
        return rows[0][0]
    (tile_height, tile_width), (stride_height, stride_width) = tiling.sizes_in_latents(pixels_per_position)
    blended_rows: list[list[Frames]] = []
    for tiles in rows:
        row: list[Frames] = []
        for tile in tiles:
            if blended_rows:
                tile = _cross_fade(blended_rows[-1][len(row)], tile, tile_height - stride_height, axis=2)
            if row:
                tile = _cross_fade(row[-1], tile, tile_width - stride_width, axis=3)
            row.append(tile)
        blended_rows.append(row)
    cropped_rows = ([tile[:, :, :stride_height, :stride_width] for tile in row] for row in blended_rows)
    return jnp.concatenate([jnp.concatenate(row, axis=3) for row in cropped_rows], axis=2)


def _cross_fade(neighbour: Frames, tile: Frames, overlap: int, axis: int) -> Frames:
    """Blend the first positions of `tile` along `axis` with the last positions of its `neighbour`. Return the whole
    tile."""
    overlap = min(neighbour.shape[axis], tile.shape[axis], overlap)
    shape = [1] * tile.ndim
    shape[axis] = overlap
    weight = (jnp.arange(overlap, dtype=tile.dtype) / overlap).reshape(shape)
    tail = jnp.take(neighbour, jnp.arange(neighbour.shape[axis] - overlap, neighbour.shape[axis]), axis=axis)
    head, remainder = jnp.split(tile, [overlap], axis=axis)
    return jnp.concatenate([tail * (1.0 - weight) + head * weight, remainder], axis=axis)
