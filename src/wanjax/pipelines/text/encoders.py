# SPDX-License-Identifier: Apache-2.0
"""The text and image encoders that several families use."""

from wanjax.checkpoints.network_kinds import NetworkKind
from wanjax.converters import clip, qwen2_vl, siglip, t5
from wanjax.models.clip import CLIPVision, CLIPVisionConfig
from wanjax.models.qwen2_vl import Qwen2VLConfig, Qwen2VLEncoder
from wanjax.models.siglip import SiglipVision, SiglipVisionConfig
from wanjax.models.t5 import T5Config, T5Encoder

T5 = NetworkKind(
    classes=("T5EncoderModel", "UMT5EncoderModel"),
    read=t5.t5_config,
    modules={T5Config: T5Encoder},
    rules=t5.t5_weight_rules,
)
QWEN2_VL = NetworkKind(
    classes=("Qwen2_5_VLTextModel",),
    read=qwen2_vl.qwen2_vl_config,
    modules={Qwen2VLConfig: Qwen2VLEncoder},
    rules=qwen2_vl.qwen2_vl_weight_rules,
    unused=qwen2_vl.qwen2_vl_unused,
)
CLIP_VISION = NetworkKind(
    classes=("CLIPVisionModelWithProjection", "CLIPVisionModel"),  # published files use the first prefix
    read=clip.clip_config,
    modules={CLIPVisionConfig: CLIPVision},
    rules=clip.clip_weight_rules,
    float32=True,
    unused=clip.clip_unused,
)
SIGLIP_VISION = NetworkKind(
    classes=("SiglipVisionModel",),
    read=siglip.siglip_config,
    modules={SiglipVisionConfig: SiglipVision},
    rules=siglip.siglip_weight_rules,
    unused=siglip.siglip_unused,
)
