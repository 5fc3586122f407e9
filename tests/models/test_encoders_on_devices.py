# SPDX-License-Identifier: Apache-2.0
"""Text and image encoders give the same features on eight devices as on one."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.compare import error
from tests.support.devices import on_meshes
from tests.support.small_wan import network, partitioner
from wanjax.layers.placement import as_shapes, axes_of
from wanjax.models.qwen2_vl import QWEN2_5_VL_7B, Qwen2VLEncoder
from wanjax.models.siglip import SIGLIP_SO400M, SiglipVision
from wanjax.models.t5 import GLYPH_BYT5, T5Encoder
from wanjax.sharding import use_partitioner

BOUND = 1e-5
QWEN = replace(QWEN2_5_VL_7B, vocab_size=80, width=112, layers=2, mlp_dim=96)  # 28 heads, 4 of keys
BYT5 = replace(GLYPH_BYT5, vocab_size=80, width=36, head_dim=8, mlp_dim=64, layers=2)  # 6 heads
SIGLIP = replace(SIGLIP_SO400M, layers=2, width=96, mlp_dim=80, image_size=38, patch=7)  # 25 tokens
TOKENS = np.random.default_rng(0).integers(3, 80, (2, 27))
MASK = np.arange(27)[None] < np.array([[27], [11]])
PIXELS = np.random.default_rng(1).normal(size=(2, 38, 38, 3)).astype(np.float32)
ENCODERS = {
    "qwen": (partial(Qwen2VLEncoder, QWEN), (TOKENS,)),
    "byt5": (partial(T5Encoder, BYT5), (TOKENS, MASK)),
    "siglip": (partial(SiglipVision, SIGLIP), (PIXELS,)),
}


@cache
def encode(name, axes=None, rules="fsdp"):
    """Return the features at the real tokens."""
    make, arguments = ENCODERS[name]
    devices = partitioner(axes, rules)
    graphdef, weights = nnx.split(network(make, devices))

    def run(weights, *arguments):
        with use_partitioner(devices):
            return nnx.merge(graphdef, weights)(*arguments)

    features = jax.jit(run)(weights, *map(jnp.asarray, arguments))
    assert devices.is_single_device or len(features.sharding.device_set) == 8
    return np.asarray(features)[MASK if name == "byt5" else ...]


@pytest.mark.parametrize(("axes", "rules"), on_meshes(((1, 1, 8), "fsdp"), ((2, 2, 2), "tp")))
@pytest.mark.parametrize("name", ENCODERS)
def test_eight_devices_encode_as_one(name, axes, rules):
    one_device = encode(name).astype(np.float64)
    relative_error = error(encode(name, axes, rules), one_device)
    print(f"relative error {relative_error:.1e}")
    assert relative_error <= BOUND


@pytest.mark.parametrize("name", ENCODERS)
def test_every_weight_names_each_of_its_axes(name):
    make, _ = ENCODERS[name]
    abstract = as_shapes(lambda rngs: make(dtype=jnp.float32, param_dtype=jnp.bfloat16, rngs=rngs))
    for path, weight in nnx.to_flat_state(nnx.state(abstract)):
        axes, shape = axes_of(weight), weight.get_value().shape
        assert len(axes) == len(shape), path
        assert (axes[0] == "layers") == (path[0] == "blocks"), path
