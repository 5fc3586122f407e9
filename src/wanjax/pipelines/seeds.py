# SPDX-License-Identifier: Apache-2.0
"""Seeds and their random numbers, which are the same whatever JAX's flags say.

The generator is threefry2x32 in its partitionable mode, and its key is the 64 bits of the seed, the high word first. A
seed below 2^32 gives the key of `jax.random.key(seed)` with JAX's default flags.
"""

import operator
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Float32, Key, PRNGKeyArray

from wanjax.errors import WanjaxError

GENERATOR = "threefry2x32"
DRAW = -1  # in place of a seed: draw one
BITS = 64
DRAWN_BITS = 32  # few enough to be typed again


def checked_seed(seed: Any) -> int:
    """Returns the seed as an int, one drawn at random in place of -1; raises WanjaxError for any other value."""
    try:
        number = None if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = None
    if number is None or not (number == DRAW or 0 <= number < 2**BITS):
        raise WanjaxError(f"the seed {seed!r} is not a whole number from 0 to 2^{BITS} - 1, nor -1, which draws one")
    return draw() if number == DRAW else number


def told_seeds(asked: Sequence[Any], chosen: Sequence[int] | None = None) -> list[int]:
    """Returns the seeds that a call asked for, as ints; a warning at the call tells those drawn in place of -1.

    `chosen` are the same seeds after drawing, if that was done before.
    """
    numbers = [checked_seed(seed) for seed in asked] if chosen is None else list(chosen)
    for seed, number in zip(asked, numbers, strict=True):
        if seed == DRAW:
            warnings.warn(f"the seed {number} was drawn at random", stacklevel=5)  # past `denoise` and its decorators
    return numbers


def draw() -> int:
    """Draws a seed at random, the same one in every process; all processes have to call it."""
    drawn = secrets.randbits(DRAWN_BITS)
    if jax.process_count() == 1:
        return drawn
    return int(multihost_utils.broadcast_one_to_all(np.uint32(drawn)))  # the first process's


def key_of(seed: int) -> PRNGKeyArray:
    """Returns the random key of a seed from 0 to 2^64 - 1."""
    words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=GENERATOR)


@contextmanager
def steady_draws() -> Iterator[None]:
    """Draws in threefry's partitionable mode, JAX's default, in this context; elsewhere JAX's flag decides."""
    with jax.threefry_partitionable(True):
        yield


@steady_draws()
def initial_noise(seed: int, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """Returns a seed's noise of this shape, normally distributed."""
    return jax.random.normal(key_of(seed), shape, jnp.float32)


@steady_draws()
def further_noise(seed: int, number: int, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """Returns normally distributed noise of a seed; that of each number is independent of all other noise of the seed.

    Number 1 is that of `solver_keys`.
    """
    return jax.random.normal(jax.random.fold_in(key_of(seed), number), shape, jnp.float32)


def solver_keys(seeds: Sequence[int], block: int = 0) -> Key[Array, " B"]:
    """Returns the keys [B] for the noise that steps draw, which is independent of the initial noise.

    Each block of a video that is made block by block has keys of its own.
    """
    keys = [jax.random.fold_in(key_of(seed), 1) for seed in seeds]
    return jnp.stack([jax.random.fold_in(key, block) if block else key for key in keys])
