# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's transformer gives the same prediction on eight devices as on one."""

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
from wanjax.kernels.autodiff import forward_only
from wanjax.models.cogvideox.config import T2V_1_5_5B, T2V_2B
from wanjax.models.cogvideox.transformer import CogVideoXTransformer
from wanjax.sharding import use_partitioner

TEXT, LATENTS = 7, {"1.5": (4, 6, 10), "2b": (2, 6, 10)}  # 30 tokens of video and 7 of text: no axis divides 37
SMALL = {"layers": 2, "head_dim": 16, "channels_in": 4, "channels_out": 4, "text_width": 8, "time_width": 12}
CONFIGS = {
    "1.5": replace(T2V_1_5_5B, heads=4, text_length=TEXT, **SMALL),
    "2b": replace(T2V_2B, heads=3, text_length=TEXT, **SMALL),  # no axis divides the heads either
}


@cache
def predict(name, axes=None, rules="fsdp", length=TEXT):
    """Return the prediction from the first `length` tokens of the prompts."""
    devices = partitioner(axes, rules)
    model = network(partial(CogVideoXTransformer, CONFIGS[name]), devices)
    for norm in (model.blocks.attn.q_norm, model.blocks.attn.k_norm):
        norm.scale.set_value(20 * norm.scale.get_value())  # so that a few keys have most of the attention
    graphdef, weights = nnx.split(model)
    random = np.random.default_rng(1)
    latents, text = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((2, *LATENTS[name], 4), (2, TEXT, 8)))

    def run(weights, latents, t, text):
        with use_partitioner(devices), forward_only():  # as a step runs
            model = nnx.merge(graphdef, weights)
            context = model.context(text)
            return model(latents, t, context, model.positions(model.grid(latents), context.text.shape[1]))

    prediction = jax.jit(run)(weights, latents, jnp.array([999.0, 137.0]), text[:, :length])
    assert devices.is_single_device or len(prediction.sharding.device_set) == 8
    return np.asarray(prediction)


QUICK = {
    "1.5": (((2, 1, 4), "fsdp"), ((1, 4, 2), "tp")),
    "2b": (((1, 8, 1), "tp"),),
}
CASES = [
    pytest.param(name, *pair.values, marks=pair.marks) for name, quick in QUICK.items() for pair in on_meshes(*quick)
]


@pytest.mark.parametrize(("name", "axes", "rules"), CASES)
def test_eight_devices_predict_as_one(name, axes, rules):
    relative_error = error(predict(name, axes, rules), predict(name).astype(np.float64))
    print(f"{relative_error:.1e}")
    assert relative_error <= 1e-5


def test_the_comparison_detects_a_missing_token():
    assert error(predict("2b", length=TEXT - 1), predict("2b").astype(np.float64)) > 1e-3
