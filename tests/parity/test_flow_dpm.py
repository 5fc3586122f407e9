# SPDX-License-Identifier: Apache-2.0
"""Flow DPM-Solver++ against the formulas of Wan's authors and against diffusers, at every step of a nonlinear field."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from tests.support.flows import Flow
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.schedulers import FlowDPM, from_config, one_step

TOLERANCE = 1e-6
NOISE = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def field(x, timestep: float):
    """Return a velocity for both, from one library, so that only the solvers differ."""
    return torch.sin(2 * x) + 0.5 * x * (timestep / 1000) - 0.3 * torch.cos(x)


def authors(steps: int, shift: float, order: int = 2) -> tuple[list[torch.Tensor], list[int], np.ndarray]:
    """Return x after each step, the timesteps and the noise levels, by the formulas in float64.

    In λ = log α - log σ, over h: x' = σ'/σ x - α' (e^-h - 1) (m + (m - m before) / 2r), r the h before over this one.
    """
    line = np.linspace(1, 0, steps + 1)[:steps]
    levels = shift * line / (1 + (shift - 1) * line)
    timesteps = [int(level * 1000) for level in levels]
    s = torch.from_numpy(np.append(levels, 0).astype(np.float32)).double()
    x, before, result, lam = NOISE, None, [], torch.log(1 - s) - torch.log(s)
    for i in range(steps):
        m = x - s[i] * field(x, timesteps[i])
        h, slope = lam[i + 1] - lam[i], 0.0
        if before is not None and order == 2 and i + 1 < steps:
            slope = (m - before) * h / (lam[i] - lam[i - 1]) / 2
        x = s[i + 1] / s[i] * x - (1 - s[i + 1]) * torch.expm1(-h) * (m + slope)
        before = m
        result.append(x)
    return result, timesteps, s.numpy()


def ours(scheduler: FlowDPM, schedule) -> list[np.ndarray]:
    x = jnp.asarray(NOISE.numpy(), jnp.float32)
    state, step, result = (
        scheduler.init(schedule, x, jax.random.split(jax.random.key(0), 3)),
        jax.jit(scheduler.step),
        [],
    )
    for index, timestep in enumerate(schedule.timesteps):
        velocity = field(torch.from_numpy(np.array(x)), float(timestep)).numpy()
        x, state = step(one_step(schedule, index), 0, jnp.asarray(velocity), x, state)
        result.append(np.asarray(x))
    return result


def error(result: list[np.ndarray], exact: list[torch.Tensor]) -> float:
    """Return the largest relative error of a step."""
    norms = [np.linalg.norm(a - e.numpy()) / np.linalg.norm(e) for a, e in zip(result, exact, strict=True)]
    return max(map(float, norms))


@pytest.mark.parametrize("shift", [3.0, 5.0, 8.0, 12.0, 16.0])
@pytest.mark.parametrize("steps", [4, 5, 8, 14, 15, 20, 30, 40, 50])
def test_every_step_is_the_authors(steps, shift):
    exact, timesteps, levels = authors(steps, shift)
    schedule = FlowDPM().schedule(steps, shift=shift)
    np.testing.assert_array_equal(schedule.timesteps, timesteps)
    np.testing.assert_array_equal(schedule.sigmas, levels)
    assert error(ours(FlowDPM(), schedule), exact) <= TOLERANCE


def test_the_first_order():
    exact, _, _ = authors(20, 5.0, order=1)
    scheduler = FlowDPM(order=1)
    assert error(ours(scheduler, scheduler.schedule(20, shift=5.0)), exact) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("shift", [3.0, 8.0])
@pytest.mark.parametrize("steps", [4, 20, 50])
def test_every_step_is_that_of_diffusers(steps, shift):
    """It has the same steps on noise levels of its own."""
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift}
    theirs = DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", **flow)
    assert from_config(theirs.config | {"_class_name": "DPMSolverMultistepScheduler"}) == FlowDPM()
    theirs.set_timesteps(steps)
    schedule = FlowDPM().schedule(steps, shift=shift, sigma_schedule="diffusers")
    np.testing.assert_array_equal(schedule.sigmas, theirs.sigmas.numpy())
    np.testing.assert_array_equal(schedule.timesteps, theirs.timesteps.numpy())
    x, exact = NOISE.float(), []
    for timestep in theirs.timesteps:
        x = theirs.step(field(x, timestep.item()), timestep, x, return_dict=False)[0]
        exact.append(x)
    assert error(ours(FlowDPM(), schedule), exact) <= 3 * TOLERANCE  # whose weights are in float32


def test_steps_are_left_out_and_too_many_refused():
    full, later = (FlowDPM().schedule(20, shift=5.0, skip=skip) for skip in (0, 12))
    np.testing.assert_array_equal(later.sigmas, full.sigmas[12:])
    np.testing.assert_array_equal(later.coefficients[1:], full.coefficients[13:])
    assert later.coefficients[0, 2] == 0
    with pytest.raises(WanjaxError, match=line_with_words("1,000,000 steps 100")):
        FlowDPM().schedule(1_000_000, shift=100.0)
    assert Flow(FlowDPM(), 5.0).schedule(1).sigmas.tolist() == [1, 0]
