# SPDX-License-Identifier: Apache-2.0
"""JAX programs use a pipeline: they pass JAX arrays, copy the pipeline, and trace its networks."""

import copy
import os
import subprocess
import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import wanjax
from tests.support.quick import quick
from tests.support.types import unchecked
from tests.support.words import has_line_with_words
from wanjax.errors import WanjaxError

SHORT_VIDEO = {"frames": 5, "steps": 1, "guidance_scale": 1.0}


@pytest.fixture(scope="module")
def pipe():
    return wanjax.load("nano")


@pytest.fixture(scope="module")
def frames(pipe):
    return pipe("a red circle", **SHORT_VIDEO).frames


@pytest.mark.parametrize("name", ["image", "video"])
def test_arrays_of_jax_are_pictures_and_clips(pipe, name):
    clip = np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), np.uint8)
    settings = {"strength": 1.0} if name == "video" else {}
    inputs = [clip[0], jnp.asarray(clip[0])] if name == "image" else [clip, jnp.asarray(clip), list(jnp.asarray(clip))]
    frames_of_numpy, *frames_of_jax = (
        pipe("a red circle", **{name: options}, **settings, **SHORT_VIDEO).frames for options in inputs
    )
    for options in frames_of_jax:
        np.testing.assert_array_equal(options, frames_of_numpy)


def test_a_text_of_a_size_has_the_width_first(pipe):
    assert pipe.settings(size="64x32").size == pipe.settings(size="64*32").size == (32, 64)


@pytest.mark.parametrize("stage", ["denoise", "noise", "decode", "encode_video", "image", "grad"])
def test_tracing_a_stage_is_refused_with_the_networks_to_trace(pipe, stage):
    conditioning, latents = pipe.encode("a"), jnp.zeros((1, 16, 2, 8, 8), jnp.float32)
    calls = {
        "denoise": (lambda x: pipe.denoise(x, **SHORT_VIDEO), conditioning),
        "noise": (lambda x: pipe.denoise(conditioning, noise=x, **SHORT_VIDEO), latents),
        "decode": (lambda x: pipe.decode(x, jnp.float32), latents),
        "encode_video": (pipe.encode_video, jnp.zeros((5, 64, 64, 3), jnp.float32)),
        "image": (lambda x: pipe("a", image=x, **SHORT_VIDEO).frames, jnp.zeros((64, 64, 3), jnp.uint8)),
        "grad": (lambda x: pipe.decode(x, jnp.float32).sum(), latents),
    }
    call, options = calls[stage]
    with unchecked(), pytest.raises(WanjaxError) as caught:
        (jax.grad if stage == "grad" else jax.jit)(call)(options)
    assert has_line_with_words(str(caught.value), "jax.jit pipe.transformer")


@pytest.mark.parametrize("t", quick([500], [jnp.float32(500.0), 500.0, 500]), ids=repr)
def test_one_timestep_applies_to_all_videos(pipe, t):
    x = jax.random.normal(jax.random.key(0), (2, 2, 8, 8, 16))
    text = jnp.concatenate([pipe.encode("a").prompt_embeds, pipe.encode("a blue square").prompt_embeds])
    expected = pipe.transformer(x, jnp.full(2, 500.0), text)
    np.testing.assert_array_equal(pipe.transformer(x, t, text), expected)


def test_a_copy_has_separate_networks(pipe, frames):
    copied = copy.deepcopy(pipe)
    np.testing.assert_array_equal(copied("a red circle", **SHORT_VIDEO).frames, frames)
    nnx.update(copied.transformer, jax.tree.map(jnp.zeros_like, nnx.state(copied.transformer)))
    assert (copied("a red circle", **SHORT_VIDEO).frames != frames).any()
    copied.free()
    np.testing.assert_array_equal(pipe("a red circle", **SHORT_VIDEO).frames, frames)
    np.testing.assert_array_equal(copy.copy(pipe)("a red circle", **SHORT_VIDEO).frames, frames)


@pytest.mark.slow
def test_a_video_is_made_without_compiling(pipe, frames):
    with jax.disable_jit():
        uncompiled = pipe("a red circle", **SHORT_VIDEO).frames
    assert np.abs(uncompiled.astype(int) - frames).max() <= 1  # results are rounded between operations


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_libtpu_prints_nothing_on_a_machine_without_a_tpu():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_"))}
    program = "import wanjax; wanjax.make_mesh(dp=1)"
    completed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (completed.returncode, completed.stderr) == (0, "")
