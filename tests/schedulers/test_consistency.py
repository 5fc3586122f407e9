# SPDX-License-Identifier: Apache-2.0
"""Solvers that add new noise, against an independent computation of the published rules in float64."""

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
    """Return the published samplers' thousand timesteps of training, in falling order, and their noise levels."""
    even = 1 - np.arange(1000) / 1000
    levels = shift * even / (1 + (shift - 1) * even)
    return levels * 1000, levels


def warped(places, shift):
    """Return timesteps and levels by Self-Forcing's rule: places in the table, counted from its end."""
    timesteps, levels = table(shift)
    rows = 1000 - np.array(places)
    return timesteps[rows], levels[rows]


def nearest(messages, shift):
    """Return timesteps and levels by the rule of CausVid and FastVideo: the level of the nearest timestep."""
    timesteps, levels = table(shift)
    return np.array(messages, float), np.array(
        [levels[min(range(1000), key=lambda i: abs(timesteps[i] - t))] for t in messages]
    )


def trigonometric(steps, sigma_max):
    """Return timesteps and levels by rCM's rule."""
    angles = np.array([np.arctan(sigma_max), *[1.5, 1.4, 1.0][: steps - 1]])
    levels = np.sin(angles) / (np.cos(angles) + np.sin(angles))
    return levels * 1000, levels


PUBLISHED = {
    "self-forcing": (Consistency(), 4, 5.0, warped((1000, 750, 500, 250), 5.0)),
    "causvid, four steps": (Consistency(), 4, 8.0, warped((1000, 750, 500, 250), 8.0)),
    "causvid, fastwan": (CAUSVID, 3, 8.0, nearest((1000, 757, 522), 8.0)),
    "another shift": (CAUSVID, 3, 5.0, nearest((1000, 757, 522), 5.0)),
    "two of three": (CAUSVID, 2, 8.0, nearest((1000, 757), 8.0)),
    "twice as many": (CAUSVID, 6, 8.0, nearest((1000, 878.5, 757, 639.5, 522, 261), 8.0)),
    "five even steps": (Consistency(), 5, 3.0, warped((1000, 800, 600, 400, 200), 3.0)),
    **{f"rcm, {steps}": (RCM(), steps, 5.0, trigonometric(steps, 80)) for steps in (1, 2, 3, 4)},
    "rcm, image to video": (RCM(sigma_max=200.0), 4, 5.0, trigonometric(4, 200)),
}
published = pytest.mark.parametrize(("scheduler", "steps", "shift", "expected"), PUBLISHED.values(), ids=PUBLISHED)


@published
def test_the_levels_are_the_published_ones(scheduler, steps, shift, expected):
    timesteps, levels = expected
    schedule = scheduler.schedule(steps, shift=shift)
    np.testing.assert_allclose(schedule.timesteps, timesteps, rtol=TOLERANCE)
    np.testing.assert_allclose(schedule.sigmas, [*levels, 0], rtol=TOLERANCE)
    assert schedule.timesteps.dtype == schedule.sigmas.dtype == np.float32
    later = scheduler.schedule(steps, shift=shift, skip=steps - 1)
    np.testing.assert_array_equal(later.timesteps, schedule.timesteps[-1:])
    np.testing.assert_array_equal(later.sigmas, schedule.sigmas[-2:])


def test_published_levels_in_numbers():
    np.testing.assert_allclose(Consistency().schedule(4, shift=5.0).timesteps, [1000, 937.5, 833.3333, 625], rtol=1e-6)
    tangents = np.array([80, 14.1014200, 5.7978837, 1.5574077])  # of rCM's angles
    np.testing.assert_allclose(RCM().schedule(4, shift=1.0).sigmas[:4], tangents / (1 + tangents), rtol=1e-6)


@published
def test_every_step_is_the_published_one(scheduler, steps, shift, expected):
    """The reference runs in float64 along its own samples, of a field that depends on the timestep."""
    random = np.random.default_rng(steps)
    first, noise = random.standard_normal(SHAPE), random.standard_normal((steps, *SHAPE))
    timesteps, levels = expected
    expected_x = first * (levels[0] if isinstance(scheduler, RCM) else 1)
    schedule, options = scheduler.schedule(steps, shift=shift), jnp.asarray(noise, jnp.float32)
    x = scheduler.start(schedule, jnp.asarray(first, jnp.float32))
    state = scheduler.init(schedule, x, jax.random.split(jax.random.key(0), SHAPE[0]), options)
    step, worst = jax.jit(scheduler.step), 0.0
    for index in range(steps):
        clean = expected_x - levels[index] * (np.sin(expected_x) + timesteps[index] / 1000)
        to = [*levels, 0][index + 1]
        expected_x = (1 - to) * clean + to * noise[index]
        velocity = np.sin(np.asarray(x, np.float64)) + timesteps[index] / 1000
        row = one_step(schedule, index)
        x0 = scheduler.x0(row, 0, jnp.asarray(velocity, jnp.float32), x)
        x, state = step(row, 0, jnp.asarray(velocity, jnp.float32), x, state)
        worst = max(worst, np.abs(x0 - clean).max(), np.abs(x - expected_x).max())
    print(f"{worst / max(1, np.abs(expected_x).max()):.1e}")
    assert worst <= TOLERANCE * max(1, np.abs(expected_x).max())
    np.testing.assert_allclose(x, x0, rtol=1e-6, atol=1e-7)  # the last step adds nothing


@pytest.mark.parametrize(("scheduler", "sigma_max"), [(RCMEuler(), 200), (RCMEuler(sigma_max=80.0), 80)])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_without_new_noise_x_follows_the_velocity(scheduler, sigma_max, steps):
    """The published rule in float64, x - (t - t') v, along its own samples, of a field that depends on the timestep."""
    first = np.random.default_rng(steps).standard_normal(SHAPE)
    timesteps, levels = trigonometric(steps, sigma_max)
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
    """From zeros, with a prediction of zeros, the noise alone is left."""
    scheduler, nothing = Consistency(), jnp.zeros((2, 64, 64))
    schedule = scheduler.schedule(4, shift=5.0)
    keys, step, drawn = jax.random.split(jax.random.key(1), 2), jax.jit(scheduler.step), []
    state = scheduler.init(schedule, nothing, keys)
    for index in range(3):
        x, state = step(schedule, index, nothing, nothing, state)
        drawn.append(np.asarray(x / schedule.sigmas[index + 1]).reshape(2, -1))
    np.testing.assert_allclose(np.std(drawn, axis=-1), 1, atol=0.03)
    np.testing.assert_allclose(np.corrcoef(np.concatenate(drawn)), np.eye(6), atol=0.06)
    x, _ = step(schedule, 0, nothing, nothing, scheduler.init(schedule, nothing, keys))
    np.testing.assert_array_equal(np.asarray(x / schedule.sigmas[1]).reshape(2, -1), drawn[0])


def test_an_input_video_starts_between_noise_and_itself():
    clean, noise = jax.random.normal(jax.random.key(0), (2, *SHAPE))
    for scheduler in (Consistency(), CAUSVID, RCM()):
        schedule = scheduler.schedule(4, shift=5.0, skip=2)
        begun = scheduler.add_noise(schedule, clean, noise)
        np.testing.assert_allclose(begun, clean + schedule.sigmas[0] * (noise - clean), atol=1e-6)
        np.testing.assert_allclose(scheduler.x0(schedule, 0, noise - clean, begun), clean, atol=2e-6)


def begun(scheduler, noise):
    schedule, keys = scheduler.schedule(4, shift=5.0), jax.random.split(jax.random.key(0), 1)
    return scheduler.init(schedule, jnp.zeros((1, 2, 3)), keys, noise)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RCM().schedule(4, shift=5.0, sigma_schedule="diffusers"), "noise diffusers sigmas official"),
        (lambda: CAUSVID.schedule(3, shift=8.0, sigma_schedule="diffusers"), "noise diffusers"),
        (lambda: Consistency().schedule(4, shift=0), "flow shift 0"),
        (lambda: CAUSVID.schedule(0, shift=8.0), "0 steps"),
        (lambda: begun(Consistency(), jnp.zeros((5, 1, 2, 3))), "[5, 1, 2, 3] [4, 1, 2, 3]"),
    ],
)
def test_invalid_schedules(make, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        make()
