# SPDX-License-Identifier: Apache-2.0
"""All forms of the autoencoders' convolutions are equal, and TPU programs have the operands that TPUs are fast at."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from tests.support.quick import quick
from tests.support.small_wan import partitioner
from tests.support.tiny import VAE
from wanjax import load
from wanjax.converters.wan.diffusers import vae_config
from wanjax.execution import EXECUTE
from wanjax.kernels.target import Target
from wanjax.layers import conv
from wanjax.layers.conv import CausalConv, FrameConv, convolve_clip, stacked_taps, sum_of_taps
from wanjax.models.wan.residual_vae import WanResidualVAE
from wanjax.models.wan.vae import WanVAE
from wanjax.sharding import ONE_DEVICE_PARTITIONER, VIDEO_AXES, constrain, use_partitioner

FORMS = (convolve_clip, sum_of_taps, stacked_taps)
V6E = Target("tpu", "TPU v6 lite")
FLOAT32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}
SMALL = vae_config(VAE)
CHUNK_METHODS = [(vae, method) for vae in (WanVAE, WanResidualVAE) for method in ("encode_chunk", "decode_chunk")]


def for_tpu():
    """Trace for a TPU that need not be present."""
    device = AbstractDevice(V6E.device_kind, 1, "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("chips",), abstract_device=device))


def convolutions(function, *arguments):
    """Return the operands' dtypes and ranks of each convolution in a function."""
    equations = jax.make_jaxpr(function)(*arguments).jaxpr.eqns
    result = [equation for equation in equations if equation.primitive.name == "conv_general_dilated"]
    return [({v.aval.dtype.name for v in equation.invars}, equation.outvars[0].aval.ndim) for equation in result]


@given(st.sampled_from([1, 3]), st.sampled_from([1, 3]), st.sampled_from([1, 2]), st.integers(0, 4), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_all_forms_of_a_convolution_are_equal(taps, size, stride, more_frames, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, taps + stride * more_frames, 5, 4, 3)).astype(np.float32)
    kernel = rng.standard_normal((taps, size, size, 3, 6)).astype(np.float32)
    first, *rest = jax.jit(lambda x, kernel: [form(x, kernel, stride) for form in FORMS])(x, kernel)
    assert first.shape == (2, more_frames + 1, 5, 4, 6)
    for output in rest:
        np.testing.assert_allclose(first, output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(2, 4), (4, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_eight_devices_convolve_frames_smaller_than_the_kernel(form, size):
    """Two devices share the 2 rows or columns of the frames."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 3, *size, 4)).astype(np.float32)
    kernels = rng.standard_normal((2, 3, 3, 3, 4, 5)).astype(np.float32)

    def run(partitioner):
        def call(x, kernels):
            with use_partitioner(partitioner or ONE_DEVICE_PARTITIONER):
                first, second = (form(constrain(x, VIDEO_AXES), kernel, 1) for kernel in kernels)
                return constrain(first + second, VIDEO_AXES)

        return jax.jit(call)(x, kernels)

    sharded = run(partitioner((2, 2, 2)))
    assert len({str(shard.index) for shard in sharded.addressable_shards}) == 8
    np.testing.assert_allclose(sharded, run(None), rtol=1e-5, atol=1e-5)


def test_tpu_convolutions_fit_the_matrix_units():
    """A layer is one convolution. Its operands are rounded before they are cached, or are float32 at high precision."""
    x, tile = jnp.ones((1, 2, 4, 4, 3)), jnp.ones((1, 8, 4, 4, 3))
    causal, frames = CausalConv(3, 5, **FLOAT32, rngs=nnx.Rngs(0)), FrameConv(3, 5, **FLOAT32, rngs=nnx.Rngs(0))

    def convolve_twice(x):
        y, conv_cache = causal(x, None)
        assert y.dtype == frames(x).dtype == jnp.float32
        return conv_cache

    assert convolutions(convolve_twice, x) == [({"float32"}, 4)] * 4
    with for_tpu():
        assert convolutions(convolve_twice, x) == [({"bfloat16"}, 5), ({"bfloat16"}, 4)]
        assert jax.eval_shape(convolve_twice, x).dtype == jnp.bfloat16
        with jax.default_matmul_precision("highest"):
            assert convolutions(convolve_twice, x) == [({"float32"}, 5), ({"float32"}, 4)]
        assert convolutions(convolve_twice, tile) == [({"bfloat16"}, 4)] * 2  # frames fill a tile


@pytest.mark.parametrize(("vae_class", "method"), quick(CHUNK_METHODS[::3], CHUNK_METHODS))
def test_cached_frames_keep_their_shape_and_dtype(vae_class, method):
    """The first chunk has its own program; all other chunks share one, on TPUs too."""
    config = SMALL if vae_class is WanVAE else replace(SMALL, patch=2)
    cells = (16 // config.patch, 16 // config.patch, config.patch_channels)
    frames, shape = (4, cells) if method == "encode_chunk" else (1, (2, 2, 4))

    def chunks(x):
        vae = vae_class(config, **FLOAT32, rngs=nnx.Rngs(0))
        caches = [None]
        for first, count in ((0, 1), (1, frames), (1, frames)):
            caches.append(getattr(vae, method)(x[:, first : first + count], caches[-1])[1])
        return caches[1:]

    with for_tpu():
        first, second, third = jax.eval_shape(chunks, jax.ShapeDtypeStruct((1, 1 + frames, *shape), jnp.float32))
    assert {x.dtype for x in jax.tree.leaves(first)} == {jnp.dtype(jnp.bfloat16)}
    assert first == second == third


@pytest.mark.parametrize("frames", quick([1], [1, 5]))
def test_rounded_operands_are_invisible_in_frames(monkeypatch, frames):
    """The bundled model's frames with a TPU's rounding are within 60 dB of those in float32."""
    pipe = load("nano")
    latents = pipe.denoise(pipe.encode("a red circle moving right"), size=(32, 32), frames=frames, seed=0)
    exact = pipe.decode(latents, jnp.float32)
    monkeypatch.setattr(conv, "target", lambda x=None: V6E)
    EXECUTE.clear_programs()
    rounded = pipe.decode(latents, jnp.float32)
    EXECUTE.clear_programs()
    error = np.mean((np.asarray(rounded) - np.asarray(exact)) ** 2)
    assert 0 < error < 10 ** (-60 / 10)  # 60 dB
