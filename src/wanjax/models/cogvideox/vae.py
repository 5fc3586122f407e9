# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's causal video autoencoder. A latent position covers 8 × 8 pixels of 4 frames. Only for the first frame of
a video with an odd number of frames, it covers a single frame.

The autoencoder processes a video chunk by chunk. The first call takes the first chunk and `None`. Each later call takes
a chunk and the cache that the previous call returned. The cache is a pytree with the last input frames of each causal
layer. The results depend on the lengths of the chunks, because norms average over the frames of a chunk.
`VAEConfig.encode_lengths` and `decode_lengths` return the lengths that the reference uses. If a chunk has an odd number
of frames, its first frame is resampled only in height and width. The reference is diffusers'
models/autoencoders/autoencoder_kl_cogvideox.py.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.layers.conv import (
    CONV_AXES,
    Autoencoder,
    Cache,
    Chunk,
    FrameConv,
    RepeatingConv,
    run_layers,
    to_operand_dtype,
)
from wanjax.layers.linear import linear
from wanjax.layers.norms import GroupNorm
from wanjax.models.cogvideox.vae_config import VAEConfig

MakeNorm = Callable[[int], nnx.Module]  # a function that makes a norm for a number of channels
EPS = 1e-6


def map_without_odd_frame(resample: Callable[[Chunk], Chunk], x: Chunk) -> Chunk:
    """Apply a function to the frames of a chunk. If their number is odd, the first frame stays unchanged."""
    first, later_frames = jnp.split(x, [x.shape[1] % 2], axis=1)
    return jnp.concatenate([first, resample(later_frames)], axis=1)


def halve(x: Float[Array, "B T H W C"]) -> Chunk:
    """Average pairs of frames."""
    return x.reshape(len(x), x.shape[1] // 2, 2, *x.shape[2:]).mean(axis=2)


def repeat_to_shape(z: Float[Array, "B T H W C"], target: Float[Array, "B _T _H _W _C"]) -> Chunk:
    """Repeat positions up to the number of frames, the height and the width of `target`."""
    num_odd, (frames, height, width) = z.shape[1] % 2, target.shape[1:4]
    if z.shape[1] > 1:
        z = map_without_odd_frame(lambda x: x.repeat((frames - num_odd) // x.shape[1], axis=1), z)
    return z.repeat(height // z.shape[2], axis=2).repeat(width // z.shape[3], axis=3)


class SpatialNorm(nnx.Module):
    """A group norm whose scales and shifts are projections of the latents at the same position (MoVQ, 2022)."""

    def __init__(self, channels: int, *, config: VAEConfig, **kw):
        self.norm = GroupNorm(channels, config.groups, EPS, **kw)
        self.scale = linear(config.latent_channels, channels, CONV_AXES, **kw)
        self.shift = linear(config.latent_channels, channels, CONV_AXES, **kw)

    def __call__(self, x: Chunk, z: Chunk) -> Chunk:
        scale, shift = (repeat_to_shape(project(z).astype(jnp.float32), x) for project in (self.scale, self.shift))
        return self.norm(x) * scale + shift


class ResBlock(nnx.Module):
    """Two causal convolutions, each after a norm and SiLU, with a shortcut. In the decoder, the norms also take the
    latents."""

    def __init__(self, channels_in: int, channels_out: int, norm: MakeNorm, **kw):
        self.norm1 = norm(channels_in)
        self.conv1 = RepeatingConv(channels_in, channels_out, **kw)
        self.norm2 = norm(channels_out)
        self.conv2 = RepeatingConv(channels_out, channels_out, **kw)
        keeps_channels = channels_in == channels_out
        self.shortcut = nnx.data(None if keeps_channels else linear(channels_in, channels_out, CONV_AXES, **kw))

    def __call__(self, x: Chunk, cache: Cache, *latents: Chunk) -> tuple[Chunk, Cache]:
        cache1, cache2 = cache or (None, None)
        h, cache1 = self.conv1(jax.nn.silu(self.norm1(x, *latents)), cache1)
        h, cache2 = self.conv2(jax.nn.silu(self.norm2(h, *latents)), cache2)
        return h + (self.shortcut(x) if self.shortcut else x), (cache1, cache2)


class Downsample(nnx.Module):
    """Halve height and width. If `temporal` is True, first halve the number of frames. If the number is odd, the first
    frame is not counted and stays unchanged."""

    def __init__(self, channels: int, temporal: bool, **kw):
        self.conv = FrameConv(channels, channels, stride=2, padding=(0, 1), **kw)
        self.temporal = temporal

    def __call__(self, x: Chunk) -> Chunk:
        return self.conv(map_without_odd_frame(halve, x) if self.temporal else x)


class Upsample(nnx.Module):
    """Double height and width. If `temporal` is True, first double the number of frames. If the number is odd, the
    first frame is not repeated."""

    def __init__(self, channels: int, temporal: bool, **kw):
        self.conv = FrameConv(channels, channels, **kw)
        self.temporal = temporal

    def __call__(self, x: Chunk) -> Chunk:
        x = to_operand_dtype(x, self.conv.dtype)
        x = map_without_odd_frame(lambda frames: frames.repeat(2, axis=1), x) if self.temporal else x
        return self.conv(x.repeat(2, axis=2).repeat(2, axis=3))


class Level(nnx.Module):
    """The residual blocks of one resolution, then the resampling to the next resolution if there is one."""

    def __init__(self, sizes: list[int], norm: MakeNorm, resample: nnx.Module | None, **kw):
        """`sizes` are the channels before the first block, and after each block."""
        self.res = nnx.List([ResBlock(a, b, norm, **kw) for a, b in pairwise(sizes)])
        self.resample = nnx.data(resample)

    def __call__(self, x: Chunk, cache: Cache, *latents: Chunk) -> tuple[Chunk, Cache]:
        x, new_cache = run_layers(self.res, x, cache, *latents)
        return x if self.resample is None else self.resample(x), new_cache


class Encoder(nnx.Module):
    """Encode pixels as the mean and log-variance of latents."""

    def __init__(self, config: VAEConfig, **kw):
        first, *_, last = sizes = config.channels
        norm = partial(GroupNorm, groups=config.groups, eps=EPS, **kw)
        downsamplers = [Downsample(size, i < config.temporal_levels, **kw) for i, size in enumerate(sizes[:-1])]
        self.conv_in = RepeatingConv(3, first, **kw)
        self.levels = nnx.List(
            [
                Level([a, *[b] * config.res_blocks], norm, down, **kw)
                for a, b, down in zip((first, *sizes[:-1]), sizes, [*downsamplers, None], strict=True)
            ]
        )
        self.mid = Level([last] * 3, norm, None, **kw)
        self.norm_out = norm(last)
        self.conv_out = RepeatingConv(last, 2 * config.latent_channels, **kw)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache_in, cache_levels, cache_mid, cache_out = cache or [None] * 4
        x, cache_in = self.conv_in(x, cache_in)
        x, cache_levels = run_layers(self.levels, x, cache_levels)
        x, cache_mid = self.mid(x, cache_mid)
        x, cache_out = self.conv_out(jax.nn.silu(self.norm_out(x)), cache_out)
        return x, (cache_in, cache_levels, cache_mid, cache_out)


class Decoder(nnx.Module):
    """Decode latents to pixels. The latents also determine the scales and shifts of every norm."""

    def __init__(self, config: VAEConfig, **kw):
        first, *_, last = sizes = config.channels[::-1]
        norm = partial(SpatialNorm, config=config, **kw)
        upsamplers = [Upsample(size, i < config.temporal_levels, **kw) for i, size in enumerate(sizes[:-1])]
        self.conv_in = RepeatingConv(config.latent_channels, first, **kw)
        self.mid = Level([first] * 3, norm, None, **kw)
        self.levels = nnx.List(
            [
                Level([a, *[b] * (config.res_blocks + 1)], norm, up, **kw)
                for a, b, up in zip((first, *sizes[:-1]), sizes, [*upsamplers, None], strict=True)
            ]
        )
        self.norm_out = norm(last)
        kw |= {"dtype": jnp.float32}  # avoid rounding frames before they become 8-bit
        self.conv_out = RepeatingConv(last, 3, **kw)

    def __call__(self, z: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache_in, cache_mid, cache_levels, cache_out = cache or [None] * 4
        x, cache_in = self.conv_in(z, cache_in)
        x, cache_mid = self.mid(x, cache_mid, z)
        x, cache_levels = run_layers(self.levels, x, cache_levels, z)
        x, cache_out = self.conv_out(jax.nn.silu(self.norm_out(x, z)), cache_out)
        return x, (cache_in, cache_mid, cache_levels, cache_out)


class CogVideoXVAE(Autoencoder):
    """CogVideoX's autoencoder: videos [B T H W 3] in [-1, 1] to latents [B T H W C] for a transformer, and back."""

    def __init__(self, config: VAEConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config = config
        self.dtype = dtype
        self.encoder = Encoder(config, **kw)
        self.decoder = Decoder(config, **kw)

    def encode_chunk(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        """Encode a chunk of frames in [-1, 1]. The channels of the result are the mean and the log-variance of the
        latents, in float32 and not scaled."""
        h, cache = self.encoder(x.astype(self.dtype), cache)
        return h.astype(jnp.float32), cache

    def decode_chunk(self, z: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        """Decode a chunk of scaled latents to frames in float32, in about [-1, 1]."""
        z = z.astype(jnp.float32) / self.config.scaling_factor
        x, cache = self.decoder(z.astype(self.dtype), cache)
        return x.astype(jnp.float32), cache
