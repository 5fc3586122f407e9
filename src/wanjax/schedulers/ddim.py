# SPDX-License-Identifier: Apache-2.0
"""DDIM (Song et al., "Denoising Diffusion Implicit Models", 2010.02502). The steps add no noise."""

from dataclasses import dataclass

import numpy as np

from wanjax.schedulers.base import Index, Sample, Schedule
from wanjax.schedulers.diffusion import Diffusion, Levels


@dataclass(frozen=True)
class DDIM(Diffusion):
    """DDIM: combine the predicted clean sample and the predicted noise in the proportions of the next level.

    A step has two weights: one for x, and one for the clean sample.
    """

    def step(
        self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: tuple[()]
    ) -> tuple[Sample, tuple[()]]:
        """Move x to the level at which the step ends."""
        coefficients = schedule.coefficients[index]
        return coefficients[0] * x + coefficients[1] * self.x0(schedule, index, prediction, x), state

    def _step_coefficients(self, levels: Levels) -> tuple[float, ...]:
        scale = np.sqrt((1 - levels.end) / (1 - levels.start))
        return scale, np.sqrt(levels.end) - np.sqrt(levels.start) * scale
