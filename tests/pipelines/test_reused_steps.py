# SPDX-License-Identifier: Apache-2.0
"""Steps that reuse results of other steps are exact for every family, and runs without a cache do not change."""

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import wanjax
from tests.support.compare import error
from tests.support.programs import init_state, prepare_steps
from tests.support.quick import quick
from tests.support.tabled import STEPS, TABLES, pipeline_with_tables
from tests.support.tiny import (
    tiny_checkpoint,
    tiny_cogvideox_checkpoint,
    tiny_control_checkpoint,
    tiny_experts_checkpoint,
    tiny_hunyuan_checkpoint,
    tiny_residual_checkpoint,
)
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache
from wanjax.pipelines import denoiser
from wanjax.pipelines.caching.cache_tables import CacheTables, MagCacheTable
from wanjax.pipelines.caching.phase_cache import embedding_changes
from wanjax.pipelines.caching.step_cache import (
    NO_CACHE,
    ForwardCache,
    GuidanceCache,
    History,
    ResidualCache,
    low_frequencies,
)
from wanjax.pipelines.denoiser import State, take_step
from wanjax.pipelines.guidance import GuidanceRule
from wanjax.pipelines.runtime import SplitNetwork
from wanjax.pipelines.seeds import seed_to_key_data, solver_keys
from wanjax.schedulers import one_step
from wanjax.sharding import replicate

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = {"size": (32, 32), "frames": 9}
MODELS = {
    "wan": tiny_checkpoint,
    "vace": tiny_control_checkpoint,
    "cogvideox": tiny_cogvideox_checkpoint,
    "hunyuanvideo": tiny_hunyuan_checkpoint,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that makes the checkpoint of a model and returns its folder."""
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda model: MODELS[model](root / model))


@pytest.fixture(scope="module")
def load(folder) -> Callable[[str], Any]:
    return functools.cache(lambda model: pipeline_with_tables(folder(model)))


@pytest.fixture(params=quick(["wan"], MODELS))
def quick_pipe(request, load) -> Any:
    return load(request.param)


@pytest.fixture(params=quick(["cogvideox"], MODELS))
def pipe(request, load) -> Any:
    return load(request.param)


class StepRecorder:
    """A callback that records which steps reuse results, and copies of the states after them."""

    def __init__(self):
        self.reused: list[bool] = []
        self.states: list[Any] = []

    def __call__(self, step: Any) -> None:
        self.reused.append(step.reuses)
        self.states.append(jax.tree.map(np.array, step.state))


def run(pipe: Any, cache: str, conditioning: Any = None, **settings: Any) -> tuple[StepRecorder, np.ndarray]:
    recorder = StepRecorder()
    options = {"steps": STEPS, "seed": 3, "guidance_scale": 3.0} | SMALL | settings
    conditioning = pipe.encode("a red circle", "a dog") if conditioning is None else conditioning
    return recorder, np.asarray(pipe.denoise(conditioning, cache=cache, callback=recorder, **options))


def prepare_predictions(pipe: Any, cache: Any = BlockCache, **settings: Any) -> Any:
    """Return a function from a step's index and latents to the predictions of all prompts, and its inputs."""
    conditioning = pipe.encode("a red circle", "a dog")
    settings_of_run = pipe.settings(**{"steps": STEPS, "seed": 3, "guidance_scale": 3.0} | SMALL | settings)
    schedule, state = init_state(pipe, conditioning, settings_of_run)
    x = state.x
    phase = pipe.model.spec.phases(schedule, settings_of_run)[0]
    step, inputs = prepare_steps(pipe, pipe.transformer, phase, conditioning, x)

    @jax.jit
    def predict(x: Any, times: Any, inputs: Any, cached: Any = None) -> Any:
        network = nnx.merge(step.graphdef, inputs.weights)
        t = jax.tree.map(lambda time: jnp.full((len(x),), time), times)
        return [
            step.denoiser.predict(
                network, x, t, prompt, inputs.shared, NO_BLOCK_CACHE if cached is None else cache(cached[i])
            )
            for i, prompt in enumerate(inputs.prompts)
        ]

    def predict_at(index: int, x: Any, cached: Any = None) -> Any:
        return predict(x, step.denoiser.timesteps(one_step(schedule, index)), inputs, cached)

    return predict_at, step, inputs, schedule, x, phase


def test_a_step_of_magcache_adds_the_cached_residual(pipe):
    """A skipped step adds the cached residual of all blocks to the embedding, and applies the head.

    The test compares the latents after the step, which the scheduler computes from the prediction.
    """
    recorder, _ = run(pipe, "magcache")
    spec, settings = pipe.model.spec, pipe.settings(steps=STEPS, cache="magcache")
    [phase] = spec.phases(spec.schedule(settings), settings)
    assert recorder.reused == list(spec.cache_rule(settings).reused(phase, TABLES))
    assert 2 <= sum(recorder.reused) <= 5
    first = recorder.reused.index(True)

    class AddResidual(BlockCache):
        def parts(self, layers: int, *cuts: int) -> Any:
            return ()

        def after(self, x: Any) -> Any:
            assert self.previous is not None
            (video, *rest), tree = jax.tree.flatten(x)
            return jax.tree.unflatten(tree, [video + self.previous[0], *rest])

    predict_at, step, _, schedule, _, _ = prepare_predictions(pipe, AddResidual)
    before, after = recorder.states[first - 1], recorder.states[first]
    cached = jax.tree.map(jnp.asarray, before.cached)
    prediction = jnp.concatenate(predict_at(first, jnp.asarray(before.x), cached)).astype(jnp.float32)
    take_one_step = jax.jit(lambda schedule, p, x, solver: step.scheduler.step(schedule, 0, p, x, solver)[0])
    guided_prediction = jax.jit(lambda pair, scale: pair[1:] + scale * (pair[:1] - pair[1:]))(
        prediction, jnp.float32(3)
    )
    x = take_one_step(
        one_step(schedule, first), guided_prediction, jnp.asarray(before.x), jax.tree.map(jnp.asarray, before.solver)
    )
    assert error(after.x, np.asarray(x, np.float64)) <= 1e-6
    for before_leaf, after_leaf in zip(jax.tree.leaves(before.cached), jax.tree.leaves(after.cached), strict=True):
        np.testing.assert_array_equal(before_leaf, after_leaf)


def test_a_reused_step_equals_input_and_residual_to_the_bit(quick_pipe):
    """In a skipped step, the head reads x + r in x's dtype. The residual r is what all blocks added, rounded once."""
    _, step, inputs, schedule, x, _ = prepare_predictions(quick_pipe)
    t = jax.tree.map(lambda time: jnp.full((len(x),), time), step.denoiser.timesteps(one_step(schedule, 2)))

    @jax.jit
    def predict_and_record(inputs: Any, cached: Any) -> Any:
        """Return the prediction and the cached values, and the video's tokens before and after the blocks."""
        network, recorded = nnx.merge(step.graphdef, inputs.weights), []

        class RecordingCache(ResidualCache):
            def before(self, part: range, x: Any) -> Any:
                recorded.append(jax.tree.leaves(x)[0])
                return super().before(part, x)

            def after(self, x: Any) -> Any:
                if self.previous is not None:  # no block runs
                    recorded.append(jax.tree.leaves(x)[0])
                result = super().after(x)
                recorded.append(jax.tree.leaves(result)[0])
                return result

        def predict(cache: Any) -> Any:
            return step.denoiser.predict(network, x, t, inputs.prompts[0], inputs.shared, cache)

        output = ForwardCache(RecordingCache).run(predict, cached)
        return output, [recorded[0], recorded[-1]]

    (full_output, cached), before = predict_and_record(inputs, None)
    (reused_output, _), after = predict_and_record(inputs, cached)
    (residual,), before, after = jax.tree.map(np.asarray, (cached, before, after))
    np.testing.assert_array_equal(residual, before[1] - before[0])
    np.testing.assert_array_equal(after[1], after[0] + residual)
    np.testing.assert_array_equal(after[0], before[0])
    assert np.abs(residual).max() > 1e-2
    assert error(np.asarray(reused_output), np.asarray(full_output, np.float64)) <= 1e-5


@pytest.mark.slow  # quick tests of tests/pipelines/test_recorded.py run the caches of two families
def test_every_family_takes_every_cache(pipe):
    uncached = run(pipe, "none", steps=10)
    for cache in ("easycache:9,2", "guidance:2"):
        cached = run(pipe, cache, steps=10)
        assert any(cached[0].reused)
        assert not cached[0].reused[0]
        assert np.isfinite(cached[1]).all()
        first = cached[0].reused.index(True)
        for step in range(first):
            assert error(cached[0].states[step].x, uncached[0].states[step].x.astype(np.float64)) <= 1e-6
        assert error(cached[1], uncached[1].astype(np.float64)) > 1e-6


@pytest.mark.parametrize("pipe", quick(["cogvideox"], MODELS), indirect=True)
def test_teacache_reads_the_change_of_the_timesteps_embedding(pipe):
    _, step, inputs, schedule, _, phase = prepare_predictions(pipe)
    network = nnx.merge(step.graphdef, inputs.weights)
    times = [
        jax.tree.map(lambda t: jnp.asarray(t)[None], step.denoiser.timesteps(one_step(schedule, i)))
        for i in range(STEPS)
    ]
    for unprojected in (False, True):
        changes = embedding_changes(
            pipe.runtime, step.denoiser, SplitNetwork(step.graphdef, inputs.weights), schedule, phase, unprojected
        )
        embed = partial(step.denoiser.embed_timesteps, unprojected=unprojected)
        embeddings = [np.asarray(jax.jit(embed)(network, t), np.float64) for t in times]
        expected = [abs(b - a).mean() / abs(a).mean() for a, b in pairwise(embeddings)]
        assert changes[0] == 0
        assert error(np.array(changes[1:]), np.array(expected)) <= 1e-5


def test_teacache_reuses_while_the_sum_of_changes_is_small(pipe):
    """The polynomial of this model is the identity."""
    _, step, inputs, schedule, _, phase = prepare_predictions(pipe)
    changes = embedding_changes(
        pipe.runtime, step.denoiser, SplitNetwork(step.graphdef, inputs.weights), schedule, phase
    )[1:]
    recorder, _ = run(pipe, f"teacache:{2.5 * np.mean(changes)}")
    total, reused = 0.0, [False]
    for change in changes[:-1]:
        total += change
        reused.append(total < 2.5 * np.mean(changes))
        total = total if reused[-1] else 0.0
    assert recorder.reused == [*reused, False]
    assert any(reused)


def test_a_first_picture_uses_another_table(tmp_path):
    """With an optional first picture, the steps and the digest in the metadata are those of the other table."""
    pipe = wanjax.load(tiny_residual_checkpoint(tmp_path), dtype="float32")
    small_changes, large_changes = (
        MagCacheTable((1.0,) + (x,) * 5, (1.0,) + (x,) * 5, 0.1, 1, 0.2) for x in (0.99, 0.5)
    )
    pipe.model = replace(pipe.model, tables=CacheTables(small_changes, image_magnitudes=large_changes))
    digests, picture = set(), np.zeros((32, 32, 3), np.uint8)
    for image, reused in ((None, [False, True] * 3), (picture, [False] * 6)):
        steps: list[bool] = []
        options = {"steps": 6, "frames": 5, "size": (32, 32), "guidance_scale": 1, "cache": "magcache"}
        video = pipe("a", image=image, callback=lambda step, steps=steps: steps.append(step.reuses), **options)
        assert steps == reused
        digests.add(video.settings["digests"]["cache"])
    assert len(digests) == 2


def easycache_of_the_authors(
    prediction: Any, take_one_step: Any, threshold: float, first: int
) -> tuple[list[bool], np.ndarray]:
    """Return which steps are computed, and the last latents, by a loop on the host with the authors' rule.

    Errors are in float32, because a threshold decides. `prediction` is the result of `prepare_predictions`.
    """
    predict_at, denoising, _, schedule, x, _ = prediction
    state = denoising.scheduler.init(schedule, x, solver_keys(seed_to_key_data([3])))
    x, error_sum, rate, previous_x, last_computed, computed = np.asarray(x), np.float32(0), None, None, None, []
    for step in range(STEPS):
        compute = True
        if first <= step < STEPS - 1 and rate is not None:
            error_sum = error_sum + rate * np.abs(x - previous_x).mean() / np.abs(last_computed[1][0]).mean()
            compute = not error_sum < threshold
        previous_x = x
        if compute:
            outputs, error_sum = [np.asarray(p, np.float32) for p in predict_at(step, jnp.asarray(x))], np.float32(0)
            if last_computed is not None:
                rate = np.abs(outputs[0] - last_computed[1][0]).mean() / np.abs(x - last_computed[0]).mean()
            last_computed = x, outputs
        predictions = [x + (output - last_computed[0]) for output in last_computed[1]]
        predictions = last_computed[1] if compute else predictions
        guided = predictions[1] + np.float32(3) * (predictions[0] - predictions[1])
        x, state = take_one_step(one_step(schedule, step), prediction=guided, x=x, state=state)
        x = np.asarray(x)
        computed.append(compute)
    return computed, x


@pytest.mark.parametrize("pipe", quick(["wan"], ["wan", "hunyuanvideo"]), indirect=True)
def test_easycache_decides_as_its_authors_do(pipe):
    prediction = prepare_predictions(pipe)
    take_one_step = jax.jit(partial(prediction[1].scheduler.step, index=0))
    for threshold in (0.2, 0.4, 0.8, 1.6, 3.2):  # until some steps are reused
        computed, expected = easycache_of_the_authors(prediction, take_one_step, threshold, 2)
        if not all(computed):
            break
    recorder, latents = run(pipe, f"easycache:{threshold},2")
    histories = [History(*state.cached[-1]) for state in recorder.states]
    computed_steps = [True, *(a.count == b.count for a, b in pairwise(histories))]
    assert [bool(step) for step in computed_steps] == computed
    assert 0 < sum(computed[2:-1]) < STEPS - 3, computed
    assert error(np.moveaxis(latents, 1, -1), np.asarray(expected, np.float64)) <= 1e-4


def test_a_guidance_cache_estimates_the_negative_prompt():
    """Low and high frequencies of the last difference have different weights, by the reference's Fourier transform.

    Follows maxdiffusion's transformer_forward_pass_cfg_cache.
    """
    rng = np.random.default_rng(0)
    prompt, negative, later = (rng.standard_normal((1, 2, 9, 14, 3), np.float32) for _ in range(3))
    cache = GuidanceCache(reused=(False, True, True), half_step=2)
    options = [lambda x=x: jnp.asarray(x) for x in (prompt, negative)]
    predictions_of_both, cached = cache.predictions(options, jnp.asarray(prompt), None)
    np.testing.assert_array_equal(predictions_of_both[1], negative)
    assert cache.cached_for(0, cached) is None
    for step, (low, high) in ((1, (1.2, 1.0)), (2, (1.0, 1.2))):
        functions = [lambda: jnp.asarray(later), options[1]]
        predictions = cache.predictions(functions, jnp.asarray(prompt), cache.cached_for(step, cached))[0]
        bias = np.fft.rfft2(np.float64(negative) - prompt, axes=(2, 3))
        rows, columns = np.arange(bias.shape[2]), np.arange(bias.shape[3])
        num_rows, num_columns = max(1, bias.shape[2] // 4), max(1, bias.shape[3] // 4)
        mask = ((rows < num_rows) | (rows > bias.shape[2] - num_rows))[:, None] & (columns < num_columns)
        weights = np.where(mask, low, high)[None, None, :, :, None]
        expected = later + np.fft.irfft2(bias * weights, s=(9, 14), axes=(2, 3))
        assert error(np.asarray(predictions[1]), expected) <= 1e-6
    with pytest.raises(WanjaxError, match="both prompts"):
        cache.predictions(options[:1], jnp.asarray(prompt), None)
    even = low_frequencies(jnp.asarray(prompt[:, :, :8]))
    # a second application changes nothing
    assert error(np.asarray(low_frequencies(even)), np.asarray(even, np.float64)) <= 1e-6


def settings_of_run(folder, mesh=None, **keywords):
    return wanjax.load(folder, mesh=mesh).settings(**{"steps": STEPS} | keywords)


def denoise(folder, **keywords):
    pipe = wanjax.load(folder)
    return pipe.denoise(pipe.encode("a red circle"), steps=STEPS, **keywords)


REFUSED_CACHES = {  # by words of the message
    "cache dp": partial(settings_of_run, mesh="dp=2,sp=2,tp=2", cache="guidance:2"),
    "cache batched guidance": partial(denoise, cache="guidance:2", batch_guidance=True),
    "guidance:2 without guidance": partial(settings_of_run, cache="guidance:2", guidance_scale=1.0),
    "step cache deepcache:11,45,4 8 steps": partial(settings_of_run, cache="deepcache", steps=8),
}


@pytest.mark.parametrize("words", REFUSED_CACHES)
def test_a_cache_that_cannot_help_is_refused(folder, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        REFUSED_CACHES[words](folder("wan"))


@pytest.mark.parametrize("cache", quick(["easycache:.5,1"], ["magcache:.2,1,.1", "teacache:.5", "easycache:.5,1"]))
def test_a_cache_starts_again_with_the_second_expert(tmp_path, cache):
    """The first step of the second expert is computed in full, and the cache then has this expert's results."""
    pipe = pipeline_with_tables(tiny_experts_checkpoint(tmp_path))
    recorder, _ = run(pipe, cache, guidance_scale_2=2.0)
    settings = pipe.settings(steps=STEPS, guidance_scale_2=2.0)
    start = pipe.model.spec.phases(pipe.model.spec.schedule(settings), settings)[1].start
    assert not recorder.reused[0]
    assert not recorder.reused[start]
    assert any(recorder.reused[:start])
    state = recorder.states[start - 1]
    conditioning, schedule = (
        pipe.encode("a red circle", "a dog"),
        pipe.scheduler.schedule(STEPS, shift=settings.flow_shift),
    )
    phase = pipe.model.spec.phases(schedule, settings)[1]
    step, inputs = prepare_steps(pipe, pipe.transformer_2, phase, conditioning, jnp.asarray(state.x))
    state_before = State(jnp.asarray(state.x), jax.tree.map(jnp.asarray, state.solver))
    after, _, _ = pipe.call(take_step, step, state_before, inputs, np.float32(2), one_step(schedule, start))
    assert error(recorder.states[start].x, np.asarray(after.x, np.float64)) <= 1e-6


@pytest.mark.parametrize(
    ("model", "cache", "mesh"),
    [
        ("wan", "easycache:9,2", "dp=2,sp=2,tp=2"),
        pytest.param("hunyuanvideo", "easycache:9,2", "dp=2,sp=2,tp=2", marks=pytest.mark.slow),
        # magcache and deepcache store tokens
        pytest.param("hunyuanvideo", "magcache", "dp=2,sp=2,tp=2", marks=pytest.mark.slow),
        # guidance and easycache store outputs
        pytest.param("hunyuanvideo", "guidance:2", "dp=1,sp=4,tp=2", marks=pytest.mark.slow),
    ],
)
def test_eight_devices_agree_with_one(folder, model, cache, mesh):
    one_device, eight_devices = (run(pipeline_with_tables(folder(model), mesh=name), cache)[1] for name in (None, mesh))
    assert error(eight_devices, one_device.astype(np.float64)) <= 1e-5


def test_a_step_without_a_cache_contains_nothing_of_caches(pipe):
    """Without a cache, a step is one forward pass for each prompt, then guidance and the scheduler."""
    _, step, inputs, schedule, x, _ = prepare_predictions(pipe)

    def take_step(step: Any, state: Any, inputs: Any, scale: Any, schedule: Any) -> Any:
        network = nnx.merge(step.graphdef, inputs.weights)
        num_videos, *shape = state.x.shape
        x = jnp.broadcast_to(state.x, (inputs.batch // num_videos, num_videos, *shape)).reshape(-1, *shape)
        t = jax.tree.map(lambda time: jnp.full((inputs.batch,), time), step.denoiser.timesteps(schedule))
        predictions_of_prompts = [
            step.denoiser.predict(network, x, t, prompt, inputs.shared) for prompt in inputs.prompts
        ]
        predictions = jnp.concatenate([prediction.astype(jnp.float32) for prediction in predictions_of_prompts])
        clean = partial(step.scheduler.x0, schedule, 0)
        guided, _ = GuidanceRule.combine(predictions, num_videos, scale, state.x, clean, None)
        prediction = replicate(guided)
        x0 = replicate(step.scheduler.x0(schedule, 0, prediction, state.x))
        x, solver = replicate(step.scheduler.step(schedule, 0, prediction, state.x, state.solver))
        return State(x, solver), x0, jnp.isfinite(x).all()

    assert step.cache == NO_CACHE
    state = State(x, step.scheduler.init(schedule, x, solver_keys(seed_to_key_data([0] * len(x)))))
    arguments = state, inputs, jnp.float32(3), one_step(schedule, 0)
    full_step = partial(denoiser.take_step.function, step)
    texts = [jax.jit(f).lower(*arguments).as_text() for f in (full_step, partial(take_step, step))]
    bodies = [text.partition("\n")[2] for text in texts]
    assert bodies[0] == bodies[1]
