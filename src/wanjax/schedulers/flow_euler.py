# SPDX-License-Identifier: Apache-2.0
"""Euler's method along a rectified flow: x follows the velocity by the difference of two noise levels."""

from dataclasses import dataclass

import numpy as np

from wanjax.schedulers.base import TRAIN_STEPS, Index, Sample, Schedule, Scheduler, check_steps, shifted


@dataclass(frozen=True)
class FlowEuler(Scheduler):
    """Euler on flow predictions.

    The official noise levels are an even line down from 1, shifted. Left to itself diffusers shifts twice: first the
    ends of the line, then the line.
    """

    def schedule(self, steps: int, skip: int = 0) -> Schedule:
        """Noise levels and timesteps, which are not rounded."""
        check_steps(steps, skip)
        if self.sigmas == "official":
            line = np.linspace(1, 0, steps + 1)[:-1].astype(np.float32)
        else:
            high, low = shifted(np.array([1, 1 / TRAIN_STEPS], np.float32), self.shift)
            line = np.linspace(float(high), float(low), steps)
        sigmas = shifted(line, self.shift)[skip:].astype(np.float32)
        return Schedule(sigmas * TRAIN_STEPS, np.append(sigmas, np.float32(0)))

    def init(self, schedule: Schedule, x: Sample) -> tuple[()]:
        """Nothing: Euler does not look back."""
        return ()

    def step(
        self, schedule: Schedule, state: tuple[()], index: Index, velocity: Sample, x: Sample
    ) -> tuple[Sample, tuple[()]]:
        """Moves x with the velocity to the next noise level."""
        return x + (schedule.sigmas[index + 1] - schedule.sigmas[index]) * velocity, state
