# SPDX-License-Identifier: Apache-2.0
"""The shapes of Wan's networks, and those of the published checkpoints."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a Wan diffusion transformer (Wan: Open and Advanced Large-Scale Video Generative Models, 2025)."""

    layers: int
    heads: int
    head_dim: int
    mlp_dim: int
    channels_in: int
    channels_out: int
    patch: tuple[int, int, int]
    text_width: int
    frequency_dim: int
    eps: float

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class VAEConfig:
    """Shape of a Wan 2.1 causal video autoencoder, and the statistics of its latents."""

    width: int
    latent_channels: int
    multipliers: tuple[int, ...]
    res_blocks: int
    temporal_downsample: tuple[bool, ...]
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    @property
    def spatial_factor(self) -> int:
        """Pixels to a latent cell, in height and in width."""
        return 2 ** len(self.temporal_downsample)

    @property
    def temporal_factor(self) -> int:
        """Frames to a latent frame, after the first."""
        return 2 ** sum(self.temporal_downsample)


T2V_14B = TransformerConfig(
    layers=40,
    heads=40,
    head_dim=128,
    mlp_dim=13824,
    channels_in=16,
    channels_out=16,
    patch=(1, 2, 2),
    text_width=4096,
    frequency_dim=256,
    eps=1e-6,
)
T2V_1_3B = replace(T2V_14B, layers=30, heads=12, mlp_dim=8960)

VAE_2_1 = VAEConfig(
    width=96,
    latent_channels=16,
    multipliers=(1, 2, 4, 4),
    res_blocks=2,
    temporal_downsample=(False, True, True),
    latents_mean=(
        *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
        *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    ),
    latents_std=(
        *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
        *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
    ),
)
