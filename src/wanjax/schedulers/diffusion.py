# SPDX-License-Identifier: Apache-2.0
"""Noise levels of diffusion models trained with a thousand discrete timesteps, where α² + σ² = 1.

The levels are based on Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models", 2112.10752. As
in Esser et al., 2403.03206, all levels have more noise. As in Lin et al., "Common Diffusion Noise Schedules and Sample
Steps are Flawed", 2305.08891, the last level is pure noise. The reference is diffusers'
schedulers/scheduling_ddim_cogvideox.py. The levels in scheduling_dpm_cogvideox.py are the same.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from wanjax.errors import WanjaxError
from wanjax.schedulers.base import (
    TRAIN_STEPS,
    Prediction,
    Reference,
    Schedule,
    Scheduler,
    check_choice,
    check_shift,
    check_steps,
)

FIRST_AND_LAST_BETA = 0.00085, 0.012  # β at the first and at the last training timestep
Spacing = Literal["trailing", "linspace", "leading"]


class Levels(NamedTuple):
    """The values of α² at a step's start, at its end, and at the previous step's start (None for the first step)."""

    start: np.float64
    end: np.float64
    previous_start: np.float64 | None


@dataclass(frozen=True)
class Diffusion(Scheduler):
    """Noise levels of a discrete diffusion model. The subclasses are solvers.

    The signal-to-noise ratio α² / σ² of every level is divided by `snr_shift`. `spacing` determines the timesteps:
    `trailing` counts down from the last timestep, `linspace` spaces them evenly from the last to the first, and
    `leading` counts up from the first. Both fields come from the checkpoint, so they are not part of a scheduler's
    name.
    """

    prediction: Prediction = "v"
    snr_shift: float = 1.0
    spacing: Spacing = "trailing"
    checkpoint_fields: ClassVar[tuple[str, ...]] = ("snr_shift", "spacing")

    def __post_init__(self):
        check_shift("SNR shift", self.snr_shift, "1 to 3")
        check_choice("timestep spacing", self.spacing, Spacing)

    def schedule(self, steps: int, *, follow: str = "official", skip: int = 0) -> Schedule:
        """Return levels and coefficients. Raises WanjaxError if there are more steps than timesteps.

        A step ends at the level of the next timestep, and the last step ends without noise. With `follow="diffusers"`,
        a step ends 1000 // steps timesteps below its start. If `steps` does not divide 1000, some noise then remains
        after the last step.
        """
        check_steps(steps, skip)
        check_choice("follow", follow, Reference)
        if steps > TRAIN_STEPS:
            raise WanjaxError(f"the model has {TRAIN_STEPS} timesteps, got {steps} steps: use fewer steps")
        alpha_bars = noise_levels(self.snr_shift)
        timesteps = _spaced_timesteps(steps, self.spacing)[skip:]
        end_timesteps = np.append(timesteps[1:], -1) if follow == "official" else timesteps - TRAIN_STEPS // steps
        start, end = alpha_bars[timesteps], np.where(end_timesteps >= 0, alpha_bars[end_timesteps], 1.0)
        levels = [Levels(start[i], end[i], start[i - 1] if i else None) for i in range(len(start))]
        level_alpha_bars = np.append(start, end[-1])
        return Schedule(
            timesteps=timesteps.astype(np.float32),
            sigmas=np.sqrt(1 - level_alpha_bars).astype(np.float32),
            alphas=np.sqrt(level_alpha_bars).astype(np.float32),
            coefficients=np.array([self._step_coefficients(level) for level in levels], np.float32),
        )

    def levels(self, fractions: Float[Array, "B"]) -> Schedule:
        """Return the levels of integer timesteps. Each timestep has an equal part of the range of fractions."""
        timesteps = jnp.minimum((fractions * TRAIN_STEPS).astype(jnp.int32), TRAIN_STEPS - 1)
        alpha_bars = noise_levels(self.snr_shift)
        alphas, sigmas = (jnp.asarray(np.sqrt(x), jnp.float32)[timesteps] for x in (alpha_bars, 1 - alpha_bars))
        times = timesteps.astype(jnp.float32)[None]
        return Schedule(times, jnp.stack([sigmas, sigmas]), jnp.stack([alphas, alphas]))

    @abstractmethod
    def _step_coefficients(self, levels: Levels) -> tuple[float, ...]:
        """Return the coefficients of a step."""


def noise_levels(snr_shift: float) -> Float[np.ndarray, " steps"]:
    """Return α² at each training timestep, in float64. At the last timestep it is 0."""
    betas = np.linspace(FIRST_AND_LAST_BETA[0] ** 0.5, FIRST_AND_LAST_BETA[1] ** 0.5, TRAIN_STEPS) ** 2
    alpha_bars = np.cumprod(1 - betas)
    alphas = np.sqrt(alpha_bars / (snr_shift + (1 - snr_shift) * alpha_bars))
    return ((alphas - alphas[-1]) * (alphas[0] / (alphas[0] - alphas[-1]))) ** 2


def _spaced_timesteps(steps: int, spacing: Spacing) -> Int[np.ndarray, " steps"]:
    """Return the timesteps of a schedule in descending order."""
    match spacing:
        case "trailing":
            # for some numbers of steps the reference's rounding appends timestep -1; it is dropped here
            timesteps = np.round(np.arange(TRAIN_STEPS, 0, -TRAIN_STEPS / steps))[:steps] - 1
        case "linspace":
            timesteps = np.linspace(0, TRAIN_STEPS - 1, steps).round()[::-1]
        case "leading":
            timesteps = np.arange(steps)[::-1] * (TRAIN_STEPS // steps)
    return timesteps.astype(np.int64)
