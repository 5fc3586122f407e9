# SPDX-License-Identifier: Apache-2.0
"""Config of CogVideoX's autoencoder, and those of the published checkpoints."""

from dataclasses import dataclass, replace

from wanjax.layers.tiling import Tiling

ENCODED, DECODED = 8, 2  # frames to encode, and latent frames to decode, of one chunk


@dataclass(frozen=True)
class VAEConfig:
    """The sizes of a causal video autoencoder (CogVideoX, 2024), and the scale of its latents.

    `channels` are those of the levels, from pixels to latents. A norm takes `groups` groups of them. `sample_size` is
    the height and width of the frames that its authors had in mind. Latents for a transformer are multiplied by
    `scaling_factor`; those of a picture that it sees are divided by it with `invert_scale_latents`.
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
        """Pixels of a cell, in height and in width: the convolutions see pixels."""
        return 1

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent cell, in height and in width."""
        return 2 ** (len(self.channels) - 1)

    @property
    def posterior_scale(self) -> float:
        """The factor of the mean of encoded frames, whose distribution `encode` returns."""
        return self.scaling_factor

    @property
    def picture_scale(self) -> float:
        """The factor of the latents of a picture that a transformer sees; in 1.5 it is inverted, which that learned."""
        return 1 / self.scaling_factor if self.invert_scale_latents else self.scaling_factor

    @property
    def temporal_levels(self) -> int:
        """The number of changes of resolution that also halve or double the number of frames; the first ones do."""
        return self.temporal_factor.bit_length() - 1

    @property
    def tiling(self) -> Tiling:
        """Half of `sample_size`; tiles overlap by a sixth of their height and a fifth of their width."""
        (height, width), cell = (side // 2 // self.spatial_factor for side in self.sample_size), self.spatial_factor
        return Tiling((height * cell, width * cell), (height * 5 // 6 * cell, width * 4 // 5 * cell))

    def encode_lengths(self, frames: int) -> tuple[int, int]:
        """Frames in the first chunk to encode of a clip, and in each later one."""
        return _chunks(frames, ENCODED)

    def decode_lengths(self, frames: int) -> tuple[int, int]:
        """Latent frames in the first chunk to decode of a clip, and in each later one."""
        return _chunks(frames, DECODED)


def _chunks(frames: int, size: int) -> tuple[int, int]:
    """The length of the first chunk, which takes the remainder too, and that of the later ones."""
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
