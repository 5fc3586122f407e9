# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's radial attention: text sees all, the first block and the first steps are dense; meshes, caches."""

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

GRID = (11, 4, 16)  # tokens of VIDEO: 11 frames of 64, of which a block of 512 queries does not see all
VIDEO = {"size": (64, 256), "frames": 41}
STEPS, DENSE = 3, 1
MASK = Radial(11, 64, 0.95, sink=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_hunyuan_checkpoint(tmp_path_factory.mktemp("tiny"), num_layers=3)


def load(folder, attention: str | None = "radial", **options):
    return wanjax.load(folder, attention=attention, dtype="float32", **options)


def trace(pipe, **settings):
    """Return the latents after each step, for prompts of which one quotes."""
    result = []
    encoded = pipe.encode('a cat says "hello"')
    pipe.denoise(
        encoded,
        **VIDEO,
        steps=STEPS,
        callback=lambda step: result.append(np.float64(step.latents)),
        batch_guidance=True,
        **settings,
    )
    return result


@pytest.fixture(scope="module")
def sparse(folder):
    return trace(load(folder))


def masked(q, k, v, *, length, text_lengths, **_):
    """Joint attention by the formula under the mask of the tests."""
    q, k, v = (jnp.concatenate(pair, axis=1) for pair in (q, k, v))
    seen = jnp.arange(q.shape[1])[None] < length + text_lengths[:, None]
    out = attention(q, k, v, key_mask=seen, window=MASK, implementation="reference")
    return VideoTextPair(out[:, :length], out[:, length:])


def test_a_model_by_hand(folder, monkeypatch):
    """Blocks one by one, the first with all of attention, the others by the formula under the mask."""
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
    def by_hand(model):
        context, rope, time = model.context(text, mask), model.rope(GRID), model.time(t)

        class ByHand(BlockCache):
            def parts(self, layers, *cuts):
                return ()

            def after(self, streams):
                for index in range(model.config.layers):
                    if index == 1:
                        monkeypatch.setattr(hunyuan, "joint_attention", masked)
                    block = model.last_block if index == model.config.layers - 1 else block_at(model.blocks, index)
                    streams = block(streams, time, rope, context)
                return streams

        return model(latents, t, context, rope, cache=ByHand())

    ours, dense, expected = (np.float64(x) for x in (run(radial), run(dense_model), by_hand(dense_model)))
    print(f"{error(ours, expected):.1e}, from dense {error(ours, dense):.1e}")
    assert error(ours, expected) <= 1e-5
    assert error(ours, dense) > 1e-4


@pytest.mark.slow  # tests/pipelines/test_radial.py has quick ones, of Wan
def test_the_first_steps_are_those_of_dense_attention(folder, sparse):
    dense = trace(load(folder, None))
    for step in range(STEPS):
        assert (dense[step] == sparse[step]).all() == (step < DENSE)


@pytest.mark.slow  # quick ones hold the same of joint attention under the mask, and of Wan's steps
@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "dp=2,sp=2,tp=2"])
@pytest.mark.parametrize("rules", ["fsdp", "tp"])
def test_several_devices(folder, sparse, mesh, rules):
    assert error(trace(load(folder, mesh=mesh, rules=rules))[-1], sparse[-1]) <= 1e-5


@pytest.mark.slow  # as above
def test_a_step_that_reuses_needs_no_dense_program(folder):
    pipe = load(folder)
    settings = pipe.settings(**VIDEO, steps=10, cache="deepcache:0,10,2")
    other_counts = {"begin": 1, "context": 1, "finish": 1}
    assert run_counts(pipe, settings) == other_counts | {"step": 3, "reusing_step": 5, "dense_step": 2}


@pytest.mark.slow
def test_a_step_cache(folder, sparse):
    result = trace(load(folder), cache="deepcache:0,3,2")
    assert np.isfinite(result[-1]).all()
    assert error(result[-1], sparse[-1]) > 1e-4


@pytest.mark.slow
def test_the_command_line(folder, sparse, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--dir", "one", "--dtype", "float32")
    succeeded(run("encode", 'a cat says "hello"', "--model", str(folder), *options))
    sizes = ("--size", "256x64", "--frames", "41", "--steps", str(STEPS))
    succeeded(run("denoise", *sizes, *options, "--attention", "radial:0.95"))
    ours = load_safetensors(tmp_path / "one" / "stage2_latents.safetensors")["latents"]
    assert error(ours, sparse[-1]) <= 1e-5


@pytest.mark.slow
def test_plans():
    options = ("--chip", "cpu", "--steps", "50", "--attention", "radial:0.2", "--json")
    data = json.loads(succeeded(run("plan", "hunyuanvideo1.5-480p-t2v", *options)).stdout)
    assert data["dense_steps"] == 12
    assert data["step_seconds"] < 0.8 * data["dense_step_seconds"]
