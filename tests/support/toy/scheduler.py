# SPDX-License-Identifier: Apache-2.0
"""The toy family's scheduler, whose steps draw noise."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanjax.schedulers import Scheduler
from wanjax.schedulers.base import Schedule, check_steps


@dataclass(frozen=True)
class Ancestral(Scheduler):
    """Ancestral steps along a cosine schedule. A step replaces half of the remaining noise by new noise."""

    prediction: Any = "v"

    def schedule(self, steps: int, *, skip: int = 0) -> Schedule:
        check_steps(steps, skip)
        angles = np.linspace(0.49, 0, steps + 1)[skip:] * np.pi
        return Schedule(*(x.astype(np.float32) for x in (angles[:-1] * 1000, np.sin(angles), np.cos(angles))))

    def levels(self, fractions):
        angles = jnp.stack([fractions, fractions]) * np.float32(0.49 * np.pi)
        return Schedule(fractions[None] * np.float32(490 * np.pi), jnp.sin(angles), jnp.cos(angles))

    def init(self, schedule, x, keys):
        return jax.random.key_data(keys)

    def step(self, schedule, index, prediction, x, state):
        x0 = self.x0(schedule, index, prediction, x)
        noise = (x - schedule.alphas[index] * x0) / schedule.sigmas[index]
        keys = jax.vmap(jax.random.split)(jax.random.wrap_key_data(state, impl="threefry2x32"))
        drawn = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:], x.dtype))(keys[:, 0])
        noise = (noise + drawn) / jnp.sqrt(2.0)
        x = schedule.alphas[index + 1] * x0 + schedule.sigmas[index + 1] * noise
        return x, jax.random.key_data(keys[:, 1])
