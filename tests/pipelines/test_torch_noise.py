# SPDX-License-Identifier: Apache-2.0
"""Videos with `rng="torch"` draw noise in the order of diffusers, in every kind of run."""

import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support import small_wan
from tests.support.commands import succeeded
from tests.support.commands import wanjax as command
from tests.support.compare import error
from tests.support.quick import quick
from tests.support.tiny import tiny_cogvideox_checkpoint
from wanjax.execution import EXECUTE, Execute
from wanjax.media.video import read_metadata
from wanjax.pipelines import torch_noise
from wanjax.pipelines.observers import Cancelled
from wanjax.pipelines.torch_noise import NoiseSpec, StepNoise, TorchGenerator, TorchNoise
from wanjax.pipelines.tracing import trace_programs
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.schedulers import DDIM, DPM, Consistency, FlowEuler

FEW_STEPS = {"size": (12, 12), "frames": 5, "steps": 4, "seed": 3, "guidance_scale": 1.0, "flow_shift": 5.0}
SETTINGS = FEW_STEPS | {"rng": "torch"}
SHAPE = (1, 4, 3, 6, 6)
each_solver = pytest.mark.parametrize("solver", quick(["rcm"], ["consistency", "rcm"]))


def make_conditioning(prompts: int = 1) -> WanConditioning:
    return WanConditioning(jnp.full((prompts, 3, 8), 0.5), jnp.zeros((prompts, 3, 8)))


def pipeline(solver, axes=None):
    pipe = small_wan.pipeline(4, small_wan.partitioner(axes))
    pipe.scheduler = solver
    return pipe


def draw_noises(seed: int, count: int) -> np.ndarray:
    """Return consecutive draws of the generator, each with the shape of the initial noise."""
    generator = TorchGenerator(seed)
    return np.stack([generator.normal(SHAPE) for _ in range(count)])


def test_the_generator_gives_the_numbers_of_torch():
    """The numbers that torch's documentation and many reports show for the seed 0."""
    numbers = [1.5409961, -0.2934289, -2.1787894, 0.56843126, -1.0845224, -1.3985955]
    np.testing.assert_allclose(TorchGenerator(0).normal((6,)), numbers, atol=1e-6)
    np.testing.assert_array_equal(TorchGenerator(2**32 + 5).normal((40,)), TorchGenerator(5).normal((40,)))


@each_solver
def test_noise_is_drawn_in_the_order_of_the_steps(solver):
    """The initial noise is drawn first, and then the noise of each step, as it is needed."""
    noise = draw_noises(3, 4)
    options = {"noise": noise[0], "step_noise": np.concatenate([noise[1:], np.zeros((1, *SHAPE), np.float32)])}
    pipe = pipeline(solver)
    latents = np.asarray(pipe.denoise(make_conditioning(), **SETTINGS), np.float64)
    assert error(pipe.denoise(make_conditioning(), noise=options, **FEW_STEPS), latents) <= 1e-6
    assert error(pipe.denoise(make_conditioning(), **FEW_STEPS), latents) > 0.1


@each_solver
def test_noise_of_the_caller_is_not_drawn(solver):
    noise, pipe = draw_noises(3, 3), pipeline(solver)
    initial = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    steps = np.concatenate([noise, np.zeros((1, *SHAPE), np.float32)])
    latents = np.asarray(pipe.denoise(make_conditioning(), noise=initial, **SETTINGS), np.float64)
    assert (
        error(pipe.denoise(make_conditioning(), noise={"noise": initial, "step_noise": steps}, **FEW_STEPS), latents)
        <= 1e-6
    )
    with_step_noise = pipe.denoise(make_conditioning(), noise={"step_noise": steps}, **SETTINGS)
    with_both_noises = pipe.denoise(
        make_conditioning(), noise={"noise": draw_noises(3, 1)[0], "step_noise": steps}, **FEW_STEPS
    )
    np.testing.assert_array_equal(with_step_noise, with_both_noises)


@pytest.mark.parametrize(
    ("solver", "stop_at"), quick([("euler", 0), ("rcm", 2)], [("euler", 0), ("euler", 2), ("rcm", 0), ("rcm", 2)])
)
def test_a_stopped_run_continues_to_the_same_bits(solver, stop_at, tmp_path):
    pipe, file, resumed_from = pipeline(solver), tmp_path / "state", []
    uninterrupted = pipe.denoise(make_conditioning(), **SETTINGS)
    with pytest.raises(Cancelled):
        pipe.denoise(make_conditioning(), keep=file, callback=lambda step: step.index != stop_at, **SETTINGS)
    latents = pipe.denoise(
        make_conditioning(), keep=file, continued=lambda *steps: resumed_from.append(steps), **SETTINGS
    )
    np.testing.assert_array_equal(latents, uninterrupted)
    assert resumed_from == [(stop_at + 1, 4)]
    # other noise starts a new run
    pipe.denoise(make_conditioning(), keep=file, continued=lambda *steps: resumed_from.append(steps), **FEW_STEPS)
    assert len(resumed_from) == 1


@pytest.mark.parametrize("stop_at", quick([1], [0, 1, 4]))
def test_a_stopped_run_with_two_draws_per_step_continues(tmp_path, stop_at):
    pipe = wanjax.load(tiny_cogvideox_checkpoint(tmp_path / "checkpoint"), scheduler="dpm")
    text, settings = pipe.encode("a red circle"), {"steps": 6, "seed": 3, "rng": "torch"}
    uninterrupted = pipe.denoise(text, **settings)
    with pytest.raises(Cancelled):
        pipe.denoise(text, keep=tmp_path / "state", callback=lambda step: step.index != stop_at, **settings)
    np.testing.assert_array_equal(pipe.denoise(text, keep=tmp_path / "state", **settings), uninterrupted)


def test_videos_of_a_batch_equal_those_made_separately():
    pipe = pipeline("rcm")
    without_seed = {name: value for name, value in SETTINGS.items() if name != "seed"}
    batch = pipe.denoise(make_conditioning(2), seeds=[3, 4], **without_seed)
    for latents, seed in zip(batch, (3, 4), strict=True):
        np.testing.assert_allclose(
            latents, pipe.denoise(make_conditioning(), **SETTINGS | {"seed": seed})[0], atol=1e-5
        )


@pytest.mark.slow  # tests/pipelines/test_few_steps.py has a quick test with the noise of JAX
@pytest.mark.parametrize("solver", ["euler", "rcm"])
def test_eight_devices_agree_with_one(solver):
    one_device, eight_devices = (
        np.asarray(pipeline(solver, axes).denoise(make_conditioning(), **SETTINGS)) for axes in (None, (2, 2, 2))
    )
    np.testing.assert_allclose(eight_devices, one_device, atol=1e-5 * max(1, np.abs(one_device).max()))


def test_chunks_draw_noise_in_order():
    """The initial noise is drawn for all frames, with frames before channels. A chunk's last step draws no noise."""
    pipe = small_wan.causal_pipeline(2, None, chunk_frames=2, window=6)
    settings = {"size": (12, 20), "frames": 7, "steps": 3, "seed": 3}
    generator = TorchGenerator(3)
    noise = np.swapaxes(generator.normal((1, 4, 4, 6, 10)), 1, 2)
    steps = np.zeros((3, *noise.shape), np.float32)
    for chunk in range(2):
        for step in range(2):
            steps[step, :, :, 2 * chunk : 2 * chunk + 2] = np.swapaxes(generator.normal((1, 2, 4, 6, 10)), 1, 2)
    chunks = list(pipe.denoise_chunks(make_conditioning(), rng="torch", **settings))
    expected_chunks = pipe.denoise_chunks(make_conditioning(), noise={"noise": noise, "step_noise": steps}, **settings)
    for latents, expected in zip(chunks, expected_chunks, strict=True):
        assert error(latents, np.asarray(expected, np.float64)) <= 1e-6


def test_each_window_draws_noise_with_its_seed():
    """Each window has a seed and a new generator for its noise."""
    pipe, options = wanjax.load("nano"), {"steps": 2, "frames": 5, "rng": "torch", "guidance_scale": 1.0}
    video = pipe("a red circle moving right", windows=2, seed=3, **options).frames
    np.testing.assert_array_equal(video[:5], pipe("a red circle moving right", seed=3, **options).frames)
    second = pipe("a red circle moving right", image=video[4], seed=4, **options).frames
    assert np.abs(video[5:].astype(int) - second[1:]).mean() < 1  # the first frames fade to the window before
    single_window = pipe("a red circle moving right", image=video[4], seed=5, **options).frames
    assert np.abs(video[5:].astype(int) - single_window[1:]).mean() > 1


def test_a_trace_draws_no_noise_and_has_the_executed_programs(monkeypatch):
    pipe = wanjax.load("nano", scheduler="consistency")
    options = {"steps": 3, "rng": "torch", "guidance_scale": 1.0, "size": (32, 32), "frames": 5}
    settings = pipe.settings(prompt="a", **options)
    with monkeypatch.context() as patch:
        patch.setattr(torch_noise, "TorchGenerator", None)
        traced = {EXECUTE.key_of(entry.traced_program) for entry in trace_programs(pipe, settings).programs}
    executed = Execute()
    pipe.with_strategy(executed)("a", **options)
    assert set(executed._compiled) == traced


def test_metadata_stores_the_generator(tmp_path, monkeypatch):
    """A video that is reproduced from its metadata has the same noise."""
    monkeypatch.chdir(tmp_path)
    small = ("--steps", "1", "--frames", "5", "--size", "32x32", "--guidance-scale", "1", "--seed", "3")
    succeeded(command("a red circle", *small, "--rng", "torch", "--out", "one.mp4"))
    succeeded(command("generate", "--from", "one.mp4", "--out", "reproduced.mp4"))
    assert [read_metadata(f"{name}.mp4")["rng"] for name in ("one", "reproduced")] == ["torch", "torch"]


def test_the_stages_make_the_same_latents(tmp_path):
    """The denoise stage draws the latents of a picture too, with the same generator."""
    folder = tiny_cogvideox_checkpoint(tmp_path / "checkpoint", in_channels=2 * 4)
    pipe, picture = wanjax.load(folder, scheduler="dpm"), np.zeros((32, 32, 3), np.uint8)
    settings = {"steps": 3, "seed": 3, "rng": "torch"}
    conditioning = pipe.encode("a", image=picture, **settings)
    first, second = (pipe.denoise(conditioning, **settings) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(pipe.decode(first), pipe("a", image=picture, **settings).frames)
    noise = pipe.noise(pipe.settings(**settings))
    # with given noise, the generator draws less before the steps
    assert error(pipe.denoise(conditioning, noise=noise, **settings), np.asarray(first, np.float64)) > 1e-3


def test_runs_without_torch_noise_use_no_torch_generator(monkeypatch):
    monkeypatch.setattr(torch_noise, "TorchGenerator", None)
    assert pipeline("rcm").denoise(make_conditioning(), **FEW_STEPS) is not None


@pytest.mark.parametrize(
    ("scheduler", "options", "draws"),
    [
        (DPM(), {}, [1, 2, 2, 1]),
        (DPM(), {"follow": "diffusers"}, [1, 2, 2, 1]),
        (DPM(), {"skip": 2}, [1, 1]),
        (DPM(), {"skip": 3}, [1]),
        (DDIM(), {}, [0] * 4),
        (Consistency(), {"shift": 3.0}, [1, 1, 1, 0]),
        (FlowEuler(), {"shift": 3.0}, [0] * 4),
    ],
)
def test_each_step_draws_as_often_as_in_diffusers(scheduler, options, draws):
    schedule = scheduler.schedule(4, **options)
    assert [scheduler.noise_draws(schedule, index) for index in range(len(schedule.timesteps))] == draws


def test_a_last_step_that_ends_with_noise_draws_twice():
    """With six steps, diffusers ends one timestep before the clean sample."""
    schedule = DPM().schedule(6, follow="diffusers")
    assert [DPM().noise_draws(schedule, index) for index in range(6)] == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("shape", [(1, 4, 3, 6, 6), (1, 3, 1, 1, 7), (1, 1, 1, 1, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_skipped_step_advances_the_generators(shape, dtype):
    """Arrays may have fewer than sixteen numbers, or a number that sixteen does not divide."""

    def make_step_noise() -> StepNoise:
        source = TorchNoise([3, 4], NoiseSpec(frames_first=True, rounded=True), dtype, executes=True)
        return StepNoise(source, [1, 2, 0, 2, 1], {"video": (2, *shape[1:]), "sound": (2, 4, 5)})

    all_steps, last_step = make_step_noise(), make_step_noise()
    for index in range(4):
        all_steps.draw(index)
    for noise, expected in zip(last_step.draw(4).values(), all_steps.draw(4).values(), strict=True):
        np.testing.assert_array_equal(noise, expected)
