# SPDX-License-Identifier: Apache-2.0
"""The config of HunyuanVideo 1.5's autoencoder, and that of the published one."""

from dataclasses import dataclass

from wanjax.layers.tiling import Tiling


@dataclass(frozen=True)
class VAEConfig:
    """The sizes of a causal video autoencoder, and the scale of its latents.

    `channels` are those of the encoder's levels; the decoder's are the same, backwards. The first levels, as many as
    `spatial_factor` needs, halve height and width, and the last of these halve the number of frames too. `scale` makes
    latents of the encoder's means. `longest` is the largest number of latent frames of a video: the middle's attention
    keeps the keys and values of so many.
    """

    channels: tuple[int, ...]
    res_blocks: int
    latent_channels: int
    spatial_factor: int
    temporal_factor: int
    scale: float
    longest: int

    @property
    def patch(self) -> int:
        """Pixels along a cell: the convolutions see pixels."""
        return 1

    @property
    def tiling(self) -> Tiling:
        """The reference's tiles of frames that would not fit in memory."""
        return Tiling(256, 192)

    @property
    def halvings(self) -> tuple[int, int]:
        """The number of levels that halve height and width, and of those that also halve the number of frames."""
        return self.spatial_factor.bit_length() - 1, self.temporal_factor.bit_length() - 1

    @property
    def longest_video(self) -> int:
        """The largest number of frames of a video."""
        return 1 + (self.longest - 1) * self.temporal_factor

    def encode_lengths(self, frames: int) -> tuple[int, int]:
        """Frames in the first chunk to encode, and in each later one, for a clip of any number of frames."""
        return 1, self.temporal_factor

    def decode_lengths(self, frames: int) -> tuple[int, int]:
        """Latent frames in the first chunk to decode, and in each later one, for a clip of any number of them."""
        return 1, 1


VAE_1_5 = VAEConfig(
    channels=(128, 256, 512, 1024, 1024),
    res_blocks=2,
    latent_channels=32,
    spatial_factor=16,
    temporal_factor=4,
    scale=1.03682,
    longest=33,
)
