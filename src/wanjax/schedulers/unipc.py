# SPDX-License-Identifier: Apache-2.0
"""UniPC: a predictor, and a corrector that uses each of the network's answers once more.

Follows Zhao et al., "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models", 2302.04867,
with B(h) = e^-h - 1, on predictions m of the clean sample. In λ = log((1 - σ) / σ) both go from one noise level to the
next by the same expansion, linear in the sample and the predictions:

    x' = w0 x + w1 m + Σ wk (mk - m)

x and m are those of the level left. The predictor's one mk is the prediction before m; the corrector goes the same way
again with that of the level reached as well. Orders and noise levels only make the weights, which are computed ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from wanjax.errors import WanjaxError
from wanjax.schedulers.base import TRAIN_STEPS, Index, Numbers, Sample, Scheduler, check_steps, shifted


class UniPCSchedule(NamedTuple):
    """Timesteps, which are whole numbers; noise levels; each step's weights (w0, w1, w2 ...) of the two expansions."""

    timesteps: Float32[Numbers, " steps"]
    sigmas: Float32[Numbers, " steps+1"]
    corrector: Float32[Numbers, "steps 4"]
    predictor: Float32[Numbers, "steps 3"]


class UniPCState(NamedTuple):
    """The last corrected sample, and the predictions at its noise level and at the one before."""

    sample: Sample
    m: Sample
    before: Sample


@dataclass(frozen=True)
class UniPC(Scheduler):
    """UniPC of order 1 or 2; raises WanjaxError for another."""

    order: int = 2

    def __post_init__(self):
        super().__post_init__()
        if self.order not in (1, 2):
            raise WanjaxError(f"the solver order {self.order!r} is not offered: 1 or 2 would do")

    def schedule(self, steps: int, skip: int = 0) -> UniPCSchedule:
        """Noise levels and weights; raises WanjaxError where float32 cannot tell the levels apart."""
        check_steps(steps, skip)
        levels = self._levels(steps)[skip:]
        sigmas = np.append(levels, 0).astype(np.float32)
        if sigmas[0] >= 1 or (np.diff(sigmas) >= 0).any():
            raise WanjaxError(f"{steps} steps at a flow shift of {self.shift} lie too close together: take fewer")
        s = sigmas.astype(np.float64)  # rounded first, as the reference has it: near pure noise λ feels it
        corrector = [(1, 0, 0, 0)] + [_corrector(s, i, min(self.order, i)) for i in range(1, len(levels))]
        predictor = [_predictor(s, i, min(self.order, i + 1)) for i in range(len(levels) - 1)] + [(0, 1, 0)]
        return UniPCSchedule(
            timesteps=np.trunc(levels * TRAIN_STEPS).astype(np.float32),
            sigmas=sigmas,
            corrector=np.array(corrector, np.float32),
            predictor=np.array(predictor, np.float32),
        )

    def _levels(self, steps: int) -> np.ndarray:
        """The noise levels but the last, 0, in float64."""
        if self.sigmas == "official":
            highest = float(np.float32(0.999))  # rounded there too, which decides some timesteps
            return shifted(np.linspace(highest, 0, steps + 1)[:-1], self.shift)
        levels = shifted(np.linspace(1, 1 / TRAIN_STEPS, steps + 1)[:-1], self.shift)
        levels[0] -= 1e-6  # at pure noise λ would be infinite
        return levels

    def init(self, schedule: UniPCSchedule, x: Sample) -> UniPCState:
        """The noise as the sample that stands corrected: the first step has nothing to correct it by."""
        return UniPCState(jnp.copy(x), jnp.zeros_like(x), jnp.zeros_like(x))

    def step(
        self, schedule: UniPCSchedule, state: UniPCState, index: Index, velocity: Sample, x: Sample
    ) -> tuple[Sample, UniPCState]:
        """Corrects x by its own velocity, then predicts the next one."""
        m = self.x0(schedule, index, velocity, x)
        sample = _expand(schedule.corrector[index], state.sample, state.m, state.before, m)
        x = _expand(schedule.predictor[index], sample, m, state.m)
        return x, UniPCState(sample, m, state.m)


def _expand(weights: Float[Array, " terms"], x: Sample, m: Sample, *others: Sample) -> Sample:
    """The expansion with `others` for mk, its small terms summed first, lest float32 lose them in the large."""
    terms = [weight * (mk - m) for weight, mk in zip(weights[2:], others, strict=True)]
    return weights[0] * x + weights[1] * m + sum(terms[1:], terms[0])


def _predictor(s: np.ndarray, i: int, order: int) -> Sequence[float]:
    """Weights from level i to i + 1, which is not the last: that takes the prediction as it is."""
    h = _lambda(s[i + 1]) - _lambda(s[i])
    gain = (1 - s[i + 1]) * -np.expm1(-h)
    before = 0.5 * h / (_lambda(s[i - 1]) - _lambda(s[i])) if order == 2 else 0.0
    return s[i + 1] / s[i], gain, gain * before


def _corrector(s: np.ndarray, i: int, order: int) -> Sequence[float]:
    """Weights from level i - 1 to i, once the prediction at i is known."""
    h = _lambda(s[i]) - _lambda(s[i - 1])
    b = np.expm1(-h)
    gain = (1 - s[i]) * -b
    if order == 1:
        return s[i] / s[i - 1], gain, 0.0, 0.5 * gain
    # The weights ρ of the two differences meet the conditions ρ1 + ρ2 = c1 and r ρ1 + ρ2 = c2 of second order.
    r = (_lambda(s[i - 2]) - _lambda(s[i - 1])) / h
    phi = b / -h - 1
    c1, c2 = phi / b, 2 * (phi / -h - 0.5) / b
    before = (c1 - c2) / (1 - r)
    return s[i] / s[i - 1], gain, gain * before / r, gain * (c1 - before)


def _lambda(sigma: float) -> float:
    return np.log(1 - sigma) - np.log(sigma)
