# SPDX-License-Identifier: Apache-2.0
"""A stochastic solver of second order: SDE-DPM-Solver++(2M).

Follows Lu et al., "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models", 2211.01095, in the
form of diffusers' schedulers/scheduling_dpm_cogvideox.py. In λ = log(α / σ) a step goes over h = λ' - λ:

    x' = σ'/σ e^-h x + α' (1 - e^-2h) D + σ' √(1 - e^-2h) noise,    D = x0 + (x0 - x0 before) / 2r

r is the h of the step before, divided by that of this one. The first step has no x0 before, and the last one, which
ends without noise, does not use it. λ is infinite where there is pure noise, or none; e^-h is then 0.

The reference draws twice in a step of second order and uses the second noise; here a step draws once.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from wanjax.schedulers.base import Index, Sample, Schedule
from wanjax.schedulers.diffusion import Diffusion, Levels
from wanjax.schedulers.noise import DrawnNoise, ProvidedNoise, noise_source, take_noise


class DPMState(NamedTuple):
    """The clean sample that the step before predicted, and where the next step's noise comes from."""

    x0: Sample
    source: DrawnNoise | ProvidedNoise


@dataclass(frozen=True)
class DPM(Diffusion):
    """SDE-DPM-Solver++(2M). The weights of a step are those of x, x0, x0 before and the noise."""

    stochastic: ClassVar[bool] = True

    def init(
        self, schedule: Schedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None = None
    ) -> DPMState:
        """Return the state of the first step. `noise` [steps, shape of x] takes the place of what steps would draw.

        Raises WanjaxError for noise of another shape.
        """
        return DPMState(jnp.zeros_like(x), noise_source(schedule, x, keys, noise))

    def step(
        self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: DPMState
    ) -> tuple[Sample, DPMState]:
        """Move x to the level at which the step ends."""
        weights = schedule.weights[index]
        x0 = self.x0(schedule, index, prediction, x)
        noise, source = take_noise(state.source, x)
        x = weights[0] * x + (weights[1] * x0 + weights[2] * state.x0) + weights[3] * noise
        return x, DPMState(x0, source)

    def _weights(self, levels: Levels) -> tuple[float, ...]:
        last = levels.end == 1
        with np.errstate(divide="ignore"):
            at, to = (np.log(bar / (1 - bar)) / 2 for bar in (levels.start, levels.end))
            behind = None if levels.before is None else np.log(levels.before / (1 - levels.before)) / 2
        h = to - at
        scale = np.sqrt((1 - levels.end) / (1 - levels.start)) * np.exp(-h)
        gain = -np.expm1(-2 * h) * np.sqrt(levels.end)
        noise = np.sqrt(1 - levels.end) * np.sqrt(-np.expm1(-2 * h))
        extra = 0.0 if behind is None or last else h / (at - behind) / 2  # 0 after pure noise, infinitely far away
        return scale, gain * (1 + extra), -gain * extra, noise
