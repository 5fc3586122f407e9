# SPDX-License-Identifier: Apache-2.0
"""Tiling: large frames pass a network in overlapping tiles, which are cross-faded where they meet."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from wanjax.errors import WanjaxError, repr_short

Frames = Float[Array, "B _T _H _W _C"]  # inputs and outputs differ in size
Pixels = int | tuple[int, int]  # one number for height and width, or one for each


class Tiling(NamedTuple):
    """Overlapping tiles in which an autoencoder passes large frames. None is the model's own number.

    Attributes:
        size: Pixels of a tile: one number for height and width, or (height, width).
        stride: Pixels from the start of a tile to that of the next, likewise; at most the size.
    """

    size: Pixels | None = None
    stride: Pixels | None = None

    def completed(self, default: "Tiling", unit: int = 1) -> "Tiling":
        """Return this tiling with the numbers of `default` in place of None.

        Args:
            default: The model's own tiling.
            unit: Pixels that every number has to be a multiple of.

        Raises:
            WanjaxError: A number is not a multiple of `unit`, or a stride is larger than its size.
        """
        whole = Tiling(*(usual if value is None else value for value, usual in zip(self, default, strict=True)))
        for name, numbers in zip(self._fields, pairs := whole.pairs(), strict=True):
            if len(numbers) != 2 or not all(type(n) is int and n > 0 and n % unit == 0 for n in numbers):
                right = f"a multiple of {unit} pixels, or one for each of height and width"
                raise WanjaxError(f"the {name} of tiles is {repr_short(getattr(whole, name))}: give {right}")
        if any(step > side for side, step in zip(*pairs, strict=True)):
            gaps = f"tiles of {whole.size} pixels, one every {whole.stride}, leave gaps"
            raise WanjaxError(f"{gaps}: give a stride of at most the size")
        return whole

    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """Return the size and the stride of a whole tiling, each as (height, width)."""
        return tuple(side if isinstance(side, tuple) else (side, side) for side in self if side is not None)

    def cells(self, pixels: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the size and the stride, each as (height, width), in cells of so many pixels.

        Args:
            pixels: Pixels of a cell's side.
        """
        (rows, columns), (down, right) = self.pairs()
        return (rows // pixels, columns // pixels), (down // pixels, right // pixels)


class Tile(NamedTuple):
    """A tile's place and size, in cells; those at the right and lower edge may be smaller than the others."""

    top: int
    left: int
    height: int
    width: int


def tiles_of(height: int, width: int, tiling: Tiling | None, pixels: int) -> list[list[Tile]]:
    """Return the rows of tiles of frames of so many cells, each of `pixels` pixels along a side.

    Frames that fit in one tile are one, as are all frames if `tiling` is None; another tiling is `completed`.
    """
    whole = [[Tile(0, 0, height, width)]]
    if tiling is None:
        return whole
    (tall, wide), (down, right) = tiling.cells(pixels)
    if height <= tall and width <= wide:
        return whole
    return [
        [Tile(top, left, min(tall, height - top), min(wide, width - left)) for left in range(0, width, right)]
        for top in range(0, height, down)
    ]


def joined(rows: Sequence[Sequence[Frames]], tiling: Tiling | None, pixels: int) -> Frames:
    """Return whole frames from the rows of their tiles, whose cells have `pixels` pixels along a side.

    As in the references, a tile is faded into its upper neighbour and then into its left one, both after their own
    fading, and is cropped to its stride.
    """
    if len(rows) == len(rows[0]) == 1 or tiling is None:
        return rows[0][0]
    (tall, wide), (down, right) = tiling.cells(pixels)
    faded: list[list[Frames]] = []
    for tiles in rows:
        row: list[Frames] = []
        for tile in tiles:
            if faded:
                tile = _fade(faded[-1][len(row)], tile, tall - down, axis=2)
            if row:
                tile = _fade(row[-1], tile, wide - right, axis=3)
            row.append(tile)
        faded.append(row)
    return jnp.concatenate(
        [jnp.concatenate([tile[:, :, :down, :right] for tile in row], axis=3) for row in faded], axis=2
    )


def _fade(before: Frames, after: Frames, overlap: int, axis: int) -> Frames:
    """Return `after`, whose first cells along `axis` are blended with the last cells of `before`."""
    overlap = min(before.shape[axis], after.shape[axis], overlap)
    shape = [1] * after.ndim
    shape[axis] = overlap
    weight = (jnp.arange(overlap, dtype=after.dtype) / overlap).reshape(shape)
    tail = jnp.take(before, jnp.arange(before.shape[axis] - overlap, before.shape[axis]), axis=axis)
    head, rest = jnp.split(after, [overlap], axis=axis)
    return jnp.concatenate([tail * (1.0 - weight) + head * weight, rest], axis=axis)
