# SPDX-License-Identifier: Apache-2.0
"""DPM-Solver++(2M) along a rectified flow: the predictor of UniPC without its corrector.

Follows Lu et al., "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models", 2211.01095, as in
wan/utils/fm_solvers.py of Wan-Video/Wan2.2: of the second order by the midpoint, the first and the last step of the
first. The noise levels begin at pure noise, from where λ is infinitely far: the second step does not look back to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from wanjax.schedulers.base import TRAIN_STEPS, Index, Sample, Schedule, shifted
from wanjax.schedulers.unipc import ExponentialIntegrator, expand


@dataclass(frozen=True)
class FlowDPM(ExponentialIntegrator):
    """DPM-Solver++ of order 1 or 2 on flow predictions. The weights of a step are the predictor's."""

    from_noise: ClassVar[bool] = True

    def init(
        self, schedule: Schedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None = None
    ) -> Sample:
        """Return the prediction before the first, which has no weight."""
        return jnp.zeros_like(x)

    def step(
        self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: Sample
    ) -> tuple[Sample, Sample]:
        """Move x to the next noise level; the state is the clean sample that was predicted."""
        m = self.x0(schedule, index, prediction, x)
        return expand(schedule.weights[index], x, m, state), m

    def _levels(self, steps: int, shift: float, sigmas: str) -> tuple[np.ndarray, np.ndarray]:
        highest = 1.0 if sigmas == "official" else 1 - 1 / TRAIN_STEPS
        levels = shifted(np.linspace(highest, 0, steps + 1)[:-1], shift)
        return np.trunc(levels * TRAIN_STEPS), levels

    def _weights(self, s: np.ndarray, i: int) -> Sequence[float]:
        return self._ahead(s, i)
