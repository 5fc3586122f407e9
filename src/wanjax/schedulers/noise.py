# SPDX-License-Identifier: Apache-2.0
"""The noise that the steps of a stochastic solver add: drawn from a key for each sample, or provided for every step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key, UInt32

from wanjax.errors import WanjaxError
from wanjax.schedulers.base import Sample, Schedule


class DrawnNoise(NamedTuple):
    """Noise drawn in each step: the data of a key for each sample."""

    keys: UInt32[Array, "B 2"]


class ProvidedNoise(NamedTuple):
    """Noise provided for every step, and the number of steps taken."""

    noise: Float[Array, "steps ..."]
    taken: Int32[Array, ""]


def noise_source(
    schedule: Schedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None
) -> DrawnNoise | ProvidedNoise:
    """Return the source of the first step's noise: the given noise [steps, shape of x], else the keys.

    Raises WanjaxError for noise of another shape.
    """
    if noise is None:
        return DrawnNoise(jax.random.key_data(keys))
    if noise.shape != (right := (len(schedule.timesteps), *x.shape)):
        raise WanjaxError(f"the noise of the steps has the shape {list(noise.shape)}: give {list(right)}")
    return ProvidedNoise(noise.astype(x.dtype), jnp.int32(0))


def take_noise(source: DrawnNoise | ProvidedNoise, x: Sample) -> tuple[Sample, DrawnNoise | ProvidedNoise]:
    """Return noise for one step, and the source of that of the next."""
    match source:
        case ProvidedNoise(noise, taken):
            return jax.lax.dynamic_index_in_dim(noise, taken, keepdims=False), ProvidedNoise(noise, taken + 1)
        case DrawnNoise(data):
            keys = jax.vmap(jax.random.split)(jax.random.wrap_key_data(data, impl="threefry2x32"))
            noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:], x.dtype))(keys[:, 0])
            return noise, DrawnNoise(jax.random.key_data(keys[:, 1]))
