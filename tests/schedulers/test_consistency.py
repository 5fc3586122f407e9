# SPDX-License-Identifier: Apache-2.0
"""Solvers that add new noise follow the published rules, computed independently in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.schedulers import RCM, Consistency, RCMEuler, one_step

TOLERANCE = 1e-6
SHAPE = (2, 3, 4, 5, 4)
CAUSVID = Consistency(timesteps=(1000.0, 757.0, 522.0))


def table(shift):
    """Return the thousand training timesteps of the published samplers, in falling order, and their sigmas."""
    unshifted = 1 - np.arange(1000) / 1000
    levels = shift * unshifted / (1 + (shift - 1) * unshifted)
    return levels * 1000, levels


def self_forcing_levels(entries, shift):
    """Return timesteps and sigmas by Self-Forcing's rule: entries of the table, counted from its end."""
    timesteps, levels = table(shift)
    rows = 1000 - np.array(entries)
    return timesteps[rows], levels[rows]


def levels_of_nearest_timesteps(requested, shift):
    """Return timesteps and sigmas by the rule of CausVid and FastVideo: the sigma of the nearest timestep."""
    timesteps, levels = table(shift)
    return np.array(requested, float), np.array(
        [levels[min(range(1000), key=lambda i: abs(timesteps[i] - t))] for t in requested]
    )


def rcm_levels(steps, sigma_max):
    """Return timesteps and sigmas by rCM's rule."""
    angles = np.array([np.arctan(sigma_max), *[1.5, 1.4, 1.0][: steps - 1]])
    levels = np.sin(angles) / (np.cos(angles) + np.sin(angles))
    return levels * 1000, levels


PUBLISHED = {
    "self-forcing": (Consistency(), 4, 5.0, self_forcing_levels((1000, 750, 500, 250), 5.0)),
    "causvid, four steps": (Consistency(), 4, 8.0, self_forcing_levels((1000, 750, 500, 250), 8.0)),
    "causvid, fastwan": (CAUSVID, 3, 8.0, levels_of_nearest_timesteps((1000, 757, 522), 8.0)),
    "another shift": (CAUSVID, 3, 5.0, levels_of_nearest_timesteps((1000, 757, 522), 5.0)),
    "two of three": (CAUSVID, 2, 8.0, levels_of_nearest_timesteps((1000, 757), 8.0)),
    "twice as many": (CAUSVID, 6, 8.0, levels_of_nearest_timesteps((1000, 878.5, 757, 639.5, 522, 261), 8.0)),
    "five even steps": (Consistency(), 5, 3.0, self_forcing_levels((1000, 800, 600, 400, 200), 3.0)),
    **{f"rcm, {steps}": (RCM(), steps, 5.0, rcm_levels(steps, 80)) for steps in (1, 2, 3, 4)},
    "rcm, image to video": (RCM(sigma_max=200.0), 4, 5.0, rcm_levels(4, 200)),
}
published = pytest.mark.parametrize(("scheduler", "steps", "shift", "expected"), PUBLISHED.values(), ids=PUBLISHED)


@published
def test_sigmas_are_the_published_ones(scheduler, steps, shift, expected):
    timesteps, levels = expected
    schedule = scheduler.schedule(steps, shift=shift)
    np.testing.assert_allclose(schedule.timesteps, timesteps, rtol=TOLERANCE)
    np.testing.assert_allclose(schedule.sigmas, [*levels, 0], rtol=TOLERANCE)
    assert schedule.timesteps.dtype == schedule.sigmas.dtype == np.float32
    later = scheduler.schedule(steps, shift=shift, skip=steps - 1)
    np.testing.assert_array_equal(later.timesteps, schedule.timesteps[-1:])
    np.testing.assert_array_equal(later.sigmas, schedule.sigmas[-2:])


def test_some_sigmas_equal_published_numbers():
    np.testing.assert_allclose(Consistency().schedule(4, shift=5.0).timesteps, [1000, 937.5, 833.3333, 625], rtol=1e-6)
    tangents = np.array([80, 14.1014200, 5.7978837, 1.5574077])  # tangents of rCM's angles
    np.testing.assert_allclose(RCM().schedule(4, shift=1.0).sigmas[:4], tangents / (1 + tangents), rtol=1e-6)


@published
def test_every_step_is_the_published_one(scheduler, steps, shift, expected):
    """The expected samples are computed in float64. The predicted velocity depends on the timestep."""
    random = np.random.default_rng(steps)
    first, noise = random.standard_normal(SHAPE), random.standard_normal((steps, *SHAPE))
    timesteps, levels = expected
    expected_x = first * (levels[0] if isinstance(scheduler, RCM) else 1)
    schedule, options = scheduler.schedule(steps, shift=shift), jnp.asarray(noise, jnp.float32)
    x = scheduler.start(schedule, jnp.asarray(first, jnp.float32))
    state = scheduler.init(schedule, x, jax.random.split(jax.random.key(0), SHAPE[0]), options)
    step, largest_error = jax.jit(scheduler.step), 0.0
    for index in range(steps):
        clean = expected_x - levels[index] * (np.sin(expected_x) + timesteps[index] / 1000)
        next_level = [*levels, 0][index + 1]
        expected_x = (1 - next_level) * clean + next_level * noise[index]
        velocity = np.sin(np.asarray(x, np.float64)) + timesteps[index] / 1000
        row = one_step(schedule, index)
        x0 = scheduler.x0(row, 0, jnp.asarray(velocity, jnp.float32), x)
        x, state = step(row, 0, jnp.asarray(velocity, jnp.float32), x, state)
        largest_error = max(largest_error, np.abs(x0 - clean).max(), np.abs(x - expected_x).max())
    print(f"{largest_error / max(1, np.abs(expected_x).max()):.1e}")
    assert largest_error <= TOLERANCE * max(1, np.abs(expected_x).max())
    np.testing.assert_allclose(x, x0, rtol=1e-6, atol=1e-7)  # the last step adds no noise


@pytest.mark.parametrize(("scheduler", "sigma_max"), [(RCMEuler(), 200), (RCMEuler(sigma_max=80.0), 80)])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_without_new_noise_steps_follow_the_velocity(scheduler, sigma_max, steps):
    """The expected samples are x - (t - t') v, computed in float64. The predicted velocity depends on the timestep."""
    first = np.random.default_rng(steps).standard_normal(SHAPE)
    timesteps, levels = rcm_levels(steps, sigma_max)
    schedule, expected = scheduler.schedule(steps, shift=5.0), first * levels[0]
    np.testing.assert_allclose(schedule.sigmas, [*levels, 0], rtol=TOLERANCE)
    np.testing.assert_allclose(schedule.timesteps, timesteps, rtol=TOLERANCE)
    x = scheduler.start(schedule, jnp.asarray(first, jnp.float32))
    state = scheduler.init(schedule, x, jax.random.split(jax.random.key(0), SHAPE[0]))
    for index in range(steps):
        expected = expected - (levels[index] - [*levels, 0][index + 1]) * (np.sin(expected) + timesteps[index] / 1000)
        velocity = jnp.asarray(np.sin(np.asarray(x, np.float64)) + timesteps[index] / 1000, jnp.float32)
        x, state = scheduler.step(one_step(schedule, index), 0, velocity, x, state)
    assert np.abs(x - expected).max() <= TOLERANCE * max(1, np.abs(expected).max())
    assert not jax.tree.leaves(state)


def test_drawn_noise_is_normal_and_new_in_each_step_and_sample():
    """If the samples and the predictions are zero, the result is only noise."""
    scheduler, zeros = Consistency(), jnp.zeros((2, 64, 64))
    schedule = scheduler.schedule(4, shift=5.0)
    keys, step, noises = jax.random.split(jax.random.key(1), 2), jax.jit(scheduler.step), []
    state = scheduler.init(schedule, zeros, keys)
    for index in range(3):
        x, state = step(schedule, index, zeros, zeros, state)
        noises.append(np.asarray(x / schedule.sigmas[index + 1]).reshape(2, -1))
    np.testing.assert_allclose(np.std(noises, axis=-1), 1, atol=0.03)
    np.testing.assert_allclose(np.corrcoef(np.concatenate(noises)), np.eye(6), atol=0.06)
    x, _ = step(schedule, 0, zeros, zeros, scheduler.init(schedule, zeros, keys))
    np.testing.assert_array_equal(np.asarray(x / schedule.sigmas[1]).reshape(2, -1), noises[0])


def test_an_input_video_is_mixed_with_noise():
    clean, noise = jax.random.normal(jax.random.key(0), (2, *SHAPE))
    for scheduler in (Consistency(), CAUSVID, RCM()):
        schedule = scheduler.schedule(4, shift=5.0, skip=2)
        noisy = scheduler.add_noise(schedule, clean, noise)
        np.testing.assert_allclose(noisy, clean + schedule.sigmas[0] * (noise - clean), atol=1e-6)
        np.testing.assert_allclose(scheduler.x0(schedule, 0, noise - clean, noisy), clean, atol=2e-6)


def initial_state(scheduler, noise):
    schedule, keys = scheduler.schedule(4, shift=5.0), jax.random.split(jax.random.key(0), 1)
    return scheduler.init(schedule, jnp.zeros((1, 2, 3)), keys, noise)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: RCM().schedule(4, shift=5.0, sigma_schedule="diffusers"),
            "scheduler noise diffusers sigmas official euler",
        ),
        (lambda: CAUSVID.schedule(3, shift=8.0, sigma_schedule="diffusers"), "noise diffusers"),
        (lambda: Consistency().schedule(4, shift=0), "flow shift 0"),
        (lambda: CAUSVID.schedule(0, shift=8.0), "0 steps"),
        (lambda: initial_state(Consistency(), jnp.zeros((5, 1, 2, 3))), "[5, 1, 2, 3] [4, 1, 2, 3]"),
    ],
)
def test_invalid_schedules_are_refused(make, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        make()
