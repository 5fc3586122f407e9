# SPDX-License-Identifier: Apache-2.0
"""Step caches in runs: full and reused steps, several devices, and commands."""

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import wanjax
from tests.support.commands import succeeded
from tests.support.commands import wanjax as run
from tests.support.compare import error
from tests.support.quick import quick
from tests.support.tabled import STEPS
from tests.support.tiny import (
    tiny_checkpoint,
    tiny_cogvideox_checkpoint,
    tiny_control_checkpoint,
    tiny_experts_checkpoint,
    tiny_hunyuan_checkpoint,
)
from tests.support.words import has_line_with_words
from wanjax.layers.stack import block_at
from wanjax.pipelines.hunyuanvideo.programs import with_condition
from wanjax.pipelines.observers import Step

pytestmark = pytest.mark.usefixtures("cached_programs")

CACHE = "deepcache:1,6,3"  # steps 0, 1, 4 and 6 of seven are full
FULL_STEPS = {0, 1, 4, 6}
SMALL = {"size": (32, 48), "frames": 5}
PROMPTS = 'a cat says "hello"', "a dog"


def hunyuan_latents_by_loop(pipe: Any, conditioning: Any, settings: Any) -> np.ndarray:
    """Return HunyuanVideo's latents, computed by a plain loop in float64 that calls the blocks one by one."""
    model, sigmas = pipe.transformer, np.float64(pipe.scheduler.schedule(STEPS, shift=settings.flow_shift).sigmas)
    x, cached = np.moveaxis(np.float64(pipe.noise(settings)), 1, -1), {}
    grid = model.grid(jnp.float32(x))
    graphdef, weights = nnx.split(model)

    @jax.jit
    def begin(weights: Any, x: Any, t: Any, text: Any) -> Any:
        model = nnx.merge(graphdef, weights)
        context = model.context(text.embeds, text.mask, (text.glyphs, text.glyph_mask))
        rope = model.rope(grid, [context])
        return model.embed(with_condition(x, None), t, context, rope), (model.time(t), rope, context)

    @partial(jax.jit, static_argnums=1)
    def block(weights: Any, index: int, streams: Any, shared: Any) -> Any:
        return block_at(nnx.merge(graphdef, weights).blocks, index)(streams, *shared)

    @jax.jit
    def finish(weights: Any, streams: Any, shared: Any) -> Any:
        model = nnx.merge(graphdef, weights)
        return model.head(model.last_block(streams, *shared)[0], shared[0], grid)

    def velocity(step: int, text: Any) -> np.ndarray:
        streams, shared = begin(weights, jnp.float32(x), jnp.float32(1000 * sigmas[step])[None], text)
        if step in FULL_STEPS:
            for index in range(model.config.layers - 1):
                streams = block(weights, index, streams, shared)
            cached[id(text)] = streams
        return np.float64(finish(weights, cached[id(text)], shared))

    prompt, negative = conditioning.texts
    for step in range(STEPS):
        prompt_velocity, negative_velocity = velocity(step, prompt), velocity(step, negative)
        guided = negative_velocity + settings.guidance_scale * (prompt_velocity - negative_velocity)
        x = x + (sigmas[step + 1] - sigmas[step]) * guided
    return np.moveaxis(x, -1, 1)


@pytest.mark.slow  # the next test is quick, and tests/parity/test_hunyuan_transformer.py has one of a cached step
def test_deepcache_computes_only_the_last_block(tmp_path):
    pipe = wanjax.load(tiny_hunyuan_checkpoint(tmp_path))
    conditioning = pipe.encode(*PROMPTS)
    settings = pipe.settings(steps=STEPS, seed=3, cache=CACHE)
    exact = hunyuan_latents_by_loop(pipe, conditioning, settings)
    assert error(np.asarray(pipe.denoise(conditioning, steps=STEPS, seed=3, cache=CACHE)), exact) <= 1e-5
    assert error(np.asarray(pipe.denoise(conditioning, steps=STEPS, seed=3)), exact) > 1e-3


MODELS = {
    "wan": tiny_checkpoint,
    "vace": tiny_control_checkpoint,
    "cogvideox": tiny_cogvideox_checkpoint,
    "hunyuanvideo": tiny_hunyuan_checkpoint,
}


def latents_by_step(pipe: Any, conditioning: Any, cache: str, **settings: Any) -> list[np.ndarray]:
    """Return the latents after each step."""
    latents: list[np.ndarray] = []

    def callback(step: Step) -> None:
        latents.append(np.asarray(step.latents))

    pipe.denoise(conditioning, **SMALL, steps=STEPS, seed=3, cache=cache, callback=callback, **settings)
    return latents


@pytest.mark.parametrize("model", quick(["wan"], MODELS))
def test_full_steps_equal_those_without_a_cache(model, tmp_path):
    """The third step reuses the result of the second, so that its latents differ from a run without a cache."""
    pipe = wanjax.load(MODELS[model](tmp_path))
    conditioning = pipe.encode(*PROMPTS, **SMALL)
    uncached, cached = (latents_by_step(pipe, conditioning, cache) for cache in ("none", CACHE))
    differences = [
        error(latents, expected.astype(np.float64)) for latents, expected in zip(cached, uncached, strict=True)
    ]
    assert max(differences[:2]) <= 1e-6
    assert min(differences[2:]) > 1e-5


def test_a_second_expert_begins_with_a_full_step(tmp_path):
    """The second expert's first step is full, also where the rule of the cache would reuse that step."""
    pipe = wanjax.load(tiny_experts_checkpoint(tmp_path))
    conditioning = pipe.encode("a red circle")
    settings = pipe.settings(steps=STEPS, guidance_scale_2=2.0)
    schedule = pipe.scheduler.schedule(STEPS, shift=settings.flow_shift, sigma_schedule=settings.sigmas)
    start = pipe.model.spec.phases(schedule, settings)[1].start
    first, second, uncached = (
        latents_by_step(pipe, conditioning, cache, guidance_scale_2=2.0)
        for cache in (f"deepcache:{start - 1},{start + 3},2", f"deepcache:{start + 1},{start + 3},2", "none")
    )
    np.testing.assert_array_equal(first, second)
    assert error(first[start + 2], uncached[start + 2].astype(np.float64)) > 1e-5


@pytest.mark.slow  # tests/pipelines/test_reused_steps.py has a quick test
def test_eight_devices_agree_with_one(tmp_path):
    folder = tiny_hunyuan_checkpoint(tmp_path)
    one_device, eight_devices = (wanjax.load(folder, mesh=mesh) for mesh in (None, "dp=2,sp=2,tp=2"))
    conditioning = one_device.encode(*PROMPTS)
    expected, latents = (
        np.asarray(x.denoise(conditioning, steps=STEPS, seed=3, cache=CACHE)) for x in (one_device, eight_devices)
    )
    assert error(latents, expected.astype(np.float64)) <= 1e-5


def test_the_metadata_contains_the_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = str(tiny_checkpoint(tmp_path / "model"))
    small = ("--size", "48x32", "--frames", "5", "--steps", "4")
    succeeded(run("a", "--model", folder, *small, "--cache", "deepcache:0,4,2", "-o", "video.webp"))
    assert json.loads(succeeded(run("info", "video.webp", "--json")).stdout)["cache"] == "deepcache:0,4,2"


@pytest.mark.slow  # tests/plan/test_estimate.py has quick tests
def test_a_plan_prices_steps_that_reuse():
    output = succeeded(run("plan", "nano", "--chip", "cpu", "--steps", "20", "--cache", "deepcache:2,18,4")).stdout
    assert has_line_with_words(output, "(deepcache:2,18,4): 12 20")
    options = ("plan", "nano", "--chip", "cpu", "--steps", "20", "--json")
    uncached = json.loads(succeeded(run(*options)).stdout)
    cached = json.loads(succeeded(run(*options, "--cache", "deepcache:2,18,4")).stdout)
    assert cached["step_seconds"] == pytest.approx(uncached["step_seconds"], rel=0.2)
    assert cached["reusing_step_seconds"] < 0.7 * uncached["step_seconds"]
    assert cached["total_seconds"] < uncached["total_seconds"]
