# SPDX-License-Identifier: Apache-2.0
"""Solvers of distilled flows: each step predicts the clean sample, and adds new noise up to the next level.

    x0 = x - σ v,    x' = (1 - σ') x0 + σ' noise

Follows multistep consistency sampling (Song et al., "Consistency Models", 2303.01469) as the samplers of distilled
video models have it. A network that was distilled at a few timesteps is best run at those; a schedule of fewer steps
takes the first of them, and one of more steps divides the path along them evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Array, Float, Key

from wanjax.errors import SettingError, WanjaxError
from wanjax.schedulers.base import TRAIN_STEPS, Flow, Index, Sample, Schedule, shifted
from wanjax.schedulers.flow_euler import FlowEuler
from wanjax.schedulers.noise import DrawnNoise, ProvidedNoise, noise_source, take_noise


@dataclass(frozen=True)
class MultistepConsistency(Flow):
    """Adds new noise in each step, up to the next level."""

    stochastic: ClassVar[bool] = True

    def init(
        self, schedule: Schedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None = None
    ) -> DrawnNoise | ProvidedNoise:
        """Return the source of the noise. `noise` [steps, shape of x] takes the place of what steps would draw.

        Raises WanjaxError for noise of another shape.
        """
        return noise_source(schedule, x, keys, noise)

    def step(
        self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: DrawnNoise | ProvidedNoise
    ) -> tuple[Sample, DrawnNoise | ProvidedNoise]:
        """Move x to the next noise level, with new noise; the last step returns the clean sample."""
        noise, state = take_noise(state, x)
        x0 = self.x0(schedule, index, prediction, x)
        return schedule.alphas[index + 1] * x0 + schedule.sigmas[index + 1] * noise, state


@dataclass(frozen=True)
class Consistency(MultistepConsistency):
    """The solver of models distilled at given `timesteps`, such as 1000, 757, 522; without any, they are spread evenly.

    Evenly spread timesteps are shifted: four steps are 1000, 750, 500, 250 before the shift. Follows
    pipeline/causal_inference.py and utils/scheduler.py of guandeh17/Self-Forcing, and diffusers'
    schedulers/scheduling_flow_match_lcm.py. Given timesteps are those that the
    network is told, without a shift; the noise level of each is the nearest among those of the thousand timesteps of
    training, which are shifted. Follows causvid/models/wan/bidirectional_inference.py of tianweiy/CausVid, and
    fastvideo/pipelines/stages/denoising.py of hao-ai-lab/FastVideo.
    """

    timesteps: tuple[float, ...] = ()
    option: ClassVar[str] = "timesteps"

    def __post_init__(self):
        falling = all(high > low for high, low in zip((np.inf, *self.timesteps), (*self.timesteps, 0), strict=True))
        if not falling or max(self.timesteps, default=0) > TRAIN_STEPS:
            raise WanjaxError(
                f"the timesteps {self.timesteps} do not fall from at most {TRAIN_STEPS} to above 0: "
                "give such as 1000, 757, 522"
            )

    def _levels(self, steps: int, shift: float, sigmas: str) -> tuple[np.ndarray, np.ndarray]:
        if not self.timesteps:
            return super()._levels(steps, shift, sigmas)
        _check_official(sigmas)
        timesteps = _along(self.timesteps, steps)
        trained = shifted(np.arange(TRAIN_STEPS, 0, -1) / TRAIN_STEPS, shift)
        nearest = np.abs(trained * TRAIN_STEPS - timesteps[:, None]).argmin(1)
        return timesteps, trained[nearest]


@dataclass(frozen=True)
class RCMLevels(Flow):
    """The noise levels of rCM (Zheng et al., "Large Scale Diffusion Distillation via Score-Regularized Continuous-Time
    Consistency", 2510.08431), which are angles: at θ, x is cos θ x0 + sin θ noise.

    Divided by cos θ + sin θ it lies on the flow's path, at σ = sin θ / (cos θ + sin θ). The first angle is the arc
    tangent of `sigma_max`: 80, or 200 for image to video. The noise is scaled by its σ, which is below 1. The shift has
    no effect. Follows rcm/inference/wan2pt1_t2v_rcm_infer.py of NVlabs/rcm, which rounds timesteps to bfloat16.
    """

    sigma_max: float = 80.0
    option: ClassVar[str] = "sigma_max"
    angles: ClassVar[tuple[float, ...]] = (1.5, 1.4, 1.0)  # after the first

    def __post_init__(self):
        least = float(np.ceil(np.tan(self.angles[0])))
        if not least <= self.sigma_max < float("inf"):
            raise WanjaxError(f"the first noise of rCM {self.sigma_max} is not from {least:g} on: 80 to 200 is usual")

    def start(self, schedule: Schedule, noise: Sample) -> Sample:
        """Return the noise at the first level, without a clean sample."""
        return schedule.sigmas[0] * noise

    def _levels(self, steps: int, shift: float, sigmas: str) -> tuple[np.ndarray, np.ndarray]:
        _check_official(sigmas)
        angles = _along((np.arctan(self.sigma_max), *self.angles), steps)
        levels = np.sin(angles) / (np.cos(angles) + np.sin(angles))
        return levels * TRAIN_STEPS, levels


@dataclass(frozen=True)
class RCM(MultistepConsistency, RCMLevels):
    """The solver of rCM, which adds new noise at its levels."""


@dataclass(frozen=True)
class RCMEuler(FlowEuler, RCMLevels):
    """Euler's method over rCM's levels, x' = x - (σ - σ') v, which adds no noise: sharper, and less robust.

    Follows turbodiffusion/inference/wan2.2_i2v_infer.py of thu-ml/TurboDiffusion, which has it for image to video.
    """

    sigma_max: float = 200.0


def _check_official(sigmas: str) -> None:
    """Raise SettingError for other noise levels than those of the models' authors."""
    if sigmas != "official":
        raise SettingError(f"distilled models have no noise levels by {sigmas}: give the sigmas official", "sigmas")


def _along(points: Sequence[float], steps: int) -> np.ndarray:
    """Return the first points, as many as steps; for more steps, values evenly along the points and down to 0."""
    if steps <= len(points):
        return np.array(points[:steps], np.float64)
    return np.interp(np.arange(steps) * len(points) / steps, np.arange(len(points) + 1), [*points, 0.0])
