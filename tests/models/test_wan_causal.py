# SPDX-License-Identifier: Apache-2.0
"""Wan's causal transformer predicts chunk by chunk what it predicts for all frames at once under a causal mask."""

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

CHUNKS, FRAMES, ROWS, COLUMNS = 6, 2, 3, 5  # frames of a chunk
TOKENS = FRAMES * ROWS * COLUMNS
TIMES = (0.0, 250.0, 999.0, 0.0, 625.0, 833.25)  # of the chunks
WINDOWS = {"whole": (12, 0), "rolling": (6, 0), "with a sink": (8, 4)}  # latent frames of the window, and of its sink


@cache
def model(name, heads=2, axes=None, rules="fsdp"):
    """Return a network of random weights in which every part affects the result."""
    window, sink = WINDOWS[name]
    config = CausalTransformerConfig(**asdict(transformer_config(heads)), chunk_frames=FRAMES, window=window, sink=sink)
    transformer = network(
        partial(WanCausalTransformer, config, attention=AttentionConfig("reference")), partitioner(axes, rules)
    )
    for norm in (transformer.blocks.self_attn.q_norm, transformer.blocks.self_attn.k_norm):
        norm.scale.set_value(10 * norm.scale.get_value())  # so that a few keys have most of the attention
    return transformer


def random_inputs():
    """Return the latents [B T H W C] of two videos, and their prompts."""
    random = np.random.default_rng(1)
    latents = random.normal(size=(2, CHUNKS * FRAMES, 2 * ROWS, 2 * COLUMNS, 4))
    return latents.astype(np.float32), random.normal(size=(2, 7, 8)).astype(np.float32)


def predict_by_chunks(model, latents, text, devices=None):
    """Return the velocity of the latents, predicted chunk by chunk, and the cache's layout after each chunk."""
    devices = devices or one_device_partitioner()
    graphdef, weights = nnx.split(model)

    @jax.jit
    def prepare(weights, latents, text):
        with use_partitioner(devices):
            transformer = nnx.merge(graphdef, weights)
            return transformer.context(text), transformer.empty_kv_cache(latents)

    @partial(jax.jit, donate_argnums=5)
    def run(weights, latents, t, context, time, window, slot):
        with use_partitioner(devices):
            velocity, new_rows = nnx.merge(graphdef, weights)(latents, t, context, time, window, slot)
            return velocity, update_cache(window, new_rows, slot)

    context, window = prepare(weights, latents[:, :FRAMES], text)
    velocities, windows = [], []
    for chunk, t in enumerate(TIMES):
        x = latents[:, chunk * FRAMES : (chunk + 1) * FRAMES]
        position = angles_at(model.config, chunk), window, slot_of(model.config, chunk, TOKENS)
        velocity, window = run(weights, x, jnp.full((2,), t), context, *position)
        velocities.append(np.asarray(velocity))
        windows.append(jax.tree.map(lambda x: (x.shape, x.sharding), window))
    assert run._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue] (one program serves all chunks)
    return np.concatenate(velocities, axis=1), windows


def attended_frames(name):
    """Return which frames a frame attends to: frames of its chunk, of the sink, and of the latest chunks."""
    window, sink = (frames // FRAMES for frames in WINDOWS[name])
    chunk = np.arange(CHUNKS * FRAMES) // FRAMES
    distance = chunk[:, None] - chunk[None]
    return (distance >= 0) & ((distance < window - sink) | (chunk[None] < sink))


@cache
def expected_velocity(name, heads=2):
    latents, text = random_inputs()
    times = np.repeat(TIMES, FRAMES)
    return np.stack(
        [
            whole_sequence.velocity(model(name, heads), *video, attended_frames(name))
            for video in zip(latents, [times, times], text, strict=True)
        ]
    )


@pytest.mark.parametrize("name", WINDOWS)
def test_predictions_by_chunk_equal_those_of_all_frames(name):
    velocity, _ = predict_by_chunks(model(name), *map(jnp.asarray, random_inputs()))
    relative_error = error(velocity, expected_velocity(name))
    print(f"{name}: {relative_error:.1e}")
    assert relative_error <= 1e-5


def test_the_comparison_detects_another_window():
    velocities = [expected_velocity("whole"), expected_velocity("rolling"), expected_velocity("with a sink")]
    assert all(error(a, b) > 1e-3 for i, a in enumerate(velocities) for b in velocities[:i])


def test_the_expected_velocity_is_that_of_a_bidirectional_transformer():
    latents, text = (x[:1] for x in random_inputs())
    config = transformer_config(2)
    bidirectional = network(partial(WanTransformer, config), None)
    all_frames = np.ones((CHUNKS * FRAMES,) * 2, bool)
    expected = whole_sequence.velocity(bidirectional, latents[0], [625.0] * len(all_frames), text[0], all_frames)

    @nnx.jit
    def run(model, latents, text):
        return model(latents, jnp.array([625.0]), model.context(text), model.rope(model.grid(latents)))

    assert error(run(bidirectional, latents, text)[0], expected) <= 1e-5


def test_the_cache_has_a_constant_size():
    _, windows = predict_by_chunks(model("rolling"), *map(jnp.asarray, random_inputs()))
    assert all(window == windows[0] for window in windows)
    assert windows[0].k[0] == (2, 2, 3 * TOKENS, 2 * 6)


QUICK = {3: (((1, 1, 8), "fsdp"), ((2, 2, 2), "tp")), 4: (((1, 4, 2), "fsdp"), ((2, 2, 2), "tp"))}
CASES = [
    pytest.param(heads, *pair.values, marks=pair.marks) for heads, quick in QUICK.items() for pair in on_meshes(*quick)
]


@pytest.mark.parametrize(("heads", "axes", "rules"), CASES)
def test_eight_devices_predict_as_one(heads, axes, rules):
    """A chunk has 30 tokens, which no axis of 4 or 8 divides."""
    devices = partitioner(axes, rules)
    velocity, windows = predict_by_chunks(
        model("with a sink", heads, axes, rules), *map(jnp.asarray, random_inputs()), devices=devices
    )
    relative_error = error(velocity, expected_velocity("with a sink", heads))
    print(f"{relative_error:.1e}")
    assert relative_error <= 1e-5
    shape, sharding = windows[-1].k
    assert sharding.shard_shape(shape)[3] == shape[3] // axes[2]
    assert shape[3] == -(-heads // axes[2]) * axes[2] * 6


def test_only_attention_to_all_cached_keys_is_accepted():
    config = model("whole").config
    for name in ("radial:0.2", "auto:window=4"):
        transformer = network(partial(WanCausalTransformer, config, attention=AttentionConfig.parse(name)), None)
        with pytest.raises(UnsupportedError, match=line_with_words("attention cached keys")):
            predict_by_chunks(transformer, *map(jnp.asarray, random_inputs()))
