# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1's causal video autoencoder. A latent position covers 8 × 8 pixels of 4 frames. Only for the first frame of a
video, it covers a single frame.

The autoencoder processes a video chunk by chunk. The first call takes one frame and `None`. Each later call takes a
chunk (a multiple of 4 frames to encode, or any latent frames to decode) and the cache that the previous call returned.
The cache is a pytree with the last input frames of each causal layer. The results are the same as for the whole video
in one call, and memory does not grow with the length. The reference is diffusers'
models/autoencoders/autoencoder_kl_wan.py.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.kernels.attention import attention
from wanjax.kernels.target import target
from wanjax.layers.conv import CONV_AXES, Autoencoder, Cache, CausalConv, Chunk, FrameConv, run_layers, to_operand_dtype
from wanjax.layers.linear import linear
from wanjax.layers.norms import ChannelNorm, expand_to_rank
from wanjax.models.wan.config import VAEConfig
from wanjax.sharding import VIDEO_AXES, num_shards, replicate

MAX_PAIRED_VALUES = 2**26  # if a frame has at most this many values at its largest level, a TPU computes two together


class ResBlock(nnx.Module):
    """Two causal convolutions, each after a norm and SiLU, with a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, **kw):
        self.norm1 = ChannelNorm(channels_in, **kw)
        self.conv1 = CausalConv(channels_in, channels_out, **kw)
        self.norm2 = ChannelNorm(channels_out, **kw)
        self.conv2 = CausalConv(channels_out, channels_out, **kw)
        keeps_channels = channels_in == channels_out
        self.shortcut = nnx.data(None if keeps_channels else linear(channels_in, channels_out, CONV_AXES, **kw))

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache1, cache2 = cache or (None, None)
        h, cache1 = self.conv1(self.norm1.silu(x), cache1)
        h, cache2 = self.conv2(self.norm2.silu(h), cache2)
        return h + (self.shortcut(x) if self.shortcut else x), (cache1, cache2)


class FrameAttention(nnx.Module):
    """Single-head self-attention over the positions of each latent frame."""

    def __init__(self, channels: int, **kw):
        self.norm = ChannelNorm(channels, **kw)
        self.qkv = linear(channels, 3 * channels, CONV_AXES, **kw)
        self.out = linear(channels, channels, CONV_AXES, **kw)

    def __call__(self, x: Chunk) -> Chunk:
        batch, frames, height, width, channels = x.shape
        # positions and tokens have different shardings; without this line, the compiler would gather both and warn
        gathered = replicate(x)
        qkv = self.qkv(self.norm(gathered)).reshape(batch * frames, height * width, 1, 3 * channels)
        y = attention(*jnp.split(qkv, 3, axis=-1))  # [B·T H·W 1 C]
        return x + self.out(replicate(y).reshape(x.shape))


class MidBlock(nnx.Module):
    """Attention between two residual blocks, at the lowest resolution."""

    def __init__(self, channels: int, **kw):
        self.res1 = ResBlock(channels, channels, **kw)
        self.attention = FrameAttention(channels, **kw)
        self.res2 = ResBlock(channels, channels, **kw)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache1, cache2 = cache or (None, None)
        x, cache1 = self.res1(x, cache1)
        x = self.attention(x)
        x, cache2 = self.res2(x, cache2)
        return x, (cache1, cache2)


class Downsample(nnx.Module):
    """Halve height and width. If `temporal` is True, also halve the number of frames after the first frame."""

    def __init__(self, channels: int, temporal: bool, **kw):
        self.conv = FrameConv(channels, channels, stride=2, padding=(0, 1), **kw)
        self.time_conv = nnx.data(CausalConv(channels, channels, (3, 1), time_stride=2, **kw) if temporal else None)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        x = self.conv(x)
        if self.time_conv is None:
            return x, ()
        if cache is None:  # the first frame is not changed, and is cached for the next chunk
            return x, to_operand_dtype(x, self.time_conv.dtype)
        return self.time_conv(x, cache)


class Upsample(nnx.Module):
    """Double height and width. If `temporal` is True, first double the number of frames after the first frame."""

    def __init__(self, channels_in: int, channels_out: int, temporal: bool, **kw):
        self.time_conv = nnx.data(CausalConv(channels_in, 2 * channels_in, (3, 1), **kw) if temporal else None)
        self.conv = FrameConv(channels_in, channels_out, **kw)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        if self.time_conv is None:
            cache = ()
        elif cache is None:  # the first frame stays a single frame, and later frames do not depend on it
            cache = self.time_conv.initial_frames(x)
        else:
            x, cache = self.time_conv(x, cache)
            x = jnp.stack(jnp.split(x, 2, axis=-1), axis=2)  # [B T 2 H W C]
            x = x.reshape(x.shape[0], -1, *x.shape[3:])
        return self.conv(upsample(to_operand_dtype(x, self.conv.dtype))), cache


def upsample(x: Chunk) -> Chunk:
    """Double the height and the width of frames by repeating each value.

    A single broadcast writes only the result. A repeat along each axis would also write an intermediate result.
    """
    batch, frames, height, width, channels = x.shape
    repeated = jnp.broadcast_to(x[:, :, :, None, :, None], (batch, frames, height, 2, width, 2, channels))
    return repeated.reshape(batch, frames, 2 * height, 2 * width, channels)


class Level(nnx.Module):
    """The residual blocks of one resolution, then the resampling to the next resolution if there is one."""

    def __init__(self, channels_in: int, channels_out: int, res_blocks: int, resample: nnx.Module | None, **kw):
        sizes = [channels_in] + [channels_out] * res_blocks
        self.res = nnx.List([ResBlock(a, b, **kw) for a, b in pairwise(sizes)])
        self.resample = nnx.data(resample)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache_res, cache_resample = cache or (None, None)
        x, cache_res = run_layers(self.res, x, cache_res)
        if self.resample is not None:
            x, cache_resample = self.resample(x, cache_resample)
        return x, (cache_res, cache_resample)


class Encoder(nnx.Module):
    """Encode pixels, folded into patches, to the mean and log-variance of the latents."""

    def __init__(self, config: VAEConfig, levels: list[nnx.Module], **kw):
        first, *_, last = config.encoder_sizes
        self.conv_in = CausalConv(config.patch_channels, first, **kw)
        self.levels = nnx.List(levels)
        self.mid = MidBlock(last, **kw)
        self.norm_out = ChannelNorm(last, **kw)
        self.conv_out = CausalConv(last, 2 * config.latent_channels, **kw)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache_in, cache_levels, cache_mid, cache_out = cache or [None] * 4
        x, cache_in = self.conv_in(x, cache_in)
        x, cache_levels = run_layers(self.levels, x, cache_levels)
        x, cache_mid = self.mid(x, cache_mid)
        x, cache_out = self.conv_out(self.norm_out.silu(x), cache_out)
        return x, (cache_in, cache_levels, cache_mid, cache_out)


class Decoder(nnx.Module):
    """Decode latents to patches of pixels."""

    def __init__(self, config: VAEConfig, levels: list[nnx.Module], **kw):
        first, *_, last = config.decoder_sizes
        self.conv_in = CausalConv(config.latent_channels, first, **kw)
        self.mid = MidBlock(first, **kw)
        self.levels = nnx.List(levels)
        self.norm_out = ChannelNorm(last, **kw)
        kw |= {"dtype": jnp.float32}  # avoid rounding frames before they become 8-bit
        self.conv_out = CausalConv(last, config.patch_channels, **kw)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache_in, cache_mid, cache_levels, cache_out = cache or [None] * 4
        x, cache_in = self.conv_in(x, cache_in)
        x, cache_mid = self.mid(x, cache_mid)
        x, cache_levels = run_layers(self.levels, x, cache_levels)
        x, cache_out = self.conv_out(self.norm_out.silu(x), cache_out)
        return x, (cache_in, cache_mid, cache_levels, cache_out)


class WanVAE(Autoencoder):
    """Wan 2.1's autoencoder: videos [B T H W 3] in [-1, 1] to normalised latents [B T H W C] and back."""

    def __init__(self, config: VAEConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        channels = config.latent_channels
        self.config = config
        self.dtype = dtype
        self.encoder = Encoder(config, self.encoder_levels(config, **kw), **kw)
        self.quant = linear(2 * channels, 2 * channels, CONV_AXES, **kw)
        self.post_quant = linear(channels, channels, CONV_AXES, **kw)
        self.decoder = Decoder(config, self.decoder_levels(config, **kw), **kw)

    @staticmethod
    def encoder_levels(config: VAEConfig, **kw) -> list[nnx.Module]:
        sizes = config.encoder_sizes
        downsamplers = [
            Downsample(size, t, **kw) for size, t in zip(sizes[1:], config.temporal_downsample, strict=False)
        ]
        return [
            Level(a, b, config.res_blocks, down, **kw)
            for a, b, down in zip(sizes[:-1], sizes[1:], [*downsamplers, None], strict=True)
        ]

    @staticmethod
    def decoder_levels(config: VAEConfig, **kw) -> list[nnx.Module]:
        first, *sizes = config.decoder_sizes
        inputs = [first] + [size // 2 for size in sizes[:-1]]  # upsampling halves the channels
        temporal = reversed(config.temporal_downsample)
        upsamplers = [Upsample(size, size // 2, t, **kw) for size, t in zip(sizes[:-1], temporal, strict=True)]
        return [
            Level(a, b, config.res_blocks + 1, up, **kw)
            for a, b, up in zip(inputs, sizes, [*upsamplers, None], strict=True)
        ]

    def posterior(self, x: Chunk, cache: Cache) -> tuple[Chunk, Chunk, Cache]:
        """Compute the mean and log-variance of the latents of a chunk of patches. The mean and the log-variance are
        float32 and not normalised."""
        h, cache = self.encoder(x.astype(self.dtype), cache)
        mean, log_variance = jnp.split(self.quant(h).astype(jnp.float32), 2, axis=-1)
        return mean, jnp.clip(log_variance, -30.0, 20.0), cache

    def encode_chunk(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        """Encode patches of frames as normalised latents. The latents are the mode of the posterior.

        The first chunk, for which `cache` is None, has one frame. Later chunks have a multiple of 4 frames. The device
        determines how many frames are encoded at a time.
        """
        mean, std = self._latent_statistics()

        def latents(x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
            z, _, cache = self.posterior(x, cache)
            return (z - mean) / std, cache

        return process_in_parts(
            latents, x, cache, self.config.temporal_factor * latent_frames_per_part(x, 1, self.config.width)
        )

    def decode_chunk(self, z: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        """Decode latent frames, a few at a time, to patches of frames in float32, in about [-1, 1]."""
        mean, std = self._latent_statistics()

        def decode_part(z: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
            h = self.post_quant((z.astype(jnp.float32) * std + mean).astype(self.dtype))
            x, cache = self.decoder(h, cache)
            return x.astype(jnp.float32), cache

        upsampling = self.config.spatial_factor // self.config.patch
        return process_in_parts(decode_part, z, cache, latent_frames_per_part(z, upsampling, self.config.decoder_width))

    def _latent_statistics(self) -> list[Float[Array, "1 1 1 1 C"]]:
        """Return the mean and the standard deviation of each channel of latents."""
        statistics = self.config.latents_mean, self.config.latents_std
        return [expand_to_rank(jnp.array(values, jnp.float32), 5) for values in statistics]


def latent_frames_per_part(x: Chunk, upsampling: int, channels: int) -> int:
    """Return the number of latent frames to compute together. On a TPU with enough memory it is two, because 8 frames
    fill a TPU's tiles.

    A frame's largest level has `upsampling` times the height and the width of x, and this number of channels.
    """
    batch, _, height, width, _ = x.shape
    level = (batch, 1, upsampling * height, upsampling * width, channels)
    return (
        2
        if target(x).platform == "tpu" and math.prod(level) <= MAX_PAIRED_VALUES * num_shards(VIDEO_AXES, level)
        else 1
    )


def process_in_parts(
    process: Callable[..., tuple[Chunk, Cache]], x: Chunk, cache: Cache, part: int
) -> tuple[Chunk, Cache]:
    """Process a clip in parts of `part` frames, and concatenate the results in time.

    If `cache` is None, the first frame is processed alone before the parts. Frames that do not fill a part are
    processed last. The parts are processed by a scan, so that `process` is compiled only once for them.
    """
    first = 1 if cache is None else 0
    last = x.shape[1] - (x.shape[1] - first) % part
    results = []
    for frames in (x[:, :first], x[:, first:last], x[:, last:]):
        if frames.shape[1]:
            y, cache = process(frames, cache) if frames.shape[1] <= part else _scan_parts(process, frames, cache, part)
            results.append(y)
    return jnp.concatenate(results, axis=1), cache


def _scan_parts(process: Callable[..., tuple[Chunk, Cache]], x: Chunk, cache: Cache, part: int) -> tuple[Chunk, Cache]:
    """Process parts of equal length in a scan."""

    def step(cache: Cache, x: Chunk) -> tuple[Cache, Chunk]:
        y, cache = process(x, cache)
        return cache, y

    parts = x.reshape(x.shape[0], -1, part, *x.shape[2:])
    cache, y = jax.lax.scan(step, cache, jnp.moveaxis(parts, 1, 0))
    y = jnp.moveaxis(y, 0, 1)
    return y.reshape(y.shape[0], -1, *y.shape[3:]), cache
