# SPDX-License-Identifier: Apache-2.0
"""Videos with `rng="torch"`: the order of their draws, stops, batches, chunks, devices, windows and traced runs."""

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

FEW = {"size": (12, 12), "frames": 5, "steps": 4, "seed": 3, "guidance_scale": 1.0, "flow_shift": 5.0}
SETTINGS = FEW | {"rng": "torch"}
SHAPE = (1, 4, 3, 6, 6)
each_solver = pytest.mark.parametrize("solver", ["consistency", "rcm"])


def encoded(prompts: int = 1) -> WanConditioning:
    return WanConditioning(jnp.full((prompts, 3, 8), 0.5), jnp.zeros((prompts, 3, 8)))


def pipeline(solver, axes=None):
    pipe = small_wan.pipeline(4, small_wan.partitioner(axes))
    pipe.scheduler = solver
    return pipe


def drawn(seed: int, count: int) -> np.ndarray:
    """Return consecutive draws of the shape of the noise."""
    generator = TorchGenerator(seed)
    return np.stack([generator.normal(SHAPE) for _ in range(count)])


def test_the_first_numbers_of_torch():
    """The numbers that torch's documentation and many reports show for the seed 0."""
    numbers = [1.5409961, -0.2934289, -2.1787894, 0.56843126, -1.0845224, -1.3985955]
    np.testing.assert_allclose(TorchGenerator(0).normal((6,)), numbers, atol=1e-6)
    np.testing.assert_array_equal(TorchGenerator(2**32 + 5).normal((40,)), TorchGenerator(5).normal((40,)))


@each_solver
def test_the_order_of_draws(solver):
    """The initial noise is drawn first, and then the noise of each step, as it is needed."""
    noise = drawn(3, 4)
    options = {"noise": noise[0], "step_noise": np.concatenate([noise[1:], np.zeros((1, *SHAPE), np.float32)])}
    pipe = pipeline(solver)
    result = np.asarray(pipe.denoise(encoded(), **SETTINGS), np.float64)
    assert error(pipe.denoise(encoded(), noise=options, **FEW), result) <= 1e-6
    assert error(pipe.denoise(encoded(), **FEW), result) > 0.1


@each_solver
def test_noise_of_the_caller_is_not_drawn(solver):
    noise, pipe = drawn(3, 3), pipeline(solver)
    initial = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    steps = np.concatenate([noise, np.zeros((1, *SHAPE), np.float32)])
    result = np.asarray(pipe.denoise(encoded(), noise=initial, **SETTINGS), np.float64)
    assert error(pipe.denoise(encoded(), noise={"noise": initial, "step_noise": steps}, **FEW), result) <= 1e-6
    step_noise_only = pipe.denoise(encoded(), noise={"step_noise": steps}, **SETTINGS)
    both = pipe.denoise(encoded(), noise={"noise": drawn(3, 1)[0], "step_noise": steps}, **FEW)
    np.testing.assert_array_equal(step_noise_only, both)


@pytest.mark.parametrize("solver", ["euler", "rcm"])
@pytest.mark.parametrize("stop_at", [0, 2])
def test_a_stopped_run_continues_to_the_same_bits(solver, stop_at, tmp_path):
    pipe, file, before = pipeline(solver), tmp_path / "state", []
    uninterrupted = pipe.denoise(encoded(), **SETTINGS)
    with pytest.raises(Cancelled):
        pipe.denoise(encoded(), keep=file, callback=lambda step: step.index != stop_at, **SETTINGS)
    latents = pipe.denoise(encoded(), keep=file, continued=lambda *steps: before.append(steps), **SETTINGS)
    np.testing.assert_array_equal(latents, uninterrupted)
    assert before == [(stop_at + 1, 4)]
    pipe.denoise(encoded(), keep=file, continued=lambda *steps: before.append(steps), **FEW)  # other noise: a new run
    assert len(before) == 1


@pytest.mark.parametrize("stop_at", [0, 1, 4])
def test_a_stopped_run_of_two_draws_a_step(tmp_path, stop_at):
    pipe = wanjax.load(tiny_cogvideox_checkpoint(tmp_path / "checkpoint"), scheduler="dpm")
    text, settings = pipe.encode("a red circle"), {"steps": 6, "seed": 3, "rng": "torch"}
    uninterrupted = pipe.denoise(text, **settings)
    with pytest.raises(Cancelled):
        pipe.denoise(text, keep=tmp_path / "state", callback=lambda step: step.index != stop_at, **settings)
    np.testing.assert_array_equal(pipe.denoise(text, keep=tmp_path / "state", **settings), uninterrupted)


def test_videos_of_a_batch_equal_those_made_separately():
    pipe = pipeline("rcm")
    both = pipe.denoise(encoded(2), seeds=[3, 4], **SETTINGS)
    for latents, seed in zip(both, (3, 4), strict=True):
        np.testing.assert_allclose(latents, pipe.denoise(encoded(), **SETTINGS | {"seed": seed})[0], atol=1e-5)


@pytest.mark.parametrize("solver", quick(["rcm"], ["euler", "rcm"]))
def test_eight_devices_agree_with_one(solver):
    one_device, together = (
        np.asarray(pipeline(solver, axes).denoise(encoded(), **SETTINGS)) for axes in (None, (2, 2, 2))
    )
    np.testing.assert_allclose(together, one_device, atol=1e-5 * max(1, np.abs(one_device).max()))


def test_chunks():
    """The initial noise is the whole video's, with frames before channels; a chunk's last step draws none."""
    pipe = small_wan.causal_pipeline(2, None, chunk_frames=2, window=6)
    settings = {"size": (12, 20), "frames": 7, "steps": 3, "seed": 3}
    generator = TorchGenerator(3)
    noise = np.swapaxes(generator.normal((1, 4, 4, 6, 10)), 1, 2)
    steps = np.zeros((3, *noise.shape), np.float32)
    for chunk in range(2):
        for step in range(2):
            steps[step, :, :, 2 * chunk : 2 * chunk + 2] = np.swapaxes(generator.normal((1, 2, 4, 6, 10)), 1, 2)
    result = list(pipe.denoise_chunks(encoded(), rng="torch", **settings))
    options = pipe.denoise_chunks(encoded(), noise={"noise": noise, "step_noise": steps}, **settings)
    for ours, expected in zip(result, options, strict=True):
        assert error(ours, np.asarray(expected, np.float64)) <= 1e-6


def test_windows():
    """Each window draws its noise from its own seed, from the start."""
    pipe, options = wanjax.load("nano"), {"steps": 2, "frames": 5, "rng": "torch", "guidance_scale": 1.0}
    video = pipe("a red circle moving right", windows=2, seed=3, **options).frames
    np.testing.assert_array_equal(video[:5], pipe("a red circle moving right", seed=3, **options).frames)
    second = pipe("a red circle moving right", image=video[4], seed=4, **options).frames
    assert np.abs(video[5:].astype(int) - second[1:]).mean() < 1  # the seam is faded
    single_window = pipe("a red circle moving right", image=video[4], seed=5, **options).frames
    assert np.abs(video[5:].astype(int) - single_window[1:]).mean() > 1


def test_a_traced_run_draws_nothing_and_traces_what_is_executed(monkeypatch):
    pipe = wanjax.load("nano", scheduler="consistency")
    settings = pipe.settings(prompt="a", steps=3, rng="torch", guidance_scale=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch_noise, "TorchGenerator", None)
        traced = {EXECUTE.key_of(entry.traced_program) for entry in trace_programs(pipe, settings).programs}
    executed = Execute()
    pipe.with_strategy(executed)("a", steps=3, rng="torch", guidance_scale=1.0)
    assert set(executed._compiled) == traced


def test_metadata_stores_the_generator(tmp_path, monkeypatch):
    """A video that is reproduced from its metadata has the same noise."""
    monkeypatch.chdir(tmp_path)
    small = ("--steps", "2", "--frames", "5", "--guidance-scale", "1", "--seed", "3")
    succeeded(command("a red circle", *small, "--rng", "torch", "--out", "one.mp4"))
    succeeded(command("generate", "--from", "one.mp4", "--out", "again.mp4"))
    assert [read_metadata(f"{name}.mp4")["rng"] for name in ("one", "again")] == ["torch", "torch"]


def test_the_stages_make_the_same_latents(tmp_path):
    """The latents of a picture are drawn in the denoise stage too, by the same generator."""
    folder = tiny_cogvideox_checkpoint(tmp_path / "checkpoint", in_channels=2 * 4)
    pipe, picture = wanjax.load(folder, scheduler="dpm"), np.zeros((32, 32, 3), np.uint8)
    settings = {"steps": 3, "seed": 3, "rng": "torch"}
    encoded = pipe.encode("a", image=picture, **settings)
    first, again = (pipe.denoise(encoded, **settings) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(pipe.decode(first), pipe("a", image=picture, **settings).frames)
    noise = pipe.noise(pipe.settings(**settings))
    assert error(pipe.denoise(encoded, noise=noise, **settings), np.asarray(first, np.float64)) > 1e-3  # fewer draws


def test_other_runs_draw_nothing(monkeypatch):
    monkeypatch.setattr(torch_noise, "TorchGenerator", None)
    assert pipeline("rcm").denoise(encoded(), **FEW) is not None


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
def test_draws_of_a_step(scheduler, options, draws):
    schedule = scheduler.schedule(4, **options)
    assert [scheduler.noise_draws(schedule, index) for index in range(len(schedule.timesteps))] == draws


def test_a_last_step_that_ends_with_noise_draws_twice():
    """diffusers ends six steps one timestep above the last."""
    schedule = DPM().schedule(6, follow="diffusers")
    assert [DPM().noise_draws(schedule, index) for index in range(6)] == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("shape", [(1, 4, 3, 6, 6), (1, 3, 1, 1, 7), (1, 1, 1, 1, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_is_skipped_moves_the_generators_on(shape, dtype):
    """Also arrays of fewer than sixteen numbers, and those whose number sixteen does not divide."""

    def steps() -> StepNoise:
        source = TorchNoise([3, 4], NoiseSpec(frames_first=True, rounded=True), dtype, executes=True)
        return StepNoise(source, [1, 2, 0, 2, 1], {"video": (2, *shape[1:]), "sound": (2, 4, 5)})

    one_by_one, last_alone = steps(), steps()
    for index in range(4):
        one_by_one.draw(index)
    for ours, expected in zip(last_alone.draw(4).values(), one_by_one.draw(4).values(), strict=True):
        np.testing.assert_array_equal(ours, expected)
