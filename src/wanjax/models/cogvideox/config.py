# SPDX-License-Identifier: Apache-2.0
"""The config class of CogVideoX's diffusion transformer, and the configs of the published checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from wanjax.layers.flops import attention_flops, linear_flops

Grid = tuple[int, int, int]  # patches along frames, height and width


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a diffusion transformer (Yang et al., CogVideoX, 2024).

    A model encodes positions by RoPE, by embeddings that are added to the tokens, or by both.

    Attributes:
        rotary: The positions for RoPE: `counted` for 0, 1, 2 and so on, or `resized` for positions that are scaled to
            the grid of the training videos. None means no RoPE.
        added: The kind of position embeddings that are added to the tokens: `sinusoids`, a `learned` table, or None.
        trained_grid: The grid of the training videos; None if the positions do not depend on it.
        position_scales: The numbers by which the positions of sinusoids are divided, for frames, height and width.
        offset_width: The width of the embedding of a constant offset, which is added to the timestep's embedding. None
            if there is no offset.
    """

    layers: int
    heads: int
    head_dim: int
    channels_in: int
    channels_out: int
    patch: tuple[int, int, int]
    text_width: int
    text_length: int
    time_width: int
    offset_width: int | None
    eps: float
    rotary: Literal["counted", "resized"] | None
    added: Literal["sinusoids", "learned"] | None
    trained_grid: Grid | None
    position_scales: tuple[float, float, float]

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def mlp_dim(self) -> int:
        return 4 * self.width

    @property
    def patch_volume(self) -> int:
        """The number of latent positions in a patch."""
        return prod(self.patch)

    @property
    def rope_channels(self) -> tuple[int, int, int]:
        """Channels of a head that RoPE rotates by frame, row and column: 16, 24 and 24 of 64."""
        spatial = 3 * self.head_dim // 8
        return self.head_dim - 2 * spatial, spatial, spatial


T2V_1_5_5B = TransformerConfig(
    layers=42,
    heads=48,
    head_dim=64,
    channels_in=16,
    channels_out=16,
    patch=(2, 2, 2),
    text_width=4096,
    text_length=226,
    time_width=512,
    offset_width=None,
    eps=1e-5,
    rotary="counted",
    added=None,
    trained_grid=None,
    position_scales=(1.0, 1.875, 1.875),
)
I2V_1_5_5B = replace(T2V_1_5_5B, channels_in=32, offset_width=512)
T2V_5B = replace(T2V_1_5_5B, patch=(1, 2, 2), rotary="resized", trained_grid=(13, 30, 45))
I2V_5B = replace(T2V_5B, channels_in=32, added="learned")
T2V_2B = replace(T2V_5B, layers=30, heads=30, rotary=None, added="sinusoids", trained_grid=None)


def forward_flops(config: TransformerConfig, *, video_tokens: int) -> Mapping[str, int]:
    """Count the operations of one forward pass for one video and its prompt, by part of the transformer.

    A multiplication and an addition are two operations. Only matrix products of real tokens count, not padding or
    operations that the compiler adds.

    `video_tokens` is the number of the video's tokens.
    """
    width, tokens, time = config.width, video_tokens + config.text_length, config.time_width
    embedding = linear_flops(1, width, time) + linear_flops(1, time, time)
    if config.offset_width is not None:
        embedding += 2 * linear_flops(1, config.offset_width, config.offset_width)
    return {
        "attention": config.layers * (4 * linear_flops(tokens, width, width) + attention_flops(tokens, tokens, width)),
        "mlp": config.layers * 2 * linear_flops(tokens, width, config.mlp_dim),
        "modulation": config.layers * linear_flops(1, time, 12 * width) + linear_flops(1, time, 2 * width),
        "embeddings": linear_flops(video_tokens, config.patch_volume * config.channels_in, width) + embedding,
        "output": linear_flops(video_tokens, width, config.patch_volume * config.channels_out),
    }
