# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's presets have the names, shapes and parameter counts of diffusers' modules with the published configs."""

import jax
import jax.numpy as jnp
import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from flax import nnx

from tests.support import published_configs as published
from wanjax.checkpoints.modules import parameters
from wanjax.converters.cogvideox.diffusers import transformer_config, transformer_weight_rules
from wanjax.converters.configs import read_config
from wanjax.converters.weight_rules import assign
from wanjax.errors import WanjaxError
from wanjax.layers.placement import as_shapes
from wanjax.models.cogvideox.config import I2V_1_5_5B, I2V_5B, T2V_1_5_5B, T2V_2B, T2V_5B
from wanjax.models.cogvideox.transformer import CogVideoXTransformer
from wanjax.pipelines.cogvideox.presets import PRESETS
from wanjax.schedulers.ddim import DDIM

CONFIG_1_0, CONFIG_1_5 = published.COGVIDEOX_5B, published.COGVIDEOX_1_5_5B
PUBLISHED = {
    "CogVideoX-2b": (T2V_2B, published.COGVIDEOX_2B, 1_693_783_872),
    "CogVideoX-5b": (T2V_5B, CONFIG_1_0, 5_570_283_072),
    "CogVideoX-5b-I2V": (I2V_5B, published.COGVIDEOX_5B_I2V, 5_570_479_680),
    "CogVideoX1.5-5B": (T2V_1_5_5B, CONFIG_1_5, 5_570_676_352),
    "CogVideoX1.5-5B-I2V": (I2V_1_5_5B, published.COGVIDEOX_1_5_5B_I2V, 5_571_594_880),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_shapes_and_parameter_counts_are_the_published_ones(name):
    config, json, count = PUBLISHED[name]
    with torch.device("meta"):
        reference = CogVideoXTransformer3DModel(**{key: x for key, x in json.items() if key[0] != "_"})
    assert transformer_config(json) == config == transformer_config(reference.config)
    abstract = as_shapes(
        lambda rngs: CogVideoXTransformer(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)
    )
    expected = {
        key: jax.ShapeDtypeStruct(tuple(weight.shape), jnp.bfloat16) for key, weight in reference.state_dict().items()
    }
    actual = parameters(abstract)
    assert {key for rule in assign(transformer_weight_rules(config), expected, actual) for key in rule.sources} == set(
        expected
    )
    positions = expected.get("patch_embed.pos_embedding")  # not a parameter in the reference
    assert sum(weight.numel() for weight in reference.parameters()) == count
    assert sum(x.size for x in jax.tree.leaves(nnx.state(abstract))) == count + (positions.size if positions else 0)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_presets_have_the_published_settings(preset):
    """A preset has the architecture, the parameters and both names of its repository."""
    name = preset.source.removeprefix("zai-org/")
    config, _, count = PUBLISHED[name]
    assert (preset.model.transformer, preset.transformer_parameters) == (config, count)
    assert preset.name == name.lower()
    assert preset.sources == (f"zai-org/{name}", f"THUDM/{name}")
    is_1_5 = "1.5" in name
    shape = (768, 1360, 81, 16) if is_1_5 else (480, 720, 49, 8)
    defaults = preset.defaults
    assert (*defaults.size, defaults.frames, defaults.fps, defaults.steps, defaults.guidance_scale) == (*shape, 50, 6.0)
    assert preset.model.scheduler == DDIM(snr_shift=3.0 if name == "CogVideoX-2b" else 1.0)


@pytest.mark.parametrize(
    ("json", "words"),
    [
        (
            CONFIG_1_0 | {"_class_name": "CogView3PlusTransformer2DModel"},
            "_class_name 'CogView3PlusTransformer2DModel'",
        ),
        (CONFIG_1_0 | {"patch_bias": False}, "patch_bias False, which is not supported: use True"),
        (CONFIG_1_0 | {"ofs_embed_dim": 512}, "ofs_embed_dim 512, which is not supported: use None"),
        (CONFIG_1_5 | {"patch_size_t": 4}, "patch_size_t 4, which is not supported: use None or 2"),
        (
            CONFIG_1_5 | {"use_rotary_positional_embeddings": False},
            "use_rotary_positional_embeddings False, which is not supported: use True",
        ),
        (
            CONFIG_1_5 | {"use_learned_positional_embeddings": True},
            "use_learned_positional_embeddings True, which is not supported: use False",
        ),
        (
            CONFIG_1_0 | {"use_rotary_positional_embeddings": False, "use_learned_positional_embeddings": True},
            "learned positions without rotary ones",
        ),
        ({key: value for key, value in CONFIG_1_0.items() if key != "num_layers"}, "no num_layers"),
        ({key: value for key, value in CONFIG_1_0.items() if key != "sample_height"}, "no sample_height"),
    ],
)
def test_other_configs_are_refused(json, words):
    with pytest.raises(WanjaxError, match=f"config.json has {words}"):
        read_config("the transformer's config.json", json, transformer_config)
