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

FULL_PRECISION = {
    "patch_embed": "the first projection",
    "proj_out": "the last projection",
    "*time_embed.*": "the embeddings of timesteps",
    "*mod": "the modulation by the timestep",
    "mod_out": "the modulation of the last projection",
    "refiner.*": "the refiner of the prompt",
    "glyph_embed.*": "the projection of quoted text",
    "image_embed.*": "the projection of the image",
}
"""The projections of HunyuanVideo's transformer that are never quantized."""

NETWORKS = (
    QWEN2_VL,
    T5,
    SIGLIP_VISION,
    NetworkKind(
        classes=("HunyuanVideo15Transformer3DModel",),
        read=diffusers.transformer_config,
        modules={TransformerConfig: HunyuanVideoTransformer},
        rules=diffusers.transformer_weight_rules,
        lora_names=LORA,
        full_precision=FULL_PRECISION,
    ),
    NetworkKind(
        classes=("AutoencoderKLHunyuanVideo15",),
        read=diffusers.vae_config,
        modules={VAEConfig: HunyuanVideoVAE},
        rules=diffusers.vae_weight_rules,
        float32=True,
    ),
)
