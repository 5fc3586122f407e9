# SPDX-License-Identifier: Apache-2.0
"""Schedulers against those of diffusers, float32, at every step of the way through one nonlinear field."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from tests.parity.references import relative_l2
from wanjax import schedulers
from wanjax.schedulers import FlowEuler, UniPC

TOLERANCE = 1e-6
COMPILED = {UniPC: jax.jit(UniPC(1.0).step), FlowEuler: jax.jit(FlowEuler(1.0).step)}  # a schedule holds all values
SHAPE = (1, 3, 8, 8, 16)
steps_and_shifts = pytest.mark.parametrize(("steps", "shift"), [(n, s) for n in (5, 20, 50) for s in (3.0, 5.0, 12.0)])


def unipc(shift, **settings):
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    return UniPCMultistepScheduler(**flow, **settings)


def euler(shift):
    return FlowMatchEulerDiscreteScheduler(shift=shift)


def field(x: torch.Tensor, timestep: float) -> torch.Tensor:
    """A velocity for both, computed by one library, lest two roundings of it hide those of the schedulers."""
    return torch.sin(3 * x) + x * (timestep / 1000)


def compare(scheduler, reference, steps):
    """Both ways in turn, each along its own samples; `reference` has its timesteps."""
    schedule = scheduler.schedule(steps)
    reference.set_begin_index(0)
    expected = torch.randn(SHAPE, generator=torch.Generator().manual_seed(steps))
    x = jnp.asarray(expected.numpy())
    state = scheduler.init(schedule, x)
    for index, timestep in enumerate(reference.timesteps):
        velocity = field(expected, timestep.item())
        expected = reference.step(velocity, timestep, expected, return_dict=False)[0]
        velocity = field(torch.from_numpy(np.array(x)), schedule.timesteps[index].item())
        x, state = COMPILED[type(scheduler)](schedule, state, index, jnp.asarray(velocity.numpy()), x)
        assert relative_l2(x, expected) <= TOLERANCE, index


def same_levels(schedule, reference):
    np.testing.assert_array_equal(schedule.sigmas, reference.sigmas.numpy())
    np.testing.assert_array_equal(schedule.timesteps, reference.timesteps.numpy())


@steps_and_shifts
def test_unipc_with_the_noise_levels_of_diffusers(steps, shift):
    scheduler, reference = UniPC(shift, "diffusers"), unipc(shift)
    reference.set_timesteps(steps)
    same_levels(scheduler.schedule(steps), reference)
    compare(scheduler, reference, steps)


@steps_and_shifts
def test_unipc_with_the_official_noise_levels(steps, shift):
    """Today's diffusers lays out others, so that it is given these: the even line of the models' authors, shifted."""
    scheduler, reference = UniPC(shift, "official"), unipc(shift)
    reference.set_timesteps(sigmas=np.linspace(float(np.float32(0.999)), 0, steps + 1)[:-1])
    same_levels(scheduler.schedule(steps), reference)
    compare(scheduler, reference, steps)


def test_unipc_of_first_order():
    scheduler, reference = UniPC(5.0, "diffusers", order=1), unipc(5.0, solver_order=1)
    reference.set_timesteps(20)
    compare(scheduler, reference, 20)


@steps_and_shifts
def test_euler_with_the_noise_levels_of_diffusers(steps, shift):
    scheduler, reference = FlowEuler(shift, "diffusers"), euler(shift)
    reference.set_timesteps(steps)
    same_levels(scheduler.schedule(steps), reference)
    compare(scheduler, reference, steps)


@steps_and_shifts
def test_euler_with_the_official_noise_levels(steps, shift):
    scheduler, reference = FlowEuler(shift, "official"), euler(shift)
    reference.set_timesteps(sigmas=np.linspace(1, 0, steps + 1)[:-1])
    same_levels(scheduler.schedule(steps), reference)
    compare(scheduler, reference, steps)


def test_the_configs_that_diffusers_writes_are_read():
    assert schedulers.from_config(unipc(8.0).config | {"_class_name": "UniPCMultistepScheduler"}) == UniPC(8.0)
    assert schedulers.from_config(euler(8.0).config | {"_class_name": "FlowMatchEulerDiscreteScheduler"}) == FlowEuler(
        8.0
    )
