# SPDX-License-Identifier: Apache-2.0
"""Schedulers against those of diffusers, float32, at every step along a nonlinear velocity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from tests.parity.references import relative_l2
from tests.support.flows import flow_euler, unipc
from wanjax import schedulers
from wanjax.pipelines.model import phases_of
from wanjax.pipelines.wan.model import EXPERTS
from wanjax.registry import presets
from wanjax.schedulers import FlowEuler, UniPC

TOLERANCE = 1e-6
COMPILED = {UniPC: jax.jit(UniPC().step), FlowEuler: jax.jit(FlowEuler().step)}  # the schedule is an argument
SHAPE = (1, 3, 8, 8, 16)
steps_and_shifts = pytest.mark.parametrize(("steps", "shift"), [(n, s) for n in (5, 20, 50) for s in (3.0, 5.0, 12.0)])


def reference_unipc(shift, **settings):
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    return UniPCMultistepScheduler(**flow, **settings)


def reference_euler(shift):
    return FlowMatchEulerDiscreteScheduler(shift=shift)


def velocity_of(x: torch.Tensor, timestep: float) -> torch.Tensor:
    """Return the velocity for both, from one library, so that only the schedulers round differently."""
    return torch.sin(3 * x) + x * (timestep / 1000)


def compare(scheduler, reference, steps, skip=0):
    """Run each scheduler along its samples, and compare them; `reference` has its timesteps."""
    schedule = scheduler.schedule(steps, skip)
    reference.set_begin_index(skip)
    expected = torch.randn(SHAPE, generator=torch.Generator().manual_seed(steps))
    x = jnp.asarray(expected.numpy())
    state = scheduler.init(schedule, x)
    for index, timestep in enumerate(reference.timesteps[skip:]):
        velocity = velocity_of(expected, timestep.item())
        expected = reference.step(velocity, timestep, expected, return_dict=False)[0]
        velocity = velocity_of(torch.from_numpy(np.array(x)), schedule.timesteps[index].item())
        x, state = COMPILED[type(scheduler.scheduler)](schedule, index, jnp.asarray(velocity.numpy()), x, state)
        assert relative_l2(x, expected) <= TOLERANCE, index


def assert_same_noise_levels(schedule, reference):
    np.testing.assert_array_equal(schedule.sigmas, reference.sigmas.numpy())
    np.testing.assert_array_equal(schedule.timesteps, reference.timesteps.numpy())


@steps_and_shifts
def test_unipc_equals_diffusers(steps, shift):
    scheduler, reference = unipc(shift, "diffusers"), reference_unipc(shift)
    reference.set_timesteps(steps)
    assert_same_noise_levels(scheduler.schedule(steps), reference)
    compare(scheduler, reference, steps)


@steps_and_shifts
def test_unipc_with_official_noise_levels_equals_diffusers(steps, shift):
    """Pass the authors' noise levels, evenly spaced before the shift, to diffusers, whose default differs."""
    scheduler, reference = unipc(shift, "official"), reference_unipc(shift)
    reference.set_timesteps(sigmas=np.linspace(float(np.float32(0.999)), 0, steps + 1)[:-1])
    assert_same_noise_levels(scheduler.schedule(steps), reference)
    compare(scheduler, reference, steps)


@pytest.mark.parametrize("skip", [1, 8, 18, 19])
@pytest.mark.parametrize("kind", [unipc, flow_euler])
def test_a_run_may_skip_the_first_steps(kind, skip):
    """Skip steps, as for an input video, which starts with the noise of the first step that runs."""
    scheduler, reference = kind(5.0, "diffusers"), (reference_unipc if kind is unipc else reference_euler)(5.0)
    reference.set_timesteps(20)
    x0, noise = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    t = reference.timesteps[skip : skip + 1]
    expected = reference.add_noise(x0, noise, t) if kind is unipc else reference.scale_noise(x0, t, noise)
    result = scheduler.add_noise(scheduler.schedule(20, skip), jnp.asarray(x0.numpy()), jnp.asarray(noise.numpy()))
    assert relative_l2(result, expected) <= TOLERANCE
    compare(scheduler, reference, 20, skip)


@pytest.mark.parametrize("sigmas", ["official", "diffusers"])
@pytest.mark.parametrize("name", ["wan2.2-t2v-a14b", "wan2.2-i2v-a14b"])
def test_the_second_expert_starts_at_the_step_of_diffusers(name, sigmas):
    defaults = presets()[name].defaults
    reference = reference_unipc(defaults.flow_shift)
    if sigmas == "official":
        reference.set_timesteps(sigmas=np.linspace(float(np.float32(0.999)), 0, defaults.steps + 1)[:-1])
    else:
        reference.set_timesteps(defaults.steps)
    boundary = defaults.boundary * reference.config.num_train_timesteps
    timesteps = unipc(defaults.flow_shift, sigmas).schedule(defaults.steps).timesteps
    first, second = phases_of(EXPERTS, np.asarray(timesteps), defaults)
    assert [bool(t >= boundary) for t in reference.timesteps] == [True] * len(first.scales) + [False] * len(
        second.scales
    )


def test_unipc_of_first_order_equals_diffusers():
    scheduler, reference = unipc(5.0, "diffusers", order=1), reference_unipc(5.0, solver_order=1)
    reference.set_timesteps(20)
    compare(scheduler, reference, 20)


@steps_and_shifts
def test_euler_equals_diffusers(steps, shift):
    scheduler, reference = flow_euler(shift, "diffusers"), reference_euler(shift)
    reference.set_timesteps(steps)
    assert_same_noise_levels(scheduler.schedule(steps), reference)
    compare(scheduler, reference, steps)


@steps_and_shifts
def test_euler_with_official_noise_levels_equals_diffusers(steps, shift):
    scheduler, reference = flow_euler(shift, "official"), reference_euler(shift)
    reference.set_timesteps(sigmas=np.linspace(1, 0, steps + 1)[:-1])
    assert_same_noise_levels(scheduler.schedule(steps), reference)
    compare(scheduler, reference, steps)


def test_configs_that_diffusers_writes_are_read():
    assert schedulers.from_config(reference_unipc(8.0).config | {"_class_name": "UniPCMultistepScheduler"}) == UniPC()
    assert (
        schedulers.from_config(reference_euler(8.0).config | {"_class_name": "FlowMatchEulerDiscreteScheduler"})
        == FlowEuler()
    )
