# SPDX-License-Identifier: Apache-2.0
"""UniPC: a predictor, and a corrector that uses each prediction of the network a second time.

Follows Zhao et al., "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models", 2302.04867,
with B(h) = e^-h - 1, on predictions m of the clean sample. In λ = log((1 - σ) / σ) both go from one noise level to the
next by the same expansion, linear in the sample and the predictions:

    x' = w0 x + w1 m + Σ wk (mk - m)

x and m belong to the level that the step leaves. The predictor has one mk, the prediction before m. The corrector
repeats the same step and also uses the prediction at the level that was reached. The weights depend only on the order
and the noise levels, so they are computed ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Key

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


class UniPCSchedule(NamedTuple):
    """Whole-numbered timesteps, noise levels, and each step's weights (w0, w1, w2 ...) of the two expansions."""

    timesteps: Float32[Numbers, " steps"]
    sigmas: Float32[Numbers, " steps+1"]
    corrector: Float32[Numbers, "steps 4"]
    predictor: Float32[Numbers, "steps 3"]

    @property
    def alphas(self) -> Float32[Numbers, "..."]:
        return 1.0 - self.sigmas


class UniPCState(NamedTuple):
    """The last corrected sample, and the predictions at its noise level and at the level before."""

    sample: Sample
    m: Sample
    before: Sample


@dataclass(frozen=True)
class UniPC(Scheduler):
    """UniPC of order 1 or 2; raises WanjaxError for other orders."""

    order: int = 2
    option: ClassVar[str] = "order"

    def __post_init__(self):
        if self.order not in (1, 2):
            raise WanjaxError(f"the solver order {self.order!r} is not offered: 1 or 2 would do")

    def schedule(self, steps: int, *, shift: float, sigmas: str = "official", skip: int = 0) -> UniPCSchedule:
        """Returns noise levels and weights.

        Raises WanjaxError for an invalid shift or sigmas, and where two levels are equal in float32.
        """
        check_steps(steps, skip)
        check_flow(shift, sigmas)
        levels = _levels(steps, shift, sigmas)[skip:]
        rounded = np.append(levels, 0).astype(np.float32)
        if rounded[0] >= 1 or (np.diff(rounded) >= 0).any():
            raise WanjaxError(f"{steps} steps at a flow shift of {shift} lie too close together: take fewer")
        s = rounded.astype(np.float64)  # rounded first, as in the reference: near pure noise the rounding changes λ
        corrector = [(1, 0, 0, 0)] + [_corrector(s, i, min(self.order, i)) for i in range(1, len(levels))]
        ahead = [predictor(s, i, min(self.order, i + 1)) for i in range(len(levels) - 1)] + [(0, 1, 0)]
        return UniPCSchedule(
            timesteps=np.trunc(levels * TRAIN_STEPS).astype(np.float32),
            sigmas=rounded,
            corrector=np.array(corrector, np.float32),
            predictor=np.array(ahead, np.float32),
        )

    def init(self, schedule: UniPCSchedule, x: Sample, keys: Key[Array, " B"]) -> UniPCState:
        """Returns the state of the first step, which has no corrector: the noise is the corrected sample."""
        return UniPCState(jnp.copy(x), jnp.zeros_like(x), jnp.zeros_like(x))

    def step(
        self, schedule: UniPCSchedule, index: Index, prediction: Sample, x: Sample, state: UniPCState
    ) -> tuple[Sample, UniPCState]:
        """Corrects x with the prediction at x, then predicts the next sample."""
        m = self.x0(schedule, index, prediction, x)
        sample = expand(schedule.corrector[index], state.sample, state.m, state.before, m)
        x = expand(schedule.predictor[index], sample, m, state.m)
        return x, UniPCState(sample, m, state.m)


def _levels(steps: int, shift: float, sigmas: str) -> np.ndarray:
    """Returns the noise levels in float64, without the last, which is 0."""
    if sigmas == "official":
        highest = float(np.float32(0.999))  # rounded in the official code too; some timesteps depend on it
        return shifted(np.linspace(highest, 0, steps + 1)[:-1], shift)
    levels = shifted(np.linspace(1, 1 / TRAIN_STEPS, steps + 1)[:-1], shift)
    levels[0] -= 1e-6  # at pure noise λ would be infinite
    return levels


def expand(weights: Float[Numbers, " terms"], x: Sample, m: Sample, *others: Sample) -> Sample:
    """Evaluates the expansion, `others` being mk; sums the small terms first, so that float32 keeps them."""
    terms = [weight * (mk - m) for weight, mk in zip(weights[2:], others, strict=True)]
    return weights[0] * x + weights[1] * m + sum(terms[1:], terms[0])


def predictor(s: np.ndarray, i: int, order: int) -> Sequence[float]:
    """Returns the weights from level i to i + 1. The last level needs none: it is the prediction itself."""
    h = _lambda(s[i + 1]) - _lambda(s[i])
    gain = (1 - s[i + 1]) * -np.expm1(-h)
    before = 0.5 * h / (_lambda(s[i - 1]) - _lambda(s[i])) if order == 2 else 0.0
    return s[i + 1] / s[i], gain, gain * before


def _corrector(s: np.ndarray, i: int, order: int) -> Sequence[float]:
    """Returns the weights from level i - 1 to i, given the prediction at i."""
    h = _lambda(s[i]) - _lambda(s[i - 1])
    b = np.expm1(-h)
    gain = (1 - s[i]) * -b
    if order == 1:
        return s[i] / s[i - 1], gain, 0.0, 0.5 * gain
    # The weights ρ of the two differences satisfy ρ1 + ρ2 = c1 and r ρ1 + ρ2 = c2, the conditions of second order.
    r = (_lambda(s[i - 2]) - _lambda(s[i - 1])) / h
    phi = b / -h - 1
    c1, c2 = phi / b, 2 * (phi / -h - 0.5) / b
    before = (c1 - c2) / (1 - r)
    return s[i] / s[i - 1], gain, gain * before / r, gain * (c1 - before)


def _lambda(sigma: float) -> float:
    with np.errstate(divide="ignore"):  # minus infinity at pure noise
        return np.log(1 - sigma) - np.log(sigma)
