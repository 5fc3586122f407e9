# SPDX-License-Identifier: Apache-2.0
"""Seeds and their random numbers, which do not depend on JAX's flags.

The generator is threefry2x32 in its partitionable mode. The key is the 64 bits of the seed, with the high 32-bit word
first. A seed below 2^32 gives the same key as `jax.random.key(seed)` with default flags. Seeds stay on the host.
Programs receive the two words of each seed as key data.
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

from wanjax.errors import WanjaxError, repr_short, user_stack_level
from wanjax.pipelines.settings import MAX_VIDEOS, RANDOM_SEED, read_seed

GENERATOR = "threefry2x32"
DRAWN_BITS = 32  # few bits, so that users can retype a drawn seed
KeyData = UInt32[Array | np.ndarray, "B 2"]  # the high and the low 32-bit word of each seed


def checked_seed(seed: Any, *, alone: bool = False) -> int:
    """Check a seed and return it as an int. For "random" and -1 draw a seed. Raise WanjaxError for an invalid value.

    All processes must call this function together. With `alone`, only this process draws a seed.
    """
    number = read_seed(seed)
    return draw(alone=alone) if number == RANDOM_SEED else number


def check_seeds(seeds: Any, seed: Any = None) -> None:
    """Raise WanjaxError if `seeds` is not a sequence, for example because it is a single seed, or if a call has both
    `seeds` and `seed`."""
    if seeds is not None and (isinstance(seeds, str | bytes) or not hasattr(seeds, "__len__")):
        raise WanjaxError(
            f"seeds must be a sequence, such as range(3) or [7], got {repr_short(seeds)}: give a single seed as seed"
        )
    if seeds is not None and not len(seeds):
        raise WanjaxError(f"seeds must not be empty, got {repr_short(seeds)}: give at least one, such as range(3)")
    if seeds is not None and seed is not None:
        raise WanjaxError(f"both seeds={repr_short(seeds)} and seed={repr_short(seed)}: give one of them")


def check_count(seeds: int, requests: int = 1) -> None:
    """Raise WanjaxError if a call asks for too many videos. Call this before a long list of seeds is built."""
    if (total := seeds * requests) > MAX_VIDEOS:
        factors = f"{seeds:,} seeds" if requests == 1 else f"{seeds:,} seeds for each of {requests:,} prompts"
        raise WanjaxError(f"{factors} make {total:,} videos: make at most {MAX_VIDEOS:,} per call")


def resolve_seeds(seeds: Sequence[Any] | None, seed: Any, drawn_seed: int) -> list[int]:
    """Return the seeds of a call as ints, and warn about each seed that is drawn at random.

    Args:
        seeds: The seeds of the call, which may be "random" or -1. None uses `seed`.
        seed: The seed of the call, or None.
        drawn_seed: `seed` as an int, already drawn if it is "random" or -1.
    """
    check_seeds(seeds, seed)
    requested = [seed] if seeds is None else seeds
    check_count(len(requested))
    int_seeds = [drawn_seed] if seeds is None else [checked_seed(each) for each in seeds]
    for value, number in zip(requested, int_seeds, strict=True):
        if value in (RANDOM_SEED, "random"):
            warnings.warn(f"the seed {number} was drawn at random", stacklevel=user_stack_level())
    return int_seeds


def draw(*, alone: bool = False) -> int:
    """Draw a random seed that is equal in all processes. All processes must call this function. With `alone`, only this
    process draws a seed."""
    seed = secrets.randbits(DRAWN_BITS)
    if alone or jax.process_count() == 1:
        return seed
    return int(multihost_utils.broadcast_one_to_all(np.uint32(seed)))  # all processes use the first process's seed


def seed_to_key_data(seeds: Sequence[int]) -> UInt32[np.ndarray, "B 2"]:
    """Split seeds from 0 to 2^64 - 1 into their upper and lower 32 bits, as key data."""
    return np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)


def key_of(key_data: UInt32[Array | np.ndarray, "2"]) -> PRNGKeyArray:
    """Return the random key of a seed's key data."""
    return jax.random.wrap_key_data(jnp.asarray(key_data), impl=GENERATOR)


def draw_noise(key_data: KeyData, shape: tuple[int, ...], key_number: int = 0) -> Float32[Array, "..."]:
    """Draw normally distributed noise; its first axis has one video per seed.

    Args:
        key_data: The key data of the seeds.
        shape: The shape of the noise.
        key_number: The number to fold into the keys; each number gives other noise, and 0 gives the initial noise.
            `key_numbers` uses 0, 1 and the numbers from 4. The numbers 2 and 3 are for sampled image and video latents.
    """
    keys = [key_of(pair) for pair in key_data]
    keys = [jax.random.fold_in(key, key_number) for key in keys] if key_number else keys
    return jnp.concatenate([jax.random.normal(key, (1, *shape[1:]), jnp.float32) for key in keys])


def key_numbers(modality: int) -> tuple[int, int]:
    """Return the two key numbers of a modality: one for its initial noise, and one for the noise of its steps.

    Modality 0 is the video. Every modality has its own numbers, so its noise does not depend on the other modalities.
    """
    return (2 + 2 * modality, 3 + 2 * modality) if modality else (0, 1)


def noise_of_frames(
    key_data: KeyData, shape: tuple[int, ...], start: Int[Array, ""], count: int
) -> Float32[Array, "..."]:
    """Draw a part of the initial noise [B C T H W] of a video: `count` frames, starting at frame `start`.

    `shape` is the shape of the whole video's noise. Each element depends only on the key and the element's index, so
    any part can be drawn alone.
    """
    _, channels, frames, height, width = shape
    if math.prod(shape[1:]) >= 2**32:
        raise WanjaxError(f"the noise of {frames} latent frames has more than 2^32 values: make a shorter video")
    position = jnp.arange(height * width, dtype=jnp.uint32)
    channel, offset = jnp.arange(channels, dtype=jnp.uint32), jnp.arange(count, dtype=jnp.uint32)
    frame = channel[:, None] * np.uint32(frames) + start.astype(jnp.uint32) + offset[None]
    counter = frame[..., None] * np.uint32(height * width) + position[None, None]  # the index of each element
    noise = []
    for pair in key_data:
        high, low = jnp.broadcast_to(pair[0], counter.shape), jnp.broadcast_to(pair[1], counter.shape)
        bits = jnp.bitwise_xor(*threefry2x32_p.bind(high, low, jnp.zeros_like(counter), counter))
        noise.append(_bits_to_normal(bits).reshape(channels, count, height, width))
    return jnp.stack(noise)


def _bits_to_normal(bits: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """Convert random bits to normally distributed numbers, as `jax.random.normal` does."""
    one_bits = np.float32(1).view(np.uint32)
    floats = jax.lax.bitcast_convert_type(bits >> np.uint32(9) | one_bits, jnp.float32) - np.float32(1)
    minimum = np.nextafter(np.float32(-1), np.float32(0))
    uniform = jnp.maximum(minimum, floats * (np.float32(1) - minimum) + minimum)
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform)


def solver_keys(key_data: KeyData, chunk: int | Int[Array, ""] = 0, key_number: int = 1) -> Key[Array, " B"]:
    """Return the keys [B] for the noise of stochastic steps. This noise is independent of the initial noise.

    Args:
        key_data: The key data of the seeds.
        chunk: The number of the chunk; each chunk of a causal video has its own keys.
        key_number: The key number of the modality's steps, from `key_numbers`.
    """
    keys = jnp.stack([jax.random.fold_in(key_of(pair), key_number) for pair in key_data])
    if isinstance(chunk, int) and chunk == 0:
        return keys
    chunk_keys = jax.vmap(lambda key: jax.random.fold_in(key, chunk))(keys)
    return jnp.where(jnp.asarray(chunk) > 0, chunk_keys, keys)
