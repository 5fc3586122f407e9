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
from wanjax.pipelines.experts import stretches
from wanjax.registry import PRESETS
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


def compare(scheduler, reference, steps, skip=0):
    """Both ways in turn, each along its own samples; `reference` has its timesteps."""
    schedule = scheduler.schedule(steps, skip)
    reference.set_begin_index(skip)
    expected = torch.randn(SHAPE, generator=torch.Generator().manual_seed(steps))
    x = jnp.asarray(expected.numpy())
    state = scheduler.init(schedule, x)
    for index, timestep in enumerate(reference.timesteps[skip:]):
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


@pytest.mark.parametrize("skip", [1, 8, 18, 19])
@pytest.mark.parametrize("kind", [UniPC, FlowEuler])
def test_the_first_steps_are_left_out(kind, skip):
    """As from a given video, which is put under the noise of the first step that is taken."""
    scheduler, reference = kind(5.0, "diffusers"), (unipc if kind is UniPC else euler)(5.0)
    reference.set_timesteps(20)
    x0, noise = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    t = reference.timesteps[skip : skip + 1]
    expected = reference.add_noise(x0, noise, t) if kind is UniPC else reference.scale_noise(x0, t, noise)
    answer = scheduler.noised(scheduler.schedule(20, skip), jnp.asarray(x0.numpy()), jnp.asarray(noise.numpy()))
    assert relative_l2(answer, expected) <= TOLERANCE
    compare(scheduler, reference, 20, skip)


@pytest.mark.parametrize("sigmas", ["official", "diffusers"])
@pytest.mark.parametrize("name", ["wan2.2-t2v-a14b", "wan2.2-i2v-a14b"])
def test_the_second_expert_takes_over_where_the_reference_s_does(name, sigmas):
    chosen = PRESETS[name].defaults
    reference = unipc(chosen.flow_shift)
    if sigmas == "official":
        reference.set_timesteps(sigmas=np.linspace(float(np.float32(0.999)), 0, chosen.steps + 1)[:-1])
    else:
        reference.set_timesteps(chosen.steps)
    boundary = chosen.boundary * reference.config.num_train_timesteps
    timesteps = UniPC(chosen.flow_shift, sigmas).schedule(chosen.steps).timesteps
    first, second = stretches(np.asarray(timesteps), chosen)
    assert [bool(t >= boundary) for t in reference.timesteps] == [True] * first.stop + [False] * (
        second.stop - first.stop
    )


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
