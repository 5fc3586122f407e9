# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's radial attention: only text, the first block and the first steps attend to all tokens."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import wanjax
from tests.support.commands import succeeded
from tests.support.commands import wanjax as run
from tests.support.compare import error
from tests.support.recorded import run_counts
from tests.support.tiny import tiny_hunyuan_checkpoint
from wanjax.checkpoints.files import load_safetensors
from wanjax.kernels.attention import VideoTextPair, attention
from wanjax.kernels.attention.radial import Radial
from wanjax.layers.stack import BlockCache, block_at
from wanjax.models.hunyuanvideo import transformer as hunyuan

pytestmark = pytest.mark.usefixtures("cached_programs")

GRID = (11, 4, 16)  # tokens of VIDEO: 11 frames of 64, so that a block of 512 queries does not attend to all
VIDEO = {"size": (64, 256), "frames": 41}
STEPS, DENSE_STEPS = 3, 1
MASK = Radial(11, 64, 0.95, has_sink=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_hunyuan_checkpoint(tmp_path_factory.mktemp("tiny"), num_layers=3)


def load(folder, attention: str | None = "radial", **options):
    return wanjax.load(folder, attention=attention, dtype="float32", **options)


def latents_by_step(pipe, **settings):
    """Return the latents after each step. One of the prompts has a quotation, which the Glyph encoder reads."""
    latents = []
    conditioning = pipe.encode('a cat says "hello"')
    pipe.denoise(
        conditioning,
        **VIDEO,
        steps=STEPS,
        callback=lambda step: latents.append(np.float64(step.latents)),
        batch_guidance=True,
        **settings,
    )
    return latents


@pytest.fixture(scope="module")
def radial_latents(folder):
    return latents_by_step(load(folder))


def joint_attention_by_formula(q, k, v, *, length, text_lengths, **_):
    """Compute joint attention by the formula under the mask of these tests."""
    q, k, v = (jnp.concatenate(pair, axis=1) for pair in (q, k, v))
    key_mask = jnp.arange(q.shape[1])[None] < length + text_lengths[:, None]
    out = attention(q, k, v, key_mask=key_mask, window=MASK, implementation="reference")
    return VideoTextPair(out[:, :length], out[:, length:])


def test_only_the_first_block_attends_to_all_tokens(folder, monkeypatch):
    """Expect the prediction of a first block with dense attention and of other blocks by the formula under the mask."""
    assert 0.5 < MASK.density(11 * 64 + 11) < 0.95
    radial, dense_model = (load(folder, attention).transformer for attention in ("radial", None))
    rng = np.random.default_rng(0)
    latents = jnp.asarray(rng.normal(size=(2, *GRID, radial.config.channels_in)), jnp.float32)
    text = jnp.asarray(rng.normal(size=(2, 11, radial.config.text_width)), jnp.float32)
    t, mask = jnp.full(2, 500.0), jnp.arange(11)[None] < jnp.asarray([[11], [4]])
    assert [model.mask(GRID) for model in (radial, dense_model)] == [MASK, None]

    @nnx.jit
    def run(model):
        return model(latents, t, model.context(text, mask), model.rope(GRID), mask=model.mask(GRID))

    @nnx.jit
    def predict_block_by_block(model):
        context, rope, time = model.context(text, mask), model.rope(GRID), model.time(t)

        class BlockByBlock(BlockCache):
            def parts(self, layers, *cuts):
                return ()

            def after(self, streams):
                for index in range(model.config.layers):
                    if index == 1:
                        monkeypatch.setattr(hunyuan, "joint_attention", joint_attention_by_formula)
                    block = model.last_block if index == model.config.layers - 1 else block_at(model.blocks, index)
                    streams = block(streams, time, rope, context)
                return streams

        return model(latents, t, context, rope, cache=BlockByBlock())

    radial_prediction, dense_prediction, expected = (
        np.float64(x) for x in (run(radial), run(dense_model), predict_block_by_block(dense_model))
    )
    print(f"{error(radial_prediction, expected):.1e}, from dense {error(radial_prediction, dense_prediction):.1e}")
    assert error(radial_prediction, expected) <= 1e-5
    assert error(radial_prediction, dense_prediction) > 1e-4


@pytest.mark.slow  # tests/pipelines/test_radial.py has quick tests of Wan
def test_only_the_first_steps_have_dense_attention(folder, radial_latents):
    dense = latents_by_step(load(folder, None))
    for step in range(STEPS):
        assert (dense[step] == radial_latents[step]).all() == (step < DENSE_STEPS)


@pytest.mark.slow  # quick tests cover joint attention under the mask, and Wan's steps
@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "dp=2,sp=2,tp=2"])
@pytest.mark.parametrize("rules", ["fsdp", "tp"])
def test_several_devices_give_the_latents_of_one(folder, radial_latents, mesh, rules):
    assert error(latents_by_step(load(folder, mesh=mesh, rules=rules))[-1], radial_latents[-1]) <= 1e-5


@pytest.mark.slow  # tests/pipelines/test_radial.py has quick tests of Wan
def test_a_step_that_reuses_needs_no_dense_program(folder):
    pipe = load(folder)
    settings = pipe.settings(**VIDEO, steps=10, cache="deepcache:0,10,2")
    other_counts = {"begin": 1, "context": 1, "finish": 1}
    assert run_counts(pipe, settings) == other_counts | {"step": 3, "reusing_step": 5, "dense_step": 2}


@pytest.mark.slow
def test_radial_attention_works_with_a_step_cache(folder, radial_latents):
    latents = latents_by_step(load(folder), cache="deepcache:0,3,2")
    assert np.isfinite(latents[-1]).all()
    assert error(latents[-1], radial_latents[-1]) > 1e-4


@pytest.mark.slow
def test_the_command_denoises_with_radial_attention(folder, radial_latents, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--dir", "one", "--dtype", "float32")
    succeeded(run("encode", 'a cat says "hello"', "--model", str(folder), *options))
    sizes = ("--size", "256x64", "--frames", "41", "--steps", str(STEPS))
    succeeded(run("denoise", *sizes, *options, "--attention", "radial:0.95"))
    latents = load_safetensors(tmp_path / "one" / "stage2_latents.safetensors")["latents"]
    assert error(latents, radial_latents[-1]) <= 1e-5


@pytest.mark.slow
def test_a_plan_prices_dense_and_radial_steps():
    options = ("--chip", "cpu", "--steps", "50", "--attention", "radial:0.2", "--json")
    data = json.loads(succeeded(run("plan", "hunyuanvideo1.5-480p-t2v", *options)).stdout)
    assert data["dense_steps"] == 12
    assert data["step_seconds"] < 0.8 * data["dense_step_seconds"]
