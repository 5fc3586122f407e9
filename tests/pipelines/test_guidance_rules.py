# SPDX-License-Identifier: Apache-2.0
"""Guidance rules in runs: their formulas, meshes, streams, stopped runs and step caches."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.commands import succeeded
from tests.support.commands import wanjax as command
from tests.support.compare import error
from tests.support.programs import init_state, num_compiled, prepare_steps
from tests.support.quick import quick
from tests.support.tabled import STEPS, pipeline_with_tables
from tests.support.tiny import (
    tiny_causal_checkpoint,
    tiny_checkpoint,
    tiny_cogvideox_checkpoint,
    tiny_control_checkpoint,
    tiny_experts_checkpoint,
    tiny_hunyuan_checkpoint,
    tiny_image_checkpoint,
)
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.media.video import read_metadata
from wanjax.pipelines.denoiser import take_step
from wanjax.pipelines.guidance import CLASSIFIER_FREE, RULES, guidance_rule
from wanjax.pipelines.observers import Cancelled
from wanjax.schedulers import one_step

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = {"size": (32, 32), "frames": 9, "seed": 3}
MODELS = {
    "wan": tiny_checkpoint,
    "wan i2v": tiny_image_checkpoint,
    "vace": tiny_control_checkpoint,
    "experts": tiny_experts_checkpoint,
    "cogvideox": tiny_cogvideox_checkpoint,
    "hunyuanvideo": tiny_hunyuan_checkpoint,
    "causal": tiny_causal_checkpoint,
}


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Callable[..., Any]:
    """Return a function that loads the pipeline of a model, with tables for step caches."""
    root = tmp_path_factory.mktemp("models")
    folder: Callable[[str], Path] = functools.cache(lambda model: MODELS[model](root / model.replace(" ", "_")))
    return functools.cache(lambda model, mesh=None: pipeline_with_tables(folder(model), mesh=mesh))


def encode(pipe: Any, negative: str = "a dog") -> Any:
    options = {"image": np.full((32, 32, 3), 99, np.uint8)} if pipe.model.spec.required_inputs else {}
    return pipe.encode("a red circle", negative, **options, **SMALL)


def run(pipe: Any, rule: str, **settings: Any) -> np.ndarray:
    options = {"steps": 4, "guidance_scale": 3.0} | SMALL | settings
    return np.asarray(pipe.denoise(encode(pipe), guidance_rule=rule, **options))


def rounding_bound(difference: Callable[[str], float], model: str) -> float:
    """Return how much two equivalent runs may differ: 2e-5, or 1.5 times their difference without a rule.

    The second of the random experts amplifies a change of its input about a hundred times.
    """
    return max(2e-5, 1.5 * difference("none")) if model == "experts" else 2e-5


def combine_by_formula(
    rule: str, scale: float, prompt: Any, negative: Any, clean: Any, average: Any
) -> tuple[Any, Any]:
    """Return a rule's prediction by the published formula, in float64, and the new average.

    Args:
        rule: `cfg-zero` or `apg`.
        scale: The guidance scale.
        prompt: The prediction for the prompt.
        negative: The prediction for the negative prompt.
        clean: The latents, and the factors of latents and prediction whose sum is the clean sample.
        average: The average of earlier differences.
    """
    if rule == "cfg-zero":
        projected = np.vdot(prompt, negative) / np.vdot(negative, negative) * negative
        return projected + scale * (prompt - projected), average
    x, x_factor, prediction_factor = clean
    clean_sample, change = x_factor * x + prediction_factor * prompt, prediction_factor * (prompt - negative)
    average = change = change - 0.5 * average
    change = change * min(1, 3 / np.linalg.norm(change))
    change = change + (0.25 - 1) * np.vdot(change, clean_sample) / np.vdot(clean_sample, clean_sample) * clean_sample
    return prompt + (scale - 1) * change / prediction_factor, average


@pytest.mark.parametrize("rule", ["cfg-zero", "apg"])
@pytest.mark.parametrize("model", quick(["wan"], ["wan", "vace", "cogvideox", "hunyuanvideo"]))
def test_every_step_follows_the_published_formula(load, model, rule):
    pipe, states = load(model), []
    text = {"cfg-zero": "cfg-zero:zero_steps=2", "apg": "apg:eta=0.25,norm=3,momentum=-0.5"}[rule]
    run(pipe, text, callback=lambda step: states.append(jax.tree.map(np.array, step.state)))
    settings, conditioning = pipe.settings(steps=4, guidance_scale=3.0, **SMALL), encode(pipe)
    schedule, state = init_state(pipe, conditioning, settings)
    [phase] = pipe.model.spec.phases(schedule, settings)
    step, inputs = prepare_steps(pipe, pipe.transformer, phase, conditioning, state.x)
    denoiser = step.denoiser

    @jax.jit
    def predict(x: Any, times: Any) -> Any:
        network = nnx.merge(step.graphdef, inputs.weights)
        t = jax.tree.map(lambda time: jnp.full((1,), time), times)
        return [denoiser.predict(network, x, t, prompt, inputs.shared) for prompt in inputs.prompts]

    @jax.jit
    def take_one_step(current: Any, prediction: Any, state: Any) -> Any:
        return step.scheduler.step(current, 0, prediction, state.x, state.solver)[0]

    average: Any = 0.0
    for index, next_state in enumerate(states):
        current = one_step(schedule, index)
        prompt, negative = (np.asarray(p, np.float64) for p in predict(state.x, denoiser.timesteps(current)))
        alpha = float(current.alphas[0]) if step.scheduler.prediction == "v" else 1.0
        clean = np.asarray(state.x, np.float64), alpha, -float(current.sigmas[0])
        expected, average = combine_by_formula(rule, 3.0, prompt, negative, clean, average)
        expected = 0 * expected if rule == "cfg-zero" and index < 2 else expected
        assert (
            error(next_state.x, np.asarray(take_one_step(current, expected.astype(np.float32), state), np.float64))
            <= 1e-6
        )
        state = next_state


def test_nag_guides_only_away_from_the_negative_prompt(load):
    """NAG changes attention by the difference of both prompts, which is zero for equal prompts."""
    pipe = load("wan")
    equal_prompts, different_prompts = encode(pipe, "a red circle"), encode(pipe)
    options = {"steps": 3, "guidance_scale": 1.0} | SMALL
    unguided, guided_by_equal, guided_by_different = (
        np.asarray(pipe.denoise(conditioning, guidance_rule=rule, **options))
        for conditioning, rule in ((equal_prompts, "none"), (equal_prompts, "nag"), (different_prompts, "nag"))
    )
    assert error(guided_by_equal, unguided) <= 1e-5
    assert error(guided_by_different, unguided) > 1e-3


@pytest.mark.parametrize("model", quick(["wan"], [name for name in MODELS if name != "causal"]))
def test_nag_with_guidance_is_the_same_in_one_batch(load, model):
    separate = run(load(model), "nag")
    bound = rounding_bound(
        lambda rule: float(error(run(load(model), rule, batch_guidance=True), run(load(model), rule))), model
    )
    assert error(run(load(model), "nag", batch_guidance=True), separate) <= bound
    assert error(run(load(model), "nag:scale=3,alpha=1"), separate) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in MODELS if name != "causal"])
def test_nag_with_guidance_is_the_same_on_a_mesh(load, model):
    def difference(rule: str) -> float:
        return float(error(run(load(model, "dp=2,sp=2,tp=2"), rule), run(load(model), rule)))

    assert difference("nag") <= rounding_bound(difference, model)


@pytest.mark.slow  # tests/pipelines/test_reused_steps.py has a quick test of guidance on a mesh
@pytest.mark.parametrize("rule", ["cfg-zero", "apg"])
def test_a_mesh_gives_the_latents_of_one_device(load, rule):
    assert error(run(load("wan", "dp=2,sp=2,tp=2"), rule), run(load("wan"), rule)) <= 2e-5


@pytest.mark.slow  # tests/pipelines/test_many.py has a quick test of a batch on a mesh
@pytest.mark.parametrize("rule", ["apg", "nag"])
def test_videos_of_a_batch_equal_those_made_separately(load, rule):
    options = {"seeds": [3, 4], "guidance_rule": rule, "steps": 3, "guidance_scale": 3.0, "size": (32, 32), "frames": 5}
    batch, one_device = (load("wan", mesh).videos(["a red circle"], **options) for mesh in ("dp=4,sp=2,tp=1", None))
    for video, expected in zip(batch, one_device, strict=True):
        assert np.abs(video.frames.astype(int) - expected.frames).max() <= 1
        assert video.settings["guidance_rule"] == str(guidance_rule(rule))


def test_nag_guides_every_chunk_of_a_stream(load):
    """NAG guides every chunk, and the chunks of a stream equal those of one call."""
    pipe = load("causal")
    chunk_frames, conditioning = pipe.model.spec.chunk_frames, pipe.encode_prompts("a red circle", "a dog")
    options = {"size": (32, 32), "frames": 8 * chunk_frames - 3, "seed": 3, "steps": 2}  # two chunks
    guided, unguided = (
        list(pipe.denoise_chunks(conditioning, guidance_rule=rule, **options)) for rule in ("nag", "none")
    )
    unchunked = pipe.denoise(conditioning, guidance_rule="nag", **options)
    np.testing.assert_array_equal(np.concatenate(guided, axis=2), unchunked)
    for guided_chunk, unguided_chunk in zip(guided, unguided, strict=True):
        assert error(guided_chunk, np.asarray(unguided_chunk)) > 1e-4


def test_changed_numbers_of_a_rule_compile_nothing(load):
    pipe = load("wan")
    for first, second in (("nag", "nag:scale=3,alpha=1"), ("apg", "apg:eta=1,norm=7,momentum=.5,of=prediction")):
        run(pipe, first)
        count = num_compiled(take_step)
        run(pipe, second, guidance_scale=2.0)
        assert num_compiled(take_step) == count
    assert error(run(pipe, "none"), run(pipe, "nag")) > 1e-4


@pytest.mark.parametrize(
    ("cache", "rule"),
    quick(
        [("guidance:2", "apg")],
        [(c, r) for c in ("magcache", "deepcache:1,6,2", "easycache:9,2", "guidance:2") for r in RULES if r != "none"],
    ),
)
def test_rules_work_with_step_caches(load, cache, rule):
    reused: list[bool] = []
    latents = run(load("wan"), rule, cache=cache, steps=STEPS, callback=lambda step: reused.append(step.reuses))
    assert any(reused)
    assert 0 < error(latents, run(load("wan"), rule, steps=STEPS)) < 0.5


@pytest.mark.parametrize(("model", "stop_at"), quick([("wan", 1)], [("wan", 1), ("experts", 1), ("experts", 3)]))
def test_a_stopped_run_resumes_with_its_average(load, model, stop_at, tmp_path):
    pipe, taken = load(model), []
    uninterrupted = run(pipe, "apg", steps=6)
    with pytest.raises(Cancelled):
        run(pipe, "apg", steps=6, keep=tmp_path / "state", callback=lambda step: step.index < stop_at)
    resumed = run(pipe, "apg", steps=6, keep=tmp_path / "state", callback=lambda step: taken.append(step.index))
    np.testing.assert_array_equal(resumed, uninterrupted)
    assert taken == list(range(stop_at + 1, 6))
    assert (run(pipe, "apg:momentum=0", steps=6) != uninterrupted).any()


@pytest.mark.parametrize("text", ["none", "cfg-zero:zero_steps=0", "apg:norm=15,of=prediction", "nag:tau=3"])
def test_the_text_of_a_rule_names_the_rule(text):
    rule = guidance_rule(text)
    assert guidance_rule(str(rule)) == rule == guidance_rule(rule)
    assert guidance_rule("none") == CLASSIFIER_FREE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cfg", "cfg " + " ".join(RULES)),
        ("", " ".join(RULES)),
        (3, "3 nag"),
        ("nag:11", "nag:11 tau"),
        ("nag:scale=x", "scale=x tau"),
        ("nag:scale=2,scale=3", "scale=2,scale=3"),
        ("nag:steps=3", "steps=3 tau"),
        ("nag:", ""),
        ("none:eta=1", "none eta=1"),
        ("nag:scale=1", "scale above 1"),
        ("nag:scale=inf", "scale=inf"),
        ("nag:tau=0", "tau"),
        ("nag:alpha=1.5", "alpha"),
        ("nag:alpha=nan", "alpha"),
        ("apg:eta=inf", "eta"),
        ("apg:norm=-1", "norm"),
        ("apg:momentum=1", "momentum between -1 1"),
        ("apg:of=noise", "of noise clean prediction"),
        ("cfg-zero:zero_steps=-1", "zero_steps"),
        ("cfg-zero:zero_steps=1.5", "zero_steps"),
        ("cfg-zero:zero_steps=" + "9" * 5000, "zero_steps"),
    ],
)
def test_other_texts_are_refused(text, words):
    if text == "nag:":
        assert guidance_rule(text) == guidance_rule("nag")
        return
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        guidance_rule(text)


CLIP = np.zeros((9, 32, 32, 3), np.uint8)
ZERO, GUIDED = {"guidance_rule": "cfg-zero"}, {"guidance_scale": 2.0}
WITHOUT_EFFECT = [  # the model, the method, its settings, and words of the message
    *(
        (model, "settings", {"guidance_rule": rule, "guidance_scale": scale}, words.format(rule))
        for rule in ("cfg-zero", "apg")
        for model, scale, words in (("wan", 1.0, "{} guidance above 1"), ("causal", 2.0, "guidance scale of 1"))
    ),
    ("wan", "settings", {"guidance_rule": "cfg-zero:zero_steps=3", "steps": 3} | GUIDED, "3 steps zero"),
    # a strength of 0.25 skips three of four steps
    ("wan", "prepare", {"prompt": "a", "video": CLIP, "strength": 0.25, "steps": 4} | ZERO | GUIDED, "1 step zero"),
]


@pytest.mark.parametrize(("model", "call", "options", "words"), WITHOUT_EFFECT)
def test_settings_without_effect_are_refused_before_a_prompt_is_read(load, model, call, options, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        getattr(load(model), call)(**(SMALL | options if call == "prepare" else options))


def test_experts_share_a_rule_with_different_scales(load):
    """The second expert has no guidance, so that the rule does not change its steps; the average is passed on."""
    pipe = load("experts")
    options = {"guidance_scale": 3.0, "guidance_scale_2": 1.0, "steps": 6}
    states: list[Any] = []
    run(pipe, "apg", callback=lambda step: states.append(step.state.average is not None), **options)
    assert states == [True] * 6
    assert (run(pipe, "apg", **options) != run(pipe, "none", **options)).any()


def test_the_metadata_reproduces_a_video_with_a_rule(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("--steps", "1", "--size", "32x32", "--frames", "5")
    options = ("a red circle", *small, "--negative-prompt", "a blue square", "--guidance-rule")
    succeeded(command(*options, "nag:scale=5", "--guidance-scale", "1", "--dir", "one"))
    assert read_metadata("one/output_video.mp4")["guidance_rule"] == "nag:scale=5.0,tau=2.5,alpha=0.25"
    succeeded(command("--from", "one/output_video.mp4", "--dir", "two"))
    assert Path("one/output_video.mp4").read_bytes() == Path("two/output_video.mp4").read_bytes()
