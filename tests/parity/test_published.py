# SPDX-License-Identifier: Apache-2.0
"""The lists of keys and the presets against the modules of diffusers and transformers with the published configs."""

from fnmatch import fnmatchcase

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel, WanVACETransformer3DModel
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection, UMT5Config, UMT5EncoderModel

from tests.support.published import TensorShapes, image_encoder_keys, text_encoder_keys, transformer_keys, vae_keys
from wanjax.converters import clip
from wanjax.converters.wan import diffusers as wan
from wanjax.models.clip import CLIP_VIT_H
from wanjax.models.t5 import UMT5_XXL
from wanjax.models.wan.config import (
    FLF2V_14B,
    I2V_14B,
    I2V_A14B,
    T2V_1_3B,
    T2V_14B,
    TI2V_5B,
    VACE_1_3B,
    VACE_14B,
    VAE_2_1,
    VAE_2_2,
)

SIZES_14B = {"num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824}
SIZES_I2V_14B = SIZES_14B | {"in_channels": 36, "out_channels": 16, "image_dim": 1280, "added_kv_proj_dim": 5120}
TRANSFORMERS = {
    "1.3B": (T2V_1_3B, {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}),
    "14B": (T2V_14B, SIZES_14B),
    "I2V 14B": (I2V_14B, SIZES_I2V_14B),
    "FLF2V 14B": (FLF2V_14B, SIZES_I2V_14B | {"pos_embed_seq_len": 514}),
    "2.2 I2V-A14B": (I2V_A14B, SIZES_14B | {"in_channels": 36}),
    "2.2 TI2V-5B": (
        TI2V_5B,
        {"num_layers": 30, "num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
    ),
}
VAES = {
    "2.1": (VAE_2_1, {}),
    "2.2": (
        VAE_2_2,
        {
            "base_dim": 160,
            "decoder_base_dim": 256,
            "z_dim": 48,
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_spatial": 16,
            "latents_mean": VAE_2_2.latents_mean,
            "latents_std": VAE_2_2.latents_std,
        },
    ),
}


def keys_of(reference: torch.nn.Module) -> TensorShapes:
    return {key: tuple(weight.shape) for key, weight in reference.state_dict().items()}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_published_transformers_have_the_keys_of_diffusers(name):
    config, sizes = TRANSFORMERS[name]
    with torch.device("meta"):
        reference = WanTransformer3DModel(**sizes)
    assert wan.transformer_config(reference.config) == config
    assert transformer_keys(config) == keys_of(reference)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (VACE_1_3B, {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960, "vace_layers": range(0, 30, 2)}),
        (VACE_14B, SIZES_14B),
    ],
    ids=["1.3B", "14B"],
)
def test_published_vace_transformers_have_the_keys_of_diffusers(config, sizes):
    with torch.device("meta"):
        reference = WanVACETransformer3DModel(**sizes)
    assert wan.transformer_config(reference.config) == config
    assert transformer_keys(config) == keys_of(reference)


@pytest.mark.parametrize("name", VAES)
def test_published_autoencoders_have_the_keys_of_diffusers(name):
    config, sizes = VAES[name]
    with torch.device("meta"):
        reference = AutoencoderKLWan(**sizes)
    assert wan.vae_config(reference.config) == config
    assert vae_keys(config) == keys_of(reference)
    assert config.spatial_factor == reference.spatial_compression_ratio


def test_the_published_text_encoder_has_the_keys_of_transformers():
    sizes = {"vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    with torch.device("meta"):
        reference = UMT5EncoderModel(UMT5Config(**sizes, feed_forward_proj="gated-gelu"))
    keys = keys_of(reference)
    assert keys.pop("encoder.embed_tokens.weight") == keys["shared.weight"]  # tied: the published file holds it once
    assert text_encoder_keys(UMT5_XXL) == keys


def test_the_published_image_encoder_has_the_keys_of_transformers():
    sizes = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
    with torch.device("meta"):
        reference = CLIPVisionModelWithProjection(
            CLIPVisionConfig(**sizes, image_size=224, patch_size=14, hidden_act="gelu", projection_dim=1024)
        )
    assert clip.clip_config(reference.config.to_dict()) == CLIP_VIT_H
    keys = keys_of(reference)
    unused = {key for key in keys if any(fnmatchcase(key, pattern) for pattern in clip.clip_unused(CLIP_VIT_H))}
    assert len(unused) == 16 + 2 + 1  # the last block, the last norm and the projection
    assert image_encoder_keys(CLIP_VIT_H) == {key: shape for key, shape in keys.items() if key not in unused}
