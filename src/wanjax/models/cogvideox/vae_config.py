# SPDX-License-Identifier: Apache-2.0
"""The config class of CogVideoX's autoencoder, and the configs of the published checkpoints."""

from dataclasses import dataclass, replace

from wanjax.layers.tiling import Tiling

# the number of frames in a chunk to encode, and of latent frames in a chunk to decode
ENCODE_CHUNK, DECODE_CHUNK = 8, 2


@dataclass(frozen=True)
class VAEConfig:
    """Sizes of a causal video autoencoder (CogVideoX, 2024), and the scale of its latents.

    Attributes:
        channels: Channels of the levels, from pixels to latents.
        latent_channels: Channels of latents.
        res_blocks: Residual blocks of an encoder level. A decoder level has one more residual block.
        groups: Groups of channels in a norm.
        temporal_factor: Frames per latent frame.
        sample_size: Height and width of the frames of the published model. The tile sizes depend on them.
        scaling_factor: The factor by which latents are multiplied for the transformer.
        invert_scale_latents: Whether the latents of an input picture are divided by `scaling_factor` instead.
    """

    channels: tuple[int, ...]
    latent_channels: int
    res_blocks: int
    groups: int
    temporal_factor: int
    sample_size: tuple[int, int]
    scaling_factor: float
    invert_scale_latents: bool

    @property
    def patch(self) -> int:
        """Pixels along the side of a patch: 1, because the convolutions work on pixels."""
        return 1

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent position, in height and in width."""
        return 2 ** (len(self.channels) - 1)

    @property
    def posterior_scale(self) -> float:
        """The factor that scales the posterior of encoded frames."""
        return self.scaling_factor

    @property
    def picture_scale(self) -> float:
        """The factor of an input picture's latents. CogVideoX 1.5 was trained with the inverse."""
        return 1 / self.scaling_factor if self.invert_scale_latents else self.scaling_factor

    @property
    def temporal_levels(self) -> int:
        """The first `temporal_levels` levels also change the number of frames."""
        return self.temporal_factor.bit_length() - 1

    @property
    def tiling(self) -> Tiling:
        """Tiles of half of `sample_size`, which overlap by a sixth of their height and a fifth of their width."""
        (height, width), factor = (side // 2 // self.spatial_factor for side in self.sample_size), self.spatial_factor
        return Tiling((height * factor, width * factor), (height * 5 // 6 * factor, width * 4 // 5 * factor))

    def encode_lengths(self, frames: int) -> tuple[int, int]:
        """Return the number of frames in the first chunk to encode and in each later chunk, for a clip of `frames`."""
        return _chunk_lengths(frames, ENCODE_CHUNK)

    def decode_lengths(self, frames: int) -> tuple[int, int]:
        """Return the number of latent frames in the first chunk to decode and in each later chunk, for a video of
        `frames` latent frames."""
        return _chunk_lengths(frames, DECODE_CHUNK)


def _chunk_lengths(frames: int, size: int) -> tuple[int, int]:
    """Return the length of the first chunk and of later chunks. The first chunk includes the remaining frames."""
    return min(frames, size + frames % size), size


VAE_5B = VAEConfig(
    channels=(128, 256, 256, 512),
    latent_channels=16,
    res_blocks=3,
    groups=32,
    temporal_factor=4,
    sample_size=(480, 720),
    scaling_factor=0.7,
    invert_scale_latents=False,
)
VAE_2B = replace(VAE_5B, scaling_factor=1.15258426)
VAE_1_5 = replace(VAE_5B, invert_scale_latents=True)
