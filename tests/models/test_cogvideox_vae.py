# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's autoencoder: eight devices, constant memory, and the precision of its norm."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh

from tests.support.compare import error
from tests.support.devices import most_bytes_on_a_device, on_meshes
from tests.support.programs import caller
from tests.support.quick import quick
from tests.support.small_wan import network, partitioner
from wanjax.layers.norms import GroupNorm
from wanjax.models.cogvideox.vae import CogVideoXVAE
from wanjax.models.cogvideox.vae_config import VAE_5B
from wanjax.pipelines.frames import DecodeStatic, chunk_count, decode_chunk, decode_latents, encode_frames, spans

SMALL = replace(VAE_5B, channels=(4, 8, 8), latent_channels=4, res_blocks=1, groups=2, sample_size=(48, 64))
# sizes of latents that eight devices can share, that some devices can share, and that no two devices can share
ALL_DEVICES, SOME_DEVICES, ONE_DEVICE = (8, 6), (6, 4), (3, 5)


@cache
def make_vae(axes=None, rules="fsdp"):
    return network(partial(CogVideoXVAE, SMALL), partitioner(axes, rules))


def decode(z, axes=None, rules="fsdp"):
    devices = partitioner(axes, rules)
    chunk_lengths = SMALL.decode_lengths(z.shape[2])
    chunks = decode_latents(make_vae(axes, rules), [z], chunk_lengths, jnp.float32, None, caller(devices))
    return np.concatenate([np.asarray(x) for x in chunks])


def encode(frames, axes=None, rules="fsdp"):
    devices = partitioner(axes, rules)
    return encode_frames(make_vae(axes, rules), frames, None, caller(devices))


SIZES = {(1, 1, 8): ALL_DEVICES, (2, 2, 2): ONE_DEVICE}


@pytest.mark.slow  # a quick test of Wan's autoencoder is in tests/test_sharding.py
@pytest.mark.parametrize(("axes", "rules"), on_meshes(((2, 2, 2), "fsdp")))
def test_eight_devices_encode_and_decode_as_one(axes, rules):
    size = SIZES.get(axes, SOME_DEVICES)
    z = np.random.default_rng(0).normal(size=(1, 4, 5, *size)).astype(np.float32)
    frames = decode(z)
    assert frames.shape == (17, 4 * size[0], 4 * size[1], 3)
    assert frames.std() > 0.05
    assert error(decode(z, axes, rules), frames.astype(np.float64)) <= 1e-5
    latents = np.asarray(encode(frames), np.float64)
    assert latents.shape == (1, 8, 5, *size)
    assert error(encode(frames, axes, rules), latents) <= 1e-5


def test_each_device_caches_an_eighth_of_the_frames():
    z = np.ones((1, 3, 8, 6, 4), np.float32)
    graphdef, weights = nnx.split(make_vae((2, 1, 4)))
    static = DecodeStatic(graphdef, jnp.dtype(jnp.uint8), 1)
    frames, conv_cache = caller(partitioner((2, 1, 4)))(decode_chunk, static, z, None, weights)
    assert frames.sharding.is_fully_replicated
    assert all(len({str(shard.index) for shard in x.addressable_shards}) == 8 for x in jax.tree.leaves(conv_cache))


def test_memory_does_not_grow_with_the_clip():
    z = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 13, *ONE_DEVICE)).astype(np.float32), jnp.float32)
    peaks = []
    for frames in decode_latents(make_vae(), [z], (3, 2), jnp.float32, None, caller()):
        frames.block_until_ready()
        peaks.append(most_bytes_on_a_device())
    assert len(peaks) == 6
    assert len(set(peaks[1:])) == 1


@pytest.mark.parametrize(
    ("frames", "lengths"), [(1, [1]), (2, [2]), (3, [3]), (4, [2, 2]), (5, [3, 2]), (13, [3] + 5 * [2])]
)
def test_any_number_of_frames_is_decoded_in_chunks(frames, lengths):
    chunk_lengths = SMALL.decode_lengths(frames)
    assert [len(part) for part in spans(frames, chunk_lengths)] == lengths
    assert chunk_count(frames, chunk_lengths) == len(lengths)


def test_clips_of_many_lengths_share_their_programs():
    assert {SMALL.encode_lengths(frames) for frames in (9, 17, 49, 81)} == {(9, 8)}
    assert {SMALL.decode_lengths(frames) for frames in (3, 5, 13, 21)} == {(3, 2)}
    assert (SMALL.encode_lengths(1), SMALL.encode_lengths(13)) == ((1, 8), (13, 8))


@pytest.mark.parametrize("method", quick(["encode_chunk"], ["encode_chunk", "decode_chunk"]))
def test_cached_frames_keep_their_shape_and_dtype(method):
    """The first chunk has its own program; all other chunks share one, on TPUs too."""
    first, later, channels = (9, 8, 3) if method == "encode_chunk" else (3, 2, 4)

    def chunks(x):
        make_vae = CogVideoXVAE(SMALL, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
        caches = [None]
        for part in spans(x.shape[1], (first, later)):
            caches.append(getattr(make_vae, method)(x[:, part.start : part.stop], caches[-1])[1])
        return caches[1:]

    device = AbstractDevice("TPU v6 lite", 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("chips",), abstract_device=device)):
        shape = (1, first + 2 * later, 8, 8, channels)
        cache_shapes = jax.eval_shape(chunks, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert {x.dtype for x in jax.tree.leaves(cache_shapes)} == {jnp.dtype(jnp.bfloat16)}
    assert cache_shapes[0] == cache_shapes[1] == cache_shapes[2]


apply_norm = jax.jit(lambda norm, x: norm(x))


@pytest.mark.parametrize(("mean", "bound"), [(0, 1e-6), (3, 2e-6), (30, 1e-4)])
def test_group_norm_is_precise(mean, bound):
    """The norm takes one pass, also over numbers whose mean is much larger than their deviation."""
    x = np.random.default_rng(0).normal(mean, 1, (1, 4, 96, 170, 8)).astype(np.float32)
    norm = GroupNorm(8, 2, 1e-6, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    groups = x.astype(np.float64).reshape(1, -1, 2, 4)
    centred = groups - groups.mean(axis=(1, 3), keepdims=True)
    exact = (centred / np.sqrt(centred.var(axis=(1, 3), keepdims=True) + 1e-6)).reshape(x.shape)
    relative_error = error(apply_norm(norm, x), exact)
    print(f"mean {mean}: relative error {relative_error:.1e}")
    assert relative_error <= bound
