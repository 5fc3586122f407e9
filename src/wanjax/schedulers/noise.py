# SPDX-License-Identifier: Apache-2.0
"""Noise for the steps of a stochastic solver. Each step draws noise from one random key per sample, or the caller
provides the noise for all steps or for a single step."""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key, UInt32

from wanjax.errors import WanjaxError
from wanjax.schedulers.base import Sample, Schedule


class DrawnNoise(NamedTuple):
    """A source of noise that is drawn in each step. It has the data of one random key per sample."""

    keys: UInt32[Array, "B 2"]


class ProvidedNoise(NamedTuple):
    """A source of noise that the caller provides for every step, with the index of the next step."""

    noise: Float[Array, "steps ..."]
    next_step: Int32[Array, ""]


class NextNoise(NamedTuple):
    """A source of noise that the caller provides for the next step only. Later steps use another source."""

    noise: Float[Array, "..."]
    later_source: DrawnNoise


NoiseSource = DrawnNoise | ProvidedNoise | NextNoise
Tree = TypeVar("Tree")


def noise_source(
    schedule: Schedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None
) -> NoiseSource:
    """Return the source of noise for the steps: `noise` [steps, shape of x], or the random keys if it is None.

    Raises WanjaxError if `noise` has another shape.
    """
    if noise is None:
        return DrawnNoise(jax.random.key_data(keys))
    if noise.shape != (expected_shape := (len(schedule.timesteps), *x.shape)):
        raise WanjaxError(f"the noise of the steps must have the shape {list(expected_shape)}, got {list(noise.shape)}")
    return ProvidedNoise(noise.astype(x.dtype), jnp.int32(0))


def with_next_noise(state: Tree, noise: Any) -> Tree:
    """Provide the noise of the next step to a solver that otherwise draws it.

    Args:
        state: The solver's state.
        noise: The noise, with the shape of x.
    """

    def is_drawn(leaf: object) -> bool:
        return isinstance(leaf, DrawnNoise)

    return jax.tree.map(lambda leaf: NextNoise(noise, leaf) if is_drawn(leaf) else leaf, state, is_leaf=is_drawn)


def next_noise(source: NoiseSource, x: Sample) -> tuple[Sample, NoiseSource]:
    """Return the noise for one step, and the source for the next step."""
    match source:
        case ProvidedNoise(noise, next_step):
            return jax.lax.dynamic_index_in_dim(noise, next_step, keepdims=False), ProvidedNoise(noise, next_step + 1)
        case NextNoise(noise, later_source):
            return noise.astype(x.dtype), later_source
        case DrawnNoise(key_data):
            keys = jax.vmap(jax.random.split)(jax.random.wrap_key_data(key_data, impl="threefry2x32"))
            noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:], x.dtype))(keys[:, 0])
            return noise, DrawnNoise(jax.random.key_data(keys[:, 1]))
