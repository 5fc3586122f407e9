# SPDX-License-Identifier: Apache-2.0
"""The interface of schedulers: compute a schedule once, then call a step that takes and returns the solver's state.

A noisy sample is x = α x0 + σ noise. A scheduler is a value without arrays:

    schedule = scheduler.schedule(steps, ...)        # all numbers that depend on the step, as arrays
    state = scheduler.init(schedule, x, keys)        # the state of the solver
    x, state = scheduler.step(schedule, index, prediction, x, state)

Each scheduler has its own options of `schedule`, such as the `shift` of a flow. Steps are identified by index, never
by timestep, because two timesteps may be equal. If a program is called with `one_step(schedule, index)`, it is compiled
once for all steps of all schedules. A stochastic solver has its random keys in the state. Noise is always drawn by
threefry2x32, whatever JAX's default generator is, and in the dtype of x.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Key

from wanjax.errors import WanjaxError
from wanjax.figures import pluralize

TRAIN_STEPS = 1000  # a flow's timestep is σ · 1000
Prediction = Literal["velocity", "v", "epsilon", "x0"]
Reference = Literal["official", "diffusers"]  # the code to match: the authors' or diffusers'
SigmaSchedule = Literal[
    "official",
    "diffusers",
    "comfy",
    "comfy-normal",
    "comfy-sgm-uniform",
    "comfy-beta",
    "comfy-karras",
    "comfy-exponential",
    "comfy-kl-optimal",
    "comfy-linear-quadratic",
]  # the noise levels of flows; comfy: ComfyUI's schedule "simple"
COMFY = "comfy"  # the start of the names of ComfyUI's schedules
RHO = 7.0  # the exponent of ComfyUI's schedule "karras"
LINEAR_NOISE = 0.025  # the first half of ComfyUI's schedule "linear_quadratic" decreases by this number in total
BETA = 0.6  # both parameters of the beta distribution in ComfyUI's schedule "beta"
AnyArray = np.ndarray | Array  # a NumPy array until it is passed to a program
Index = int | Int[Array, ""]
Sample = Float[Array, "..."]


class Schedule(NamedTuple):
    """The numbers for all steps: the network's timesteps, the noise levels in descending order, and coefficients.

    The number of noise levels is the number of steps plus one, because the last step ends at the last level. A step is
    a weighted sum, and `coefficients` has its weights; None if the solver needs only the noise levels. A schedule for
    training has a single step, which starts and ends at the same level. It has one level per sample.
    """

    timesteps: Float32[AnyArray, " steps *B"]
    sigmas: Float32[AnyArray, " steps+1 *B"]
    alphas: Float32[AnyArray, " steps+1 *B"]
    coefficients: Float32[AnyArray, "steps terms"] | Any = None


@dataclass(frozen=True)
class Scheduler(ABC):
    """A solver and its noise levels. `prediction` is the quantity that the network predicts:

    - `velocity`: noise - x0, for a flow, where α = 1 - σ
    - `v`: α noise - σ x0, where α² + σ² = 1 (Salimans and Ho, Progressive Distillation, 2022)
    - `epsilon`: the noise
    - `x0`: the clean sample
    """

    prediction: Prediction = "velocity"
    stochastic: ClassVar[bool] = False
    """Whether the steps of the solver draw noise."""
    checkpoint_fields: ClassVar[tuple[str, ...]] = ()
    """Fields whose values come from the checkpoint. If another solver replaces the checkpoint's solver, it gets
    them."""
    option: ClassVar[str] = ""
    """The field that a text may set after the solver's name, as in `unipc:order=1`."""

    @abstractmethod
    def schedule(self, steps: int, *, skip: int = 0, **options: Any) -> Schedule:
        """Compute the schedule of `steps` steps as NumPy arrays, without the first `skip` steps.

        Raises WanjaxError if no step remains or an option has an invalid value.
        """

    @abstractmethod
    def levels(self, fractions: Float[Array, "B"]) -> Schedule:
        """Return the noise levels for training. A fraction of 0 means no noise, and 1 means pure noise."""

    def init(
        self, schedule: Schedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None = None
    ) -> Any:
        """Create the state before the first step, a pytree of arrays. By default the state is empty.

        Args:
            schedule: The schedule of the run.
            x: The initial noise.
            keys: One random key per sample. A stochastic solver stores the data of the keys in the state.
            noise: The noise [steps, shape of x] for every step. With None, the steps draw noise.
        """
        return ()

    @abstractmethod
    def step(self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: Any) -> tuple[Sample, Any]:
        """Move x from noise level `index` to noise level `index + 1`, with the network's prediction at x.

        Return the new x and the new state.
        """

    def noise_draws(self, schedule: Schedule, index: int) -> int:
        """Return the number of noise arrays that the reference draws in a step. Only the last array is used.

        Args:
            schedule: The schedule of the run.
            index: The index of the step.
        """
        return 1 if self.stochastic else 0

    def x0(self, schedule: Schedule, index: Index, prediction: Sample, x: Sample) -> Sample:
        """Compute the clean sample from the network's prediction at x."""
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
        """Return the sample at the first noise level of a video that starts from noise."""
        return noise

    def add_noise(self, schedule: Schedule, x0: Sample, noise: Sample) -> Sample:
        """Add noise to a clean sample, up to the first noise level of the schedule.

        Both products are rounded before they are added. The result therefore does not depend on how the compiler fuses
        the operations.
        """
        products = jnp.stack([schedule.alphas[0] * x0, schedule.sigmas[0] * noise])
        return jax.lax.optimization_barrier(products).sum(0)

    def target(self, alphas: Sample, sigmas: Sample, x0: Sample, noise: Sample) -> Sample:
        """Compute the target that the network is trained to predict at α x0 + σ noise."""
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
    """The noise levels of rectified flows, where α = 1 - σ. The subclasses are solvers for flows."""

    def schedule(self, steps: int, *, shift: float, sigma_schedule: str = "official", skip: int = 0) -> Schedule:
        """Compute noise levels and timesteps. Raises WanjaxError if the shift or the sigma schedule is invalid."""
        check_steps(steps, skip)
        check_flow(shift, sigma_schedule)
        timesteps, levels = self._levels(steps, shift, sigma_schedule)
        rounded = np.append(levels[skip:], 0).astype(np.float32)
        return Schedule(timesteps[skip:].astype(np.float32), rounded, 1 - rounded)

    def levels(self, fractions: Float[Array, "B"]) -> Schedule:
        """Use the fractions as noise levels."""
        sigmas = jnp.stack([fractions, fractions])
        return Schedule(sigmas[:1] * TRAIN_STEPS, sigmas, 1.0 - sigmas)

    def _levels(self, steps: int, shift: float, sigma_schedule: str) -> tuple[np.ndarray, np.ndarray]:
        """Return timesteps and noise levels, without the last level, which is 0.

        The levels are evenly spaced, unless `sigma_schedule` names a schedule of ComfyUI.
        """
        all_levels = (
            comfy_levels(steps, shift, sigma_schedule)
            if sigma_schedule.startswith(COMFY)
            else even_levels(steps, shift, sigma_schedule)
        )
        levels = all_levels.astype(np.float32)
        return levels * TRAIN_STEPS, levels


def one_step(schedule: Schedule, index: int) -> Schedule:
    """Return the schedule of one step. The shapes of the result do not depend on the number of steps."""
    steps = len(schedule.timesteps)
    return jax.tree.map(lambda x: x[index : index + 1 + len(x) - steps], schedule)


def shift_sigmas(sigmas: np.ndarray, shift: float) -> np.ndarray:
    """Multiply the noise-to-signal ratio of noise levels by the shift."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def even_levels(steps: int, shift: float, sigma_schedule: str) -> np.ndarray:
    """Return evenly spaced, shifted noise levels in descending order, without the last level, which is 0.

    The official levels are evenly spaced from 1 to 0 and then shifted. diffusers shifts twice: first the two ends of
    the range, and then each of the levels that are evenly spaced between these ends.
    """
    if sigma_schedule == "official":
        levels = np.linspace(1, 0, steps + 1)[:-1].astype(np.float32)
    else:
        high, low = shift_sigmas(np.array([1, 1 / TRAIN_STEPS], np.float32), shift)
        levels = np.linspace(float(high), float(low), steps)
    return shift_sigmas(levels, shift)


def comfy_levels(steps: int, shift: float, sigma_schedule: str) -> np.ndarray:
    """Return the noise levels of a schedule of ComfyUI in descending order, without the last level, which is 0.

    ComfyUI has a table of a thousand shifted levels: 1/1000, 2/1000 ... 1 before the shift.

    - "simple" takes evenly spaced entries, from the end of the table on. Fractional indices are rounded down.
    - "beta" takes the entries at evenly spaced quantiles of a beta distribution, from 1 on (2407.12173).
    - "normal" shifts levels that are evenly spaced from 1 to the table's first entry, which is already shifted.
    - "sgm_uniform" does the same with one more level, and drops the last level.
    - "karras" decreases from 1 to the table's first entry evenly in σ^(1/7) (2206.00364), "exponential" evenly in
      log σ, and "kl_optimal" evenly in arctan σ.
    - "linear_quadratic" decreases linearly by 0.025 in the first half of the steps, and quadratically in the second
      half. The slope is continuous. There is no shift.

    Raises WanjaxError if two steps of "beta" have the same level, or if "kl_optimal" has only one step.
    """
    table = shift_sigmas(np.arange(1, TRAIN_STEPS + 1) / TRAIN_STEPS, shift)
    lowest = table[0]
    match sigma_schedule:
        case "comfy-normal":
            return shift_sigmas(np.linspace(1, lowest, steps), shift)
        case "comfy-sgm-uniform":
            return shift_sigmas(np.linspace(1, lowest, steps + 1)[:-1], shift)
        case "comfy-beta":
            entries = _beta_entries(steps)
            if (count := len(np.unique(entries))) < steps:
                most = next(n for n in range(steps - 1, 0, -1) if len(np.unique(_beta_entries(n))) == n)
                raise WanjaxError(
                    f"sigmas comfy-beta has only {count} different noise levels for {steps} steps: use at most {most} "
                    "steps"
                )
            return table[entries]
        case "comfy-karras":
            return np.linspace(1, lowest ** (1 / RHO), steps) ** RHO
        case "comfy-exponential":
            return np.exp(np.linspace(0, np.log(lowest), steps))
        case "comfy-kl-optimal":
            if steps == 1:
                raise WanjaxError("sigmas comfy-kl-optimal has no noise level for 1 step: use 2 steps or more")
            return np.tan(np.linspace(np.arctan(1), np.arctan(lowest), steps))
        case "comfy-linear-quadratic":
            return _linear_quadratic(steps)
        case _:
            # the spacing is first rounded to a float, as in ComfyUI: of 38 steps, step 19 has entry -500
            spacing = TRAIN_STEPS / steps
            return np.array([table[-1 - int(step * spacing)] for step in range(steps)])


def _linear_quadratic(steps: int) -> np.ndarray:
    """Return levels that decrease from 1 along a line, and then along a parabola. Where they meet, the line and the
    parabola have the same slope. The parabola reaches 0 at the end of the last step."""
    half = steps // 2
    if half == 0:
        return np.ones(1)
    step, steps_after_half = np.arange(steps), np.maximum(np.arange(steps) - half, 0)
    slope = LINEAR_NOISE / half
    curvature = (1 - slope * steps) / (steps - half) ** 2
    return 1 - slope * step - curvature * steps_after_half**2


def _beta_entries(steps: int) -> np.ndarray:
    """Return the entries of a table of a thousand levels that are nearest to the quantiles 1, 1 - 1/steps, ... of a
    symmetric beta distribution."""
    midpoints = (np.arange(TRAIN_STEPS - 1) + 0.5) / (TRAIN_STEPS - 1)  # between neighbouring entries
    quantiles = 1 - np.arange(steps) / steps
    return np.searchsorted(_beta_cdf(midpoints), quantiles + 1e-12, side="right")  # at a midpoint: the upper entry


def _beta_cdf(x: np.ndarray) -> np.ndarray:
    """Compute the distribution function of the symmetric beta distribution with both parameters `BETA`.

    The density is x^(a-1) (1-x)^(a-1) / B. Up to the middle, the function integrates the binomial series of the second
    factor.
    """
    n = np.arange(64)  # below 1/2, the terms decrease at least as fast as powers of 1/2
    factors = np.cumprod(np.append(1, (n[1:] - BETA) / n[1:]))
    tail = np.minimum(x, 1 - x)[:, None]
    total = math.gamma(BETA) ** 2 / math.gamma(2 * BETA)
    areas = (factors * tail ** (n + BETA) / (n + BETA)).sum(1) / total
    return np.where(x <= 0.5, areas, 1 - areas)


def check_steps(steps: int, skip: int) -> None:
    """Raise WanjaxError unless at least one step remains after the first `skip` steps."""
    if steps < 1:
        raise WanjaxError(f"at least 1 step is needed, got {pluralize(steps, 'step')}")
    if not 0 <= skip < steps:
        raise WanjaxError(f"cannot skip {skip} of {pluralize(steps, 'step')}: give a number from 0 to {steps - 1}")


def check_flow(shift: object, sigma_schedule: object) -> None:
    """Raise WanjaxError for an invalid shift or an unknown sigma schedule.

    A shift of 1 has no effect. A shift above 1 moves steps to higher noise levels.
    """
    check_shift("flow shift", shift, "3 to 12")
    check_choice("sigmas", sigma_schedule, SigmaSchedule)


def check_shift(name: str, shift: object, usual_values: str) -> None:
    """Raise WanjaxError for a shift that is not a finite number above 0."""
    if not (isinstance(shift, int | float) and 0 < shift < float("inf")):
        raise WanjaxError(f"the {name} must be a number above zero, got {shift!r}: {usual_values} is usual")


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise WanjaxError for a value that is not among the values of a `Literal` type."""
    if value not in get_args(choices):
        raise WanjaxError(f"unknown {name} {value!r}: give {' or '.join(get_args(choices))}")
