# SPDX-License-Identifier: Apache-2.0
"""What every scheduler is: noise levels laid out once, and a step that carries its memory in and out.

A scheduler itself is a value. `schedule(steps)` gives all numbers that depend on the step, as arrays, so that a compiled
step takes its index as an argument; `init` and `step` hand over the state. Steps are found by index and never by their
timestep, of which two may be equal.

Noise levels are those of rectified flow: x(σ) = (1 - σ) x0 + σ noise, and the networks predict v = noise - x0.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from wanjax.errors import WanjaxError

TRAIN_STEPS = 1000  # a timestep is σ · 1000
Sigmas = Literal["official", "diffusers"]  # who laid the noise levels out: the models' authors, or today's diffusers
Index = int | Int[Array, ""]


class Schedule(NamedTuple):
    """Noise levels σ, from noise to the last one, 0, and the timesteps that the network is told."""

    timesteps: Float32[Array, " steps"]
    sigmas: Float32[Array, " steps+1"]


@dataclass(frozen=True)
class Scheduler:
    """Noise levels under a shift (above 0; 1 is none) that spends more of the steps where there is more noise.

    Raises WanjaxError where the shift or the name of the noise levels is none.
    """

    shift: float
    sigmas: Sigmas = "official"

    def __post_init__(self):
        if not (isinstance(self.shift, int | float) and 0 < self.shift < float("inf")):
            raise WanjaxError(f"the flow shift {self.shift!r} is not a number above zero: 3 to 12 is usual")
        if self.sigmas not in get_args(Sigmas):
            raise WanjaxError(f"the sigmas {self.sigmas!r} are not known: {' or '.join(get_args(Sigmas))} would do")

    def configured(self, *, shift: float, sigmas: Sigmas):
        """This scheduler with another shift and other noise levels."""
        return dataclasses.replace(self, shift=shift, sigmas=sigmas)

    def x0(self, schedule: Any, index: Index, velocity: Float[Array, "..."], x: Float[Array, "..."]) -> jax.Array:
        """The clean sample that the velocity at x points to."""
        return x - schedule.sigmas[index] * velocity


def shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    """Noise levels moved towards noise: signal over noise divided by the shift."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def check_steps(steps: int) -> None:
    """Raises WanjaxError unless there is a step."""
    if steps < 1:
        raise WanjaxError(f"{steps} steps cannot make a video: at least 1 is needed")
