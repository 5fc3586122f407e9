# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's schedules, and solvers with these schedules, follow their rules in float64."""

import math
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.schedulers import RCM, Consistency, FlowDPM, FlowEuler, UniPC, one_step

TOLERANCE = 1e-6
SHAPE = (2, 3, 4, 5, 4)
FLOWS = [FlowEuler(), Consistency(), FlowDPM(), UniPC()]
# For each number of steps, the entries of the table, counted from its end.
ENTRIES = {
    4: [1, 251, 501, 751],
    6: [1, 167, 334, 501, 667, 834],
    20: list(range(1, 1000, 50)),
    15: [1, 67, 134, 201, 267, 334, 401, 467, 534, 601, 667, 734, 801, 867, 934],
}


def sigmas_by_rule(steps, shift):
    """Return the sigmas of the schedule `comfy`, with the last sigma, 0."""
    table = [shift * (t / 1000) / (1 + (shift - 1) * (t / 1000)) for t in range(1, 1001)]
    return np.array([table[-(1 + int(k * (1000 / steps)))] for k in range(steps)] + [0.0])


BETA_ENTRIES = {  # counted from the start of the table, from 0
    4: [999, 823, 500, 176],
    6: [999, 908, 724, 500, 275, 91],
    8: [999, 942, 823, 670, 500, 329, 176, 57],
}


def shift_time(t, shift):
    return shift * t / (1 + (shift - 1) * t)


SPACINGS = {  # a function of the sigma that falls evenly, and the inverse function
    "comfy-karras": (lambda x: x ** (1 / 7), lambda x: x**7),
    "comfy-exponential": (math.log, math.exp),
    "comfy-kl-optimal": (math.atan, math.tan),
}


def linear_quadratic(steps):
    """Return the sigmas of linear_quadratic: 1 minus a line in the first half, and minus a parabola in the second."""
    half = steps // 2
    if half == 0:
        return [1.0]
    rest = half - 0.025 * steps
    b = rest / (half * (steps - half) ** 2)
    c = 0.025 / half - 2 * rest / (steps - half) ** 2
    line = [1 - i * 0.025 / half for i in range(half)]
    return line + [1 - (b * i**2 + c * i + b * half**2) for i in range(half, steps)]


def sigmas_by_other_rule(name, steps, shift):
    """Return the sigmas of another schedule by its rule, with the last sigma, 0."""
    table = [shift_time(t / 1000, shift) for t in range(1, 1001)]
    if name == "comfy-beta":
        quantiles = [1 - k / steps for k in range(steps)]
        return np.array([table[int(np.rint(999 * stats.beta.ppf(q, 0.6, 0.6)))] for q in quantiles] + [0.0])
    if name == "comfy-linear-quadratic":
        return np.array([*linear_quadratic(steps), 0.0])
    if name in SPACINGS:
        transform, inverse = SPACINGS[name]
        fractions = [k / max(1, steps - 1) for k in range(steps)]
        return np.array(
            [inverse(transform(1.0) + fraction * (transform(table[0]) - transform(1.0))) for fraction in fractions]
            + [0.0]
        )
    intervals = steps if name == "comfy-sgm-uniform" else max(1, steps - 1)
    times = [1 + (table[0] - 1) * k / intervals for k in range(steps)]
    return np.array([shift_time(t, shift) for t in times] + [0.0])


@pytest.mark.parametrize("steps", BETA_ENTRIES)
def test_sigmas_of_beta_are_entries_of_the_table(steps):
    schedule = FlowEuler().schedule(steps, shift=1.0, sigma_schedule="comfy-beta")
    np.testing.assert_allclose(schedule.sigmas[:-1], [(1 + k) / 1000 for k in BETA_ENTRIES[steps]], rtol=TOLERANCE)


@pytest.mark.parametrize(
    "name", ["comfy-normal", "comfy-sgm-uniform", "comfy-beta", "comfy-linear-quadratic", *SPACINGS]
)
def test_sigmas_of_other_schedules_follow_their_rules(name):
    for steps in (*range(2 if name == "comfy-kl-optimal" else 1, 41), 50, 77, 100, 120):
        for shift in (1.0, 5.0, 12.0):
            expected = sigmas_by_other_rule(name, steps, shift)
            schedule = FlowEuler().schedule(steps, shift=shift, sigma_schedule=name)
            np.testing.assert_allclose(schedule.sigmas, expected, rtol=2e-6)
            np.testing.assert_allclose(schedule.timesteps, 1000 * expected[:-1], rtol=2e-6)
    for solver in FLOWS:
        schedule = solver.schedule(20, shift=5.0, sigma_schedule=name)
        np.testing.assert_allclose(schedule.sigmas, sigmas_by_other_rule(name, 20, 5.0), rtol=2e-6)
        np.testing.assert_array_equal(
            solver.schedule(20, shift=5.0, sigma_schedule=name, skip=8).sigmas, schedule.sigmas[8:]
        )


def test_two_steps_with_one_sigma_are_refused():
    with pytest.raises(WanjaxError, match=line_with_words("comfy-beta 149 150 at most 138 steps")):
        FlowEuler().schedule(150, shift=5.0, sigma_schedule="comfy-beta")
    FlowEuler().schedule(138, shift=5.0, sigma_schedule="comfy-beta")


def test_some_sigmas_equal_numbers_computed_by_hand():
    """The expected numbers are computed by hand: the kink of linear_quadratic, and the middle of karras."""
    levels = FlowEuler().schedule(4, shift=5.0, sigma_schedule="comfy-linear-quadratic").sigmas
    np.testing.assert_allclose(levels, [1, 0.9875, 0.975, 0.725, 0], atol=TOLERANCE)
    lowest = 0.005 / 1.004  # the shifted 1/1000
    middle = FlowEuler().schedule(3, shift=5.0, sigma_schedule="comfy-karras").sigmas[1]
    np.testing.assert_allclose(middle, ((1 + lowest ** (1 / 7)) / 2) ** 7, rtol=2e-6)


def test_the_optimal_schedule_of_one_step_is_refused():
    with pytest.raises(WanjaxError, match=line_with_words("comfy-kl-optimal 1 step 2")):
        FlowEuler().schedule(1, shift=5.0, sigma_schedule="comfy-kl-optimal")


@pytest.mark.parametrize("shift", [1.0, 5.0, 8.0])
@pytest.mark.parametrize("steps", ENTRIES)
def test_sigmas_of_comfy_are_entries_of_the_table(steps, shift):
    schedule = FlowEuler().schedule(steps, shift=shift, sigma_schedule="comfy")
    unshifted = schedule.sigmas / (shift - (shift - 1) * np.float64(schedule.sigmas))  # without the shift
    np.testing.assert_allclose(unshifted[:-1], [(1001 - entry) / 1000 for entry in ENTRIES[steps]], rtol=TOLERANCE)


@pytest.mark.parametrize("steps", [1, 3, 7, 19, 38, 50, 76, 174, 999, 1000])
def test_sigmas_of_comfy_follow_the_rule(steps):
    for shift in (1.0, 5.0, 12.0):
        schedule = FlowEuler().schedule(steps, shift=shift, sigma_schedule="comfy")
        np.testing.assert_allclose(schedule.sigmas, sigmas_by_rule(steps, shift), rtol=TOLERANCE)
        np.testing.assert_allclose(schedule.timesteps, 1000 * sigmas_by_rule(steps, shift)[:-1], rtol=TOLERANCE)
    middle = FlowEuler().schedule(38, shift=1.0, sigma_schedule="comfy").sigmas[19]
    assert middle == np.float32(0.501)  # 1000 / 38 is rounded before it is multiplied by 19


def test_every_flow_solver_takes_comfy_sigmas():
    for solver in FLOWS:
        schedule = solver.schedule(20, shift=5.0, sigma_schedule="comfy")
        np.testing.assert_allclose(schedule.timesteps, 1000 * sigmas_by_rule(20, 5.0)[:-1], rtol=TOLERANCE)
        np.testing.assert_allclose(schedule.sigmas[1:], sigmas_by_rule(20, 5.0)[1:], rtol=TOLERANCE)
        later = solver.schedule(20, shift=5.0, sigma_schedule="comfy", skip=8)
        np.testing.assert_array_equal(later.sigmas, schedule.sigmas[8:])
        np.testing.assert_array_equal(later.timesteps, schedule.timesteps[8:])
    firsts = {solver: solver.schedule(20, shift=5.0, sigma_schedule="comfy").sigmas[0] for solver in FLOWS}
    assert firsts == {solver: np.float32(1 - 1e-6) if solver == UniPC() else 1 for solver in FLOWS}


@pytest.mark.parametrize("solver", [RCM(), Consistency(timesteps=(1000.0, 757.0, 522.0))])
def test_distilled_solvers_refuse_other_sigmas(solver):
    with pytest.raises(WanjaxError, match=line_with_words("comfy official")):
        solver.schedule(4, shift=5.0, sigma_schedule="comfy")


def velocity_at(x, sigma):
    """Return the velocity that a network predicts."""
    return np.sin(x) + sigma


def solve(solver, steps, shift, first, noise):
    """Return all samples of a run, in float32."""
    schedule = solver.schedule(steps, shift=shift, sigma_schedule="comfy")
    x = solver.start(schedule, jnp.asarray(first, jnp.float32))
    keys = jax.random.split(jax.random.key(0), SHAPE[0])
    state, samples = solver.init(schedule, x, keys, jnp.asarray(noise, jnp.float32)), []
    for index in range(steps):
        velocity = velocity_at(np.asarray(x, np.float64), schedule.timesteps[index] / 1000)
        x, state = jax.jit(solver.step)(one_step(schedule, index), 0, jnp.asarray(velocity, jnp.float32), x, state)
        samples.append(np.asarray(x))
    return samples


@pytest.mark.parametrize(("steps", "shift"), [(4, 5.0), (20, 8.0), (6, 5.0)])
@pytest.mark.parametrize("name", ["euler", "lcm"])
def test_steps_along_comfy_sigmas_follow_the_rule(name, steps, shift):
    random = np.random.default_rng(steps)
    x, noise = random.standard_normal(SHAPE), random.standard_normal((steps, *SHAPE))
    samples = solve(FlowEuler() if name == "euler" else Consistency(), steps, shift, x, noise)
    levels = sigmas_by_rule(steps, shift)
    for index, (level, next_level) in enumerate(pairwise(levels)):
        clean = x - level * velocity_at(x, level)
        euler, lcm = (
            x + (x - clean) / level * (next_level - level),
            (1 - next_level) * clean + next_level * noise[index],
        )
        x = euler if name == "euler" else lcm
        np.testing.assert_allclose(samples[index], x, atol=3 * TOLERANCE * max(1, np.abs(x).max()))


def test_solvers_of_higher_order_have_smaller_errors():
    """With the same sigmas, both solvers have a smaller error than Euler's method."""
    first = np.random.default_rng(0).standard_normal(SHAPE)
    solution = first
    for level, next_level in pairwise(np.linspace(1, 0, 4001)):
        solution = solution + (next_level - level) * velocity_at(solution, level)
    errors = {
        solver: np.abs(solve(solver, 20, 5.0, first, np.zeros((20, *SHAPE)))[-1] - solution).max()
        for solver in (FlowEuler(), FlowDPM(), UniPC())
    }
    assert max(errors[FlowDPM()], errors[UniPC()]) < errors[FlowEuler()] / 2
