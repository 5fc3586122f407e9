# SPDX-License-Identifier: Apache-2.0
"""The config class of HunyuanVideo 1.5's autoencoder, and the config of the published autoencoder."""

from dataclasses import dataclass

from wanjax.layers.tiling import Tiling


@dataclass(frozen=True)
class VAEConfig:
    """Sizes of a causal video autoencoder, and the scale of its latents.

    The first levels of the encoder halve height and width, as often as `spatial_factor` requires. The last of these
    levels also halve the number of frames.

    Attributes:
        channels: Channels of the encoder's levels. The decoder's levels have the same channels in reverse order.
        scale: The factor by which the encoder's means are multiplied to get latents.
        max_latent_frames: The maximum number of latent frames of a video. The cache of the attention has this size.
    """

    channels: tuple[int, ...]
    res_blocks: int
    latent_channels: int
    spatial_factor: int
    temporal_factor: int
    scale: float
    max_latent_frames: int

    @property
    def patch(self) -> int:
        """Pixels along the side of a patch: 1, because the convolutions work on pixels."""
        return 1

    @property
    def tiling(self) -> Tiling:
        """The reference's tile size, for frames too large for memory."""
        return Tiling(256, 192)

    @property
    def num_halving_levels(self) -> tuple[int, int]:
        """The number of levels that halve height and width, and the number that also halve the number of frames."""
        return self.spatial_factor.bit_length() - 1, self.temporal_factor.bit_length() - 1

    @property
    def longest_video(self) -> int:
        """The maximum number of frames of a video."""
        return 1 + (self.max_latent_frames - 1) * self.temporal_factor

    def encode_lengths(self, frames: int) -> tuple[int, int]:
        """Return the number of frames in the first chunk to encode and in each later chunk."""
        return 1, self.temporal_factor

    def decode_lengths(self, frames: int) -> tuple[int, int]:
        """Return the number of latent frames in the first chunk to decode and in each later chunk."""
        return 1, 1


VAE_1_5 = VAEConfig(
    channels=(128, 256, 512, 1024, 1024),
    res_blocks=2,
    latent_channels=32,
    spatial_factor=16,
    temporal_factor=4,
    scale=1.03682,
    max_latent_frames=33,
)
