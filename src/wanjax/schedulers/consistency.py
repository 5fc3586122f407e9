# SPDX-License-Identifier: Apache-2.0
"""Solvers for distilled flows: each step predicts the clean sample, then adds new noise up to the next level.

    x0 = x - σ v,    x' = (1 - σ') x0 + σ' noise

This is multistep consistency sampling (Song et al., "Consistency Models", 2303.01469), in the form that distilled video
models use. A network that was distilled at a few timesteps works best at these timesteps. If a schedule has fewer
steps, it uses the first of these timesteps. If it has more steps, it interpolates evenly between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Array, Float, Key

from wanjax.errors import SettingError, WanjaxError
from wanjax.schedulers.base import TRAIN_STEPS, Flow, Index, Sample, Schedule, shift_sigmas
from wanjax.schedulers.flow_euler import FlowEuler
from wanjax.schedulers.noise import NoiseSource, next_noise, noise_source


@dataclass(frozen=True)
class MultistepConsistency(Flow):
    """Multistep consistency sampling: each step adds new noise up to the next level."""

    stochastic: ClassVar[bool] = True

    def init(
        self, schedule: Schedule, x: Sample, keys: Key[Array, " B"], noise: Float[Array, "..."] | None = None
    ) -> NoiseSource:
        """Return the source of noise for the steps: `noise` [steps, shape of x], or the random keys if it is None.

        Raises WanjaxError if `noise` has another shape.
        """
        return noise_source(schedule, x, keys, noise)

    def noise_draws(self, schedule: Schedule, index: int) -> int:
        """Return 1, or 0 for the last step, as the sampler of Self-Forcing's authors draws noise."""
        return int(index + 1 < len(schedule.timesteps))

    def step(
        self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: NoiseSource
    ) -> tuple[Sample, NoiseSource]:
        """Move x to the next noise level with new noise. The last step returns the clean sample."""
        noise, state = next_noise(state, x)
        x0 = self.x0(schedule, index, prediction, x)
        return schedule.alphas[index + 1] * x0 + schedule.sigmas[index + 1] * noise, state


@dataclass(frozen=True)
class Consistency(MultistepConsistency):
    """The solver for models that were distilled at certain `timesteps`, such as 1000, 757, 522.

    If `timesteps` is empty, the timesteps are evenly spaced and then shifted. Before the shift, the timesteps of four
    steps are 1000, 750, 500, 250. The references are pipeline/causal_inference.py and utils/scheduler.py of
    guandeh17/Self-Forcing, and diffusers' schedulers/scheduling_flow_match_lcm.py.

    Explicit `timesteps` are passed to the network without a shift. The noise level of a timestep is the nearest of the
    thousand shifted noise levels of training. The references are causvid/models/wan/bidirectional_inference.py of
    tianweiy/CausVid, and fastvideo/pipelines/stages/denoising.py of hao-ai-lab/FastVideo.
    """

    timesteps: tuple[float, ...] = ()
    option: ClassVar[str] = "timesteps"

    def __post_init__(self):
        decreasing = all(high > low for high, low in zip((np.inf, *self.timesteps), (*self.timesteps, 0), strict=True))
        if not decreasing or max(self.timesteps, default=0) > TRAIN_STEPS:
            raise WanjaxError(
                f"the timesteps {self.timesteps} do not fall from at most {TRAIN_STEPS} to above 0: "
                "give decreasing ones, such as 1000, 757, 522"
            )

    def _levels(self, steps: int, shift: float, sigma_schedule: str) -> tuple[np.ndarray, np.ndarray]:
        if not self.timesteps:
            return super()._levels(steps, shift, sigma_schedule)
        _check_official(sigma_schedule)
        timesteps = _points_along(self.timesteps, steps)
        training_sigmas = shift_sigmas(np.arange(TRAIN_STEPS, 0, -1) / TRAIN_STEPS, shift)
        nearest_indices = np.abs(training_sigmas * TRAIN_STEPS - timesteps[:, None]).argmin(1)
        return timesteps, training_sigmas[nearest_indices]


@dataclass(frozen=True)
class RCMLevels(Flow):
    """Noise levels of rCM (Zheng et al., "Large Scale Diffusion Distillation via Score-Regularized Continuous-Time
    Consistency", 2510.08431).

    A level is an angle θ, at which x = cos θ x0 + sin θ noise. Divided by cos θ + sin θ, this is the flow's sample at
    σ = sin θ / (cos θ + sin θ). The first angle is the arc tangent of `sigma_max`: 80, or 200 for image to video. The
    initial noise is multiplied by the first σ, which is below 1. The flow shift has no effect. The reference is
    rcm/inference/wan2pt1_t2v_rcm_infer.py of NVlabs/rcm, which rounds timesteps to bfloat16.
    """

    sigma_max: float = 80.0
    option: ClassVar[str] = "sigma_max"
    angles: ClassVar[tuple[float, ...]] = (1.5, 1.4, 1.0)  # the angles after the first angle

    def __post_init__(self):
        min_sigma_max = float(np.ceil(np.tan(self.angles[0])))
        if not min_sigma_max <= self.sigma_max < float("inf"):
            raise WanjaxError(
                f"sigma_max of rCM must be at least {min_sigma_max:g}, got {self.sigma_max}: 80 to 200 is usual"
            )

    def start(self, schedule: Schedule, noise: Sample) -> Sample:
        """Scale the noise to the first level."""
        return schedule.sigmas[0] * noise

    def _levels(self, steps: int, shift: float, sigma_schedule: str) -> tuple[np.ndarray, np.ndarray]:
        _check_official(sigma_schedule)
        angles = _points_along((np.arctan(self.sigma_max), *self.angles), steps)
        levels = np.sin(angles) / (np.cos(angles) + np.sin(angles))
        return levels * TRAIN_STEPS, levels


@dataclass(frozen=True)
class RCM(MultistepConsistency, RCMLevels):
    """rCM's solver: multistep consistency sampling at rCM's levels."""


@dataclass(frozen=True)
class RCMEuler(FlowEuler, RCMLevels):
    """Euler's method at rCM's levels, x' = x - (σ - σ') v.

    The solver adds no noise. Videos are sharper, but the solver is less robust. The reference is
    turbodiffusion/inference/wan2.2_i2v_infer.py of thu-ml/TurboDiffusion, which uses this solver for image to video.
    """

    sigma_max: float = 200.0


def _check_official(sigma_schedule: str) -> None:
    """Raise SettingError unless the official noise levels are requested."""
    if sigma_schedule != "official":
        message = f"the scheduler has noise levels of its own, so sigmas {sigma_schedule} cannot replace them"
        raise SettingError(f"{message}: use sigmas official, or another scheduler such as euler", "sigmas")


def _points_along(points: Sequence[float], steps: int) -> np.ndarray:
    """Return the first `steps` points.

    If there are more steps than points, interpolate evenly along the points and down to 0.
    """
    if steps <= len(points):
        return np.array(points[:steps], np.float64)
    return np.interp(np.arange(steps) * len(points) / steps, np.arange(len(points) + 1), [*points, 0.0])
