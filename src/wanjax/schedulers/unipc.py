# SPDX-License-Identifier: Apache-2.0
"""UniPC: a predictor of second order, and a corrector that uses each new prediction once more.

Follows Zhao et al., "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models" (2302.04867),
in the form B(h) = e^-h - 1 with predictions of the clean sample, m. A step is linear in what it has at hand: the sample,
the corrected sample before it, and three predictions. All that the orders, the noise levels and their logarithms do is to
give the weights of that sum; they are computed ahead, in the reference's float32, from which parity follows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from wanjax.errors import WanjaxError
from wanjax.schedulers.base import TRAIN_STEPS, Index, Scheduler, check_steps, shifted


class UniPCSchedule(NamedTuple):
    """Noise levels, timesteps, and each step's weights.

    corrector: of (x, previous corrected sample, m, previous m, the m before it).
    predictor: of (corrected sample, m, previous m).
    """

    timesteps: Float32[Array, " steps"]
    sigmas: Float32[Array, " steps+1"]
    corrector: Float32[Array, "steps 5"]
    predictor: Float32[Array, "steps 3"]


class UniPCState(NamedTuple):
    """The sample last predicted from, and the last two predictions of the clean sample, newest first."""

    sample: Float[Array, "..."]
    m1: Float[Array, "..."]
    m2: Float[Array, "..."]


@dataclass(frozen=True)
class UniPC(Scheduler):
    """UniPC on flow predictions, of order 1 or 2; raises WanjaxError for another."""

    order: int = 2

    def __post_init__(self):
        super().__post_init__()
        if self.order not in (1, 2):
            raise WanjaxError(f"the solver order {self.order!r} is not offered: 1 or 2 would do")

    def schedule(self, steps: int) -> UniPCSchedule:
        """All that depends on the step; raises WanjaxError where float32 cannot hold so many noise levels apart."""
        check_steps(steps)
        levels = self._levels(steps)
        sigmas = np.append(levels, 0).astype(np.float32)
        if sigmas[0] >= 1 or not (np.diff(sigmas) < 0).all():
            raise WanjaxError(f"{steps} steps at the flow shift {self.shift} are too close to tell apart: use fewer")
        orders = [min(self.order, i + 1, steps - i) for i in range(steps)]
        corrector = [(1, 0, 0, 0, 0)] + [_corrector(sigmas, i, orders[i - 1]) for i in range(1, steps)]
        predictor = [_predictor(sigmas, i, orders[i]) for i in range(steps)]
        return UniPCSchedule(
            timesteps=jnp.asarray(np.trunc(levels * TRAIN_STEPS), jnp.float32),
            sigmas=jnp.asarray(sigmas),
            corrector=jnp.asarray(np.array(corrector), jnp.float32),
            predictor=jnp.asarray(np.array(predictor), jnp.float32),
        )

    def _levels(self, steps: int) -> np.ndarray:
        """The noise levels but the last, in float64."""
        if self.sigmas == "official":
            return shifted(np.linspace(0.999, 0, steps + 1)[:-1], self.shift)
        levels = shifted(np.linspace(1, 1 / TRAIN_STEPS, steps + 1)[:-1], self.shift)
        levels[0] -= 1e-6  # pure noise has no logarithm of its signal
        return levels

    def init(self, schedule: UniPCSchedule, x: Float[Array, "..."]) -> UniPCState:
        """The state before the first step."""
        return UniPCState(jnp.zeros_like(x), jnp.zeros_like(x), jnp.zeros_like(x))

    def step(
        self, schedule: UniPCSchedule, state: UniPCState, index: Index, velocity: Float[Array, "..."], x: Float[Array, "..."]
    ) -> tuple[Float[Array, "..."], UniPCState]:
        """x at the next noise level, given the velocity at this one."""
        m = self.x0(schedule, index, velocity, x)
        corrected = _weighted(schedule.corrector[index], x, state.sample, m, state.m1, state.m2)
        following = _weighted(schedule.predictor[index], corrected, m, state.m1)
        return following, UniPCState(corrected, m, state.m1)


def _weighted(weights: Float[Array, " terms"], *terms: Float[Array, "..."]) -> Float[Array, "..."]:
    return sum(weight * term for weight, term in zip(weights, terms, strict=True))


def _predictor(sigmas: np.ndarray, i: int, order: int) -> tuple[float, ...]:
    """Weights of (sample, m, previous m) for the sample at level i + 1."""
    if sigmas[i + 1] == 0:
        return 0, 1, 0  # without noise the sample is the prediction; λ is infinite there
    h = _lambda(sigmas[i + 1]) - _lambda(sigmas[i])
    phi, _, _ = _moments(h)
    alpha_phi = (1 - sigmas[i + 1]) * phi
    slope = 0.0
    if order == 2:
        r = (_lambda(sigmas[i - 1]) - _lambda(sigmas[i])) / h
        slope = 0.5 / r
    return sigmas[i + 1] / sigmas[i], -alpha_phi * (1 - slope), -alpha_phi * slope


def _corrector(sigmas: np.ndarray, i: int, order: int) -> tuple[float, ...]:
    """Weights of (x, previous corrected sample, m, previous m, the m before it) for the sample at level i."""
    h = _lambda(sigmas[i]) - _lambda(sigmas[i - 1])
    phi, b1, b2 = _moments(h)
    alpha_phi = (1 - sigmas[i]) * phi
    rho, slope = np.float32(0.5), 0.0
    if order == 2:
        r = (_lambda(sigmas[i - 2]) - _lambda(sigmas[i - 1])) / h
        before = (b1 - b2) / (1 - r)
        rho, slope = b1 - before, before / r
    return 0, sigmas[i] / sigmas[i - 1], -alpha_phi * rho, -alpha_phi * (1 - slope - rho), -alpha_phi * slope


def _lambda(sigma: np.float32) -> np.float32:
    """Half the logarithm of signal over noise."""
    return np.log(1 - sigma) - np.log(sigma)


def _moments(h: np.float32) -> tuple[np.float32, ...]:
    """φ = B(h), and the right-hand sides of the corrector's conditions of order 1 and 2."""
    phi = np.expm1(-h)
    k1 = phi / -h - 1
    k2 = k1 / -h - np.float32(0.5)
    return phi, k1 / phi, 2 * k2 / phi
