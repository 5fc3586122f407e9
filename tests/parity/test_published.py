# SPDX-License-Identifier: Apache-2.0
"""The lists of keys and the presets, against what diffusers and transformers build for the real configs."""

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from tests.published import Keys, text_encoder_keys, transformer_keys, vae_keys
from wanjax.converters import wan
from wanjax.models.t5 import UMT5_XXL
from wanjax.models.wan.config import I2V_A14B, T2V_1_3B, T2V_14B, TI2V_5B, VAE_2_1, VAE_2_2

TRANSFORMERS = {
    "1.3B": (T2V_1_3B, {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}),
    "14B": (T2V_14B, {"num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824}),
    "2.2 I2V-A14B": (I2V_A14B, {"num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824, "in_channels": 36}),
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


def keys_of(reference: torch.nn.Module) -> Keys:
    return {key: tuple(weight.shape) for key, weight in reference.state_dict().items()}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer(name):
    config, sizes = TRANSFORMERS[name]
    with torch.device("meta"):
        reference = WanTransformer3DModel(**sizes)
    assert wan.transformer_config(reference.config) == config
    assert transformer_keys(config) == keys_of(reference)


@pytest.mark.parametrize("name", VAES)
def test_vae(name):
    config, sizes = VAES[name]
    with torch.device("meta"):
        reference = AutoencoderKLWan(**sizes)
    assert wan.vae_config(reference.config) == config
    assert vae_keys(config) == keys_of(reference)
    assert config.spatial_factor == reference.spatial_compression_ratio


def test_text_encoder():
    sizes = {"vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    with torch.device("meta"):
        reference = UMT5EncoderModel(UMT5Config(**sizes, feed_forward_proj="gated-gelu"))
    keys = keys_of(reference)
    assert keys.pop("encoder.embed_tokens.weight") == keys["shared.weight"]  # tied: the published file holds it once
    assert text_encoder_keys(UMT5_XXL) == keys
