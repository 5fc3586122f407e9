# SPDX-License-Identifier: Apache-2.0
"""Euler's method along a rectified flow: x moves with the velocity by the difference of two noise levels."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from wanjax.schedulers.base import TRAIN_STEPS, Index, Schedule, Scheduler, check_steps, shifted


@dataclass(frozen=True)
class FlowEuler(Scheduler):
    """Euler on flow predictions.

    The official noise levels are an even line from 1, shifted. Left to itself diffusers shifts twice: the ends of the
    line, and then the line between them.
    """

    def schedule(self, steps: int) -> Schedule:
        """Noise levels and timesteps, computed in float32 where the reference does."""
        check_steps(steps)
        if self.sigmas == "official":
            line = np.linspace(1, 0, steps + 1)[:-1].astype(np.float32)
        else:
            last = shifted(np.float32(1 / TRAIN_STEPS), np.float32(self.shift))
            line = np.linspace(1, float(last), steps)
        sigmas = shifted(line, self.shift).astype(np.float32)
        return Schedule(jnp.asarray(sigmas * TRAIN_STEPS), jnp.asarray(np.append(sigmas, np.float32(0))))

    def init(self, schedule: Schedule, x: Float[Array, "..."]) -> tuple[()]:
        """Euler remembers nothing."""
        return ()

    def step(
        self, schedule: Schedule, state: tuple[()], index: Index, velocity: Float[Array, "..."], x: Float[Array, "..."]
    ) -> tuple[Float[Array, "..."], tuple[()]]:
        """x at the next noise level, given the velocity at this one."""
        return x + (schedule.sigmas[index + 1] - schedule.sigmas[index]) * velocity, state
