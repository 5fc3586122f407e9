# SPDX-License-Identifier: Apache-2.0
"""Decoding and encoding of frames by a causal video autoencoder, chunk by chunk and optionally tile by tile.

The autoencoder has the methods `decode_cells(z, cache)` and `encode_cells(x, cache)`, which also return the cache for
the next chunk. A cell is `config.patch` × `config.patch` pixels. `config.decoded_at_once(frames)` and
`config.encoded_at_once(frames)` are the lengths of the first chunk of a clip and of the later ones, and
`config.tiling` the tiles of frames that would not fit in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from wanjax.compilation import Compile, program
from wanjax.kernels.compiler_options import convolutions, scanned
from wanjax.layers.conv import VIDEO
from wanjax.layers.patch import to_cells, to_pixels
from wanjax.layers.tiling import Tiling, map_tiles
from wanjax.sharding import constrain, following, replicate

Latents = Float[Array, "B C T H W"]
GivenLatents = Float[Array | np.ndarray, "B C T H W"]
GivenFrames = Shaped[Array | np.ndarray, "T H W 3"] | Sequence[Shaped[np.ndarray, "H W 3"]]
Chunk = Float[Array, "B _T _H _W _C"]  # inputs and outputs differ in size
Frames = UInt8[Array, "T H W 3"] | Float[Array, "T H W 3"]


@program(convolutions, donated=("cache",))
def decode_chunk(static: tuple[Any, Any, int], z: Chunk, cache: Any, weights: Any) -> tuple[Frames, Any]:
    """Decodes a chunk of latents to frames of the final dtype; returns the cache. static: graphdef, dtype, patch."""
    graphdef, dtype, patch = static
    with following(*z.shape[2:4]):
        x, cache = _decode(graphdef, z, cache, weights)
        return _finished(x, dtype, patch), cache


@program(convolutions, donated=("cache",))
def decode_tile(graphdef: Any, z: Chunk, cache: Any, weights: Any) -> tuple[Chunk, Any]:
    """Decodes a tile of latents to cells of pixels, about [-1, 1]; returns the cache too."""
    with following(*z.shape[2:4]):
        return _decode(graphdef, z, cache, weights)


@program(convolutions)
def encode_chunk(graphdef: Any, x: Chunk, cache: Any, weights: Any) -> tuple[Chunk, Any]:
    """Encodes a chunk of cells of pixels in [-1, 1] to latents; returns the cache too."""
    vae = nnx.merge(graphdef, weights)
    cells = vae.config.spatial_factor // vae.config.patch
    with following(x.shape[2] // cells, x.shape[3] // cells):
        z, cache = vae.encode_cells(constrain(x, VIDEO), cache)
        return constrain(z, VIDEO), _constrained(cache)


@program(scanned)
def to_frames(static: tuple[Any, int], x: Chunk) -> Frames:
    """Converts cells of pixels to frames of the final dtype. static: dtype, patch."""
    return _finished(x, *static)


@program(scanned)
def from_frames(patch: int, frames: Shaped[Array, "T H W 3"]) -> Chunk:
    """Converts frames, bytes or floats in [0, 1], to cells of pixels in [-1, 1]."""
    x = frames.astype(jnp.float32) / 255.0 if frames.dtype == jnp.uint8 else frames.astype(jnp.float32)
    return to_cells(x[None] * 2.0 - 1.0, patch)


def _decode(graphdef: Any, z: Chunk, cache: Any, weights: Any) -> tuple[Chunk, Any]:
    x, cache = nnx.merge(graphdef, weights).decode_cells(constrain(z, VIDEO), cache)
    return constrain(x, VIDEO), _constrained(cache)


def _constrained(cache: Any) -> Any:
    """Constrains the cache to the sharding of frames."""
    return jax.tree.map(lambda x: constrain(x, VIDEO), cache)


def _finished(x: Chunk, dtype: Any, patch: int) -> Frames:
    """Converts cells in [-1, 1] to bytes or floats in [0, 1], replicated so that every process can read them."""
    frames = jnp.clip(to_pixels(x, patch) * 0.5 + 0.5, 0.0, 1.0)
    frames = jnp.round(frames * 255.0).astype(dtype) if dtype == jnp.uint8 else frames.astype(dtype)
    return replicate(constrain(frames, VIDEO)[0])  # gathered after the rounding, because bytes are less to send


def decoded(
    vae: Any,
    pieces: Iterable[GivenLatents],
    at_once: tuple[int, int],
    dtype: DTypeLike,
    tiling: Tiling | None,
    compiled: Compile,
) -> Iterator[Frames]:
    """Yields the frames of each chunk of a video's latents, which come in pieces; only one chunk is in memory.

    `at_once` are the lengths of the first chunk and of the later ones. A later piece has whole chunks.
    """
    config, (first, rest) = vae.config, at_once
    cells = (config.spatial_factor, config.patch)
    tiling = tiling and tiling.completed(config.tiling)
    graphdef, weights = nnx.split(vae)
    decode = compiled(decode_tile)
    cache = None
    for piece in pieces:
        z = jnp.moveaxis(jnp.asarray(piece), 1, -1)
        for chunk in spans(z.shape[1], (first if cache is None else rest, rest)):
            z_chunk = z[:, chunk]
            if tiling is None:  # one program from latents to frames
                static = (graphdef, jnp.dtype(dtype), config.patch)
                frames, cache = compiled(decode_chunk)(static, z_chunk, cache, weights)
            else:
                process = partial(_with_weights, decode, graphdef, weights)
                x, cache = map_tiles(process, z_chunk, cache, tiling, cells)
                frames = compiled(to_frames)((jnp.dtype(dtype), config.patch), x)
            yield frames


def encoded(vae: Any, frames: GivenFrames, tiling: Tiling | None, compiled: Compile) -> Float[Array, "1 C _T _H _W"]:
    """Returns the latents of frames that are uint8 or floats in [0, 1]."""
    config = vae.config
    cells = (1, config.spatial_factor // config.patch)  # a tile has as many cells as `tiling` has pixels
    tiling = tiling and tiling.completed(config.tiling)
    graphdef, weights = nnx.split(vae)
    process = partial(_with_weights, compiled(encode_chunk), graphdef, weights)
    cache, latents = None, []
    for chunk in spans(len(frames), config.encoded_at_once(len(frames))):
        x = compiled(from_frames)(config.patch, np.asarray(frames[chunk]))
        z, cache = map_tiles(process, x, cache, tiling, cells)
        latents.append(z)
    return jnp.moveaxis(jnp.concatenate(latents, axis=1), -1, 1)


def _with_weights(run: Any, graphdef: Any, weights: Any, x: Chunk, cache: Any) -> tuple[Chunk, Any]:
    return run(graphdef, x, cache, weights)


def chunk_count(count: int, at_once: tuple[int, int]) -> int:
    """Returns the number of chunks of `count` frames, as `spans` divides them."""
    return len(list(spans(count, at_once)))


def spans(count: int, at_once: tuple[int, int]) -> Iterable[slice]:
    """Yields slices of `count` frames: the first slice has `at_once[0]` frames, the others `at_once[1]`."""
    first, rest = at_once
    yield slice(0, first)
    for start in range(first, count, rest):
        yield slice(start, start + rest)
