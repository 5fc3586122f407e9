# SPDX-License-Identifier: Apache-2.0
"""Videos by solvers that add new noise in each step: seeds, stopped runs, devices and experts."""

from dataclasses import replace
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support import small_wan
from tests.support.commands import succeeded
from tests.support.commands import wanjax as command
from tests.support.programs import init_state
from tests.support.quick import quick
from wanjax.media.pictures import read_clip
from wanjax.pipelines.observers import Cancelled
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.schedulers import RCM, parse

SETTINGS = {"size": (12, 12), "frames": 5, "steps": 4, "seed": 3, "guidance_scale": 1.0, "flow_shift": 5.0}
SOLVERS = ["consistency", "consistency:timesteps=1000,757,522", "rcm", "rcm:sigma_max=200"]
each_solver = pytest.mark.parametrize("solver", quick(["consistency", "rcm:sigma_max=200"], SOLVERS))


def make_conditioning(prompts: int = 1) -> WanConditioning:
    return WanConditioning(jnp.full((prompts, 3, 8), 0.5), jnp.zeros((prompts, 3, 8)))


def pipeline(solver, axes=None):
    pipe = small_wan.pipeline(4, small_wan.partitioner(axes))
    pipe.scheduler = solver
    return pipe


@each_solver
def test_every_step_predicts_the_clean_sample_and_adds_noise(solver):
    """Each step computes the published rule from the clean sample that the network predicts."""
    pipe, predictions_and_latents = pipeline(solver), []
    draws = np.random.default_rng(0).standard_normal((5, 1, 4, 3, 6, 6)).astype(np.float32)
    options = {"noise": draws[0], "step_noise": draws[1:]}

    def callback(step):
        predictions_and_latents.append((np.array(step.x0, np.float64), np.array(step.latents)))

    latents = pipe.denoise(make_conditioning(), noise=options, callback=callback, **SETTINGS)
    levels = np.asarray(parse(solver).schedule(4, shift=5.0).sigmas, np.float64)
    for (clean, after), level, noise in zip(predictions_and_latents, levels[1:], draws[1:], strict=True):
        np.testing.assert_allclose(after, (1 - level) * clean + level * noise, atol=1e-6)
    np.testing.assert_array_equal(latents, predictions_and_latents[-1][1])
    np.testing.assert_array_equal(latents, predictions_and_latents[-1][0].astype(np.float32))


def test_the_initial_noise_is_scaled_by_the_first_sigma():
    noise = np.random.default_rng(0).standard_normal((1, 4, 3, 6, 6)).astype(np.float32)
    settings = pipeline("rcm").settings(**SETTINGS)
    scales = {"rcm": 80 / 81, "rcm:sigma_max=200": 200 / 201, "rcm-ode": 200 / 201, "consistency": 1, "unipc": 1}
    for solver, scale in scales.items():
        _, state = init_state(pipeline(solver), make_conditioning(), settings, noise)
        np.testing.assert_allclose(np.moveaxis(state.x, -1, 1), scale * noise, rtol=1e-6)


@pytest.mark.parametrize("solver", quick(["rcm"], SOLVERS))
def test_the_seed_decides_the_video(solver):
    pipe = pipeline(solver)
    first, same_seed, another_seed = (
        np.asarray(pipe.denoise(make_conditioning(), **SETTINGS | {"seed": seed})) for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, same_seed)
    assert np.abs(another_seed - first).max() > 0.1
    euler = np.asarray(pipeline("euler").denoise(make_conditioning(), **SETTINGS))
    assert np.abs(euler - first).max() > 0.01


def test_videos_of_a_batch_equal_those_made_separately():
    pipe = pipeline("rcm")
    without_seed = {name: value for name, value in SETTINGS.items() if name != "seed"}
    batch = pipe.denoise(make_conditioning(2), seeds=[3, 4], **without_seed)
    for latents, seed in zip(batch, (3, 4), strict=True):
        np.testing.assert_allclose(
            latents, pipe.denoise(make_conditioning(), **SETTINGS | {"seed": seed})[0], atol=1e-5
        )


@pytest.mark.parametrize(
    ("solver", "stop_at"), quick([("rcm", 1), ("rcm", 3)], product(["consistency", "rcm"], [0, 1, 2, 3]))
)
def test_a_stopped_run_continues_to_the_same_bits(solver, stop_at, tmp_path):
    pipe, file = pipeline(solver), tmp_path / "state"
    uninterrupted = pipe.denoise(make_conditioning(), **SETTINGS)
    with pytest.raises(Cancelled):
        # a comparison of NumPy's numbers gives np.False_, which stops a run too
        pipe.denoise(make_conditioning(), keep=file, callback=lambda step: np.int32(step.index) != stop_at, **SETTINGS)
    resumed_from = []
    latents = pipe.denoise(
        make_conditioning(), keep=file, continued=lambda *message: resumed_from.append(message), **SETTINGS
    )
    np.testing.assert_array_equal(latents, uninterrupted)
    assert resumed_from == [(stop_at + 1, 4)]


@pytest.mark.parametrize("solver", quick(["rcm"], ["consistency", "rcm"]))
def test_eight_devices_agree_with_one(solver):
    one_device, eight_devices = (
        np.asarray(pipeline(solver, axes).denoise(make_conditioning(), **SETTINGS)) for axes in (None, (2, 2, 2))
    )
    np.testing.assert_allclose(eight_devices, one_device, atol=1e-5 * max(1, np.abs(one_device).max()))


@pytest.mark.parametrize(("boundary", "high"), [(0.9, 2), (0.86, 2), (0.5, 4)])
def test_experts_share_the_steps_of_rcm(boundary, high):
    """The sigmas are 0.995, 0.934, 0.853 and 0.609. At 0.9, rCM's wan2pt2_i2v_rcm_infer.py has two steps each."""
    pipe = pipeline("rcm:sigma_max=200")
    pipe.model = replace(pipe.model, has_experts=True)
    pipe.defaults = replace(pipe.defaults, boundary=boundary, guidance_scale_2=1.0)
    settings = pipe.settings(**SETTINGS)
    phases = pipe.model.spec.phases(pipe.model.spec.schedule(settings), settings)
    assert [len(phase.scales) for phase in phases] == ([high, 4 - high] if high < 4 else [4])


@pytest.mark.slow
def test_the_bundled_model_takes_pictures_clips_and_caches():
    pipe = wanjax.load("nano", scheduler="consistency")
    assert pipe.scheduler == parse("consistency")
    clip = pipe("a red circle moving right", steps=4, seed=1)
    nearer, farther = (
        np.abs(pipe("a red circle moving right", video=clip.frames, strength=s, steps=4, seed=2).frames - 0.0
               - clip.frames).mean()
        for s in (0.25, 1.0)
    )  # fmt: skip
    assert nearer < farther
    moved = pipe("moving up", image=clip.frames[0], steps=4, seed=2)
    unchanged, changed = (np.abs(moved.frames[i] - 0.0 - clip.frames[0]).mean() for i in (0, -1))
    assert unchanged < min(5, changed)
    cached = pipe("a red circle moving right", steps=4, seed=1, cache="deepcache:1,4,2")
    assert cached.frames.shape == clip.frames.shape


@pytest.mark.slow  # tests/pipelines/test_distilled.py has a quick test with another solver
def test_the_command_uses_the_solver_and_reproduces_the_video(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("a red circle moving right", "--scheduler", "consistency", "--steps", "4", "--guidance-scale", "1")
    for name, seed in {"first": "5", "another_seed": "6"}.items():
        succeeded(command(*arguments, "--size", "32x32", "--frames", "5", "--seed", seed, "--out", f"{name}.webp"))
    succeeded(command("generate", "--from", "first.webp", "--out", "reproduced.webp"))
    first, another_seed, reproduced = (
        read_clip(f"{name}.webp", 99, 16) for name in ("first", "another_seed", "reproduced")
    )
    np.testing.assert_array_equal(first, reproduced)
    assert (first != another_seed).any()
    assert "consistency" in succeeded(command("info", "first.webp")).stdout


def test_any_model_of_velocities_takes_a_solver_of_few_steps():
    assert isinstance(wanjax.load("nano", scheduler=RCM(sigma_max=120.0)).scheduler, RCM)
