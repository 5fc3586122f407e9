# SPDX-License-Identifier: Apache-2.0
"""A small, fast decoder of latents: TAEHV by Ollin Boer Bohan (2025), taehv.py of madebyollin/taehv.

The decoder takes the latents of the denoiser, without rescaling. In the reference, two levels increase the number of
frames. Previews need only one picture per latent frame: the last of the frames that the reference decodes from it. The
reference has options for this, and for skipping the upsampling of later levels.
"""

from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.layers.linear import default_kernel_init
from wanjax.layers.patch import space_to_depth
from wanjax.layers.placement import with_axes

BLOCKS_PER_LEVEL = 3
AXES = (None, None, "conv_in", "conv_out")
Frames = Float[Array, "B _T _H _W _C"]


class TinyDecoderConfig(NamedTuple):
    """Sizes of a tiny decoder.

    Attributes:
        latent_channels: Channels of the latents.
        channels: Input channels of each level, then output channels of the last level.
        patch: Pixels along the side of a patch.
        frame_factors: The number of frames that each level outputs per input frame.
    """

    latent_channels: int
    channels: tuple[int, ...] = (256, 128, 64, 64)
    patch: int = 1
    frame_factors: tuple[int, ...] = (1, 1, 1)

    @property
    def spatial_factor(self) -> int:
        """Pixels along the side of a latent position."""
        return 2 ** len(self.frame_factors) * self.patch

    @property
    def temporal_factor(self) -> int:
        """Frames per latent frame, after the first."""
        return prod(self.frame_factors)


def conv(channels_in: int, channels_out: int, size: int = 3, *, bias: bool = True, **kw) -> nnx.Conv:
    """Make a 2-D convolution that is applied to each frame."""
    init = with_axes(default_kernel_init, AXES), with_axes(nnx.initializers.zeros_init(), AXES[-1:])
    return nnx.Conv(
        channels_in, channels_out, (size, size), use_bias=bias, kernel_init=init[0], bias_init=init[1], **kw
    )


class MemoryBlock(nnx.Module):
    """A residual block. Its input for a frame is concatenated with its input for the previous frame. For the first
    frame, the previous input is zeros."""

    def __init__(self, channels: int, **kw):
        self.convs = nnx.List([conv(2 * channels, channels, **kw), *(conv(channels, channels, **kw) for _ in range(2))])

    def __call__(self, x: Frames, previous_frame: Frames | None) -> tuple[Frames, Frames]:
        """Apply the block, and also return the last frame of x. `previous_frame` is the last input frame of the
        previous chunk; None means zeros."""
        first = jnp.zeros_like(x[:, :1]) if previous_frame is None else previous_frame
        previous = jnp.concatenate([first, x[:, :-1]], axis=1)
        y = jnp.concatenate([x, previous], axis=-1)
        for layer in self.convs[:-1]:
            y = nnx.relu(layer(y))
        return nnx.relu(self.convs[-1](y) + x), x[:, -1:]


class Level(nnx.Module):
    """Blocks at one resolution, then optional upsampling in space and in time."""

    def __init__(self, channels_in: int, channels_out: int, frame_factor: int, **kw):
        self.blocks = nnx.List([MemoryBlock(channels_in, **kw) for _ in range(BLOCKS_PER_LEVEL)])
        self.mix = conv(channels_in, frame_factor * channels_in, 1, bias=False, **kw)
        self.out = conv(channels_in, channels_out, bias=False, **kw)

    def __call__(self, x: Frames, upsamples: bool, memory: tuple[Any, ...]) -> tuple[Frames, tuple[Any, ...]]:
        """Apply the level, and also return its new memory. `memory` has the last input frame of each block. If
        `upsamples` is True, height and width are doubled."""
        new_memory = []
        for block, previous_frame in zip(self.blocks, memory, strict=True):
            x, last_frame = block(x, previous_frame)
            new_memory.append(last_frame)
        if upsamples:
            x = x.repeat(2, axis=2).repeat(2, axis=3)
        return self.out(_unfold_frames(self.mix(x), x.shape[-1])), tuple(new_memory)


class TinyDecoder(nnx.Module):
    """Decode latents [B T H W C] to one picture per latent frame."""

    def __init__(self, config: TinyDecoderConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kw = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        channels = config.channels
        self.config = config
        self.conv_in = conv(config.latent_channels, channels[0], **kw)
        self.levels = nnx.List(
            [
                Level(*pair, frame_factors, **kw)
                for pair, frame_factors in zip(pairwise(channels), config.frame_factors, strict=True)
            ]
        )
        self.conv_out = conv(channels[-1], 3 * config.patch**2, **kw)

    def __call__(self, latents: Frames, num_upsamplings: int) -> Float[Array, "B _T _H _W 3"]:
        """Decode to pictures in [0, 1]. The first `num_upsamplings` levels double height and width."""
        x, _ = self._decode_patches(latents, num_upsamplings, None)
        return jnp.clip(_patches_to_pixels(x, self.config.patch), 0, 1)

    def decode_chunk(self, latents: Frames, cache: Any) -> tuple[Frames, Any]:
        """Decode latent frames to patches of pixels in about [-1, 1]. `cache` is None for the first chunk of a video.

        Every latent frame is decoded to several frames. For the first latent frame of the video, only the last of these
        frames is returned.
        """
        x, memory = self._decode_patches(latents.astype(jnp.float32), len(self.levels), cache)
        x = space_to_depth(_patches_to_pixels(x, self.config.patch), self.config.patch)
        return 2 * (x if cache is not None else x[:, self.config.temporal_factor - 1 :]) - 1, memory

    def _decode_patches(self, latents: Frames, num_upsamplings: int, memory: Any) -> tuple[Frames, Any]:
        """Decode to the colours of patches. Also return the memory of the blocks for the next chunk."""
        memory = memory or ((None,) * BLOCKS_PER_LEVEL,) * len(self.levels)
        x, new_memory = nnx.relu(self.conv_in(3 * jnp.tanh(latents / 3))), []
        for index, level in enumerate(self.levels):
            x, level_memory = level(x, index < num_upsamplings, memory[index])
            new_memory.append(level_memory)
        return self.conv_out(nnx.relu(x)), tuple(new_memory)


def _unfold_frames(x: Frames, channels: int) -> Frames:
    """Unfold channels into frames, with the frame as the slowest index."""
    batch, frames, height, width, _ = x.shape
    x = jnp.moveaxis(x.reshape(batch, frames, height, width, -1, channels), 4, 2)
    return x.reshape(batch, -1, height, width, channels)


def _patches_to_pixels(x: Frames, patch: int) -> Float[Array, "B _T _H _W 3"]:
    """Unfold the channels of patches, in the order colour, row, column, into pixels."""
    batch, frames, height, width, _ = x.shape
    patches = x.reshape(batch, frames, height, width, 3, patch, patch)
    return jnp.transpose(patches, (0, 1, 2, 5, 3, 6, 4)).reshape(batch, frames, height * patch, width * patch, 3)


def decode_pictures(network: TinyDecoder, latents: jax.Array, max_height: int) -> Float[Array, "B _T _H _W 3"]:
    """Decode latents [B C T H W] to pictures of at most `max_height` rows, upsampled as often as this height allows."""
    height, num_upsamplings = latents.shape[3] * network.config.patch, 0
    while num_upsamplings < len(network.levels) and 2 * height <= max_height:
        height, num_upsamplings = 2 * height, num_upsamplings + 1
    return network(jnp.moveaxis(latents, 1, -1), num_upsamplings)
