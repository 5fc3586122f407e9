# SPDX-License-Identifier: Apache-2.0
"""Euler's method along a rectified flow: x follows the velocity by the difference of two noise levels."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Key

from wanjax.schedulers.base import (
    TRAIN_STEPS,
    Index,
    Sample,
    Schedule,
    Scheduler,
    check_flow,
    check_steps,
    even_levels,
)


@dataclass(frozen=True)
class FlowEuler(Scheduler):
    """Euler on flow predictions, from one noise level of `even_levels` to the next."""

    def schedule(self, steps: int, *, shift: float, sigmas: str = "official", skip: int = 0) -> Schedule:
        """Returns noise levels and unrounded timesteps; raises WanjaxError for an invalid shift or sigmas."""
        check_steps(steps, skip)
        check_flow(shift, sigmas)
        levels = even_levels(steps, shift, sigmas)[skip:].astype(np.float32)
        return Schedule(levels * TRAIN_STEPS, np.append(levels, np.float32(0)))

    def init(self, schedule: Schedule, x: Sample, keys: Key[Array, " B"]) -> tuple[()]:
        """Returns an empty state: Euler's method uses the current sample only."""
        return ()

    def step(
        self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: tuple[()]
    ) -> tuple[Sample, tuple[()]]:
        """Moves x along the velocity to the next noise level."""
        return moved(schedule, index, prediction, x), state


def moved(schedule: Schedule, index: Index, velocity: Sample, x: Sample) -> Sample:
    """Returns x at the next noise level, by Euler's method."""
    return x + (schedule.sigmas[index + 1] - schedule.sigmas[index]) * velocity
