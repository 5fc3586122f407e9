# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's autoencoder on eight devices, in constant memory, and its norm's precision."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh

from tests.support.compare import error
from tests.support.devices import most_held, on_meshes
from tests.support.programs import caller
from tests.support.quick import quick
from tests.support.small_wan import network, partitioner
from wanjax.layers.norms import GroupNorm
from wanjax.models.cogvideox.vae import CogVideoXVAE
from wanjax.models.cogvideox.vae_config import VAE_5B
from wanjax.pipelines.frames import DecodeStatic, chunk_count, decode_chunk, decode_latents, encode_frames, spans

SMALL = replace(VAE_5B, channels=(4, 8, 8), latent_channels=4, res_blocks=1, groups=2, sample_size=(48, 64))
EVEN, SOME, NONE = (8, 6), (6, 4), (3, 5)  # sizes of latents that eight devices can share, or not


@cache
def vae(axes=None, rules="fsdp"):
    return network(partial(CogVideoXVAE, SMALL), partitioner(axes, rules))


def frames_of(z, axes=None, rules="fsdp"):
    devices = partitioner(axes, rules)
    chunk_lengths = SMALL.decode_lengths(z.shape[2])
    chunks = decode_latents(vae(axes, rules), [z], chunk_lengths, jnp.float32, None, caller(devices))
    return np.concatenate([np.asarray(x) for x in chunks])


def latents_of(frames, axes=None, rules="fsdp"):
    devices = partitioner(axes, rules)
    return encode_frames(vae(axes, rules), frames, None, caller(devices))


SIZES = {(1, 1, 8): EVEN, (2, 2, 2): NONE}


@pytest.mark.slow  # the autoencoder of Wan has a quick one in tests/test_sharding.py, the rest below
@pytest.mark.parametrize(("axes", "rules"), on_meshes(((2, 2, 2), "fsdp")))
def test_eight_devices(axes, rules):
    size = SIZES.get(axes, SOME)
    z = np.random.default_rng(0).normal(size=(1, 4, 5, *size)).astype(np.float32)
    frames = frames_of(z)
    assert frames.shape == (17, 4 * size[0], 4 * size[1], 3)
    assert frames.std() > 0.05
    assert error(frames_of(z, axes, rules), frames.astype(np.float64)) <= 1e-5
    latents = np.asarray(latents_of(frames), np.float64)
    assert latents.shape == (1, 8, 5, *size)
    assert error(latents_of(frames, axes, rules), latents) <= 1e-5


def test_each_device_holds_an_eighth():
    z = np.ones((1, 3, 8, 6, 4), np.float32)
    graphdef, weights = nnx.split(vae((2, 1, 4)))
    static = DecodeStatic(graphdef, jnp.dtype(jnp.uint8), 1)
    frames, conv_cache = caller(partitioner((2, 1, 4)))(decode_chunk, static, z, None, weights)
    assert frames.sharding.is_fully_replicated
    assert all(len({str(shard.index) for shard in x.addressable_shards}) == 8 for x in jax.tree.leaves(conv_cache))


def test_memory_does_not_grow_with_the_clip():
    z = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 13, *NONE)).astype(np.float32), jnp.float32)
    held = []
    for frames in decode_latents(vae(), [z], (3, 2), jnp.float32, None, caller()):
        frames.block_until_ready()
        held.append(most_held())
    assert len(held) == 6
    assert len(set(held[1:])) == 1


@pytest.mark.parametrize(
    ("frames", "lengths"), [(1, [1]), (2, [2]), (3, [3]), (4, [2, 2]), (5, [3, 2]), (13, [3] + 5 * [2])]
)
def test_chunks(frames, lengths):
    chunk_lengths = SMALL.decode_lengths(frames)
    assert [len(part) for part in spans(frames, chunk_lengths)] == lengths
    assert chunk_count(frames, chunk_lengths) == len(lengths)


def test_clips_of_many_lengths_share_their_programs():
    assert {SMALL.encode_lengths(frames) for frames in (9, 17, 49, 81)} == {(9, 8)}
    assert {SMALL.decode_lengths(frames) for frames in (3, 5, 13, 21)} == {(3, 2)}
    assert (SMALL.encode_lengths(1), SMALL.encode_lengths(13)) == ((1, 8), (13, 8))


@pytest.mark.parametrize("way", quick(["encode_chunk"], ["encode_chunk", "decode_chunk"]))
def test_cached_frames_keep_their_shape_and_dtype(way):
    """All chunks but the first share one program, on TPUs too."""
    first, later, channels = (9, 8, 3) if way == "encode_chunk" else (3, 2, 4)

    def chunks(x):
        vae = CogVideoXVAE(SMALL, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
        caches = [None]
        for part in spans(x.shape[1], (first, later)):
            caches.append(getattr(vae, way)(x[:, part.start : part.stop], caches[-1])[1])
        return caches[1:]

    device = AbstractDevice("TPU v6 lite", 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("chips",), abstract_device=device)):
        shape = (1, first + 2 * later, 8, 8, channels)
        cache_shapes = jax.eval_shape(chunks, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert {x.dtype for x in jax.tree.leaves(cache_shapes)} == {jnp.dtype(jnp.bfloat16)}
    assert cache_shapes[0] == cache_shapes[1] == cache_shapes[2]


normed = jax.jit(lambda norm, x: norm(x))


@pytest.mark.parametrize(("mean", "bound"), [(0, 1e-6), (3, 2e-6), (30, 1e-4)])
def test_group_norm_is_precise(mean, bound):
    """One pass over many cells, whose mean may be larger than their deviation, against float64."""
    x = np.random.default_rng(0).normal(mean, 1, (1, 4, 96, 170, 8)).astype(np.float32)
    norm = GroupNorm(8, 2, 1e-6, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    groups = x.astype(np.float64).reshape(1, -1, 2, 4)
    centred = groups - groups.mean(axis=(1, 3), keepdims=True)
    exact = (centred / np.sqrt(centred.var(axis=(1, 3), keepdims=True) + 1e-6)).reshape(x.shape)
    result = error(normed(norm, x), exact)
    print(f"mean {mean}: relative error {result:.1e}")
    assert result <= bound
