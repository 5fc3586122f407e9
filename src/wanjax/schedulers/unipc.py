# SPDX-License-Identifier: Apache-2.0
"""UniPC: a predictor, and a corrector that uses each network prediction a second time.

The solver is that of Zhao et al., "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion
Models", 2302.04867, with B(h) = e^-h - 1 and predictions m of the clean sample. λ is log((1 - σ) / σ). The predictor
and the corrector use the same expansion to move from one noise level to the next. The expansion is linear in the sample
and the predictions:

    x' = w0 x + w1 m + Σ wk (mk - m)

x and m are the sample and the prediction at the start of the step. The predictor has one mk: the prediction before m.
The corrector repeats the previous step with a second mk: the prediction at the end of the previous step. The
coefficients w depend only on the order and the noise levels, so they are part of the schedule.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from wanjax.errors import WanjaxError
from wanjax.figures import pluralize
from wanjax.schedulers.base import COMFY, TRAIN_STEPS, AnyArray, Flow, Index, Sample, Schedule, shift_sigmas


class UniPCState(NamedTuple):
    """The last corrected sample, the prediction at its noise level, and the prediction at the previous noise level."""

    sample: Sample
    m: Sample
    previous_m: Sample


@dataclass(frozen=True)
class ExponentialIntegrator(Flow):
    """A solver of order 1 or 2 that uses UniPC's expansion. Raises WanjaxError for other orders."""

    order: int = 2
    option: ClassVar[str] = "order"
    starts_at_pure_noise: ClassVar[bool] = False
    """Whether the first level may be pure noise, where λ is infinite."""

    def __post_init__(self):
        if self.order not in (1, 2):
            raise WanjaxError(f"the solver's order must be 1 or 2, got {self.order!r}")

    def schedule(self, steps: int, *, shift: float, sigma_schedule: str = "official", skip: int = 0) -> Schedule:
        """Return noise levels, integer timesteps and coefficients.

        Raises WanjaxError for an invalid shift or sigma schedule, or if two levels are equal in float32.
        """
        schedule = super().schedule(steps, shift=shift, sigma_schedule=sigma_schedule, skip=skip)
        s = np.asarray(schedule.sigmas, np.float64)  # converted from float32, as in the references
        if (s[0] == 1 and not self.starts_at_pure_noise) or (np.diff(s) >= 0).any():
            raise WanjaxError(
                f"{pluralize(steps, 'step')} at a flow shift of {shift} have equal noise levels: use fewer steps"
            )
        return schedule._replace(
            coefficients=np.array([self._step_coefficients(s, i) for i in range(len(s) - 1)], np.float32)
        )

    @abstractmethod
    def _step_coefficients(self, s: np.ndarray, i: int) -> Sequence[float]:
        """Return the coefficients of the step that starts at level i of the levels s."""

    def _predictor_coefficients(self, s: np.ndarray, i: int) -> Sequence[float]:
        """Return the predictor's coefficients from level i to i + 1. The last step returns the prediction itself."""
        if i + 2 == len(s):
            return 0, 1, 0
        h = _lambda(s[i + 1]) - _lambda(s[i])
        gain = (1 - s[i + 1]) * -np.expm1(-h)
        previous = 0.5 * h / (_lambda(s[i - 1]) - _lambda(s[i])) if min(self.order, i + 1) == 2 else 0.0
        return s[i + 1] / s[i], gain, gain * previous


@dataclass(frozen=True)
class UniPC(ExponentialIntegrator):
    """UniPC of order 1 or 2. A step has four coefficients for the corrector and three for the predictor."""

    def init(
        self, schedule: Schedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None = None
    ) -> UniPCState:
        """Create the state before the first step.

        The first step has no corrector, so its corrected sample is the noise.
        """
        return UniPCState(jnp.copy(x), jnp.zeros_like(x), jnp.zeros_like(x))

    def step(
        self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: UniPCState
    ) -> tuple[Sample, UniPCState]:
        """Correct x with the prediction at x, then predict the next sample."""
        coefficients, m = schedule.coefficients[index], self.x0(schedule, index, prediction, x)
        sample = evaluate_expansion(coefficients[:4], state.sample, state.m, state.previous_m, m)
        x = evaluate_expansion(coefficients[4:], sample, m, state.m)
        return x, UniPCState(sample, m, state.m)

    def _levels(self, steps: int, shift: float, sigma_schedule: str) -> tuple[np.ndarray, np.ndarray]:
        if sigma_schedule == "official":
            highest = float(np.float32(0.999))  # float32 as in the official code; some timesteps depend on the rounding
            levels = shift_sigmas(np.linspace(highest, 0, steps + 1)[:-1], shift)
        elif sigma_schedule.startswith(COMFY):
            timesteps, levels = super()._levels(steps, shift, sigma_schedule)
            return timesteps, np.minimum(levels, 1 - 1e-6)  # at pure noise λ would be infinite
        else:
            levels = shift_sigmas(np.linspace(1, 1 / TRAIN_STEPS, steps + 1)[:-1], shift)
            levels[0] -= 1e-6  # at pure noise λ would be infinite
        return np.trunc(levels * TRAIN_STEPS), levels

    def _step_coefficients(self, s: np.ndarray, i: int) -> Sequence[float]:
        return *_corrector_coefficients(s, i, min(self.order, i)), *self._predictor_coefficients(s, i)


def evaluate_expansion(
    coefficients: Float[AnyArray, " terms"], x: Sample, m: Sample, *other_predictions: Sample
) -> Sample:
    """Evaluate the expansion. `other_predictions` are the predictions mk.

    The small terms are added first, so that they are not lost in float32.
    """
    terms = [coefficient * (mk - m) for coefficient, mk in zip(coefficients[2:], other_predictions, strict=True)]
    return coefficients[0] * x + coefficients[1] * m + sum(terms[1:], terms[0])


def _corrector_coefficients(s: np.ndarray, i: int, order: int) -> Sequence[float]:
    """Return the corrector's coefficients from level i - 1 to i.

    For i = 0 the corrector does not change x, because no step ends at the first level.
    """
    if order == 0:
        return 1, 0, 0, 0
    h = _lambda(s[i]) - _lambda(s[i - 1])
    b = np.expm1(-h)
    gain = (1 - s[i]) * -b
    if order == 1:
        return s[i] / s[i - 1], gain, 0.0, 0.5 * gain
    # The coefficients ρ of the two differences satisfy the second-order conditions: ρ1 + ρ2 = c1 and r ρ1 + ρ2 = c2
    r = (_lambda(s[i - 2]) - _lambda(s[i - 1])) / h
    phi = b / -h - 1
    c1, c2 = phi / b, 2 * (phi / -h - 0.5) / b
    previous = (c1 - c2) / (1 - r)
    return s[i] / s[i - 1], gain, gain * previous / r, gain * (c1 - previous)


def _lambda(sigma: float) -> float:
    with np.errstate(divide="ignore"):  # λ is minus infinity at pure noise
        return np.log(1 - sigma) - np.log(sigma)
