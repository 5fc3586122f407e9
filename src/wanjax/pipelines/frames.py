# SPDX-License-Identifier: Apache-2.0
"""Frames to latents and back, chunk by chunk, tile by tile if asked.

The autoencoder's cache makes the chunks of a clip the same as the whole. Each tile has a cache of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt8

from wanjax.execution import Program, Value, program
from wanjax.kernels.compiler_options import conv_options, fast_conv_options, scan_options
from wanjax.layers.conv import Chunk
from wanjax.layers.patch import depth_to_space, space_to_depth
from wanjax.layers.tiling import Tile, Tiling, blend_tiles, split_into_tiles
from wanjax.sharding import VIDEO, aligned_to, constrain, replicate

GivenLatents = Float[Value | np.ndarray, "B C T H W"]
AnyLatents = GivenLatents | Mapping[str, Float[Value | np.ndarray, "B ..."]]  # of the video, or streams by name
GivenFrames = Shaped[Array | np.ndarray, "T H W 3"] | Sequence[Shaped[np.ndarray, "_H _W 3"]]
Frames = UInt8[Value, "_T _H _W 3"] | Float[Value, "_T _H _W 3"]
Call = Callable[..., Any]  # of a program with its arguments, as `Pipeline.call`


class Decoded(NamedTuple):
    """A chunk of a video.

    Args:
        frames: [T H W 3].
        extras: What was decoded with them, by name, such as the samples of sound.
    """

    frames: Frames
    extras: Mapping[str, Any] = {}


class DecodeStatic(NamedTuple):
    """What decodes: the network, the frames' dtype and the width of a cell of pixels."""

    graphdef: Any
    dtype: Any
    patch: int


class LatentTile(NamedTuple):
    """A part of latents: its frames from `start` until `stop`, and its tile."""

    start: int
    stop: int
    tile: Tile


class JoinStatic(NamedTuple):
    """The tiles that are joined, the width of their cells, and the frames' dtype; None leaves cells as they are."""

    tiling: Tiling
    pixels: int
    dtype: Any = None


@program(scan_options)
def cut(
    parts: tuple[LatentTile, ...], latents: Float[Array, "_B C T H W"], video: Int[Array, ""]
) -> tuple[Float[Array, "1 _T _H _W C"], ...]:
    """Cut parts out of the latents of a video of the batch, so that one program decodes videos of any length."""
    x = jnp.moveaxis(jax.lax.dynamic_slice_in_dim(latents, video, 1), 1, -1)

    def cut_tile(part: LatentTile) -> Float[Array, "1 _T _H _W C"]:
        top, left, height, width = part.tile
        return x[:, part.start : part.stop, top : top + height, left : left + width]

    return tuple(map(cut_tile, parts))


@program(conv_options, donated=("cache",), fast=fast_conv_options)
def decode_chunk(static: DecodeStatic, z: Chunk, cache: Any, weights: Any) -> tuple[Frames, Any]:
    """Decode a chunk of latents to frames of the final dtype; return the cache too."""
    x, cache = _decode(static, z, cache, weights)
    return _finished(x, static.dtype, static.patch), cache


@program(conv_options, donated=("cache",), fast=fast_conv_options)
def decode_tile(static: DecodeStatic, z: Chunk, cache: Any, weights: Any) -> tuple[Chunk, Any]:
    """Decode a tile of latents to cells of pixels, about [-1, 1]; return the cache too."""
    return _decode(static, z, cache, weights)


@program(conv_options, fast=fast_conv_options)
def encode_chunk(graphdef: Any, x: Chunk, cache: Any, weights: Any) -> tuple[Chunk, Any]:
    """Encode a chunk of cells of pixels in [-1, 1] to latents; return the cache too."""
    vae = nnx.merge(graphdef, weights)
    cells = vae.config.spatial_factor // vae.config.patch
    with aligned_to(x.shape[2] // cells, x.shape[3] // cells):
        z, cache = vae.encode_cells(constrain(x, VIDEO), cache)
        return constrain(z, VIDEO), _constrained(cache)


@program(scan_options)
def join_tiles(static: JoinStatic, rows: Sequence[Sequence[Chunk]]) -> Frames | Chunk:
    """Join the tiles of a chunk; those of pixels to frames of the final dtype."""
    x = blend_tiles(rows, static.tiling, static.pixels)
    return x if static.dtype is None else _finished(x, static.dtype, static.pixels)


@program(scan_options)
def from_frames(patch: int, frames: Shaped[Array, "T H W 3"]) -> Chunk:
    """Convert frames, bytes or floats in [0, 1], to cells of pixels in [-1, 1]."""
    x = frames.astype(jnp.float32) / 255.0 if frames.dtype == jnp.uint8 else frames.astype(jnp.float32)
    return space_to_depth(x[None] * 2.0 - 1.0, patch)


@program(scan_options)
def join_chunks(static: None, chunks: tuple[Chunk, ...]) -> Float[Array, "B C T H W"]:
    """Join the latents of a clip's chunks."""
    return jnp.moveaxis(jnp.concatenate(chunks, axis=1), -1, 1)


@program(scan_options)
def split_posterior(
    scale: float, moments: Float[Array, "1 _C T H W"]
) -> tuple[Float[Array, "1 C T H W"], Float[Array, "1 C T H W"]]:
    """Return the mean and the deviation of encoded frames, multiplied by a factor.

    The log-variance is kept within the reference's limits, beyond which its deviation may be infinite.
    """
    mean, log_variance = jnp.split(moments, 2, axis=1)
    return scale * mean, scale * jnp.exp(0.5 * jnp.clip(log_variance, -30.0, 20.0))


def _decode(static: DecodeStatic, z: Chunk, cache: Any, weights: Any) -> tuple[Chunk, Any]:
    with aligned_to(*z.shape[2:4]):
        x, cache = nnx.merge(static.graphdef, weights).decode_cells(constrain(z, VIDEO), cache)
        return constrain(x, VIDEO), _constrained(cache)


def _constrained(cache: Any) -> Any:
    """Constrains the cache to the sharding of frames."""
    return jax.tree.map(lambda x: constrain(x, VIDEO), cache)


def _finished(x: Chunk, dtype: Any, patch: int) -> Frames:
    """Convert cells in [-1, 1] to bytes or floats in [0, 1], replicated so that every process can read them."""
    frames = jnp.clip(depth_to_space(x, patch) * 0.5 + 0.5, 0.0, 1.0)
    frames = jnp.round(frames * 255.0).astype(dtype) if dtype == jnp.uint8 else frames.astype(dtype)
    return replicate(constrain(frames, VIDEO)[0])  # gathered after the rounding, because bytes are less to send


def decode_latents(
    vae: Any,
    latent_chunks: Iterable[GivenLatents],
    chunk_lengths: tuple[int, int],
    dtype: DTypeLike,
    tiling: Tiling | None,
    call: Call,
    video: int = 0,
) -> Iterator[Frames]:
    """Decode the latents of a video lazily; yield the frames of each chunk.

    `chunk_lengths` are the latent frames of the first chunk and of each later one. Every array after the first holds
    whole chunks. `video` is the index of the video in the batch. The tiling has all of its sizes.
    """
    config, (first, rest), dtype = vae.config, chunk_lengths, jnp.dtype(dtype)
    graphdef, weights = nnx.split(vae)
    caches: dict[Tile, Any] = {}

    static = DecodeStatic(graphdef, dtype, config.patch)

    def decode(program: Program, tile: Tile, z: Float[Value, "1 _T _H _W _C"]) -> Any:
        frames, caches[tile] = call(program, static, z, caches.get(tile), weights)
        return frames

    for latent_chunk in latent_chunks:
        rows = split_into_tiles(latent_chunk.shape[3], latent_chunk.shape[4], tiling, config.spatial_factor)
        chunks = list(spans(latent_chunk.shape[2], (rest if caches else first, rest)))
        parts = tuple(LatentTile(span.start, span.stop, tile) for span in chunks for row in rows for tile in row)
        left = iter(call(cut, parts, latent_chunk, np.int32(video)))
        for _ in chunks:
            if tiling is None:  # one program from latents to frames
                yield decode(decode_chunk, rows[0][0], next(left))
            else:
                tiles = [[decode(decode_tile, tile, next(left)) for tile in row] for row in rows]
                yield call(join_tiles, JoinStatic(tiling, config.patch, dtype), tiles)


def encode_frames(vae: Any, frames: GivenFrames, tiling: Tiling | None, call: Call) -> Float[Value, "1 C _T _H _W"]:
    """Return the latents of frames that are uint8 or floats in [0, 1]."""
    config = vae.config
    tiling = tiling and tiling.completed(config.tiling, config.spatial_factor // config.patch)
    graphdef, weights = nnx.split(vae)
    caches: dict[Tile, Any] = {}
    height, width, _ = frames[0].shape

    def encode(tile: Tile, chunk: Shaped[np.ndarray, "T H W 3"]) -> Any:
        top, left, tall, wide = (config.patch * n for n in tile)
        x = call(from_frames, config.patch, chunk[:, top : top + tall, left : left + wide])
        latents, caches[tile] = call(encode_chunk, graphdef, x, caches.get(tile), weights)
        return latents

    # a tile has as many cells as `tiling` has pixels
    rows, chunks = split_into_tiles(height // config.patch, width // config.patch, tiling, 1), []
    for span in spans(len(frames), config.encode_lengths(len(frames))):
        chunk = np.asarray(frames[span.start : span.stop])
        tiles = [[encode(tile, chunk) for tile in row] for row in rows]
        join = JoinStatic(tiling, config.spatial_factor // config.patch) if tiling else None
        chunks.append(tiles[0][0] if join is None else call(join_tiles, join, tiles))
    return call(join_chunks, None, tuple(chunks))


def encode_clip(vae: Any, frames: GivenFrames, tiling: Tiling | None, call: Call) -> Float[Value, "1 C _T _H _W"]:
    """Return the latents on which a network is trained; of an autoencoder with a posterior, its scaled mean."""
    moments = encode_frames(vae, frames, tiling, call)
    scale = getattr(vae.config, "posterior_scale", None)
    return moments if scale is None else call(split_posterior, scale, moments)[0]


def chunk_count(count: int, chunk_lengths: tuple[int, int]) -> int:
    """Return the number of chunks of `count` frames, as `spans` divides them."""
    return len(list(spans(count, chunk_lengths)))


def spans(count: int, chunk_lengths: tuple[int, int]) -> Iterator[range]:
    """Yield the frames of each chunk of `count` frames: the first has `at_once[0]`, the others `at_once[1]`."""
    first, rest = chunk_lengths
    yield range(min(first, count))
    for start in range(first, count, rest):
        yield range(start, min(start + rest, count))
