# SPDX-License-Identifier: Apache-2.0
"""The kinds of text and image encoders that families share."""

from wanjax.checkpoints.networks import NetworkKind
from wanjax.converters import clip, t5
from wanjax.models.clip import CLIPVision, CLIPVisionConfig
from wanjax.models.t5 import T5Config, T5Encoder

T5 = NetworkKind(
    classes=("T5EncoderModel", "UMT5EncoderModel"),
    read=t5.t5_config,
    modules={T5Config: T5Encoder},
    rules=t5.t5_rules,
)
CLIP_VISION = NetworkKind(
    classes=("CLIPVisionModel",),
    read=clip.clip_config,
    modules={CLIPVisionConfig: CLIPVision},
    rules=clip.clip_rules,
    float32=True,
    unused=clip.clip_unused,
)
