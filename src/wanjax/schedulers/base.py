# SPDX-License-Identifier: Apache-2.0
"""What every scheduler is: noise levels laid out once, and a step whose memory goes in and comes out.

A scheduler itself is a value. `schedule(steps)` gives every number that depends on the step or on the shift, as arrays;
`init` and `step` hand the state on. Steps go by index and never by timestep, of which two may be equal. A compiled step
that is given `one_step(schedule, index)` serves every step of every schedule.

Noise levels are those of rectified flow: x(σ) = (1 - σ) x0 + σ noise, and the networks predict v = noise - x0.
"""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from wanjax.errors import WanjaxError

TRAIN_STEPS = 1000  # a timestep is σ · 1000
Sigmas = Literal["official", "diffusers"]  # as the models' authors lay the noise levels out, or as diffusers does
Numbers = np.ndarray | Array  # the host's, until a program is given them
Index = int | Int[Array, ""]
Sample = Float[Array, "..."]


class Schedule(NamedTuple):
    """Noise levels σ, from noise to none, and the timesteps that the network is told."""

    timesteps: Float32[Numbers, " steps"]
    sigmas: Float32[Numbers, " steps+1"]


@dataclass(frozen=True)
class Scheduler(ABC):
    """Noise levels under a shift, which is above 0, and 1 for none: the higher, the more steps go to much noise.

    Raises WanjaxError for a shift that is no such number and for sigmas of another name.
    """

    shift: float
    sigmas: Sigmas = "official"

    def __post_init__(self):
        if not (isinstance(self.shift, int | float) and 0 < self.shift < float("inf")):
            raise WanjaxError(f"the flow shift {self.shift!r} is not a number above zero: 3 to 12 is usual")
        if self.sigmas not in get_args(Sigmas):
            raise WanjaxError(f"the sigmas {self.sigmas!r} are not known: {' or '.join(get_args(Sigmas))} would do")

    def configured(self, *, shift: float, sigmas: Sigmas) -> "Scheduler":
        """This scheduler with another shift and other noise levels."""
        return dataclasses.replace(self, shift=shift, sigmas=sigmas)

    @abstractmethod
    def schedule(self, steps: int, skip: int = 0) -> Any:
        """Arrays by name, `timesteps` and `sigmas` among them, of `steps` steps but the first `skip`.

        Raises WanjaxError unless at least one step is left.
        """

    def noised(self, schedule: Any, x0: Sample, noise: Sample) -> Sample:
        """A clean sample with as much noise as the first step expects."""
        return (1.0 - schedule.sigmas[0]) * x0 + schedule.sigmas[0] * noise

    @abstractmethod
    def init(self, schedule: Any, x: Sample) -> Any:
        """The state before the first step, x being the noise."""

    @abstractmethod
    def step(self, schedule: Any, state: Any, index: Index, velocity: Sample, x: Sample) -> tuple[Sample, Any]:
        """x at noise level `index + 1` and the state to go on with, from x and its velocity at level `index`."""

    def x0(self, schedule: Any, index: Index, velocity: Sample, x: Sample) -> Sample:
        """The clean sample that the velocity at x points to."""
        return x - schedule.sigmas[index] * velocity


def one_step(schedule: Any, index: int) -> Any:
    """What one step needs of a schedule: itself a schedule, whose step 0 it is, of the same shapes for any number."""
    steps = len(schedule.timesteps)
    return jax.tree.map(lambda x: x[index : index + 1 + len(x) - steps], schedule)


def shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    """Noise levels with the ratio of noise to signal multiplied by the shift."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def check_steps(steps: int, skip: int) -> None:
    """Raises WanjaxError unless there is a step, and one is left."""
    if steps < 1:
        raise WanjaxError(f"{steps} steps cannot make a video: at least 1 is needed")
    if not 0 <= skip < steps:
        raise WanjaxError(f"{skip} of {steps} steps cannot be skipped: from 0 to {steps - 1} would do")
