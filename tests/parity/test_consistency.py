# SPDX-License-Identifier: Apache-2.0
"""Each step of the consistency solver equals that of two solvers of diffusers, for a nonlinear prediction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler

from tests.parity.references import relative_l2
from wanjax import schedulers
from wanjax.schedulers import Consistency, one_step

SHAPE = (2, 3, 4, 5, 4)
REFERENCES = {
    "scheduling_flow_match_lcm": FlowMatchLCMScheduler(shift=5.0),
    "scheduling_flow_match_euler_discrete": FlowMatchEulerDiscreteScheduler(shift=5.0, stochastic_sampling=True),
}


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
@pytest.mark.parametrize("module", REFERENCES)
def test_every_step_equals_that_of_diffusers(module, steps, monkeypatch):
    reference, scheduler = REFERENCES[module], Consistency()
    assert schedulers.from_config(dict(reference.config) | {"_class_name": type(reference).__name__}) == scheduler
    reference.set_timesteps(steps)
    reference.set_begin_index(0)
    generator = torch.Generator().manual_seed(steps)
    expected, noise = torch.randn(SHAPE, generator=generator), torch.randn(steps, *SHAPE, generator=generator)
    noises = iter(noise)
    monkeypatch.setattr(f"diffusers.schedulers.{module}.randn_tensor", lambda *args, **kwargs: next(noises))
    schedule, x = scheduler.schedule(steps, shift=5.0, sigma_schedule="diffusers"), jnp.asarray(expected.numpy())
    np.testing.assert_array_equal(schedule.timesteps, reference.timesteps.numpy())
    np.testing.assert_array_equal(schedule.sigmas, reference.sigmas.numpy())
    state = scheduler.init(schedule, x, jax.random.split(jax.random.key(0), 2), jnp.asarray(noise.numpy()))
    step = jax.jit(scheduler.step)
    for index, timestep in enumerate(reference.timesteps):
        expected = reference.step(torch.sin(expected) + timestep / 1000, timestep, expected, return_dict=False)[0]
        velocity = torch.sin(torch.from_numpy(np.array(x))) + timestep / 1000
        x, state = step(one_step(schedule, index), 0, jnp.asarray(velocity.numpy()), x, state)
        assert relative_l2(x, expected) <= 1e-6
    print(f"{relative_l2(x, expected):.1e}")
