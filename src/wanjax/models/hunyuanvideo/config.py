# SPDX-License-Identifier: Apache-2.0
"""The config class of HunyuanVideo 1.5's diffusion transformer, and the configs of the published checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from wanjax.layers.flops import attention_flops, linear_flops


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a dual-stream diffusion transformer (HunyuanVideo 1.5 Technical Report, 2025).

    A latent position is a token.

    Attributes:
        glyph_width: The width of the features of glyphs, which are quoted text that the video shows.
        image_width: The width of the features of a picture.
        rope_channels: The channels of a head that RoPE rotates by frame, row and column.
        uses_meanflow: Whether the network also takes the timestep at which a step ends.
        target_size: The square root of the area of the model's videos, in pixels.
    """

    layers: int
    refiner_layers: int
    heads: int
    head_dim: int
    mlp_dim: int
    refiner_mlp_dim: int
    channels_in: int
    channels_out: int
    text_width: int
    glyph_width: int
    glyph_mlp_dim: int
    image_width: int
    frequency_dim: int
    rope_channels: tuple[int, int, int]
    rope_theta: float
    eps: float
    uses_meanflow: bool
    target_size: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


SIZE_480P = TransformerConfig(
    layers=54,
    refiner_layers=2,
    heads=16,
    head_dim=128,
    mlp_dim=8192,
    refiner_mlp_dim=8192,
    channels_in=65,
    channels_out=32,
    text_width=3584,
    glyph_width=1472,
    glyph_mlp_dim=2048,
    image_width=1152,
    frequency_dim=256,
    rope_channels=(16, 56, 56),
    rope_theta=256.0,
    eps=1e-6,
    uses_meanflow=False,
    target_size=640,
)
"""The config of the networks for text to video and image to video at 480p, with and without distilled guidance."""
SIZE_720P = replace(SIZE_480P, target_size=960)
"""The config of the networks for text to video and image to video at 720p, with and without distilled guidance."""
FEW_STEPS_480P = replace(SIZE_480P, uses_meanflow=True)
"""The config of the network for image to video at 480p in eight or twelve steps."""


def forward_flops(
    config: TransformerConfig, *, video_tokens: int, prompt_tokens: int, other_tokens: int
) -> Mapping[str, int]:
    """Count the operations of one forward pass for one video and its text, by part of the transformer.

    A multiplication and an addition are two operations. Only matrix products count, not operations that the compiler
    adds. Computations on the text that are the same in every step are not counted.

    `video_tokens` and `prompt_tokens` are the numbers of tokens of the video and of the prompt. `other_tokens` is the
    number of tokens of glyphs and of a picture together.
    """
    width, tokens = config.width, video_tokens + prompt_tokens + other_tokens
    time = linear_flops(1, config.frequency_dim, width) + linear_flops(1, width, width)
    refiner = 4 * linear_flops(prompt_tokens, width, width) + attention_flops(prompt_tokens, prompt_tokens, width)
    refiner += 2 * linear_flops(prompt_tokens, width, config.refiner_mlp_dim) + linear_flops(1, width, 2 * width)
    return {
        "attention": config.layers * (4 * linear_flops(tokens, width, width) + attention_flops(tokens, tokens, width)),
        "mlp": config.layers * 2 * linear_flops(tokens, width, config.mlp_dim),
        "modulation": config.layers * 2 * linear_flops(1, width, 6 * width) + linear_flops(1, width, 2 * width),
        "refiner": config.refiner_layers * refiner + time,
        "embeddings": linear_flops(video_tokens, config.channels_in, width) + (2 if config.uses_meanflow else 1) * time,
        "output": linear_flops(video_tokens, width, config.channels_out),
    }
