# SPDX-License-Identifier: Apache-2.0
"""Wan's causal transformer: block by block against the whole sequence under the mask of its blocks."""

from dataclasses import asdict
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support import whole_sequence
from tests.support.compare import error
from tests.support.devices import on_meshes
from tests.support.small_wan import network, partitioner, transformer_config
from tests.support.words import line_with_words
from wanjax.errors import UnsupportedError
from wanjax.kernels.attention import AttentionConfig
from wanjax.kernels.attention.kv_cache import update_cache
from wanjax.models.wan.causal import WanCausalTransformer, angles_at, slot_of
from wanjax.models.wan.config import CausalTransformerConfig
from wanjax.models.wan.transformer import WanTransformer
from wanjax.sharding import one_device_partitioner, use_partitioner

BLOCKS, FRAMES, ROWS, COLUMNS = 6, 2, 3, 5
TOKENS = FRAMES * ROWS * COLUMNS
TIMES = (0.0, 250.0, 999.0, 0.0, 625.0, 833.25)  # of the blocks
WINDOWS = {"whole": (12, 0), "rolling": (6, 0), "with a sink": (8, 4)}  # latent frames in all, and those of the sink


@cache
def model(name, heads=2, axes=None, rules="fsdp"):
    """Return a network of random weights, of which every part matters."""
    window, sink = WINDOWS[name]
    config = CausalTransformerConfig(**asdict(transformer_config(heads)), chunk_frames=FRAMES, window=window, sink=sink)
    result = network(
        partial(WanCausalTransformer, config, attention=AttentionConfig("reference")), partitioner(axes, rules)
    )
    for norm in (result.blocks.self_attn.q_norm, result.blocks.self_attn.k_norm):
        norm.scale.set_value(10 * norm.scale.get_value())  # so that a few keys have most of the attention
    return result


def random_inputs():
    """Return the latents [B T H W C] of two videos, and their prompts."""
    random = np.random.default_rng(1)
    latents = random.normal(size=(2, BLOCKS * FRAMES, 2 * ROWS, 2 * COLUMNS, 4))
    return latents.astype(np.float32), random.normal(size=(2, 7, 8)).astype(np.float32)


def by_blocks(model, latents, text, devices=None):
    """Return the velocity of the latents, block by block, and the window after each block."""
    devices = devices or one_device_partitioner()
    graphdef, weights = nnx.split(model)

    @jax.jit
    def begin(weights, latents, text):
        with use_partitioner(devices):
            output = nnx.merge(graphdef, weights)
            return output.context(text), output.empty_kv_cache(latents)

    @partial(jax.jit, donate_argnums=5)
    def run(weights, latents, t, context, time, window, slot):
        with use_partitioner(devices):
            velocity, new_rows = nnx.merge(graphdef, weights)(latents, t, context, time, window, slot)
            return velocity, update_cache(window, new_rows, slot)

    context, window = begin(weights, latents[:, :FRAMES], text)
    result, windows = [], []
    for block, t in enumerate(TIMES):
        x = latents[:, block * FRAMES : (block + 1) * FRAMES]
        where = angles_at(model.config, block), window, slot_of(model.config, block, TOKENS)
        velocity, window = run(weights, x, jnp.full((2,), t), context, *where)
        result.append(np.asarray(velocity))
        windows.append(jax.tree.map(lambda x: (x.shape, x.sharding), window))
    assert run._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue] (one program, whatever the block)
    return np.concatenate(result, axis=1), windows


def sees(name):
    """Return which frames a frame attends to: those of its block, of the sink, and of the latest blocks."""
    window, sink = (frames // FRAMES for frames in WINDOWS[name])
    block = np.arange(BLOCKS * FRAMES) // FRAMES
    behind = block[:, None] - block[None]
    return (behind >= 0) & ((behind < window - sink) | (block[None] < sink))


@cache
def expected_velocity(name, heads=2):
    latents, text = random_inputs()
    times = np.repeat(TIMES, FRAMES)
    return np.stack(
        [
            whole_sequence.velocity(model(name, heads), *video, sees(name))
            for video in zip(latents, [times, times], text, strict=True)
        ]
    )


@pytest.mark.parametrize("name", WINDOWS)
def test_block_by_block_equals_the_whole_sequence(name):
    result, _ = by_blocks(model(name), *map(jnp.asarray, random_inputs()))
    reported = error(result, expected_velocity(name))
    print(f"{name}: {reported:.1e}")
    assert reported <= 1e-5


def test_a_window_that_slides_one_chunk_less_is_detected():
    result = [expected_velocity("whole"), expected_velocity("rolling"), expected_velocity("with a sink")]
    assert all(error(a, b) > 1e-3 for i, a in enumerate(result) for b in result[:i])


def test_the_whole_sequence_equals_the_bidirectional_transformer():
    latents, text = (x[:1] for x in random_inputs())
    config = transformer_config(2)
    bidirectional = network(partial(WanTransformer, config), None)
    everything = np.ones((BLOCKS * FRAMES,) * 2, bool)
    expected = whole_sequence.velocity(bidirectional, latents[0], [625.0] * len(everything), text[0], everything)

    @nnx.jit
    def run(model, latents, text):
        return model(latents, jnp.array([625.0]), model.context(text), model.rope(model.grid(latents)))

    assert error(run(bidirectional, latents, text)[0], expected) <= 1e-5


def test_the_window_keeps_its_size():
    _, windows = by_blocks(model("rolling"), *map(jnp.asarray, random_inputs()))
    assert all(window == windows[0] for window in windows)
    assert windows[0].k[0] == (2, 2, 3 * TOKENS, 2 * 6)


QUICK = {3: (((1, 1, 8), "fsdp"), ((2, 2, 2), "tp")), 4: (((1, 4, 2), "fsdp"), ((2, 2, 2), "tp"))}
CASES = [
    pytest.param(heads, *pair.values, marks=pair.marks) for heads, quick in QUICK.items() for pair in on_meshes(*quick)
]


@pytest.mark.parametrize(("heads", "axes", "rules"), CASES)
def test_on_eight_devices(heads, axes, rules):
    """Two videos, of 30 tokens a block, which no axis of 4 or 8 divides."""
    devices = partitioner(axes, rules)
    result, windows = by_blocks(
        model("with a sink", heads, axes, rules), *map(jnp.asarray, random_inputs()), devices=devices
    )
    reported = error(result, expected_velocity("with a sink", heads))
    print(f"{reported:.1e}")
    assert reported <= 1e-5
    shape, sharding = windows[-1].k
    assert sharding.shard_shape(shape)[3] == shape[3] // axes[2]
    assert shape[3] == -(-heads // axes[2]) * axes[2] * 6


def test_only_attention_to_all_cached_keys_is_accepted():
    config = model("whole").config
    for name in ("radial:0.2", "auto:window=4"):
        result = network(partial(WanCausalTransformer, config, attention=AttentionConfig.parse(name)), None)
        with pytest.raises(UnsupportedError, match=line_with_words("attention cached keys")):
            by_blocks(result, *map(jnp.asarray, random_inputs()))
