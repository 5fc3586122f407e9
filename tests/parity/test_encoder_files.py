# SPDX-License-Identifier: Apache-2.0
"""The files of text and image encoders have the published sizes and names, and can be converted back."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch
from transformers import (
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

from tests.parity.encoder_references import qwen_reference, siglip_reference
from tests.parity.references import t5_reference
from wanjax.checkpoints import modules
from wanjax.checkpoints.convert import ConversionToDiffusers, ConversionToWanjax
from wanjax.checkpoints.files import SafetensorsFolder
from wanjax.checkpoints.network_kinds import network_of
from wanjax.converters import weight_rules
from wanjax.models.qwen2_vl import QWEN2_5_VL_7B
from wanjax.models.siglip import SIGLIP_SO400M
from wanjax.models.t5 import GLYPH_BYT5
from wanjax.pipelines.text.encoders import QWEN2_VL, SIGLIP_VISION, T5
from wanjax.registry import open_source

KINDS = (QWEN2_VL, SIGLIP_VISION, T5)
PUBLISHED = {  # the class, its config, wanjax's config, all parameters, and the used parameters
    "qwen": (
        Qwen2_5_VLTextModel,
        Qwen2_5_VLTextConfig(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        QWEN2_5_VL_7B,
        7_070_619_136,
        6_604_499_968,
    ),
    "siglip": (
        SiglipVisionModel,
        SiglipVisionConfig(
            hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, image_size=384,
            patch_size=14,
        ),
        SIGLIP_SO400M,
        428_225_600,
        412_987_248,
    ),
    "byt5": (
        T5EncoderModel,
        T5Config(
            vocab_size=1510, d_model=1472, d_kv=64, d_ff=3584, num_layers=12, num_heads=6,
            feed_forward_proj="gated-gelu",
        ),
        GLYPH_BYT5,
        219_314_944,
        219_314_944,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_encoders_have_the_published_sizes(name):
    model, settings, config, parameters, used = PUBLISHED[name]
    with torch.device("meta"):
        reference = model(settings)
    network = network_of(config, KINDS)
    assert network.kind.read(settings.to_dict()) == config
    specs = {key: jax.ShapeDtypeStruct(tuple(w.shape), jnp.bfloat16) for key, w in reference.state_dict().items()}
    targets = modules.parameters(network.abstract(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16))
    rules = weight_rules.assign(network.rules, specs, targets, ignore=network.unused)
    unused = {key for key in specs if any(fnmatchcase(key, pattern) for pattern in network.unused)}
    tied = {"encoder.embed_tokens.weight"} & specs.keys()
    assert {key for rule in rules for key in rule.sources} == specs.keys() - unused - tied
    assert sum(weight.numel() for weight in reference.parameters()) == parameters
    assert network.parameters == used == parameters - sum(specs[key].size for key in unused)


def tensors(folder: Path) -> dict[str, tuple]:
    """Return the dtype, the shape and the bytes of all tensors of a folder."""
    reader = SafetensorsFolder(folder)
    return {key: (*spec, reader.read(key).tobytes()) for key, spec in reader.specs.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_converted_encoders_can_be_converted_back(dtype, tmp_path):
    """All tensors return, also those that the encoders do not use."""
    source = tmp_path / "source"
    components = {
        "text_encoder": qwen_reference(),
        "text_encoder_2": t5_reference("t5"),
        "image_encoder": siglip_reference(),
    }
    for name, component in components.items():
        component.to(dtype).save_pretrained(source / name)
    index = {name: ["transformers", type(component).__name__] for name, component in components.items()}
    (source / "model_index.json").write_text(json.dumps({"_class_name": "SomePipeline", **index}))
    ConversionToWanjax(open_source(source), tmp_path / "converted", KINDS).run()
    assert (tmp_path / "converted" / "text_encoder" / "unused.safetensors").is_file()
    ConversionToDiffusers(open_source(tmp_path / "converted"), tmp_path / "converted_back", KINDS).run()
    for name in components:
        assert tensors(tmp_path / "converted_back" / name) == tensors(source / name)
