# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's schedule against diffusers: evenly spaced noise levels, shifted once, and Euler's method."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import retrieve_timesteps

from tests.parity.references import relative_l2
from wanjax.schedulers import FlowEuler, one_step
from wanjax.schedulers.base import TRAIN_STEPS

TOLERANCE = 1e-6
SHIFTS = {5.0: 0.0926, 7.0: 0.125, 9.0: 0.1552}  # of the published checkpoints, and the last of 50 noise levels


def reference(steps: int, shift: float) -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    retrieve_timesteps(scheduler, steps, sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
    return scheduler


@pytest.mark.parametrize("steps", [8, 12, 50])
@pytest.mark.parametrize("shift", SHIFTS)
def test_every_step_equals_that_of_diffusers(steps, shift):
    reference_scheduler, schedule = reference(steps, shift), FlowEuler().schedule(steps, shift=shift)
    np.testing.assert_array_equal(schedule.sigmas, reference_scheduler.sigmas.numpy())
    np.testing.assert_array_equal(schedule.timesteps, reference_scheduler.timesteps.numpy())
    if steps == 50:
        assert round(float(schedule.sigmas[-2]), 4) == SHIFTS[shift]
    expected = torch.randn((1, 4, 3, 4, 6), generator=torch.Generator().manual_seed(steps))
    x = jnp.asarray(expected.numpy())
    for index, t in enumerate(reference_scheduler.timesteps):
        velocity = torch.sin(3 * expected) + expected * (t / 1000)
        expected = reference_scheduler.step(velocity, t, expected, return_dict=False)[0]
        x, _ = FlowEuler().step(schedule, index, jnp.asarray(velocity.numpy()), x, ())
        assert relative_l2(x, expected) <= TOLERANCE, index


def test_the_next_timestep_is_the_next_noise_level():
    """A network for few steps reads the timestep after a step; after the last step it is 0."""
    schedule, reference_scheduler = FlowEuler().schedule(8, shift=5.0), reference(8, 5.0)
    next_timesteps = [one_step(schedule, index).sigmas[1] * np.float32(TRAIN_STEPS) for index in range(8)]
    np.testing.assert_array_equal(next_timesteps, [*reference_scheduler.timesteps[1:].tolist(), 0.0])
