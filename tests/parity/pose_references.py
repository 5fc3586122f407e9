# SPDX-License-Identifier: Apache-2.0
"""Small random networks of Wan Animate."""

from typing import Any

import torch
from diffusers import WanAnimateTransformer3DModel

from tests.parity.references import randomise

SIZES: dict[str, Any] = {
    "num_attention_heads": 3, "attention_head_dim": 32, "text_dim": 48, "freq_dim": 128, "ffn_dim": 250,
    "num_layers": 4, "inject_face_latents_blocks": 2, "image_dim": 64, "added_kv_proj_dim": 96,
    "motion_encoder_size": 32, "motion_encoder_channel_sizes": {"32": 10, "16": 14, "8": 18, "4": 12},
    "motion_style_dim": 24, "motion_dim": 6, "motion_encoder_dim": 20, "face_encoder_hidden_dim": 28,
    "face_encoder_num_heads": 3,
}  # fmt: skip


@torch.no_grad()
def pose_transformer(seed: int = 0, **sizes: Any) -> Any:
    """Return a small random transformer in which the mask, the pose and the face affect the result."""
    torch.manual_seed(seed)
    network: Any = WanAnimateTransformer3DModel(**SIZES | sizes).eval()
    randomise(network, seed)
    for layer in network.motion_encoder.modules():  # the layer divides by the root of the fan-in
        if hasattr(layer, "scale") and hasattr(layer, "weight"):
            layer.weight.copy_(torch.randn(layer.weight.shape))
    for block in network.blocks:  # random MLPs would stay in the linear range of their GELU
        block.ffn.net[0].proj.weight.mul_(3)
    for adapter in network.face_adapter:  # even attention would hide errors
        adapter.norm_q.weight.mul_(2)
        adapter.norm_k.weight.mul_(2)
        adapter.to_out.weight.mul_(3)
    network.patch_embedding.weight[:, 16:20].mul_(3)  # the mask
    network.pose_patch_embedding.weight.mul_(3)
    network.proj_out.weight.mul_(3)
    return network
