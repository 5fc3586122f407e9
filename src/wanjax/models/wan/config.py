# SPDX-License-Identifier: Apache-2.0
"""The config classes of Wan's networks, and the configs of the published checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from wanjax.kernels.attention import AUTO, AttentionConfig, SparseLinearAttentionConfig
from wanjax.layers.flops import attention_flops, linear_flops
from wanjax.layers.tiling import Tiling


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a diffusion transformer (Wan: Open and Advanced Large-Scale Video Generative Models, 2025).

    `sparse_linear` has the options of sparse-linear self-attention, or None if the network was trained with another
    kind of attention.
    """

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
    sparse_linear: SparseLinearAttentionConfig | None

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def patch_volume(self) -> int:
        """The number of latent positions in a patch."""
        return prod(self.patch)

    @property
    def rope_channels(self) -> tuple[int, int, int]:
        """Channels of a head that RoPE rotates by frame, row and column: 44, 42 and 42 of 128."""
        spatial = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * spatial, spatial, spatial

    def resolve_attention(self, requested: AttentionConfig) -> AttentionConfig:
        """Replace AUTO by the kind of attention with which the network was trained. Return other configs unchanged."""
        return AttentionConfig(sparse=self.sparse_linear) if self.sparse_linear and requested == AUTO else requested


@dataclass(frozen=True)
class ImageTransformerConfig(TransformerConfig):
    """Sizes of a transformer with cross-attention to features of one image, or of a first and a last image.

    `image_width` is the width of the features. For a first and a last image, there is a learned position for each
    feature, and `image_positions` is their number. For one image, there are no positions, and it is None.
    """

    image_width: int
    image_positions: int | None


@dataclass(frozen=True)
class AnimateTransformerConfig(ImageTransformerConfig):
    """Sizes of a transformer that also attends to the keys and values of a driving clip (Wan Animate 2).

    `clip_offset` has the first positions of the clip for RoPE, by frame, row and column. -1 stands for the number of
    positions of the clip along this axis.
    """

    clip_offset: tuple[int, int, int] = field(metadata={"least": -1})


@dataclass(frozen=True)
class PoseTransformerConfig(ImageTransformerConfig):
    """Sizes of a transformer that follows a pose clip and a clip of a face (Wan Animate).

    The motion encoder reads faces of `face_size` × `face_size` pixels. `motion_channels` has its channels at this size
    and after each halving, down to 4 × 4 pixels. The motion encoder computes `motion_width` features of a face. From
    the features it computes the factors of `motions` directions, which are vectors of `motion_space` numbers. The face
    encoder has `face_heads` heads of `face_width` channels. There is a face adapter after the first of every
    `face_stride` blocks.
    """

    face_size: int
    motion_channels: tuple[int, ...]
    motion_width: int
    motions: int
    motion_space: int
    face_width: int
    face_heads: int
    face_stride: int

    @property
    def face_adapters(self) -> int:
        return self.layers // self.face_stride

    @property
    def face_tokens(self) -> int:
        """The number of tokens of a face in each latent frame: one token for each head, and a learned token."""
        return self.face_heads + 1


@dataclass(frozen=True)
class ControlTransformerConfig(TransformerConfig):
    """Sizes of a transformer with a control clip (VACE). There is one control block for every `control_stride` blocks.

    `control_channels` is the number of channels of the control clip: latents of the unchanged parts, latents of the
    replaced parts, and the mask.
    """

    control_channels: int
    control_stride: int

    @property
    def control_blocks(self) -> int:
        return self.layers // self.control_stride


@dataclass(frozen=True)
class CausalTransformerConfig(TransformerConfig):
    """Sizes of a transformer that makes a video chunk by chunk. A chunk attends to itself and to earlier chunks.

    A chunk has `chunk_frames` latent frames. A chunk attends to at most `window` latent frames, including its own: the
    first `sink` frames of the video, and the latest frames. `window` and `sink` are multiples of `chunk_frames`.
    """

    chunk_frames: int
    window: int
    sink: int = field(metadata={"least": 0})

    @property
    def slots(self) -> int:
        """The number of chunks in the KV cache."""
        return self.window // self.chunk_frames

    def slot(self, chunk: int) -> int:
        """Return the slot in the KV cache for the chunk with this index.

        While there are unused slots, it is the next unused slot, then the slot of the oldest chunk after the sink.
        """
        sink_slots = self.sink // self.chunk_frames
        return chunk if chunk < self.slots else sink_slots + (chunk - sink_slots) % (self.slots - sink_slots)


@dataclass(frozen=True)
class VAEConfig:
    """Sizes of a Wan 2.1 causal video autoencoder, and the statistics of its latents.

    The convolutions work on patches of `patch` × `patch` pixels.
    """

    width: int
    decoder_width: int
    patch: int
    latent_channels: int
    multipliers: tuple[int, ...]
    res_blocks: int
    temporal_downsample: tuple[bool, ...]
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    @property
    def tiling(self) -> Tiling:
        """The reference's tile size, for frames too large for memory."""
        return Tiling(256, 192)

    @property
    def patch_channels(self) -> int:
        """Channels of a patch: three colours for each of its pixels."""
        return 3 * self.patch**2

    @property
    def encoder_sizes(self) -> list[int]:
        """Channels before the encoder's first level, and after each level."""
        return [self.width * m for m in (1, *self.multipliers)]

    @property
    def decoder_sizes(self) -> list[int]:
        """Channels before the decoder's first level, and inside each level."""
        return [self.decoder_width * m for m in (self.multipliers[-1], *reversed(self.multipliers))]

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent position, in height and in width."""
        return self.patch * 2 ** len(self.temporal_downsample)

    @property
    def temporal_factor(self) -> int:
        """Frames per latent frame, after the first."""
        return 2 ** sum(self.temporal_downsample)

    def encode_lengths(self, frames: int) -> tuple[int, int]:
        """Return the number of frames in the first chunk to encode and in each later chunk, for a clip of `frames`."""
        later_latent_frames = (frames - 1) // self.temporal_factor
        return 1, self.temporal_factor * _later_chunk_length(later_latent_frames)

    def decode_lengths(self, frames: int) -> tuple[int, int]:
        """Return the number of latent frames in the first chunk to decode and in each later chunk, for a video of
        `frames` latent frames."""
        return 1, _later_chunk_length(frames - 1)


def _later_chunk_length(count: int) -> int:
    """Return the number of latent frames in each chunk after the first, for `count` latent frames in these chunks. Two
    latent frames, which are eight frames, fill a TPU's tiles."""
    return 2 if count % 2 == 0 else 1


@dataclass(frozen=True)
class ResidualVAEConfig(VAEConfig):
    """Sizes of a Wan 2.2 autoencoder, where each change of resolution has a shortcut."""


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
    sparse_linear=None,
)
T2V_1_3B = replace(T2V_14B, layers=30, heads=12, mlp_dim=8960)
I2V_A14B = replace(T2V_14B, channels_in=36)
TI2V_5B = replace(T2V_14B, layers=30, heads=24, mlp_dim=14336, channels_in=48, channels_out=48)
I2V_14B = ImageTransformerConfig(**vars(I2V_A14B), image_width=1280, image_positions=None)
FLF2V_14B = replace(I2V_14B, image_positions=514)
ANIMATE_14B = AnimateTransformerConfig(**vars(I2V_14B), clip_offset=(1, 0, -1))
POSE_14B = PoseTransformerConfig(
    **vars(I2V_14B),
    face_size=512,
    motion_channels=(32, 64, 128, 256, 512, 512, 512, 512),
    motion_width=512,
    motions=20,
    motion_space=512,
    face_width=1024,
    face_heads=4,
    face_stride=5,
)
INP_1_3B = replace(I2V_14B, layers=30, heads=12, mlp_dim=8960)
INP_5B = replace(TI2V_5B, channels_in=100)
CAUSAL_1_3B = CausalTransformerConfig(**vars(T2V_1_3B), chunk_frames=3, window=21, sink=0)
VACE_14B = ControlTransformerConfig(**vars(T2V_14B), control_channels=96, control_stride=5)
VACE_1_3B = ControlTransformerConfig(**vars(T2V_1_3B), control_channels=96, control_stride=2)

VAE_2_1 = VAEConfig(
    width=96,
    decoder_width=96,
    patch=1,
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
VAE_2_2 = ResidualVAEConfig(
    width=160,
    decoder_width=256,
    patch=2,
    latent_channels=48,
    multipliers=(1, 2, 4, 4),
    res_blocks=2,
    temporal_downsample=(False, True, True),
    latents_mean=(
        *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557),
        *(-0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825),
        *(-0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
        *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230),
        *(-0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748),
        *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
    ),
    latents_std=(
        *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013),
        *(0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978),
        *(0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
        *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093),
        *(0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887),
        *(0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
    ),
)


def forward_flops(
    config: TransformerConfig, *, tokens: int, text_tokens: int, image_tokens: int = 0
) -> Mapping[str, int]:
    """Count the operations of one forward pass for one video and its context, by part of the transformer.

    A multiplication and an addition are two operations. Only matrix products of real tokens count, not padding or
    operations that the compiler adds.

    `tokens` is the number of tokens of the video. `text_tokens` and `image_tokens` are the numbers of tokens to which
    cross-attention attends.
    """
    width, patch_volume = config.width, config.patch_volume
    block_flops = _block_flops(config, tokens, text_tokens + image_tokens)
    flops = {part: config.layers * count for part, count in block_flops.items()}
    flops["embeddings"] = (
        linear_flops(tokens, patch_volume * config.channels_in, width)
        + linear_flops(1, config.frequency_dim, width)
        + linear_flops(1, width, width)
        + linear_flops(1, width, 6 * width)
    )
    flops["output"] = linear_flops(tokens, width, patch_volume * config.channels_out)
    if isinstance(config, ControlTransformerConfig):
        hint = linear_flops(tokens, width, width)  # the projection of the sum takes the same number of operations
        flops["control"] = config.control_blocks * (sum(block_flops.values()) + hint)
        flops["embeddings"] += linear_flops(tokens, patch_volume * config.control_channels, width) + hint
    return flops


def _block_flops(config: TransformerConfig, tokens: int, context_tokens: int) -> dict[str, int]:
    width = config.width
    return {
        "self_attention": 4 * linear_flops(tokens, width, width) + attention_flops(tokens, tokens, width),
        "cross_attention": (2 * linear_flops(tokens, width, width) + attention_flops(tokens, context_tokens, width)),
        "mlp": 2 * linear_flops(tokens, width, config.mlp_dim),
    }
