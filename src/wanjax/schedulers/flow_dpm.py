# SPDX-License-Identifier: Apache-2.0
"""DPM-Solver++(2M) along a rectified flow: the predictor of UniPC without its corrector.

Follows Lu et al., "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models", 2211.01095, as in
wan/utils/fm_solvers.py of Wan-Video/Wan2.2: the midpoint method of second order, with a first and a last step of first
order. The noise levels start at pure noise, where λ is infinite, so the second step does not use the first prediction.
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
    """DPM-Solver++ of order 1 or 2 for flow predictions. A step has the predictor's weights."""

    starts_at_pure_noise: ClassVar[bool] = True

    def init(
        self, schedule: Schedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None = None
    ) -> Sample:
        """Return zeros for the previous prediction, whose weight is 0 in the first step."""
        return jnp.zeros_like(x)

    def step(
        self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: Sample
    ) -> tuple[Sample, Sample]:
        """Move x to the next noise level; the state is the predicted clean sample."""
        m = self.x0(schedule, index, prediction, x)
        return evaluate_expansion(schedule.coefficients[index], x, m, state), m

    def _levels(self, steps: int, shift: float, sigma_schedule: str) -> tuple[np.ndarray, np.ndarray]:
        if sigma_schedule.startswith(COMFY):
            return super()._levels(steps, shift, sigma_schedule)
        highest = 1.0 if sigma_schedule == "official" else 1 - 1 / TRAIN_STEPS
        levels = shift_sigmas(np.linspace(highest, 0, steps + 1)[:-1], shift)
        return np.trunc(levels * TRAIN_STEPS), levels

    def _step_coefficients(self, s: np.ndarray, i: int) -> Sequence[float]:
        return self._predictor_weights(s, i)
