# SPDX-License-Identifier: Apache-2.0
"""The interface of schedulers: a schedule computed once, and a step that takes and returns the solver's state.

A noisy sample is x = α x0 + σ noise. A scheduler is a value without arrays:

    schedule = scheduler.schedule(steps, ...)                # the numbers that depend on the step, as arrays
    state = scheduler.init(schedule, x, keys)                # the solver's memory
    x, state = scheduler.step(schedule, i, prediction, x, state)

Each scheduler has its own options of `schedule`, such as the `shift` of a flow. Steps are identified by index, never
by timestep, because two timesteps may be equal. One compiled step, called with `one_step(schedule, index)`, serves
every step of every schedule. A step that draws noise takes it from the keys, which the state then holds. The key's
generator is threefry2x32, whatever JAX's default, and noise is drawn in the dtype of x.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Key

from wanjax.errors import WanjaxError
from wanjax.figures import quantity

TRAIN_STEPS = 1000  # a flow's timestep is σ · 1000
Prediction = Literal["velocity", "v", "epsilon", "x0"]
Reference = Literal["official", "diffusers"]  # whose schedule to match: that of the models' authors, or of diffusers
Numbers = np.ndarray | Array  # NumPy's until they are passed to a program
Index = int | Int[Array, ""]
Sample = Float[Array, "..."]


class Schedule(NamedTuple):
    """The numbers of the steps: the network's timesteps, the noise levels in falling order, and the solver's weights.

    A last level is where the last step ends. `weights` are those of the terms that a step sums, None for a solver that
    follows from the levels alone. In training there is one step that moves nothing, with a level for each sample.
    """

    timesteps: Float32[Numbers, " steps *B"]
    sigmas: Float32[Numbers, " steps+1 *B"]
    alphas: Float32[Numbers, " steps+1 *B"]
    weights: Float32[Numbers, "steps terms"] | Any = None


@dataclass(frozen=True)
class Scheduler(ABC):
    """A solver and its noise levels; `prediction` names the quantity that the network predicts:

    `velocity`: noise - x0, for a flow, where α = 1 - σ; `v`: α noise - σ x0, where α² + σ² = 1 (Salimans and Ho,
    Progressive Distillation, 2022); `epsilon`: the noise; `x0`: the clean sample.
    """

    prediction: Prediction = "velocity"
    stochastic: ClassVar[bool] = False
    """True for a solver whose steps draw noise."""
    checkpoint_fields: ClassVar[tuple[str, ...]] = ()
    """Fields with the values of a checkpoint's training, which another solver of that checkpoint keeps."""
    option: ClassVar[str] = ""
    """The field that the solver's name may tell, as in `unipc:order=1`."""

    @abstractmethod
    def schedule(self, steps: int, *, skip: int = 0, **options: Any) -> Schedule:
        """Return arrays of the host for `steps` steps without the first `skip`.

        Raises WanjaxError unless at least one step is left, and where an option has an impossible value.
        """

    @abstractmethod
    def levels(self, fractions: Float[Array, "B"]) -> Schedule:
        """Return the noise levels of training at fractions of their range, from 0 without noise to 1."""

    def init(
        self, schedule: Schedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None = None
    ) -> Any:
        """Return the state before the first step, a tree of arrays; x is the noise. Here no state is needed.

        `keys` has a key for each sample on the first axis. A scheduler that draws noise keeps their data in the state,
        or the `noise` [steps, shape of x] that is given in place of what its steps would draw.
        """
        return ()

    @abstractmethod
    def step(self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: Any) -> tuple[Sample, Any]:
        """Return x at noise level `index + 1` and the next state; take x and the prediction at level `index`."""

    def x0(self, schedule: Schedule, index: Index, prediction: Sample, x: Sample) -> Sample:
        """Return the clean sample that follows from the network's prediction at x."""
        sigma = schedule.sigmas[index]
        match self.prediction:
            case "velocity":
                return x - sigma * prediction
            case "v":
                return schedule.alphas[index] * x - sigma * prediction
            case "epsilon":
                return (x - sigma * prediction) / schedule.alphas[index]
            case "x0":
                return prediction

    def start(self, schedule: Schedule, noise: Sample) -> Sample:
        """Return the sample at the first noise level of the schedule where there is nothing but noise."""
        return noise

    def add_noise(self, schedule: Schedule, x0: Sample, noise: Sample) -> Sample:
        """Add noise to a clean sample, up to the first noise level of the schedule.

        Both products are rounded before they are summed, whatever program this is a part of.
        """
        products = jnp.stack([schedule.alphas[0] * x0, schedule.sigmas[0] * noise])
        return jax.lax.optimization_barrier(products).sum(0)

    def target(self, alphas: Sample, sigmas: Sample, x0: Sample, noise: Sample) -> Sample:
        """Return the target of the network's prediction at α x0 + σ noise."""
        match self.prediction:
            case "velocity":
                return noise - x0
            case "v":
                return alphas * noise - sigmas * x0
            case "epsilon":
                return noise
            case "x0":
                return x0


@dataclass(frozen=True)
class Flow(Scheduler):
    """The noise levels of rectified flows, where α = 1 - σ; subclasses are their solvers."""

    def schedule(self, steps: int, *, shift: float, sigmas: str = "official", skip: int = 0) -> Schedule:
        """Return noise levels and timesteps; raise WanjaxError for an invalid shift or sigmas."""
        check_steps(steps, skip)
        check_flow(shift, sigmas)
        timesteps, levels = self._levels(steps, shift, sigmas)
        rounded = np.append(levels[skip:], 0).astype(np.float32)
        return Schedule(timesteps[skip:].astype(np.float32), rounded, 1 - rounded)

    def levels(self, fractions: Float[Array, "B"]) -> Schedule:
        """Return the fractions as noise levels."""
        sigmas = jnp.stack([fractions, fractions])
        return Schedule(sigmas[:1] * TRAIN_STEPS, sigmas, 1.0 - sigmas)

    def _levels(self, steps: int, shift: float, sigmas: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the timesteps and the noise levels, without the last level, which is 0; here even ones."""
        levels = even_levels(steps, shift, sigmas).astype(np.float32)
        return levels * TRAIN_STEPS, levels


def one_step(schedule: Schedule, index: int) -> Schedule:
    """Return a schedule of one step, cut from a schedule; its shapes are the same for any number of steps."""
    steps = len(schedule.timesteps)
    return jax.tree.map(lambda x: x[index : index + 1 + len(x) - steps], schedule)


def shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    """Return noise levels whose ratio of noise to signal is multiplied by the shift."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def even_levels(steps: int, shift: float, sigmas: str) -> np.ndarray:
    """Return noise levels that are spread evenly and shifted, in falling order, without the last, which is 0.

    The official ones fall evenly from 1. diffusers shifts twice by default: first the two ends, then all between them.
    """
    if sigmas == "official":
        line = np.linspace(1, 0, steps + 1)[:-1].astype(np.float32)
    else:
        high, low = shifted(np.array([1, 1 / TRAIN_STEPS], np.float32), shift)
        line = np.linspace(float(high), float(low), steps)
    return shifted(line, shift)


def check_steps(steps: int, skip: int) -> None:
    """Raise WanjaxError unless there is at least one step, and one is left after `skip`."""
    if steps < 1:
        raise WanjaxError(f"{quantity(steps, 'step')} cannot make a video: give 1 or more")
    if not 0 <= skip < steps:
        raise WanjaxError(f"{skip} of {quantity(steps, 'step')} cannot be skipped: give a number from 0 to {steps - 1}")


def check_flow(shift: object, sigmas: object) -> None:
    """Raise WanjaxError for an invalid shift, and for an unknown name of sigmas.

    A shift of 1 changes nothing; a higher shift moves steps to high noise.
    """
    check_shift("flow shift", shift, "3 to 12")
    check_choice("sigmas", sigmas, Reference)


def check_shift(name: str, shift: object, usual: str) -> None:
    """Raise WanjaxError for a shift that is not a finite number above 0."""
    if not (isinstance(shift, int | float) and 0 < shift < float("inf")):
        raise WanjaxError(f"the {name} {shift!r} is not a number above zero: {usual} is usual")


def check_choice(name: str, chosen: object, among: Any) -> None:
    """Raise WanjaxError for a value that is not among those of a `Literal`."""
    if chosen not in get_args(among):
        raise WanjaxError(f"the {name} {chosen!r} is not known: give {' or '.join(get_args(among))}")
