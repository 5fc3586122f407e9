# SPDX-License-Identifier: Apache-2.0
"""The networks of Wan's checkpoints."""

from wanjax.checkpoints.network_kinds import NetworkKind
from wanjax.converters.wan import animate, diffusers, pose
from wanjax.converters.wan.original import TRANSFORMER as AUTHORS_NAMES
from wanjax.models.wan.animate import WanAnimateTransformer
from wanjax.models.wan.causal import WanCausalTransformer
from wanjax.models.wan.config import (
    AnimateTransformerConfig,
    CausalTransformerConfig,
    ControlTransformerConfig,
    ImageTransformerConfig,
    PoseTransformerConfig,
    ResidualVAEConfig,
    TransformerConfig,
    VAEConfig,
)
from wanjax.models.wan.control import WanControlTransformer
from wanjax.models.wan.image import WanImageTransformer
from wanjax.models.wan.pose import WanPoseTransformer
from wanjax.models.wan.residual_vae import WanResidualVAE
from wanjax.models.wan.transformer import WanTransformer
from wanjax.models.wan.vae import WanVAE
from wanjax.pipelines.text.encoders import CLIP_VISION, T5

FULL_PRECISION = {
    "patch_embed": "the first projection",
    "proj_out": "the last projection",
    "time_embed.*": "the embedding of the timestep",
    "time_proj": "the modulation by the timestep",
    "text_embed.*": "the projection of the text",
    "image_embed.*": "the projection of the image",
    "control_embed": "the first projection of a control clip",
    "control_in": "the projection of a control clip",
    "pose_embed": "the first projection of a pose clip",
    "face_*": "the projections of the face",
    "*.proj_l": "the projection of linear attention",
}
"""The projections of Wan's transformers that are never quantized."""

NETWORKS = (
    T5,
    CLIP_VISION,
    NetworkKind(
        classes=("WanTransformer3DModel", "WanVACETransformer3DModel", "CausalWanTransformer3DModel"),
        read=diffusers.transformer_config,
        modules={
            TransformerConfig: WanTransformer,
            ImageTransformerConfig: WanImageTransformer,
            ControlTransformerConfig: WanControlTransformer,
            CausalTransformerConfig: WanCausalTransformer,
        },
        rules=diffusers.transformer_weight_rules,
        unused=diffusers.transformer_unused,
        lora_names=AUTHORS_NAMES,
        full_precision=FULL_PRECISION,
    ),
    NetworkKind(
        classes=(animate.TRANSFORMER_CLASS,),
        read=animate.transformer_config,
        modules={AnimateTransformerConfig: WanAnimateTransformer},
        rules=animate.transformer_weight_rules,
        lora_names=animate.LORA_NAMES,
        full_precision=FULL_PRECISION,
    ),
    NetworkKind(
        classes=(pose.TRANSFORMER_CLASS,),
        read=pose.transformer_config,
        modules={PoseTransformerConfig: WanPoseTransformer},
        rules=pose.transformer_weight_rules,
        lora_names=pose.NAMES,
        full_precision=FULL_PRECISION,
    ),
    NetworkKind(
        classes=("AutoencoderKLWan",),
        read=diffusers.vae_config,
        modules={VAEConfig: WanVAE, ResidualVAEConfig: WanResidualVAE},
        rules=diffusers.vae_weight_rules,
        float32=True,
    ),
)
