# SPDX-License-Identifier: Apache-2.0
"""A tiny decoder of latents: TAEHV by Ollin Boer Bohan (2025), taehv.py of madebyollin/taehv.

Its latents are those of the denoiser, not scaled back. The reference adds frames at two of its levels. Previews have
one picture of each latent frame, the last of those that the reference makes of it. The reference offers that too, and
to leave out the doubling of height and width at later levels.
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

BLOCKS = 3  # of a level
AXES = (None, None, "conv_in", "conv_out")
Frames = Float[Array, "B _T _H _W _C"]


class TinyDecoderConfig(NamedTuple):
    """Sizes of a tiny decoder: channels of the latents and of what each level takes and gives, and pixels of a cell.

    `growing` is the number of frames that each level makes of one.
    """

    latent_channels: int
    channels: tuple[int, ...] = (256, 128, 64, 64)
    patch: int = 1
    growing: tuple[int, ...] = (1, 1, 1)

    @property
    def spatial_factor(self) -> int:
        """The pixels of a latent cell's side."""
        return 2 ** len(self.growing) * self.patch

    @property
    def temporal_factor(self) -> int:
        """The frames of each latent frame but the first, which gives one."""
        return prod(self.growing)


def conv(channels_in: int, channels_out: int, size: int = 3, *, bias: bool = True, **kw) -> nnx.Conv:
    """A 2-D convolution of each frame."""
    init = with_axes(default_kernel_init, AXES), with_axes(nnx.initializers.zeros_init(), AXES[-1:])
    return nnx.Conv(
        channels_in, channels_out, (size, size), use_bias=bias, kernel_init=init[0], bias_init=init[1], **kw
    )


class MemoryBlock(nnx.Module):
    """A residual block that also sees its input of the frame before, which is zeros before the first frame."""

    def __init__(self, channels: int, **kw):
        self.convs = nnx.List([conv(2 * channels, channels, **kw), *(conv(channels, channels, **kw) for _ in range(2))])

    def __call__(self, x: Frames, last: Frames | None) -> tuple[Frames, Frames]:
        """`last` is the input's last frame before x, None for zeros; returns also that of x."""
        before = jnp.concatenate([jnp.zeros_like(x[:, :1]) if last is None else last, x[:, :-1]], axis=1)
        y = jnp.concatenate([x, before], axis=-1)
        for layer in self.convs[:-1]:
            y = nnx.relu(layer(y))
        return nnx.relu(self.convs[-1](y) + x), x[:, -1:]


class Level(nnx.Module):
    """Blocks at one resolution; then each cell may become four, and each frame several."""

    def __init__(self, channels_in: int, channels_out: int, growing: int, **kw):
        self.blocks = nnx.List([MemoryBlock(channels_in, **kw) for _ in range(BLOCKS)])
        self.mix = conv(channels_in, growing * channels_in, 1, bias=False, **kw)
        self.out = conv(channels_in, channels_out, bias=False, **kw)

    def __call__(self, x: Frames, doubles: bool, memory: tuple[Any, ...]) -> tuple[Frames, tuple[Any, ...]]:
        """`memory` has what each block is given of the frames before; returns also that of x."""
        new_memory = []
        for block, last in zip(self.blocks, memory, strict=True):
            x, last = block(x, last)
            new_memory.append(last)
        if doubles:
            x = x.repeat(2, axis=2).repeat(2, axis=3)
        return self.out(_unfolded(self.mix(x), x.shape[-1])), tuple(new_memory)


class TinyDecoder(nnx.Module):
    """Decodes latents [B T H W C] to a picture of each latent frame."""

    def __init__(self, config: TinyDecoderConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kw = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        channels = config.channels
        self.config = config
        self.conv_in = conv(config.latent_channels, channels[0], **kw)
        self.levels = nnx.List(
            [Level(*pair, growing, **kw) for pair, growing in zip(pairwise(channels), config.growing, strict=True)]
        )
        self.conv_out = conv(channels[-1], 3 * config.patch**2, **kw)

    def __call__(self, latents: Frames, doublings: int) -> Float[Array, "B _T _H _W 3"]:
        """Return pictures in [0, 1]; `doublings` of the levels, the first ones, double height and width."""
        x, _ = self._cells(latents, doublings, None)
        return jnp.clip(_pixels(x, self.config.patch), 0, 1)

    def decode_cells(self, latents: Frames, cache: Any) -> tuple[Frames, Any]:
        """Decode latent frames to cells of pixels in about [-1, 1]; `cache` is None for a video's first ones.

        Of the frames of the first latent frame, the last is the video's first.
        """
        x, memory = self._cells(latents.astype(jnp.float32), len(self.levels), cache)
        x = space_to_depth(_pixels(x, self.config.patch), self.config.patch)
        return 2 * (x if cache is not None else x[:, self.config.temporal_factor - 1 :]) - 1, memory

    def _cells(self, latents: Frames, doublings: int, memory: Any) -> tuple[Frames, Any]:
        """The colours of cells, and what the blocks keep for the frames that follow."""
        memory = memory or ((None,) * BLOCKS,) * len(self.levels)
        x, new_memory = nnx.relu(self.conv_in(3 * jnp.tanh(latents / 3))), []
        for index, level in enumerate(self.levels):
            x, of_level = level(x, index < doublings, memory[index])
            new_memory.append(of_level)
        return self.conv_out(nnx.relu(x)), tuple(new_memory)


def _unfolded(x: Frames, channels: int) -> Frames:
    """Unfolds the channels of several frames, one after another, to frames."""
    batch, frames, height, width, _ = x.shape
    x = jnp.moveaxis(x.reshape(batch, frames, height, width, -1, channels), 4, 2)
    return x.reshape(batch, -1, height, width, channels)


def _pixels(x: Frames, patch: int) -> Float[Array, "B _T _H _W 3"]:
    """Lays out the channels of a cell, of which those of a colour are side by side, as its pixels."""
    batch, frames, height, width, _ = x.shape
    cells = x.reshape(batch, frames, height, width, 3, patch, patch)
    return jnp.transpose(cells, (0, 1, 2, 5, 3, 6, 4)).reshape(batch, frames, height * patch, width * patch, 3)


def pictures(network: TinyDecoder, latents: jax.Array, tallest: int) -> Float[Array, "B _T _H _W 3"]:
    """Return the pictures of latents [B C T H W], doubled as often as keeps them within `tallest` pixels."""
    height, doublings = latents.shape[3] * network.config.patch, 0
    while doublings < len(network.levels) and 2 * height <= tallest:
        height, doublings = 2 * height, doublings + 1
    return network(jnp.moveaxis(latents, 1, -1), doublings)
