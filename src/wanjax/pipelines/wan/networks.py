# SPDX-License-Identifier: Apache-2.0
"""The networks of Wan's checkpoints."""

from wanjax.checkpoints.networks import NetworkKind
from wanjax.converters import clip, t5
from wanjax.converters.wan import diffusers
from wanjax.converters.wan.original import TRANSFORMER as AUTHORS_NAMES
from wanjax.models.clip import CLIPVision, CLIPVisionConfig
from wanjax.models.t5 import T5Config, T5Encoder
from wanjax.models.wan.config import (
    ControlTransformerConfig,
    ImageTransformerConfig,
    ResidualVAEConfig,
    TransformerConfig,
    VAEConfig,
)
from wanjax.models.wan.control import WanControlTransformer
from wanjax.models.wan.image import WanImageTransformer
from wanjax.models.wan.residual_vae import WanResidualVAE
from wanjax.models.wan.transformer import WanTransformer
from wanjax.models.wan.vae import WanVAE

NETWORKS = (
    NetworkKind(
        classes=("T5EncoderModel", "UMT5EncoderModel"),
        read=t5.t5_config,
        modules={T5Config: T5Encoder},
        rules=t5.t5_rules,
    ),
    NetworkKind(
        classes=("CLIPVisionModel",),
        read=clip.clip_config,
        modules={CLIPVisionConfig: CLIPVision},
        rules=clip.clip_rules,
        float32=True,
        unused=clip.clip_unused,
    ),
    NetworkKind(
        classes=("WanTransformer3DModel", "WanVACETransformer3DModel"),
        read=diffusers.transformer_config,
        modules={
            TransformerConfig: WanTransformer,
            ImageTransformerConfig: WanImageTransformer,
            ControlTransformerConfig: WanControlTransformer,
        },
        rules=diffusers.transformer_rules,
        lora_names=AUTHORS_NAMES,
    ),
    NetworkKind(
        classes=("AutoencoderKLWan",),
        read=diffusers.vae_config,
        modules={VAEConfig: WanVAE, ResidualVAEConfig: WanResidualVAE},
        rules=diffusers.vae_rules,
        float32=True,
    ),
)
