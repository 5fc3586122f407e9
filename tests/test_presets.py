# SPDX-License-Identifier: Apache-2.0
"""The published models at their real sizes, as shapes alone: parameters, keys of the checkpoints, defaults."""

import hashlib
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.published import Keys, text_encoder_keys, transformer_keys, vae_keys
from wanjax.checkpoint import Spec
from wanjax.converters import engine, t5, wan
from wanjax.errors import WanjaxError
from wanjax.models.t5 import UMT5_XXL, T5Encoder
from wanjax.models.wan.config import I2V_A14B, T2V_1_3B, T2V_14B, TI2V_5B, VAE_2_1, VAE_2_2
from wanjax.models.wan.residual_vae import WanResidualVAE
from wanjax.models.wan.transformer import WanTransformer
from wanjax.models.wan.vae import WanVAE
from wanjax.pipelines.text import TEXT_LENGTH
from wanjax.registry import NANO, PRESETS
from wanjax.sources import read_json


class Published(NamedTuple):
    """A network, the table of its weights, what its checkpoint holds, and how many parameters that is."""

    make: Callable[..., nnx.Module]
    rules: list[engine.Rule]
    keys: Keys
    parameters: int


NANO_TRANSFORMER = wan.transformer_config(read_json(NANO / "transformer" / "config.json"))
NETWORKS = {
    "nano": Published(
        partial(WanTransformer, NANO_TRANSFORMER),
        wan.transformer_rules(NANO_TRANSFORMER),
        transformer_keys(NANO_TRANSFORMER),
        2_380_032,
    ),
    "wan2.1-t2v-1.3b": Published(
        partial(WanTransformer, T2V_1_3B), wan.transformer_rules(T2V_1_3B), transformer_keys(T2V_1_3B), 1_418_996_800
    ),
    "wan2.1-t2v-14b": Published(
        partial(WanTransformer, T2V_14B), wan.transformer_rules(T2V_14B), transformer_keys(T2V_14B), 14_288_491_584
    ),
    "wan2.2-t2v-a14b": Published(
        partial(WanTransformer, T2V_14B), wan.transformer_rules(T2V_14B), transformer_keys(T2V_14B), 14_288_491_584
    ),
    "wan2.2-i2v-a14b": Published(
        partial(WanTransformer, I2V_A14B), wan.transformer_rules(I2V_A14B), transformer_keys(I2V_A14B), 14_288_901_184
    ),
    "wan2.2-ti2v-5b": Published(
        partial(WanTransformer, TI2V_5B), wan.transformer_rules(TI2V_5B), transformer_keys(TI2V_5B), 4_999_787_712
    ),
    "umt5-xxl": Published(
        partial(T5Encoder, UMT5_XXL), t5.t5_rules(UMT5_XXL), text_encoder_keys(UMT5_XXL), 5_680_910_336
    ),
    "wan2.1-vae": Published(partial(WanVAE, VAE_2_1), wan.vae_rules(VAE_2_1), vae_keys(VAE_2_1), 126_892_531),
    "wan2.2-vae": Published(partial(WanResidualVAE, VAE_2_2), wan.vae_rules(VAE_2_2), vae_keys(VAE_2_2), 704_688_668),
}


@cache
def weights(name: str) -> dict[str, Any]:
    make = NETWORKS[name].make
    return engine.parameters(
        nnx.eval_shape(lambda: make(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    )


def checkpoint(name: str) -> dict[str, Spec]:
    return {key: Spec(shape, np.dtype(jnp.bfloat16)) for key, shape in NETWORKS[name].keys.items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_as_many_parameters_as_published(name):
    published = NETWORKS[name]
    assert sum(math.prod(shape) for shape in published.keys.values()) == published.parameters
    assert sum(weight.size for weight in weights(name).values()) == published.parameters


@pytest.mark.parametrize("name", NETWORKS)
def test_every_key_of_the_checkpoint_is_mapped(name):
    sources = checkpoint(name)
    fills = engine.plan(NETWORKS[name].rules, sources, weights(name))
    assert sorted(key for fill in fills for key in fill.sources) == sorted(sources)
    assert {fill.target for fill in fills} == weights(name).keys()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_key_too_many_or_too_few_is_told(name):
    sources = checkpoint(name)
    key = list(sources)[len(sources) // 2]
    for wrong in ({k: v for k, v in sources.items() if k != key}, sources | {f"{key}.other": sources[key]}):
        with pytest.raises(WanjaxError, match=key.rsplit(".", 1)[-1]):
            engine.plan(NETWORKS[name].rules, wrong, weights(name))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_its_parameters(name):
    assert PRESETS[name].transformer_parameters == NETWORKS[name].parameters


@pytest.mark.parametrize(
    ("name", "source", "size"),
    [
        ("wan2.1-t2v-1.3b", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", (480, 832)),
        ("wan2.1-t2v-14b", "Wan-AI/Wan2.1-T2V-14B-Diffusers", (720, 1280)),
    ],
)
def test_defaults_are_those_of_the_authors(name, source, size):
    preset, defaults = PRESETS[name], PRESETS[name].defaults
    assert (preset.name, defaults.model, preset.source, preset.licence) == (name, name, source, "Apache-2.0")
    assert (defaults.size, defaults.frames, defaults.fps) == (size, 81, 16)
    assert (defaults.steps, defaults.guidance_scale, defaults.flow_shift, defaults.sigmas) == (50, 5.0, 5.0, "official")
    assert TEXT_LENGTH == 512
    negative = hashlib.sha256(defaults.negative_prompt.encode()).hexdigest()
    assert negative == "ce96e0324e4b54ce4b6e867f669ca520952e1a34cc116543516b1897f0d3c47e"
