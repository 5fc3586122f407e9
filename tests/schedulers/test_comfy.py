# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's schedules and the solvers along them, against their rules in float64."""

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
# Steps, and the numbers of their entries, counted from the end of the table.
ENTRIES = {
    4: [1, 251, 501, 751],
    6: [1, 167, 334, 501, 667, 834],
    20: list(range(1, 1000, 50)),
    15: [1, 67, 134, 201, 267, 334, 401, 467, 534, 601, 667, 734, 801, 867, 934],
}


def rule(steps, shift):
    """Return the noise levels by the rule, with the last level, which is 0."""
    table = [shift * (t / 1000) / (1 + (shift - 1) * (t / 1000)) for t in range(1, 1001)]
    return np.array([table[-(1 + int(k * (1000 / steps)))] for k in range(steps)] + [0.0])


BETA_ENTRIES = {  # counted from the start of the table, from 0
    4: [999, 823, 500, 176],
    6: [999, 908, 724, 500, 275, 91],
    8: [999, 942, 823, 670, 500, 329, 176, 57],
}


def shifted(t, shift):
    return shift * t / (1 + (shift - 1) * t)


BETWEEN = {  # what falls evenly from 1 to the lowest level
    "comfy-karras": (lambda x: x ** (1 / 7), lambda x: x**7),
    "comfy-exponential": (math.log, math.exp),
    "comfy-kl-optimal": (math.atan, math.tan),
}


def linear_quadratic(steps):
    """Return the levels by the coefficients of a line i · a and a parabola i² · b + i · c + d, which are subtracted."""
    half = steps // 2
    if half == 0:
        return [1.0]
    rest = half - 0.025 * steps
    b = rest / (half * (steps - half) ** 2)
    c = 0.025 / half - 2 * rest / (steps - half) ** 2
    line = [1 - i * 0.025 / half for i in range(half)]
    return line + [1 - (b * i**2 + c * i + b * half**2) for i in range(half, steps)]


def other_rule(name, steps, shift):
    """Return the noise levels of another schedule by its rule, with the last level, which is 0."""
    table = [shifted(t / 1000, shift) for t in range(1, 1001)]
    if name == "comfy-beta":
        quantiles = [1 - k / steps for k in range(steps)]
        return np.array([table[int(np.rint(999 * stats.beta.ppf(q, 0.6, 0.6)))] for q in quantiles] + [0.0])
    if name == "comfy-linear-quadratic":
        return np.array([*linear_quadratic(steps), 0.0])
    if name in BETWEEN:
        to, back = BETWEEN[name]
        share = [k / max(1, steps - 1) for k in range(steps)]
        return np.array([back(to(1.0) + each * (to(table[0]) - to(1.0))) for each in share] + [0.0])
    intervals = steps if name == "comfy-sgm-uniform" else max(1, steps - 1)
    times = [1 + (table[0] - 1) * k / intervals for k in range(steps)]
    return np.array([shifted(t, shift) for t in times] + [0.0])


@pytest.mark.parametrize("steps", BETA_ENTRIES)
def test_levels_of_beta_are_entries_of_the_table(steps):
    schedule = FlowEuler().schedule(steps, shift=1.0, sigma_schedule="comfy-beta")
    np.testing.assert_allclose(schedule.sigmas[:-1], [(1 + k) / 1000 for k in BETA_ENTRIES[steps]], rtol=TOLERANCE)


@pytest.mark.parametrize(
    "name", ["comfy-normal", "comfy-sgm-uniform", "comfy-beta", "comfy-linear-quadratic", *BETWEEN]
)
def test_levels_of_other_schedules_follow_their_rules(name):
    for steps in (*range(2 if name == "comfy-kl-optimal" else 1, 41), 50, 77, 100, 120):
        for shift in (1.0, 5.0, 12.0):
            expected = other_rule(name, steps, shift)
            schedule = FlowEuler().schedule(steps, shift=shift, sigma_schedule=name)
            np.testing.assert_allclose(schedule.sigmas, expected, rtol=2e-6)
            np.testing.assert_allclose(schedule.timesteps, 1000 * expected[:-1], rtol=2e-6)
    for solver in FLOWS:
        schedule = solver.schedule(20, shift=5.0, sigma_schedule=name)
        np.testing.assert_allclose(schedule.sigmas, other_rule(name, 20, 5.0), rtol=2e-6)
        np.testing.assert_array_equal(
            solver.schedule(20, shift=5.0, sigma_schedule=name, skip=8).sigmas, schedule.sigmas[8:]
        )


def test_two_steps_at_one_level_are_refused():
    with pytest.raises(WanjaxError, match=line_with_words("comfy-beta 149 150 steps fewer")):
        FlowEuler().schedule(150, shift=5.0, sigma_schedule="comfy-beta")


def test_levels_of_two_schedules_at_some_steps():
    """Numbers that were computed by hand: the kink of linear_quadratic, and the middle of karras."""
    levels = FlowEuler().schedule(4, shift=5.0, sigma_schedule="comfy-linear-quadratic").sigmas
    np.testing.assert_allclose(levels, [1, 0.9875, 0.975, 0.725, 0], atol=TOLERANCE)
    lowest = 0.005 / 1.004  # the shifted 1/1000
    middle = FlowEuler().schedule(3, shift=5.0, sigma_schedule="comfy-karras").sigmas[1]
    np.testing.assert_allclose(middle, ((1 + lowest ** (1 / 7)) / 2) ** 7, rtol=2e-6)


def test_one_step_has_no_optimal_level():
    with pytest.raises(WanjaxError, match=line_with_words("comfy-kl-optimal 1 step 2")):
        FlowEuler().schedule(1, shift=5.0, sigma_schedule="comfy-kl-optimal")


@pytest.mark.parametrize("shift", [1.0, 5.0, 8.0])
@pytest.mark.parametrize("steps", ENTRIES)
def test_levels_are_entries_of_the_table(steps, shift):
    schedule = FlowEuler().schedule(steps, shift=shift, sigma_schedule="comfy")
    even = schedule.sigmas / (shift - (shift - 1) * np.float64(schedule.sigmas))  # the shift, undone
    np.testing.assert_allclose(even[:-1], [(1001 - entry) / 1000 for entry in ENTRIES[steps]], rtol=TOLERANCE)


@pytest.mark.parametrize("steps", [1, 3, 7, 19, 38, 50, 76, 174, 999, 1000])
def test_levels_follow_the_rule(steps):
    for shift in (1.0, 5.0, 12.0):
        schedule = FlowEuler().schedule(steps, shift=shift, sigma_schedule="comfy")
        np.testing.assert_allclose(schedule.sigmas, rule(steps, shift), rtol=TOLERANCE)
        np.testing.assert_allclose(schedule.timesteps, 1000 * rule(steps, shift)[:-1], rtol=TOLERANCE)
    middle = FlowEuler().schedule(38, shift=1.0, sigma_schedule="comfy").sigmas[19]
    assert middle == np.float32(0.501)  # 1000 / 38 is rounded before it is multiplied by 19


def test_every_flow_has_these_levels():
    for solver in FLOWS:
        schedule = solver.schedule(20, shift=5.0, sigma_schedule="comfy")
        np.testing.assert_allclose(schedule.timesteps, 1000 * rule(20, 5.0)[:-1], rtol=TOLERANCE)
        np.testing.assert_allclose(schedule.sigmas[1:], rule(20, 5.0)[1:], rtol=TOLERANCE)
        later = solver.schedule(20, shift=5.0, sigma_schedule="comfy", skip=8)
        np.testing.assert_array_equal(later.sigmas, schedule.sigmas[8:])
        np.testing.assert_array_equal(later.timesteps, schedule.timesteps[8:])
    firsts = {solver: solver.schedule(20, shift=5.0, sigma_schedule="comfy").sigmas[0] for solver in FLOWS}
    assert firsts == {solver: np.float32(1 - 1e-6) if solver == UniPC() else 1 for solver in FLOWS}


@pytest.mark.parametrize("solver", [RCM(), Consistency(timesteps=(1000.0, 757.0, 522.0))])
def test_levels_of_a_distillation_are_not_replaced(solver):
    with pytest.raises(WanjaxError, match=line_with_words("comfy official")):
        solver.schedule(4, shift=5.0, sigma_schedule="comfy")


def field(x, sigma):
    """The velocity that a network predicts."""
    return np.sin(x) + sigma


def solved(solver, steps, shift, first, noise):
    """Return all samples of a run, in float32."""
    schedule = solver.schedule(steps, shift=shift, sigma_schedule="comfy")
    x = solver.start(schedule, jnp.asarray(first, jnp.float32))
    keys = jax.random.split(jax.random.key(0), SHAPE[0])
    state, samples = solver.init(schedule, x, keys, jnp.asarray(noise, jnp.float32)), []
    for index in range(steps):
        velocity = field(np.asarray(x, np.float64), schedule.timesteps[index] / 1000)
        x, state = jax.jit(solver.step)(one_step(schedule, index), 0, jnp.asarray(velocity, jnp.float32), x, state)
        samples.append(np.asarray(x))
    return samples


@pytest.mark.parametrize(("steps", "shift"), [(4, 5.0), (20, 8.0), (6, 5.0)])
@pytest.mark.parametrize("name", ["euler", "lcm"])
def test_steps_follow_the_rule(name, steps, shift):
    random = np.random.default_rng(steps)
    x, noise = random.standard_normal(SHAPE), random.standard_normal((steps, *SHAPE))
    samples = solved(FlowEuler() if name == "euler" else Consistency(), steps, shift, x, noise)
    levels = rule(steps, shift)
    for index, (level, to) in enumerate(pairwise(levels)):
        clean = x - level * field(x, level)
        euler, lcm = x + (x - clean) / level * (to - level), (1 - to) * clean + to * noise[index]
        x = euler if name == "euler" else lcm
        np.testing.assert_allclose(samples[index], x, atol=3 * TOLERANCE * max(1, np.abs(x).max()))


def test_solvers_of_higher_order_come_near_to_the_solution():
    """Along the rule's levels, both come nearer to it than Euler's method does."""
    first = np.random.default_rng(0).standard_normal(SHAPE)
    solution = first
    for level, to in pairwise(np.linspace(1, 0, 4001)):
        solution = solution + (to - level) * field(solution, level)
    errors = {
        solver: np.abs(solved(solver, 20, 5.0, first, np.zeros((20, *SHAPE)))[-1] - solution).max()
        for solver in (FlowEuler(), FlowDPM(), UniPC())
    }
    assert max(errors[FlowDPM()], errors[UniPC()]) < errors[FlowEuler()] / 2
