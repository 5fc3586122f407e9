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

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Key, UInt32

from wanjax.errors import WanjaxError
from wanjax.schedulers.base import Index, Sample
from wanjax.schedulers.diffusion import Diffusion, DiffusionSchedule, Levels


class Drawn(NamedTuple):
    """Noise that is drawn in each step: the data of a key for each sample."""

    keys: UInt32[Array, "B 2"]


class Given(NamedTuple):
    """Noise that was given for every step, and how many of them were taken."""

    noise: Float[Array, "steps ..."]
    taken: Int32[Array, ""]


class DPMState(NamedTuple):
    """The clean sample that the step before predicted, and where the next step's noise comes from."""

    x0: Sample
    source: Drawn | Given


@dataclass(frozen=True)
class DPM(Diffusion):
    """SDE-DPM-Solver++(2M). The weights of a step are those of x, x0, x0 before and the noise."""

    stochastic: ClassVar[bool] = True

    def init(
        self, schedule: DiffusionSchedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None = None
    ) -> DPMState:
        """Returns the state of the first step. `noise` [steps, shape of x] takes the place of what steps would draw.

        Raises WanjaxError for noise of another shape.
        """
        if noise is None:
            return DPMState(jnp.zeros_like(x), Drawn(jax.random.key_data(keys)))
        if noise.shape != (right := (len(schedule.timesteps), *x.shape)):
            raise WanjaxError(f"the noise of the steps has the shape {list(noise.shape)}: {list(right)} would do")
        return DPMState(jnp.zeros_like(x), Given(noise.astype(x.dtype), jnp.int32(0)))

    def step(
        self, schedule: DiffusionSchedule, index: Index, prediction: Sample, x: Sample, state: DPMState
    ) -> tuple[Sample, DPMState]:
        """Moves x to the level at which the step ends."""
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
        kept = np.sqrt((1 - levels.end) / (1 - levels.start)) * np.exp(-h)
        gain = -np.expm1(-2 * h) * np.sqrt(levels.end)
        noise = np.sqrt(1 - levels.end) * np.sqrt(-np.expm1(-2 * h))
        extra = 0.0 if behind is None or last else h / (at - behind) / 2  # 0 after pure noise, infinitely far away
        return kept, gain * (1 + extra), -gain * extra, noise


def take_noise(source: Drawn | Given, x: Sample) -> tuple[Sample, Drawn | Given]:
    """Returns noise for one step, and the source of that of the next."""
    match source:
        case Given(noise, taken):
            return jax.lax.dynamic_index_in_dim(noise, taken, keepdims=False), Given(noise, taken + 1)
        case Drawn(data):
            keys = jax.vmap(jax.random.split)(jax.random.wrap_key_data(data, impl="threefry2x32"))
            noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:], x.dtype))(keys[:, 0])
            return noise, Drawn(jax.random.key_data(keys[:, 1]))
