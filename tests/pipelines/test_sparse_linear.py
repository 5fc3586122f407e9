# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that was trained with sparse-linear attention: its attention, its conversions, and what it refuses."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support import small_wan, tiny
from tests.support.commands import refused, succeeded
from tests.support.commands import wanjax as command
from tests.support.compare import error
from tests.support.words import naming, says
from wanjax.checkpoints.files import load_safetensors
from wanjax.checkpoints.modules import parameters
from wanjax.errors import UnsupportedError
from wanjax.kernels.attention import Attention, SparseLinear
from wanjax.models.wan.transformer import WanTransformer
from wanjax.pipelines.wan.conditioning import WanEncoded

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
SMALL = {"size": (64, 64), "frames": 9, "steps": 1, "guidance_scale": 1.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.tiny_sparse_linear_checkpoint(tmp_path_factory.mktemp("sparse"))


def test_it_attends_as_it_was_trained(checkpoint):
    """The share of keys can be another, and shows; the record tells one that was asked for."""
    videos, asked = [], "sla:top=0.5,block_q=8,block_kv=4"
    pipes = [wanjax.load(checkpoint, attention=attention) for attention in (None, asked)]
    encoded = pipes[0].encode("a cat", "")
    for pipe in pipes:
        videos.append(np.asarray(pipe.denoise(encoded, **SMALL)))
    assert pipes[0].transformer.attention == Attention(sparse=SparseLinear(0.1))
    assert [pipe.components.recorded.get("attention") for pipe in pipes] == [None, asked]
    assert np.abs(videos[1] - videos[0]).max() > 1e-3


def test_it_is_converted_and_back(checkpoint, tmp_path):
    succeeded(command("convert", checkpoint, tmp_path / "ours"))
    succeeded(command("convert", tmp_path / "ours", tmp_path / "theirs", "--to", "diffusers"))
    before, after = (load_safetensors(folder / WEIGHTS) for folder in (checkpoint, tmp_path / "theirs"))
    assert before.keys() == after.keys()
    assert before["blocks.1.attn1.proj_l.weight"].shape == (12, 12)
    for key, x in before.items():
        np.testing.assert_array_equal(after[key], x)
    found = [parameters(wanjax.load(folder).transformer) for folder in (checkpoint, tmp_path / "ours")]
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("asked", ["chunked", "radial", "auto:window=9"])
def test_other_attention_is_refused(asked, checkpoint):
    with pytest.raises(UnsupportedError, match=naming("--attention auto")):
        wanjax.load(checkpoint, attention=asked)


def test_the_command_refuses_it_too(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = refused("a cat", "--model", str(checkpoint), "--attention", "reference")
    assert says(told, "sparse-linear reference --attention auto sla:top=0.15")


def test_eight_devices_agree_with_one():
    config = replace(small_wan.transformer_config(4), sparse_linear=True)
    random = np.random.default_rng(0)
    encoded = WanEncoded(*(jnp.asarray(random.normal(size=(1, 3, 8)), jnp.float32) for _ in range(2)))
    asked, latents = Attention.parse("sla:top=0.5,block_q=8,block_kv=4"), []
    for axes in (None, (2, 2, 2)):
        pipe = small_wan.pipeline(4, small_wan.partitioner(axes))
        transformer = small_wan.network(partial(WanTransformer, config, attention=asked), pipe.partitioner)
        pipe.components.put("transformer", transformer)
        pipe.architecture = replace(pipe.architecture, transformer=config)
        latents.append(np.asarray(pipe.denoise(encoded, size=(24, 24), frames=5, steps=1, guidance_scale=1.0)))
    assert error(latents[1], latents[0]) <= 1e-5
