# SPDX-License-Identifier: Apache-2.0
"""Each step of Flow DPM-Solver++ equals the formulas of Wan's authors and diffusers, for a nonlinear prediction."""

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


def predict_velocity(x, timestep: float):
    """Return a velocity, computed by torch for both solvers, so that only the solvers differ."""
    return torch.sin(2 * x) + 0.5 * x * (timestep / 1000) - 0.3 * torch.cos(x)


def authors_samples(steps: int, shift: float, order: int = 2) -> tuple[list[torch.Tensor], list[int], np.ndarray]:
    """Return x after each step, the timesteps and the sigmas, by the formulas in float64.

    With λ = log α - log σ, h its change and r = h_previous / h:
    x' = σ'/σ x - α' (e^-h - 1) (m + (m - m_previous) / 2r).
    """
    line = np.linspace(1, 0, steps + 1)[:steps]
    levels = shift * line / (1 + (shift - 1) * line)
    timesteps = [int(level * 1000) for level in levels]
    s = torch.from_numpy(np.append(levels, 0).astype(np.float32)).double()
    x, previous_m, samples, lambdas = NOISE, None, [], torch.log(1 - s) - torch.log(s)
    for i in range(steps):
        m = x - s[i] * predict_velocity(x, timesteps[i])
        h, slope = lambdas[i + 1] - lambdas[i], 0.0
        if previous_m is not None and order == 2 and i + 1 < steps:
            slope = (m - previous_m) * h / (lambdas[i] - lambdas[i - 1]) / 2
        x = s[i + 1] / s[i] * x - (1 - s[i + 1]) * torch.expm1(-h) * (m + slope)
        previous_m = m
        samples.append(x)
    return samples, timesteps, s.numpy()


def solve(scheduler: FlowDPM, schedule) -> list[np.ndarray]:
    x = jnp.asarray(NOISE.numpy(), jnp.float32)
    state, step, samples = (
        scheduler.init(schedule, x, jax.random.split(jax.random.key(0), 3)),
        jax.jit(scheduler.step),
        [],
    )
    for index, timestep in enumerate(schedule.timesteps):
        velocity = predict_velocity(torch.from_numpy(np.array(x)), float(timestep)).numpy()
        x, state = step(one_step(schedule, index), 0, jnp.asarray(velocity), x, state)
        samples.append(np.asarray(x))
    return samples


def error(samples: list[np.ndarray], exact: list[torch.Tensor]) -> float:
    """Return the largest relative error of all steps."""
    norms = [np.linalg.norm(a - e.numpy()) / np.linalg.norm(e) for a, e in zip(samples, exact, strict=True)]
    return max(map(float, norms))


@pytest.mark.parametrize("shift", [3.0, 5.0, 8.0, 12.0, 16.0])
@pytest.mark.parametrize("steps", [4, 5, 8, 14, 15, 20, 30, 40, 50])
def test_every_step_equals_the_authors_formulas(steps, shift):
    exact, timesteps, levels = authors_samples(steps, shift)
    schedule = FlowDPM().schedule(steps, shift=shift)
    np.testing.assert_array_equal(schedule.timesteps, timesteps)
    np.testing.assert_array_equal(schedule.sigmas, levels)
    assert error(solve(FlowDPM(), schedule), exact) <= TOLERANCE


def test_steps_of_first_order_equal_the_authors_formulas():
    exact, _, _ = authors_samples(20, 5.0, order=1)
    scheduler = FlowDPM(order=1)
    assert error(solve(scheduler, scheduler.schedule(20, shift=5.0)), exact) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("shift", [3.0, 8.0])
@pytest.mark.parametrize("steps", [4, 20, 50])
def test_every_step_equals_that_of_diffusers(steps, shift):
    """diffusers takes the same steps, with other sigmas."""
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift}
    reference = DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", **flow)
    assert from_config(reference.config | {"_class_name": "DPMSolverMultistepScheduler"}) == FlowDPM()
    reference.set_timesteps(steps)
    schedule = FlowDPM().schedule(steps, shift=shift, sigma_schedule="diffusers")
    np.testing.assert_array_equal(schedule.sigmas, reference.sigmas.numpy())
    np.testing.assert_array_equal(schedule.timesteps, reference.timesteps.numpy())
    x, exact = NOISE.float(), []
    for timestep in reference.timesteps:
        x = reference.step(predict_velocity(x, timestep.item()), timestep, x, return_dict=False)[0]
        exact.append(x)
    assert error(solve(FlowDPM(), schedule), exact) <= 3 * TOLERANCE  # the reference's weights are float32


def test_a_run_may_skip_steps_and_too_many_are_refused():
    full, later = (FlowDPM().schedule(20, shift=5.0, skip=skip) for skip in (0, 12))
    np.testing.assert_array_equal(later.sigmas, full.sigmas[12:])
    np.testing.assert_array_equal(later.coefficients[1:], full.coefficients[13:])
    assert later.coefficients[0, 2] == 0
    with pytest.raises(WanjaxError, match=line_with_words("1,000,000 steps 100")):
        FlowDPM().schedule(1_000_000, shift=100.0)
    assert Flow(FlowDPM(), 5.0).schedule(1).sigmas.tolist() == [1, 0]
