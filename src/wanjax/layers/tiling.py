# SPDX-License-Identifier: Apache-2.0
"""Tiling: large frames pass a network in overlapping tiles, which are cross-faded where they meet."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Frames = Float[Array, "B _T _H _W _C"]  # inputs and outputs differ in size
Pixels = int | tuple[int, int]  # one number for height and width, or one for each


class Tiling(NamedTuple):
    """Tiles of `size` pixels, one every `stride` pixels, in height and in width; None is the model's own number."""

    size: Pixels | None = None
    stride: Pixels | None = None

    def completed(self, own: "Tiling") -> "Tiling":
        """Returns this tiling with the numbers of `own` in place of None."""
        return Tiling(*(other if given is None else given for given, other in zip(self, own, strict=True)))

    def cells(self, pixels: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the size and the stride, each as (height, width), in cells of so many pixels."""
        pairs = [side if isinstance(side, tuple) else (side, side) for side in self if side is not None]
        (rows, columns), (down, right) = pairs
        return (rows // pixels, columns // pixels), (down // pixels, right // pixels)


def map_tiles(
    process: Callable[[Frames, Any], tuple[Frames, Any]],
    x: Frames,
    caches: Any,
    tiling: Tiling | None,
    cells: tuple[int, int],
) -> tuple[Frames, Any]:
    """Runs `process(tile, cache) -> (tile, cache)` over the tiles of a chunk; each tile has a cache of its own.

    `cells` are the widths in pixels of a cell of x and of a cell of the result. Frames that fit in one tile are
    processed whole, as are all frames if `tiling` is None; another tiling is `completed`. Tiles at the right and lower
    edge may be smaller. As in the references, a tile is faded into its upper neighbour and then into its left one, both
    after their own fading, and is cropped to its stride.
    """
    if tiling is None:
        return process(x, caches)
    (height, width), (down, right) = tiling.cells(cells[0])
    if x.shape[2] <= height and x.shape[3] <= width:
        return process(x, caches)
    (tall, wide), kept = tiling.cells(cells[1])
    caches_out, rows = {}, []
    for top in range(0, x.shape[2], down):
        row = []
        for left in range(0, x.shape[3], right):
            tile = x[:, :, top : top + height, left : left + width]
            tile, caches_out[top, left] = process(tile, caches and caches[top, left])
            if rows:
                tile = _fade(rows[-1][len(row)], tile, tall - kept[0], axis=2)
            if row:
                tile = _fade(row[-1], tile, wide - kept[1], axis=3)
            row.append(tile)
        rows.append(row)
    joined = [jnp.concatenate([tile[:, :, : kept[0], : kept[1]] for tile in row], axis=3) for row in rows]
    return jnp.concatenate(joined, axis=2), caches_out


@partial(jax.jit, static_argnames=("overlap", "axis"))
def _fade(before: Frames, after: Frames, overlap: int, axis: int) -> Frames:
    """Returns `after`, whose first cells along `axis` are blended with the last cells of `before`."""
    overlap = min(before.shape[axis], after.shape[axis], overlap)
    shape = [1] * after.ndim
    shape[axis] = overlap
    weight = (jnp.arange(overlap, dtype=after.dtype) / overlap).reshape(shape)
    tail = jnp.take(before, jnp.arange(before.shape[axis] - overlap, before.shape[axis]), axis=axis)
    head, rest = jnp.split(after, [overlap], axis=axis)
    return jnp.concatenate([tail * (1.0 - weight) + head * weight, rest], axis=axis)
