# SPDX-License-Identifier: Apache-2.0
"""Large frames through a network in overlapping tiles that are cross-faded where they meet."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

Frames = Float[Array, "B T H W C"]


class Tiling(NamedTuple):
    """Tiles of `size` × `size` input cells, one every `stride`; each input cell becomes `scale` output cells."""

    size: int
    stride: int
    scale: float

    @property
    def stride_out(self) -> int:
        return round(self.stride * self.scale)

    @property
    def overlap_out(self) -> int:
        return round((self.size - self.stride) * self.scale)


def map_tiles(
    process: Callable[[Frames, Any], tuple[Frames, Any]], x: Frames, caches: dict | None, tiling: Tiling
) -> tuple[Frames, dict]:
    """Runs `process(tile, cache) -> (tile, cache)` over the tiles of a chunk; each tile keeps a cache of its own.

    Tiles at the right and lower edge are what is left. As in the reference, a tile is faded into its upper neighbour
    first and then into its left one, both as they are after their own fading, and loses what lies beyond its stride.
    """
    _, _, height, width, _ = x.shape
    caches_out, rows = {}, []
    for top in range(0, height, tiling.stride):
        row = []
        for left in range(0, width, tiling.stride):
            tile = x[:, :, top : top + tiling.size, left : left + tiling.size]
            tile, caches_out[top, left] = process(tile, caches and caches[top, left])
            if rows:
                tile = _fade(rows[-1][len(row)], tile, tiling.overlap_out, axis=2)
            if row:
                tile = _fade(row[-1], tile, tiling.overlap_out, axis=3)
            row.append(tile)
        rows.append(row)
    stride = tiling.stride_out
    cropped = [jnp.concatenate([tile[:, :, :stride, :stride] for tile in row], axis=3) for row in rows]
    y = jnp.concatenate(cropped, axis=2)
    return y[:, :, : round(height * tiling.scale), : round(width * tiling.scale)], caches_out


def _fade(before: Frames, after: Frames, overlap: int, axis: int) -> Frames:
    """`after` with its first cells along `axis` faded in over the last cells of `before`."""
    overlap = min(before.shape[axis], after.shape[axis], overlap)
    shape = [1] * after.ndim
    shape[axis] = overlap
    weight = (jnp.arange(overlap, dtype=after.dtype) / overlap).reshape(shape)
    tail = jnp.take(before, jnp.arange(before.shape[axis] - overlap, before.shape[axis]), axis=axis)
    head, rest = jnp.split(after, [overlap], axis=axis)
    return jnp.concatenate([tail * (1.0 - weight) + head * weight, rest], axis=axis)
