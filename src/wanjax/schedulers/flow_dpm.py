# SPDX-License-Identifier: Apache-2.0
"""DPM-Solver++(2M) along a rectified flow: the predictor of UniPC without its corrector.

Follows Lu et al., "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models", 2211.01095, as in
wan/utils/fm_solvers.py of Wan-Video/Wan2.2: of the second order by the midpoint, the first and the last step of the
first. The noise levels begin at pure noise, from where λ is infinitely far: the second step does not look back to it.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Key

from wanjax.errors import WanjaxError
from wanjax.schedulers.base import (
    TRAIN_STEPS,
    Index,
    Numbers,
    Sample,
    Scheduler,
    check_flow,
    check_steps,
    shifted,
)
from wanjax.schedulers.unipc import expand, predictor


class FlowDPMSchedule(NamedTuple):
    """Whole-numbered timesteps, noise levels, and each step's weights of x, m and the prediction before it."""

    timesteps: Float32[Numbers, " steps"]
    sigmas: Float32[Numbers, " steps+1"]
    weights: Float32[Numbers, "steps 3"]

    @property
    def alphas(self) -> Float32[Numbers, "..."]:
        return 1.0 - self.sigmas


@dataclass(frozen=True)
class FlowDPM(Scheduler):
    """DPM-Solver++ of order 1 or 2 on flow predictions; raises WanjaxError for other orders."""

    order: int = 2
    option: ClassVar[str] = "order"

    def __post_init__(self):
        if self.order not in (1, 2):
            raise WanjaxError(f"the solver order {self.order!r} is not offered: 1 or 2 would do")

    def schedule(self, steps: int, *, shift: float, sigmas: str = "official", skip: int = 0) -> FlowDPMSchedule:
        """Returns noise levels and weights.

        Raises WanjaxError for an invalid shift or sigmas, and where two levels are equal in float32.
        """
        check_steps(steps, skip)
        check_flow(shift, sigmas)
        highest = 1.0 if sigmas == "official" else 1 - 1 / TRAIN_STEPS
        levels = shifted(np.linspace(highest, 0, steps + 1)[:-1], shift)[skip:]
        rounded = np.append(levels, 0).astype(np.float32)
        if (np.diff(rounded) >= 0).any():
            raise WanjaxError(f"{steps} steps at a flow shift of {shift} lie too close together: take fewer")
        s = rounded.astype(np.float64)  # rounded first, as in the reference
        weights = [predictor(s, i, min(self.order, i + 1)) for i in range(len(levels) - 1)] + [(0, 1, 0)]
        return FlowDPMSchedule(
            timesteps=np.trunc(levels * TRAIN_STEPS).astype(np.float32),
            sigmas=rounded,
            weights=np.array(weights, np.float32),
        )

    def init(self, schedule: FlowDPMSchedule, x: Sample, keys: Key[Array, " B"]) -> Sample:
        """Returns the prediction before the first, which has no weight."""
        return jnp.zeros_like(x)

    def step(
        self, schedule: FlowDPMSchedule, index: Index, prediction: Sample, x: Sample, state: Sample
    ) -> tuple[Sample, Sample]:
        """Moves x to the next noise level; the state is the clean sample that was predicted."""
        m = self.x0(schedule, index, prediction, x)
        return expand(schedule.weights[index], x, m, state), m
