# SPDX-License-Identifier: Apache-2.0
"""Seeds and their random numbers, which do not depend on JAX's flags.

The generator is threefry2x32 in its partitionable mode. The key is the 64 bits of the seed, high word first. A seed
below 2^32 gives the key of `jax.random.key(seed)` with default flags. Seeds stay on the host: programs receive their
words as key data, and draw from them.
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
DRAWN_BITS = 32  # few enough to retype
KeyData = UInt32[Array | np.ndarray, "B 2"]  # the high and low word of each seed


def checked_seed(seed: Any, *, alone: bool = False) -> int:
    """Return a seed as an int; draw one for "random" or -1; raise WanjaxError for any other value.

    All processes must call it together, unless `alone`: then one process draws without the others.
    """
    number = read_seed(seed)
    return draw(alone=alone) if number == DRAW else number


def check_seeds(seeds: Any) -> None:
    """Raise WanjaxError if the seeds of several videos are not a sequence, such as a single seed."""
    if seeds is not None and (isinstance(seeds, str | bytes) or not hasattr(seeds, "__len__")):
        raise WanjaxError(
            f"seeds is given as {repr_short(seeds)}: give a sequence, such as range(3) or [7], or one as seed"
        )
    if seeds is not None and not len(seeds):
        raise WanjaxError(f"seeds is given as {repr_short(seeds)}: give one seed or more, such as range(3)")


def check_count(seeds: int, requests: int = 1) -> None:
    """Raise WanjaxError if all seeds of all requests exceed the limit of a call, before they are listed."""
    if (total := seeds * requests) > MOST_VIDEOS:
        of = f"{seeds:,} seeds" if requests == 1 else f"{seeds:,} seeds of each of {requests:,} prompts"
        raise WanjaxError(f"{of} ask for {total:,} videos: {MOST_VIDEOS:,} are the most of one call")


def resolve_seeds(requested: Sequence[Any], chosen: Sequence[int] | None = None) -> list[int]:
    """Return the seeds of a call as ints; warn about those that were drawn for -1.

    `chosen` are the same seeds after an earlier draw.
    """
    check_count(len(requested))
    numbers = [checked_seed(seed) for seed in requested] if chosen is None else list(chosen)
    for seed, number in zip(requested, numbers, strict=True):
        if seed in (DRAW, "random"):
            warnings.warn(f"the seed {number} was drawn at random", stacklevel=3)  # past `denoise`
    return numbers


def draw(*, alone: bool = False) -> int:
    """Draw a random seed, equal in all processes. All must call it, unless one draws `alone`."""
    drawn = secrets.randbits(DRAWN_BITS)
    if alone or jax.process_count() == 1:
        return drawn
    return int(multihost_utils.broadcast_one_to_all(np.uint32(drawn)))  # the first process's


def seed_to_key_data(seeds: Sequence[int]) -> UInt32[np.ndarray, "B 2"]:
    """Split seeds from 0 to 2^64 - 1 into their upper and lower 32 bits, as key data."""
    return np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)


def key_of(key_data: UInt32[Array | np.ndarray, "2"]) -> PRNGKeyArray:
    """Return the random key of a seed's key data."""
    return jax.random.wrap_key_data(jnp.asarray(key_data), impl=GENERATOR)


def drawn_noise(key_data: KeyData, shape: tuple[int, ...], number: int = 0) -> Float32[Array, "..."]:
    """Draw normally distributed noise of this shape, with a video on the first axis for each seed.

    `number` 0 is the initial noise; each other number gives independent noise. Numbers 0 and 1, and those from 4, are
    the ones of `key_numbers`; 2 and 3 are for sampled image and video latents.
    """
    keys = [key_of(pair) for pair in key_data]
    keys = [jax.random.fold_in(key, number) for key in keys] if number else keys
    return jnp.concatenate([jax.random.normal(key, (1, *shape[1:]), jnp.float32) for key in keys])


def key_numbers(stream: int) -> tuple[int, int]:
    """Return two key numbers of a stream: for its initial noise, and for the noise of its steps.

    `stream` is 0 for the video. Its noise does not depend on other streams.
    """
    return (2 + 2 * stream, 3 + 2 * stream) if stream else (0, 1)


def noise_of_frames(
    key_data: KeyData, shape: tuple[int, ...], start: Int[Array, ""], count: int
) -> Float32[Array, "..."]:
    """Return `count` frames, starting at `start`, of the initial noise [B C T H W] of a whole video of this shape.

    The generator numbers the elements of an array, so that any part of it can be drawn alone.
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
    """Convert random bits to normally distributed numbers, as `jax.random.normal` does."""
    ones = np.float32(1).view(np.uint32)
    floats = jax.lax.bitcast_convert_type(bits >> np.uint32(9) | ones, jnp.float32) - np.float32(1)
    low = np.nextafter(np.float32(-1), np.float32(0))
    uniform = jnp.maximum(low, floats * (np.float32(1) - low) + low)
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform)


def solver_keys(key_data: KeyData, chunk: int | Int[Array, ""] = 0, number: int = 1) -> Key[Array, " B"]:
    """Return the keys [B] for the noise that steps draw, which is independent of the initial noise.

    Each chunk of a causal video has its own keys. `number` comes from `key_numbers`.
    """
    keys = jnp.stack([jax.random.fold_in(key_of(pair), number) for pair in key_data])
    if isinstance(chunk, int) and chunk == 0:
        return keys
    chunk_keys = jax.vmap(lambda key: jax.random.fold_in(key, chunk))(keys)
    return jnp.where(jnp.asarray(chunk) > 0, chunk_keys, keys)
