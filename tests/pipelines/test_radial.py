# SPDX-License-Identifier: Apache-2.0
"""Radial attention in models and videos: only the first block and the first steps attend to all tokens."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import wanjax
from tests.support.commands import refused, succeeded
from tests.support.commands import wanjax as run
from tests.support.compare import error
from tests.support.configs import TRANSFORMER
from tests.support.quick import quick
from tests.support.recorded import run_counts
from tests.support.small_wan import network
from tests.support.tiny import (
    tiny_causal_checkpoint,
    tiny_checkpoint,
    tiny_cogvideox_checkpoint,
    tiny_control_checkpoint,
)
from tests.support.words import has_line_with_words
from wanjax.checkpoints.files import load_safetensors
from wanjax.kernels.attention import AUTO, AttentionConfig, attention
from wanjax.kernels.attention.radial import Radial
from wanjax.layers.stack import BlockCache, block_at
from wanjax.models.wan import transformer as wan
from wanjax.pipelines.phases import dense_steps

pytestmark = pytest.mark.usefixtures("cached_programs")

CONFIG = replace(TRANSFORMER, layers=3)
GRID = (11, 4, 16)  # VIDEO has 11 frames of 64 tokens, so that a block of 512 queries does not attend to all
VIDEO = {"size": (64, 256), "frames": 41, "guidance_scale": 1.0}
STEPS = 4
DENSE_STEPS = 1  # of four steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_radial_mask_of_these_tests_hides_tokens():
    assert 0.3 < Radial(11, 64, 0.2).density(11 * 64) < 0.95


@pytest.mark.parametrize(("steps", "dense"), [(1, 0), (2, 1), (4, 1), (5, 2), (40, 10), (50, 12)])
def test_a_quarter_of_the_steps_is_dense(steps, dense):
    assert dense_steps(steps) == dense


def test_only_the_first_block_attends_to_all_tokens(monkeypatch):
    """Expect the prediction of a first block with dense attention and of other blocks by the formula under the mask."""
    attentions = AttentionConfig(radial=True), AUTO
    radial, dense_model = (network(partial(wan.WanTransformer, CONFIG, attention=a), None) for a in attentions)
    rng = np.random.default_rng(0)
    latents = jnp.asarray(rng.normal(size=(1, 11, 8, 32, CONFIG.channels_in)), jnp.float32)
    t, text = jnp.full(1, 500.0), jnp.asarray(rng.normal(size=(1, 7, CONFIG.text_width)), jnp.float32)
    calls = []

    @nnx.jit
    def run(model):
        return model(latents, t, model.context(text), model.rope(GRID), mask=model.mask(GRID))

    @nnx.jit
    def predict_block_by_block(model):
        context, rope = model.context(text), model.rope(GRID)
        time = model.time_embed(t).reshape(1, 1, -1)
        mod = model.time_proj(jax.nn.silu(time)).reshape(1, 1, 6, -1)

        class BlockByBlock(BlockCache):
            def parts(self, layers, *cuts):
                return ()

            def after(self, x):
                for index in range(CONFIG.layers):
                    if index == 1:
                        monkeypatch.setattr(wan, "attention", attention_by_formula)
                    x, _ = block_at(model.blocks, index)(x, block_at(context, index), mod, rope)
                return x

        return model(latents, t, context, rope, cache=BlockByBlock())

    def attention_by_formula(q, k, v, **options):
        is_self_attention = q.shape[1] == k.shape[1]
        calls.append(is_self_attention)
        window = Radial(11, 64, 0.2) if is_self_attention else None
        return attention(q, k, v, window=window, implementation="reference")

    assert (radial.mask(GRID), dense_model.mask(GRID)) == (Radial(11, 64, 0.2), None)
    radial_prediction, dense_prediction, expected = (
        np.float64(x) for x in (run(radial), run(dense_model), predict_block_by_block(dense_model))
    )
    assert sum(calls) == CONFIG.layers - 1 > 0
    assert error(radial_prediction, expected) <= 1e-5
    assert error(radial_prediction, dense_prediction) > 1e-4


def clean_samples_by_step(pipe, **settings):
    """Return the predicted clean sample of each step."""
    clean_samples = []
    options = VIDEO | {"steps": STEPS} | settings
    pipe.denoise(pipe.encode("a"), callback=lambda step: clean_samples.append(np.array(step.x0)), **options)
    return clean_samples


@pytest.mark.parametrize("text", quick(["radial:0.2"], ["radial", "radial:0.2"]))
def test_only_the_first_steps_have_dense_attention(folder, text):
    dense_samples, radial_samples = (
        clean_samples_by_step(wanjax.load(folder, attention=a, dtype="float32")) for a in (None, text)
    )
    for step in range(STEPS):
        assert (dense_samples[step] == radial_samples[step]).all() == (step < DENSE_STEPS)


@pytest.mark.slow  # tests/kernels/test_joint_attention.py has a quick test of radial attention on meshes
def test_several_devices_give_the_latents_of_one(folder):
    mesh = wanjax.make_mesh(tp=2, devices=jax.devices()[:2])
    one_device, two_devices = (wanjax.load(folder, attention="radial", dtype="float32", mesh=m) for m in (None, mesh))
    options = {"steps": 2}
    assert (
        error(
            clean_samples_by_step(two_devices, **options)[-1],
            np.float64(clean_samples_by_step(one_device, **options)[-1]),
        )
        <= 1e-5
    )


@pytest.mark.slow  # the test above is the quick one, with two devices and one prompt
def test_prompts_of_a_batch_on_eight_devices_give_the_latents_of_one(folder):
    one_device, eight_devices = (
        wanjax.load(folder, attention="radial", dtype="float32", mesh=m) for m in (None, "dp=2,tp=4")
    )
    options = {"steps": 2, "guidance_scale": 4.0}  # with a dp axis, both prompts share a batch
    assert (
        error(
            clean_samples_by_step(eight_devices, **options)[-1],
            np.float64(clean_samples_by_step(one_device, **options)[-1]),
        )
        <= 1e-5
    )


def test_a_step_that_reuses_needs_no_dense_program(folder):
    pipe = wanjax.load(folder, attention="radial", dtype="float32")
    settings = pipe.settings(**VIDEO, steps=10, cache="deepcache:0,10,2")
    other_counts = {"begin": 1, "context": 1, "finish": 1}
    assert run_counts(pipe, settings) == other_counts | {"step": 3, "reusing_step": 5, "dense_step": 2}
    assert run_counts(wanjax.load(folder, dtype="float32"), settings) == other_counts | {"step": 5, "reusing_step": 5}


@pytest.mark.slow  # quick tests have radial attention, and step caches with dense attention
def test_radial_attention_works_with_a_step_cache(folder):
    pipe = wanjax.load(folder, attention="radial", dtype="float32")
    assert np.isfinite(clean_samples_by_step(pipe, cache="deepcache:0,4,2")[-1]).all()


def test_the_command_denoises_with_radial_attention(folder, tmp_path):
    succeeded(run("encode", "a", "--model", str(folder), "--dir", "one", "--dtype", "float32"))
    sizes = ("--size", "256x64", "--frames", "41", "--steps", "3", "--guidance-scale", "1", "--dtype", "float32")
    succeeded(run("denoise", *sizes, "--dir", "one", "--attention", "radial:0.3"))
    latents = load_safetensors(tmp_path / "one" / "stage2_latents.safetensors")["latents"]
    pipe = wanjax.load(folder, attention="radial:0.3", dtype="float32")
    expected = pipe.denoise(pipe.encode("a"), **VIDEO, steps=3)
    assert error(latents, np.float64(expected)) <= 1e-5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--attention radial:0", "decay '0' number 0 16 radial:0.2"),
        ("--attention radial:99", "decay '99' number 0"),
        ("--attention radial:wide", "decay 'wide' number 0"),
        ("--attention radial --window 9", "radial attention window tiles 'window=9'"),
        ("--attention radial:0.2 --block-q 512", "radial attention window tiles"),
    ],
)
def test_invalid_radial_options_are_reported(folder, options, words):
    assert has_line_with_words(refused("a", "--model", str(folder), *options.split()), words)


@pytest.mark.parametrize("make", [tiny_cogvideox_checkpoint, tiny_control_checkpoint, tiny_causal_checkpoint])
def test_models_without_radial_attention_refuse_it(make, tmp_path):
    assert has_line_with_words(
        refused("a", "--model", str(make(tmp_path)), "--attention", "radial"), "radial attention --attention auto"
    )


PLAN = ("plan", "wan2.1-t2v-1.3b", "--chip", "cpu", "--steps", "50", "--json")


def test_a_plan_prices_dense_and_radial_steps():
    assert has_line_with_words(
        refused("plan", "cogvideox-2b", "--attention", "radial"), "cogvideox-2b radial attention"
    )
    data = json.loads(succeeded(run(*PLAN, "--attention", "radial")).stdout)
    assert data["dense_steps"] == 12
    assert data["step_seconds"] < 0.9 * data["dense_step_seconds"]


@pytest.mark.slow  # the test above is the quick one, with one plan
def test_a_plan_with_radial_attention_is_cheaper_than_one_without():
    radial, dense = (json.loads(succeeded(run(*PLAN, *options)).stdout) for options in (("--attention", "radial"), ()))
    assert (radial["dense_steps"], dense["dense_steps"], dense["dense_step_seconds"]) == (12, 0, None)
    assert radial["dense_step_seconds"] == pytest.approx(dense["step_seconds"], rel=0.2)
    assert radial["step_seconds"] < 0.9 * dense["step_seconds"]
    assert radial["total_seconds"] < dense["total_seconds"]
