# SPDX-License-Identifier: Apache-2.0
"""Encode frames to latents, and decode latents to frames, chunk by chunk and optionally tile by tile. The autoencoder
has a cache, so that a clip in chunks gives the same result as the whole clip at once. Each tile has its own cache.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt8

from wanjax.execution import ArrayOrShape, Program, program
from wanjax.kernels.compiler_options import conv_options, fast_conv_options, scan_options
from wanjax.layers.conv import Chunk
from wanjax.layers.patch import depth_to_space, space_to_depth
from wanjax.layers.tiling import Tile, Tiling, blend_tiles, split_into_tiles
from wanjax.sharding import VIDEO_AXES, align_shardings, constrain, replicate

LatentsInput = Float[ArrayOrShape | np.ndarray, "B C T H W"]
# The latents of the video, or a mapping by modality
AnyLatents = LatentsInput | Mapping[str, Float[ArrayOrShape | np.ndarray, "B ..."]]
FramesInput = Shaped[Array | np.ndarray, "T H W 3"] | Sequence[Shaped[np.ndarray, "_H _W 3"]]
Frames = UInt8[ArrayOrShape, "_T _H _W 3"] | Float[ArrayOrShape, "_T _H _W 3"]
Call = Callable[..., Any]  # calls a program with arguments, like `Runtime.call`


class Decoded(NamedTuple):
    """A chunk of a video.

    Args:
        frames: The frames [T H W 3].
        extras: Other decoded arrays by name, such as the samples of sound.
    """

    frames: Frames
    extras: Mapping[str, Any] = {}


class DecodeStatic(NamedTuple):
    """The static inputs for decoding: the network's definition, the frames' dtype and the width of a patch in
    pixels."""

    graphdef: Any
    dtype: Any
    patch: int


class LatentTile(NamedTuple):
    """A part of the latents: the frames from `start` to `stop` (exclusive), within one tile."""

    start: int
    stop: int
    tile: Tile


class JoinStatic(NamedTuple):
    """The static inputs for joining tiles: the tiling, the width of a patch in pixels, and the dtype of frames.

    If the dtype is None, patches are not converted to frames.
    """

    tiling: Tiling
    pixels: int
    dtype: Any = None


@program(scan_options)
def cut(
    latent_tiles: tuple[LatentTile, ...], latents: Float[Array, "_B C T H W"], video: Int[Array, ""]
) -> tuple[Float[Array, "1 _T _H _W C"], ...]:
    """Cut the latents of one video of the batch into parts. One program decodes all parts of the same shape."""
    x = jnp.moveaxis(jax.lax.dynamic_slice_in_dim(latents, video, 1), 1, -1)

    def cut_tile(latent_tile: LatentTile) -> Float[Array, "1 _T _H _W C"]:
        top, left, height, width = latent_tile.tile
        return x[:, latent_tile.start : latent_tile.stop, top : top + height, left : left + width]

    return tuple(map(cut_tile, latent_tiles))


@program(conv_options, donated=("cache",), fast_options=fast_conv_options)
def decode_chunk(static: DecodeStatic, z: Chunk, cache: Any, weights: Any) -> tuple[Frames, Any]:
    """Decode a chunk of latents to frames of the final dtype. Also return the new cache."""
    x, cache = _decode(static, z, cache, weights)
    return _to_frames(x, static.dtype, static.patch), cache


@program(conv_options, donated=("cache",), fast_options=fast_conv_options)
def decode_tile(static: DecodeStatic, z: Chunk, cache: Any, weights: Any) -> tuple[Chunk, Any]:
    """Decode a tile of latents to patches of pixels in about [-1, 1]. Also return the new cache."""
    return _decode(static, z, cache, weights)


@program(conv_options, fast_options=fast_conv_options)
def encode_chunk(graphdef: Any, x: Chunk, cache: Any, weights: Any) -> tuple[Chunk, Any]:
    """Encode a chunk of patches of pixels in [-1, 1] to latents. Also return the new cache."""
    vae = nnx.merge(graphdef, weights)
    stride = vae.config.spatial_factor // vae.config.patch
    with align_shardings(x.shape[2] // stride, x.shape[3] // stride):
        z, cache = vae.encode_chunk(constrain(x, VIDEO_AXES), cache)
        return constrain(z, VIDEO_AXES), _constrain_cache(cache)


@program(scan_options)
def join_tiles(static: JoinStatic, rows: Sequence[Sequence[Chunk]]) -> Frames | Chunk:
    """Blend the tiles of a chunk. If the static inputs have a dtype of frames, convert patches of pixels to frames."""
    x = blend_tiles(rows, static.tiling, static.pixels)
    return x if static.dtype is None else _to_frames(x, static.dtype, static.pixels)


@program(scan_options)
def from_frames(patch: int, frames: Shaped[Array, "T H W 3"]) -> Chunk:
    """Convert frames (bytes, or floats in [0, 1]) to patches of pixels in [-1, 1]."""
    x = frames.astype(jnp.float32) / 255.0 if frames.dtype == jnp.uint8 else frames.astype(jnp.float32)
    return space_to_depth(x[None] * 2.0 - 1.0, patch)


@program(scan_options)
def join_chunks(static: None, chunks: tuple[Chunk, ...]) -> Float[Array, "B C T H W"]:
    """Concatenate the latents of a clip's chunks."""
    return jnp.moveaxis(jnp.concatenate(chunks, axis=1), -1, 1)


@program(scan_options)
def split_posterior(
    scale: float, moments: Float[Array, "1 _C T H W"]
) -> tuple[Float[Array, "1 C T H W"], Float[Array, "1 C T H W"]]:
    """Split encoded frames into mean and standard deviation, and scale both.

    The log-variance is clipped as in the reference, so that the deviation stays finite.
    """
    mean, log_variance = jnp.split(moments, 2, axis=1)
    return scale * mean, scale * jnp.exp(0.5 * jnp.clip(log_variance, -30.0, 20.0))


def _decode(static: DecodeStatic, z: Chunk, cache: Any, weights: Any) -> tuple[Chunk, Any]:
    with align_shardings(*z.shape[2:4]):
        x, cache = nnx.merge(static.graphdef, weights).decode_chunk(constrain(z, VIDEO_AXES), cache)
        return constrain(x, VIDEO_AXES), _constrain_cache(cache)


def _constrain_cache(cache: Any) -> Any:
    """Constrain the arrays of a cache to the sharding of frames."""
    return jax.tree.map(lambda x: constrain(x, VIDEO_AXES), cache)


def _to_frames(x: Chunk, dtype: Any, patch: int) -> Frames:
    """Convert patches in [-1, 1] to bytes or floats in [0, 1], replicated so that every process can read them."""
    frames = jnp.clip(depth_to_space(x, patch) * 0.5 + 0.5, 0.0, 1.0)
    frames = jnp.round(frames * 255.0).astype(dtype) if dtype == jnp.uint8 else frames.astype(dtype)
    # Devices gather frames after the rounding to bytes, because bytes need less bandwidth than floats
    return replicate(constrain(frames, VIDEO_AXES)[0])


def decode_latents(
    vae: Any,
    latent_chunks: Iterable[LatentsInput],
    chunk_lengths: tuple[int, int],
    dtype: DTypeLike,
    tiling: Tiling | None,
    call: Call,
    video: int = 0,
) -> Iterator[Frames]:
    """Decode the latents of a video lazily; yield the frames of each chunk.

    `chunk_lengths` has the number of latent frames in the first chunk, and the number in each later chunk. Every array
    of `latent_chunks` after the first array consists of complete chunks. `video` is the index of the video in the
    batch. All sizes of the tiling must be set.
    """
    config, (first_length, later_length), dtype = vae.config, chunk_lengths, jnp.dtype(dtype)
    graphdef, weights = nnx.split(vae)
    caches: dict[Tile, Any] = {}

    static = DecodeStatic(graphdef, dtype, config.patch)

    def decode(program: Program, tile: Tile, z: Float[ArrayOrShape, "1 _T _H _W _C"]) -> Any:
        frames, caches[tile] = call(program, static, z, caches.get(tile), weights)
        return frames

    for latent_chunk in latent_chunks:
        rows = split_into_tiles(latent_chunk.shape[3], latent_chunk.shape[4], tiling, config.spatial_factor)
        chunks = list(spans(latent_chunk.shape[2], (later_length if caches else first_length, later_length)))
        latent_tiles = tuple(LatentTile(span.start, span.stop, tile) for span in chunks for row in rows for tile in row)
        tile_latents = iter(call(cut, latent_tiles, latent_chunk, np.int32(video)))
        for _ in chunks:
            if tiling is None:  # one program from latents to frames
                yield decode(decode_chunk, rows[0][0], next(tile_latents))
            else:
                tiles = [[decode(decode_tile, tile, next(tile_latents)) for tile in row] for row in rows]
                yield call(join_tiles, JoinStatic(tiling, config.patch, dtype), tiles)


def encode_frames(
    vae: Any, frames: FramesInput, tiling: Tiling | None, call: Call
) -> Float[ArrayOrShape, "1 C _T _H _W"]:
    """Encode frames, which are uint8 or floats in [0, 1], to latents."""
    config = vae.config
    tiling = tiling and tiling.with_defaults(config.tiling, config.spatial_factor // config.patch)
    graphdef, weights = nnx.split(vae)
    caches: dict[Tile, Any] = {}
    height, width, _ = frames[0].shape

    def encode(tile: Tile, chunk: Shaped[np.ndarray, "T H W 3"]) -> Any:
        top, left, tile_height, tile_width = (config.patch * side for side in tile)
        x = call(from_frames, config.patch, chunk[:, top : top + tile_height, left : left + tile_width])
        latents, caches[tile] = call(encode_chunk, graphdef, x, caches.get(tile), weights)
        return latents

    # the sizes of `tiling` count patches here, not pixels
    rows, chunks = split_into_tiles(height // config.patch, width // config.patch, tiling, 1), []
    for span in spans(len(frames), config.encode_lengths(len(frames))):
        chunk = np.asarray(frames[span.start : span.stop])
        tiles = [[encode(tile, chunk) for tile in row] for row in rows]
        static = JoinStatic(tiling, config.spatial_factor // config.patch) if tiling else None
        chunks.append(tiles[0][0] if static is None else call(join_tiles, static, tiles))
    return call(join_chunks, None, tuple(chunks))


def encode_clip(
    vae: Any, frames: FramesInput, tiling: Tiling | None, call: Call
) -> Float[ArrayOrShape, "1 C _T _H _W"]:
    """Encode frames to the latents for training. If the autoencoder has a posterior, the latents are the scaled mean of
    the posterior."""
    moments = encode_frames(vae, frames, tiling, call)
    scale = getattr(vae.config, "posterior_scale", None)
    return moments if scale is None else call(split_posterior, scale, moments)[0]


def chunk_count(count: int, chunk_lengths: tuple[int, int]) -> int:
    """Count the chunks into which `spans` divides `count` frames."""
    return len(list(spans(count, chunk_lengths)))


def spans(count: int, chunk_lengths: tuple[int, int]) -> Iterator[range]:
    """Yield the indices of the frames in each chunk of `count` frames. `chunk_lengths` has the length of the first
    chunk, and the length of each later chunk."""
    first_length, later_length = chunk_lengths
    yield range(min(first_length, count))
    for start in range(first_length, count, later_length):
        yield range(start, min(start + later_length, count))
