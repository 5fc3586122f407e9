# SPDX-License-Identifier: Apache-2.0
"""Schedulers solve equations with a known solution, and have the published sigmas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.flows import Flow, flow_euler, unipc
from tests.support.programs import num_compiled
from tests.support.types import unchecked
from tests.support.words import line_with_words
from wanjax import load, schedulers
from wanjax.errors import WanjaxError
from wanjax.pipelines.denoiser import take_step
from wanjax.schedulers import FlowDPM, FlowEuler, UniPC, one_step
from wanjax.schedulers.base import Schedule

EXACT = [
    unipc(5.0, "official"),
    unipc(5.0, "diffusers"),
    unipc(12.0, "diffusers", order=1),
    flow_euler(5.0, "official"),
    flow_euler(5.0, "diffusers"),
    unipc(8.0, "comfy"),
    flow_euler(5.0, "comfy"),
]
"""Schedulers whose last step gives exactly the predicted clean sample."""
SCHEDULERS = [*EXACT, Flow(FlowDPM(), 5.0)]
each_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS, ids=str)


def solve(scheduler, steps, x, predict_clean):
    """Return all samples, starting with x; `predict_clean` takes x and σ."""
    schedule = scheduler.schedule(steps)
    state = scheduler.init(schedule, x)
    samples = [x]
    for index in range(steps):
        sigma = schedule.sigmas[index]
        x, state = scheduler.step(schedule, index, (x - predict_clean(x, sigma)) / sigma, x, state)
        samples.append(x)
    return schedule, samples


@each_scheduler
@pytest.mark.parametrize("steps", [1, 2, 3, 20])
def test_a_constant_clean_sample_is_reached_on_a_straight_line(scheduler, steps):
    noise, clean = jax.random.normal(jax.random.key(0), (2, 64))
    schedule, samples = solve(scheduler, steps, noise, lambda x, sigma: clean)
    for sigma, x in zip(schedule.sigmas, samples, strict=True):
        noise_share = sigma / schedule.sigmas[0]
        np.testing.assert_allclose(x, noise_share * noise + (1 - noise_share) * clean, atol=2e-6)


@pytest.mark.parametrize(
    ("scheduler", "spreads"),
    [
        (unipc(5.0, "diffusers"), [0.325, 0.441, 0.492, 0.501]),
        (unipc(5.0, "official"), [0.327, 0.443, 0.494, 0.502]),
        (unipc(5.0, order=1), [0.313, 0.410, 0.463, 0.487]),
        (flow_euler(5.0), [0.309, 0.398, 0.447, 0.473]),
    ],
    ids=str,
)
def test_a_higher_order_needs_fewer_steps(scheduler, spreads):
    """For normal data of deviation 0.5 the velocity is linear, so that one sample at one deviation gives the spread."""

    def predict_clean(x, sigma):
        return x * (1 - sigma) * 0.25 / ((1 - sigma) ** 2 * 0.25 + sigma**2)

    solved_spreads = [
        float(solve(scheduler, steps, jnp.float32(1), predict_clean)[1][-1]) for steps in (10, 20, 40, 80)
    ]
    np.testing.assert_allclose(solved_spreads, spreads, atol=1e-3)


@pytest.mark.parametrize(
    ("shift", "steps", "sigmas", "first", "last", "timesteps"),
    [
        (5, 50, "official", [0.999800, 0.995732, 0.991531], [0.172265, 0.092507], [999, 995, 991, 987, 241, 172, 92]),
        (5, 50, "diffusers", [0.999999, 0.995939, 0.991744], [0.175969, 0.096778], [999, 995, 991, 987, 244, 175, 96]),
        (3, 50, "official", [0.999666, 0.992907, 0.985963], [0.111008, 0.057637], [999, 992, 985, 978, 160, 111, 57]),
        (3, 50, "diffusers", [0.999999, 0.993250, 0.986315], [0.113576, 0.060405], [999, 993, 986, 979, 162, 113, 60]),
        (12, 40, "official", [0.999917, 0.997783, 0.995546], [0.386847, 0.235110], [999, 997, 995, 993, 492, 386, 235]),
        (
            12,
            40,
            "diffusers",
            [0.999999, 0.997870, 0.995638],
            [0.391810, 0.242431],
            [999, 997, 995, 993, 496, 391, 242],
        ),
        (16, 50, "official", [0.999937, 0.998663, 0.997338], [0.399750, 0.245964], [999, 998, 997, 995, 504, 399, 245]),
        (
            16,
            50,
            "diffusers",
            [0.999999, 0.998727, 0.997405],
            [0.405947, 0.255328],
            [999, 998, 997, 996, 509, 405, 255],
        ),
    ],
)
def test_sigmas_of_unipc_are_the_published_ones(shift, steps, sigmas, first, last, timesteps):
    schedule = unipc(shift, sigmas).schedule(steps)
    np.testing.assert_allclose(schedule.sigmas[:3], first, atol=6e-7)
    np.testing.assert_allclose(schedule.sigmas[-3:], [*last, 0], atol=6e-7)
    np.testing.assert_array_equal(schedule.timesteps[jnp.array([0, 1, 2, 3, -3, -2, -1])], timesteps)


def test_official_timesteps_start_from_a_rounded_sigma():
    """In float32, 0.999 is rounded up. Without the rounding, the timesteps would be 665 and 332."""
    np.testing.assert_array_equal(unipc(1.0, "official").schedule(3).timesteps, [999, 666, 333])


@pytest.mark.parametrize(("shift", "last"), [(5.0, 0.0926), (9.0, 0.1552), (7.0, 0.125)])
def test_official_euler_sigmas_are_shifted_once(shift, last):
    schedule = flow_euler(shift, "official").schedule(50)
    np.testing.assert_array_equal(schedule.sigmas[jnp.array([0, -1])], [1, 0])
    np.testing.assert_allclose(schedule.sigmas[-2], last, atol=5e-5)
    np.testing.assert_allclose(schedule.timesteps, schedule.sigmas[:-1] * 1000, rtol=1e-7)


def test_diffusers_euler_sigmas_are_shifted_twice():
    np.testing.assert_allclose(flow_euler(7.0, "diffusers").schedule(2).sigmas, [1, 0.046756, 0], atol=1e-6)


@pytest.mark.parametrize("scheduler", EXACT, ids=str)
def test_the_last_step_gives_the_clean_sample_exactly(scheduler):
    schedule = scheduler.schedule(4)
    x, velocity = jax.random.normal(jax.random.key(1), (2, 1, 2, 4, 4, 3))
    state = jax.tree.map(jnp.ones_like, scheduler.init(schedule, x))
    clean = scheduler.x0(schedule, 3, velocity, x)
    np.testing.assert_array_equal(clean, x - schedule.sigmas[3] * velocity)
    next_x, _ = scheduler.step(schedule, 3, velocity, x, state)
    np.testing.assert_array_equal(next_x, clean)


@each_scheduler
def test_one_compiled_step_serves_every_index_and_donates_its_buffers(scheduler):
    traces = []

    def step(schedule, state, index, x):
        traces.append(index)
        return scheduler.step(schedule, index, jnp.sin(x), x, state)

    compiled = jax.jit(step, donate_argnums=(1, 3))
    x = expected = jax.random.normal(jax.random.key(2), (1, 2, 4, 4, 3))
    schedule = scheduler.schedule(6)
    eager_state = scheduler.init(schedule, x)
    state = scheduler.init(schedule, x := jnp.copy(x))
    for index in range(6):
        expected, eager_state = scheduler.step(schedule, index, jnp.sin(expected), expected, eager_state)
        x, state = compiled(schedule, state, index, x)
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=2e-6)
    assert len(traces) == 1


@pytest.mark.parametrize("prediction", ["velocity", "v", "epsilon", "x0"])
def test_the_training_target_gives_the_clean_sample(prediction):
    """A network that predicts its target exactly ends at the clean sample."""
    noise, clean = jax.random.normal(jax.random.key(0), (2, 64))
    sigma = jnp.float32(0.6)
    alpha = 1 - sigma if prediction == "velocity" else jnp.float32(0.8)
    scheduler = FlowEuler(prediction=prediction)
    schedule = Schedule(jnp.zeros(1), jnp.full(2, sigma), jnp.full(2, alpha))
    target = scheduler.target(alpha, sigma, clean, noise)
    np.testing.assert_allclose(scheduler.x0(schedule, 0, target, alpha * clean + sigma * noise), clean, atol=1e-6)


def test_two_equal_timesteps_are_two_steps():
    scheduler = unipc(16.0, "diffusers")
    noise = jnp.arange(4.0)
    schedule, samples = solve(scheduler, 100, noise, lambda x, sigma: jnp.ones(4))
    assert schedule.timesteps[0] == schedule.timesteps[1]
    np.testing.assert_allclose(samples[1], 1 + (noise - 1) * schedule.sigmas[1] / schedule.sigmas[0], atol=1e-6)


WAN = {
    "_class_name": "UniPCMultistepScheduler",
    "flow_shift": 3.0,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "num_train_timesteps": 1000,
    "disable_corrector": [],
    "timestep_spacing": "linspace",
}
LCM = {"_class_name": "FlowMatchLCMScheduler", "shift": 7.0}
DPM = {**WAN, "_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "dpmsolver++", "solver_type": "midpoint"}
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 7.0, "use_dynamic_shifting": False}


def test_a_config_names_the_scheduler():
    assert schedulers.from_config(WAN) == UniPC(order=2)
    assert schedulers.from_config(WAN | {"solver_order": 1}) == UniPC(order=1)
    assert schedulers.from_config(DPM) == FlowDPM(order=2)
    assert schedulers.from_config(DPM | {"solver_order": 1}) == FlowDPM(order=1)
    assert schedulers.from_config(EULER) == FlowEuler()
    assert schedulers.from_config(EULER | {"stochastic_sampling": True}) == schedulers.Consistency()
    assert schedulers.from_config(LCM) == schedulers.Consistency()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"_class_name": ["DDIMScheduler"]}, "['DDIMScheduler'] UniPCMultistepScheduler"),
        ({"_class_name": "DDIMScheduler"}, "'DDIMScheduler' UniPCMultistepScheduler FlowMatchEulerDiscreteScheduler"),
        ({}, "scheduler None"),
        (WAN | {"prediction_type": "epsilon"}, "prediction_type 'epsilon' 'flow_prediction'"),
        ({"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True}, "prediction_type 'epsilon'"),
        (WAN | {"use_flow_sigmas": False}, "use_flow_sigmas False True"),
        (WAN | {"solver_order": 3}, "order 3 1 or 2"),
        (WAN | {"solver_type": "bh1"}, "solver_type 'bh1' 'bh2'"),
        (WAN | {"final_sigmas_type": "sigma_min"}, "final_sigmas_type 'sigma_min' 'zero'"),
        (WAN | {"lower_order_final": False}, "lower_order_final False True"),
        (WAN | {"disable_corrector": [0]}, "disable_corrector [0]"),
        (WAN | {"use_dynamic_shifting": True}, "use_dynamic_shifting True False"),
        (WAN | {"flow_shift": None}, "shift None"),
        (WAN | {"flow_shift": -1.0}, "shift -1.0"),
        (DPM | {"algorithm_type": "sde-dpmsolver++"}, "algorithm_type 'sde-dpmsolver++' 'dpmsolver++'"),
        (DPM | {"solver_type": "heun"}, "solver_type 'heun' 'midpoint'"),
        (LCM | {"scale_factors": [0.5, 1.0]}, "scale_factors [0.5, 1.0] None"),
        (EULER | {"use_karras_sigmas": True}, "use_karras_sigmas True False"),
        (EULER | {"shift_terminal": 0.1}, "shift_terminal 0.1 None"),
    ],
)
def test_unsupported_entries_of_a_config_are_named(config, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        schedulers.from_config(config)


@each_scheduler
def test_zero_steps_are_refused(scheduler):
    with pytest.raises(WanjaxError, match="0 steps"):
        scheduler.schedule(0)


@pytest.mark.parametrize(
    ("scheduler", "steps", "words"),
    [
        (lambda: FlowDPM(order=3), 2, "order 3 1 2"),
        (lambda: unipc(3.0, "karras"), 2, "'karras' official diffusers"),
        (lambda: unipc(100000.0), 1000, "1000 steps shift 100000.0"),  # these sigmas are equal in float32
    ],
)
def test_invalid_sigmas_are_refused(scheduler, steps, words):
    with unchecked(), pytest.raises(WanjaxError, match=line_with_words(words)):
        scheduler().schedule(steps)


@each_scheduler
def test_a_step_needs_only_its_part_of_the_schedule(scheduler):
    """One compiled program takes any step of any schedule."""
    x, velocity = jax.random.normal(jax.random.key(0), (2, 64))
    shapes = set()
    for schedule, index in [(scheduler.schedule(steps), index) for steps in (1, 2, 7) for index in range(steps)]:
        one_step_schedule, state = one_step(schedule, index), scheduler.init(schedule, x)
        expected = scheduler.step(schedule, index, velocity, x, state)
        jax.tree.map(np.testing.assert_array_equal, scheduler.step(one_step_schedule, 0, velocity, x, state), expected)
        shapes.add(tuple(number.shape for number in jax.tree.leaves(one_step_schedule)))
    assert len(shapes) == 1


def test_settings_that_change_no_shape_compile_nothing():
    pipe = load("nano")
    embeddings = pipe.encode("a red circle moving right")
    base_settings: dict[str, Any] = {"steps": 2, "frames": 5, "seed": 0}
    clip = pipe.denoise(embeddings, **base_settings)
    programs = num_compiled(take_step)
    setting_changes: tuple[dict[str, Any], ...] = ({"flow_shift": 7.0}, {"steps": 3}, {"sigmas": "diffusers"})
    for changes in setting_changes:
        assert np.abs(pipe.denoise(embeddings, **base_settings | changes) - clip).max() > 0.01
    assert num_compiled(take_step) == programs
