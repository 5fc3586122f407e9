# SPDX-License-Identifier: Apache-2.0
"""Tiling: large frames pass a network in overlapping tiles, which are cross-faded where they meet."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Frames = Float[Array, "B _T _H _W _C"]  # inputs and outputs differ in size


class Tiling(NamedTuple):
    """Tiles of `size` × `size` pixels, one every `stride` pixels; the defaults are the reference's."""

    size: int = 256
    stride: int = 192


def map_tiles(
    process: Callable[[Frames, Any], tuple[Frames, Any]],
    x: Frames,
    caches: Any,
    tiling: Tiling | None,
    cells: tuple[int, int],
) -> tuple[Frames, Any]:
    """Runs `process(tile, cache) -> (tile, cache)` over the tiles of a chunk; each tile has a cache of its own.

    `cells` are the widths in pixels of a cell of x and of a cell of the result. Frames that fit in one tile are
    processed whole, as are all frames if `tiling` is None. Tiles at the right and lower edge may be smaller. As in the
    reference, a tile is faded into its upper neighbour and then into its left one, both after their own fading, and is
    cropped to its stride.
    """
    if tiling is None or max(x.shape[2:4]) <= tiling.size // cells[0]:
        return process(x, caches)
    size, stride = tiling.size // cells[0], tiling.stride // cells[0]
    kept, overlap = tiling.stride // cells[1], (tiling.size - tiling.stride) // cells[1]
    caches_out, rows = {}, []
    for top in range(0, x.shape[2], stride):
        row = []
        for left in range(0, x.shape[3], stride):
            tile = x[:, :, top : top + size, left : left + size]
            tile, caches_out[top, left] = process(tile, caches and caches[top, left])
            if rows:
                tile = _fade(rows[-1][len(row)], tile, overlap, axis=2)
            if row:
                tile = _fade(row[-1], tile, overlap, axis=3)
            row.append(tile)
        rows.append(row)
    joined = [jnp.concatenate([tile[:, :, :kept, :kept] for tile in row], axis=3) for row in rows]
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
