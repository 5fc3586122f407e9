# SPDX-License-Identifier: Apache-2.0
"""A stochastic solver of second order: SDE-DPM-Solver++(2M).

The solver is that of Lu et al., "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models",
2211.01095, in the form of diffusers' schedulers/scheduling_dpm_cogvideox.py. A step increases λ = log(α / σ) by
h = λ' - λ:

    x' = σ'/σ e^-h x + α' (1 - e^-2h) D + σ' √(1 - e^-2h) noise,    D = x0 + (x0 - previous x0) / 2r

r is the previous step's h divided by this step's h. The first step has no previous x0. The last step, which ends
without noise, does not use the previous x0. At pure noise and without noise, λ is infinite, and e^-h is 0.

In a second-order step, the reference draws noise twice and uses the second draw. wanjax draws once, unless it
reproduces the random numbers of the reference.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from wanjax.schedulers.base import Index, Sample, Schedule
from wanjax.schedulers.diffusion import Diffusion, Levels
from wanjax.schedulers.noise import NoiseSource, next_noise, noise_source


class DPMState(NamedTuple):
    """The clean sample predicted by the previous step, and the source of the next step's noise."""

    x0: Sample
    source: NoiseSource


@dataclass(frozen=True)
class DPM(Diffusion):
    """SDE-DPM-Solver++(2M). A step has four coefficients: for x, for x0, for the previous x0 and for the noise."""

    stochastic: ClassVar[bool] = True

    def init(
        self, schedule: Schedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None = None
    ) -> DPMState:
        """Return the state before the first step. If `noise` [steps, shape of x] is not None, no noise is drawn.

        Raises WanjaxError if `noise` has another shape.
        """
        return DPMState(jnp.zeros_like(x), noise_source(schedule, x, keys, noise))

    def noise_draws(self, schedule: Schedule, index: int) -> int:
        """Return 1 for the first step and for a last step that ends without noise, and 2 for other steps."""
        ends_clean = index + 1 == len(schedule.timesteps) and schedule.sigmas[-1] == 0
        return 1 if index == 0 or ends_clean else 2

    def step(
        self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: DPMState
    ) -> tuple[Sample, DPMState]:
        """Move x to the level at which the step ends."""
        coefficients = schedule.coefficients[index]
        x0 = self.x0(schedule, index, prediction, x)
        noise, source = next_noise(state.source, x)
        x = coefficients[0] * x + (coefficients[1] * x0 + coefficients[2] * state.x0) + coefficients[3] * noise
        return x, DPMState(x0, source)

    def _step_coefficients(self, levels: Levels) -> tuple[float, ...]:
        is_last_step = levels.end == 1
        previous_start = levels.previous_start
        with np.errstate(divide="ignore"):
            start_lambda, end_lambda = (np.log(bar / (1 - bar)) / 2 for bar in (levels.start, levels.end))
            previous_lambda = None if previous_start is None else np.log(previous_start / (1 - previous_start)) / 2
        h = end_lambda - start_lambda
        scale = np.sqrt((1 - levels.end) / (1 - levels.start)) * np.exp(-h)
        gain = -np.expm1(-2 * h) * np.sqrt(levels.end)
        noise = np.sqrt(1 - levels.end) * np.sqrt(-np.expm1(-2 * h))
        extrapolation = 0.0
        if previous_lambda is not None and not is_last_step:
            extrapolation = h / (start_lambda - previous_lambda) / 2  # 0 after pure noise, where λ is infinite
        return scale, gain * (1 + extrapolation), -gain * extrapolation, noise
