# SPDX-License-Identifier: Apache-2.0
"""Seeds and their random numbers, which are the same whatever JAX's flags say.

The generator is threefry2x32 in its partitionable mode, and its key is the 64 bits of the seed, the high word first. A
seed below 2^32 gives the key of `jax.random.key(seed)` with JAX's default flags. A seed is a fact of the host: programs
are given its words, and draw.
"""

import math
import secrets
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float32, Int, Key, PRNGKeyArray, UInt32

from wanjax.errors import WanjaxError, repr_short
from wanjax.pipelines.settings import DRAW, MOST_VIDEOS, read_seed

GENERATOR = "threefry2x32"
DRAWN_BITS = 32  # few enough to be typed again
KeyData = UInt32[Array | np.ndarray, "B 2"]  # of seeds, the high word first


def checked_seed(seed: Any, *, alone: bool = False) -> int:
    """Return the seed as an int, one drawn in place of "random" or -1; raise WanjaxError for any other value.

    All processes have to call it, unless one draws `alone`, for the others.
    """
    number = read_seed(seed)
    return draw(alone=alone) if number == DRAW else number


def check_seeds(seeds: Any) -> None:
    """Raise WanjaxError where the seeds of several videos are no sequence, such as one seed."""
    if seeds is not None and (isinstance(seeds, str | bytes) or not hasattr(seeds, "__len__")):
        raise WanjaxError(
            f"seeds is given as {repr_short(seeds)}: give a sequence, such as range(3) or [7], or one as seed"
        )
    if seeds is not None and not len(seeds):
        raise WanjaxError(f"seeds is given as {repr_short(seeds)}: give one seed or more, such as range(3)")


def check_count(seeds: int, requests: int = 1) -> None:
    """Raise WanjaxError where a video of each seed for each request is more than a call makes, before any is listed."""
    if (total := seeds * requests) > MOST_VIDEOS:
        of = f"{seeds:,} seeds" if requests == 1 else f"{seeds:,} seeds of each of {requests:,} prompts"
        raise WanjaxError(f"{of} ask for {total:,} videos: {MOST_VIDEOS:,} are the most of one call")


def resolve_seeds(requested: Sequence[Any], chosen: Sequence[int] | None = None) -> list[int]:
    """Return the seeds that a call asked for, as ints; a warning at the call tells those drawn in place of -1.

    `chosen` are the same seeds after drawing, if that was done before.
    """
    check_count(len(requested))
    numbers = [checked_seed(seed) for seed in requested] if chosen is None else list(chosen)
    for seed, number in zip(requested, numbers, strict=True):
        if seed in (DRAW, "random"):
            warnings.warn(f"the seed {number} was drawn at random", stacklevel=3)  # past `denoise`
    return numbers


def draw(*, alone: bool = False) -> int:
    """Draw a seed at random, the same one in every process; all have to call it, unless one draws `alone`."""
    drawn = secrets.randbits(DRAWN_BITS)
    if alone or jax.process_count() == 1:
        return drawn
    return int(multihost_utils.broadcast_one_to_all(np.uint32(drawn)))  # the first process's


def seed_to_key_data(seeds: Sequence[int]) -> UInt32[np.ndarray, "B 2"]:
    """Return the data of the keys of seeds from 0 to 2^64 - 1: the upper and the lower 32 bits of each."""
    return np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)


def key_of(key_data: UInt32[Array | np.ndarray, "2"]) -> PRNGKeyArray:
    """Return the random key of a seed's words."""
    return jax.random.wrap_key_data(jnp.asarray(key_data), impl=GENERATOR)


def drawn_noise(key_data: KeyData, shape: tuple[int, ...], number: int = 0) -> Float32[Array, "..."]:
    """Return normally distributed noise of this shape, a video on the first axis for each seed.

    `number` 0 is the initial noise; that of each other number is independent of all other noise of the seed. Numbers 0
    and 1, and from 4 on, are those of `key_numbers`; 2 and 3 are pictures that are drawn.
    """
    keys = [key_of(pair) for pair in key_data]
    keys = [jax.random.fold_in(key, number) for key in keys] if number else keys
    return jnp.concatenate([jax.random.normal(key, (1, *shape[1:]), jnp.float32) for key in keys])


def key_numbers(stream: int) -> tuple[int, int]:
    """Return the numbers of a stream's keys: that of its initial noise, and that of the noise of its steps.

    `stream` is 0 for the video, whose noise is the same whatever is made beside it or after it.
    """
    return (2 + 2 * stream, 3 + 2 * stream) if stream else (0, 1)


def noise_of_frames(
    key_data: KeyData, shape: tuple[int, ...], start: Int[Array, ""], count: int
) -> Float32[Array, "..."]:
    """Return `count` frames, from `start` on, of the initial noise [B C T H W] of a whole video of this shape.

    The generator numbers the elements of an array, so a part of it can be drawn alone.
    """
    _, channels, frames, height, width = shape
    if math.prod(shape[1:]) >= 2**32:
        raise WanjaxError(f"the noise of {frames} latent frames has more than 2^32 numbers: make a shorter video")
    cells = jnp.arange(height * width, dtype=jnp.uint32)
    channel, drawn = jnp.arange(channels, dtype=jnp.uint32), jnp.arange(count, dtype=jnp.uint32)
    frame = channel[:, None] * np.uint32(frames) + start.astype(jnp.uint32) + drawn[None]
    low = frame[..., None] * np.uint32(height * width) + cells[None, None]
    parts = []
    for pair in key_data:
        first, second = jnp.broadcast_to(pair[0], low.shape), jnp.broadcast_to(pair[1], low.shape)
        bits = jnp.bitwise_xor(*threefry2x32_p.bind(first, second, jnp.zeros_like(low), low))
        parts.append(_normal(bits).reshape(channels, count, height, width))
    return jnp.stack(parts)


def _normal(bits: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """Return the normal numbers that `jax.random.normal` makes of random bits."""
    ones = np.float32(1).view(np.uint32)
    floats = jax.lax.bitcast_convert_type(bits >> np.uint32(9) | ones, jnp.float32) - np.float32(1)
    low = np.nextafter(np.float32(-1), np.float32(0))
    uniform = jnp.maximum(low, floats * (np.float32(1) - low) + low)
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform)


def solver_keys(key_data: KeyData, chunk: int | Int[Array, ""] = 0, number: int = 1) -> Key[Array, " B"]:
    """Return the keys [B] for the noise that steps draw, which is independent of the initial noise.

    Each block of a video that is made block by block has keys of its own. `number` is that of `key_numbers`.
    """
    keys = jnp.stack([jax.random.fold_in(key_of(pair), number) for pair in key_data])
    if isinstance(chunk, int) and chunk == 0:
        return keys
    chunk_keys = jax.vmap(lambda key: jax.random.fold_in(key, chunk))(keys)
    return jnp.where(jnp.asarray(chunk) > 0, chunk_keys, keys)
