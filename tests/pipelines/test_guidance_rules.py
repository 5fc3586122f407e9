# SPDX-License-Identifier: Apache-2.0
"""Rules of guidance in whole runs: steps by their formulas, on meshes, in streams, stopped, with caches, refused."""

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
from tests.support.programs import begun, compiled, prepared
from tests.support.quick import quick
from tests.support.tabled import STEPS, tabled
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
    """Return the pipeline of a model, with tables of step caches."""
    root = tmp_path_factory.mktemp("models")
    folder: Callable[[str], Path] = functools.cache(lambda model: MODELS[model](root / model.replace(" ", "_")))
    return functools.cache(lambda model, mesh=None: tabled(folder(model), mesh=mesh))


def encoded(pipe: Any, negative: str = "a dog") -> Any:
    options = {"image": np.full((32, 32, 3), 99, np.uint8)} if pipe.model.spec.required_inputs else {}
    return pipe.encode("a red circle", negative, **options, **SMALL)


def run(pipe: Any, rule: str, **settings: Any) -> np.ndarray:
    options = {"steps": 4, "guidance_scale": 3.0} | SMALL | settings
    return np.asarray(pipe.denoise(encoded(pipe), guidance_rule=rule, **options))


def rounded(apart: Callable[[str], float], model: str) -> float:
    """Return how far two ways of one run may be apart: 2e-5, or half more than they are without a rule.

    The second of the random experts answers a change of its input by one some hundred times as large.
    """
    return max(2e-5, 1.5 * apart("none")) if model == "experts" else 2e-5


def joined(rule: str, scale: float, prompt: Any, negative: Any, clean: Any, average: Any) -> tuple[Any, Any]:
    """Return the published formulas' prediction of one video, in float64; `clean` has the shares of x and of it."""
    if rule == "cfg-zero":
        fitted = np.vdot(prompt, negative) / np.vdot(negative, negative) * negative
        return fitted + scale * (prompt - fitted), average
    x, of_x, of_prediction = clean
    along, change = of_x * x + of_prediction * prompt, of_prediction * (prompt - negative)
    average = change = change - 0.5 * average
    change = change * min(1, 3 / np.linalg.norm(change))
    change = change + (0.25 - 1) * np.vdot(change, along) / np.vdot(along, along) * along
    return prompt + (scale - 1) * change / of_prediction, average


@pytest.mark.parametrize("rule", ["cfg-zero", "apg"])
@pytest.mark.parametrize("model", quick(["wan"], ["wan", "vace", "cogvideox", "hunyuanvideo"]))
def test_every_step_is_by_the_formula(load, model, rule):
    pipe, states = load(model), []
    text = {"cfg-zero": "cfg-zero:zero_steps=2", "apg": "apg:eta=0.25,norm=3,momentum=-0.5"}[rule]
    run(pipe, text, callback=lambda step: states.append(jax.tree.map(np.array, step.state)))
    chosen, inputs_of = pipe.settings(steps=4, guidance_scale=3.0, **SMALL), encoded(pipe)
    schedule, state = begun(pipe, inputs_of, chosen)
    [phase] = pipe.model.spec.phases(schedule, chosen)
    step, inputs = prepared(pipe, pipe.transformer, phase, inputs_of, state.x)
    denoiser = step.denoiser

    @jax.jit
    def predicted(x: Any, times: Any) -> Any:
        network = nnx.merge(step.graphdef, inputs.weights)
        t = jax.tree.map(lambda time: jnp.full((1,), time), times)
        return [denoiser.predict(network, x, t, prompt, inputs.shared) for prompt in inputs.prompts]

    @jax.jit
    def stepped(now: Any, prediction: Any, state: Any) -> Any:
        return step.scheduler.step(now, 0, prediction, state.x, state.solver)[0]

    average: Any = 0.0
    for index, after in enumerate(states):
        now = one_step(schedule, index)
        prompt, negative = (np.asarray(p, np.float64) for p in predicted(state.x, denoiser.timesteps(now)))
        alpha = float(now.alphas[0]) if step.scheduler.prediction == "v" else 1.0
        clean = np.asarray(state.x, np.float64), alpha, -float(now.sigmas[0])
        expected, average = joined(rule, 3.0, prompt, negative, clean, average)
        expected = 0 * expected if rule == "cfg-zero" and index < 2 else expected
        assert error(after.x, np.asarray(stepped(now, expected.astype(np.float32), state), np.float64)) <= 1e-6
        state = after


def test_nag_guides_only_away_from_the_negative_prompt(load):
    """Attention is led by a difference, which is nothing where both prompts are one."""
    pipe = load("wan")
    same, different = encoded(pipe, "a red circle"), encoded(pipe)
    options = {"steps": 3, "guidance_scale": 1.0} | SMALL
    unguided, led, off = (
        np.asarray(pipe.denoise(conditioning, guidance_rule=rule, **options))
        for conditioning, rule in ((same, "none"), (same, "nag"), (different, "nag"))
    )
    assert error(led, unguided) <= 1e-5
    assert error(off, unguided) > 1e-3


@pytest.mark.parametrize("model", quick(["wan"], [name for name in MODELS if name != "causal"]))
def test_nag_with_guidance_is_the_same_in_one_batch(load, model):
    separate = run(load(model), "nag")
    bound = rounded(
        lambda rule: float(error(run(load(model), rule, batch_guidance=True), run(load(model), rule))), model
    )
    assert error(run(load(model), "nag", batch_guidance=True), separate) <= bound
    assert error(run(load(model), "nag:scale=3,alpha=1"), separate) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in MODELS if name != "causal"])
def test_nag_with_guidance_is_the_same_on_a_mesh(load, model):
    def apart(rule: str) -> float:
        return float(error(run(load(model, "dp=2,sp=2,tp=2"), rule), run(load(model), rule)))

    assert apart("nag") <= rounded(apart, model)


@pytest.mark.parametrize("rule", quick(["apg"], ["cfg-zero", "apg"]))
def test_a_mesh_makes_the_same(load, rule):
    assert error(run(load("wan", "dp=2,sp=2,tp=2"), rule), run(load("wan"), rule)) <= 2e-5


@pytest.mark.slow  # the test above has a quick one, of one video on a mesh
@pytest.mark.parametrize("rule", ["apg", "nag"])
def test_videos_of_a_batch_equal_those_made_separately(load, rule):
    options = {"seeds": [3, 4], "guidance_rule": rule, "steps": 3, "guidance_scale": 3.0, "size": (32, 32), "frames": 5}
    together, one_device = (load("wan", mesh).videos(["a red circle"], **options) for mesh in ("dp=4,sp=2,tp=1", None))
    for video, expected in zip(together, one_device, strict=True):
        assert np.abs(video.frames.astype(int) - expected.frames).max() <= 1
        assert video.settings["guidance_rule"] == str(guidance_rule(rule))


def test_nag_in_a_video_by_blocks(load):
    """Every block is led, from the first: the blocks of a stream are those of a call."""
    pipe = load("causal")
    block, texts = pipe.model.spec.chunk_frames, pipe.encode_prompts("a red circle", "a dog")
    options = {"size": (32, 32), "frames": 8 * block - 3, "seed": 3, "steps": 2}  # two blocks
    led, unguided = (list(pipe.denoise_chunks(texts, guidance_rule=rule, **options)) for rule in ("nag", "none"))
    unchunked = pipe.denoise(texts, guidance_rule="nag", **options)
    np.testing.assert_array_equal(np.concatenate(led, axis=2), unchunked)
    for guided_chunk, unguided_chunk in zip(led, unguided, strict=True):
        assert error(guided_chunk, np.asarray(unguided_chunk)) > 1e-4


def test_numbers_of_a_rule_compile_nothing(load):
    pipe = load("wan")
    for first, second in (("nag", "nag:scale=3,alpha=1"), ("apg", "apg:eta=1,norm=7,momentum=.5,of=prediction")):
        run(pipe, first)
        count = compiled(take_step)
        run(pipe, second, guidance_scale=2.0)
        assert compiled(take_step) == count
    assert error(run(pipe, "none"), run(pipe, "nag")) > 1e-4


@pytest.mark.parametrize(
    ("cache", "rule"),
    quick(
        [("deepcache:1,6,2", "nag"), ("guidance:2", "apg")],
        [(c, r) for c in ("magcache", "deepcache:1,6,2", "easycache:9,2", "guidance:2") for r in RULES if r != "none"],
    ),
)
def test_rules_go_with_step_caches(load, cache, rule):
    reused: list[bool] = []
    result = run(load("wan"), rule, cache=cache, steps=STEPS, callback=lambda step: reused.append(step.reuses))
    assert any(reused)
    assert 0 < error(result, run(load("wan"), rule, steps=STEPS)) < 0.5


@pytest.mark.parametrize(("model", "stop_at"), quick([("wan", 1)], [("wan", 1), ("experts", 1), ("experts", 3)]))
def test_a_stopped_run_resumes_with_its_average(load, model, stop_at, tmp_path):
    pipe, taken = load(model), []
    uninterrupted = run(pipe, "apg", steps=6)
    with pytest.raises(Cancelled):
        run(pipe, "apg", steps=6, keep=tmp_path / "state", callback=lambda step: step.index < stop_at)
    again = run(pipe, "apg", steps=6, keep=tmp_path / "state", callback=lambda step: taken.append(step.index))
    np.testing.assert_array_equal(again, uninterrupted)
    assert taken == list(range(stop_at + 1, 6))
    assert (run(pipe, "apg:momentum=0", steps=6) != uninterrupted).any()


@pytest.mark.parametrize("text", ["none", "cfg-zero:zero_steps=0", "apg:norm=15,of=prediction", "nag:tau=3"])
def test_a_rule_is_its_text(text):
    rule = guidance_rule(text)
    assert guidance_rule(str(rule)) == rule == guidance_rule(rule)
    assert guidance_rule("none") == CLASSIFIER_FREE


@pytest.mark.parametrize(
    ("text", "why"),
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
def test_other_texts_are_refused(text, why):
    if text == "nag:":
        assert guidance_rule(text) == guidance_rule("nag")
        return
    with pytest.raises(WanjaxError, match=line_with_words(why)):
        guidance_rule(text)


CLIP = np.zeros((9, 32, 32, 3), np.uint8)
ZERO, GUIDED = {"guidance_rule": "cfg-zero"}, {"guidance_scale": 2.0}
NOTHING = [  # the model, what calls it, its settings, and what the sentence names
    *(
        (model, "settings", {"guidance_rule": rule, "guidance_scale": scale}, words.format(rule))
        for rule in ("cfg-zero", "apg")
        for model, scale, words in (("wan", 1.0, "{} guidance above 1"), ("causal", 2.0, "guidance scale of 1"))
    ),
    ("wan", "settings", {"guidance_rule": "cfg-zero:zero_steps=3", "steps": 3} | GUIDED, "3 steps zero"),
    # of four steps, three are left out
    ("wan", "prepare", {"prompt": "a", "video": CLIP, "strength": 0.25, "steps": 4} | ZERO | GUIDED, "1 step zero"),
]


@pytest.mark.parametrize(("model", "call", "options", "words"), NOTHING)
def test_settings_without_effect_are_refused_before_a_prompt_is_read(load, model, call, options, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        getattr(load(model), call)(**(SMALL | options if call == "prepare" else options))


def test_experts_share_a_rule_and_have_different_scales(load):
    """The second expert, without guidance, makes its steps as without a rule; the average passes over them."""
    pipe = load("experts")
    options = {"guidance_scale": 3.0, "guidance_scale_2": 1.0, "steps": 6}
    states: list[Any] = []
    run(pipe, "apg", callback=lambda step: states.append(step.state.average is not None), **options)
    assert states == [True] * 6
    assert (run(pipe, "apg", **options) != run(pipe, "none", **options)).any()


def test_the_command_line_and_a_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("a red circle", "--steps", "2", "--negative-prompt", "a blue square", "--guidance-rule")
    succeeded(command(*options, "nag:scale=5", "--guidance-scale", "1", "--dir", "one"))
    assert read_metadata("one/output_video.mp4")["guidance_rule"] == "nag:scale=5.0,tau=2.5,alpha=0.25"
    succeeded(command("--from", "one/output_video.mp4", "--dir", "two"))
    assert Path("one/output_video.mp4").read_bytes() == Path("two/output_video.mp4").read_bytes()
