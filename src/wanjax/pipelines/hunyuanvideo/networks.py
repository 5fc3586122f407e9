# SPDX-License-Identifier: Apache-2.0
"""The networks of HunyuanVideo's checkpoints."""

from wanjax.checkpoints.network_kinds import NetworkKind
from wanjax.converters.hunyuanvideo import diffusers
from wanjax.converters.hunyuanvideo.original import LORA
from wanjax.models.hunyuanvideo.config import TransformerConfig
from wanjax.models.hunyuanvideo.transformer import HunyuanVideoTransformer
from wanjax.models.hunyuanvideo.vae import HunyuanVideoVAE
from wanjax.models.hunyuanvideo.vae_config import VAEConfig
from wanjax.pipelines.text.encoders import QWEN2_VL, SIGLIP_VISION, T5

NETWORKS = (
    QWEN2_VL,
    T5,
    SIGLIP_VISION,
    NetworkKind(
        classes=("HunyuanVideo15Transformer3DModel",),
        read=diffusers.transformer_config,
        modules={TransformerConfig: HunyuanVideoTransformer},
        rules=diffusers.transformer_rules,
        lora_names=LORA,
    ),
    NetworkKind(
        classes=("AutoencoderKLHunyuanVideo15",),
        read=diffusers.vae_config,
        modules={VAEConfig: HunyuanVideoVAE},
        rules=diffusers.vae_rules,
        float32=True,
    ),
)
