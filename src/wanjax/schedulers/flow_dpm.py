# SPDX-License-Identifier: Apache-2.0
"""DPM-Solver++(2M) along a rectified flow: the predictor of UniPC without its corrector.

The solver is that of Lu et al., "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models",
2211.01095, in the form of wan/utils/fm_solvers.py of Wan-Video/Wan2.2: the midpoint method of second order. The first
and the last step are of first order. The noise levels start at pure noise, where λ is infinite, so the second step does
not use the first prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from wanjax.schedulers.base import COMFY, TRAIN_STEPS, Index, Sample, Schedule, shift_sigmas
from wanjax.schedulers.unipc import ExponentialIntegrator, evaluate_expansion


@dataclass(frozen=True)
class FlowDPM(ExponentialIntegrator):
    """DPM-Solver++ of order 1 or 2 for flow predictions. The coefficients of a step are those of UniPC's predictor."""

    starts_at_pure_noise: ClassVar[bool] = True

    def init(
        self, schedule: Schedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None = None
    ) -> Sample:
        """Return zeros in place of a previous prediction. Its coefficient is 0 in the first step."""
        return jnp.zeros_like(x)

    def step(
        self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: Sample
    ) -> tuple[Sample, Sample]:
        """Move x to the next noise level. The state is the clean sample that the previous step predicted."""
        m = self.x0(schedule, index, prediction, x)
        return evaluate_expansion(schedule.coefficients[index], x, m, state), m

    def _levels(self, steps: int, shift: float, sigma_schedule: str) -> tuple[np.ndarray, np.ndarray]:
        if sigma_schedule.startswith(COMFY):
            return super()._levels(steps, shift, sigma_schedule)
        highest = 1.0 if sigma_schedule == "official" else 1 - 1 / TRAIN_STEPS
        levels = shift_sigmas(np.linspace(highest, 0, steps + 1)[:-1], shift)
        return np.trunc(levels * TRAIN_STEPS), levels

    def _step_coefficients(self, s: np.ndarray, i: int) -> Sequence[float]:
        return self._predictor_coefficients(s, i)
