# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo 1.5's causal video autoencoder. A latent position covers 16 × 16 pixels of 4 frames. Only for the first
frame of a video, it covers a single frame.

The autoencoder processes a video chunk by chunk. The first call takes `None` and the first frame or latent frame,
optionally with later frames. Each later call takes a chunk (a multiple of 4 frames to encode, or any latent frames to
decode) and the cache that the previous call returned. The cache is a pytree with the last input frames of each
convolution, and the attention's keys and values of all frames. The results are the same as for the whole video in one
call. A video has at most `max_latent_frames` latent frames (`VAEConfig`). The reference is diffusers'
models/autoencoders/autoencoder_kl_hunyuanvideo15.py.
"""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wanjax.kernels.attention import attention
from wanjax.layers.conv import CONV_AXES, Autoencoder, Cache, Chunk, RepeatingConv, run_layers, to_operand_dtype
from wanjax.layers.linear import linear
from wanjax.layers.norms import ChannelNorm
from wanjax.models.hunyuanvideo.vae_config import VAEConfig
from wanjax.sharding import replicate


class EdgeConv(RepeatingConv):
    """A causal 3 × 3 × 3 convolution. The padding repeats the values at the edges, and the first frame."""

    def __call__(
        self, x: Float[Array, "B T H W C"], previous_frames: Float[Array, "B _T H W C"] | None
    ) -> tuple[Float[Array, "B T H W _C"], Float[Array, "B _T H W C"]]:
        """Convolve a chunk. Also return the frames to cache for the next chunk."""
        x = to_operand_dtype(x, self.dtype)
        previous_frames = self.initial_frames(x) if previous_frames is None else previous_frames
        y, next_frames = super().__call__(x, previous_frames)
        return y + self.edge_products(jnp.concatenate([previous_frames, x], axis=1)).astype(y.dtype), next_frames

    def edge_products(self, x: Float[Array, "B _T H W C"]) -> Float32[Array, "B T H W _C"]:
        """Compute the products with the padding beyond the four edges of a frame.

        The convolution itself pads with zeros. Padding the frames before the convolution would copy them. If their
        width is sharded, it would also send nearly all values between devices.
        """
        kernel = self.kernel[...].astype(x.dtype)  # [frame row column C _C]
        top, bottom = (convolve_edge(x[:, :, i], kernel[:, i], "edge") for i in (0, -1))  # [B T W C], with the corners
        left, right = (convolve_edge(x[:, :, :, i], kernel[:, :, i], "constant") for i in (0, -1))  # [B T H C]
        row, column = jnp.arange(x.shape[2])[:, None, None], jnp.arange(x.shape[3])[None, :, None]
        return (
            jnp.where((row == 0)[None, None], top[:, :, None], 0.0)
            + jnp.where((row == x.shape[2] - 1)[None, None], bottom[:, :, None], 0.0)
            + jnp.where((column == 0)[None, None], left[:, :, :, None], 0.0)
            + jnp.where((column == x.shape[3] - 1)[None, None], right[:, :, :, None], 0.0)
        )


def convolve_edge(
    x: Float[Array, "B _T L C"], kernel: Float[Array, "3 3 C _C"], padding: str
) -> Float32[Array, "B T L _C"]:
    """Convolve one row or column of each frame, over frames and positions, in float32.

    `padding` is the padding mode for the two ends of the row or column. Every device computes the whole convolution,
    which is small. If it were sharded, devices would send as much data, in many small messages.
    """
    y = jax.lax.conv_general_dilated(
        jnp.pad(replicate(x), ((0, 0), (0, 0), (1, 1), (0, 0)), mode=padding),
        kernel,
        window_strides=(1, 1),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=jnp.float32,
    )
    return replicate(y)


class ResBlock(nnx.Module):
    """Two causal convolutions, each after a norm and SiLU, with an identity shortcut."""

    def __init__(self, channels: int, **kw):
        self.norm1 = ChannelNorm(channels, **kw)
        self.conv1 = EdgeConv(channels, channels, **kw)
        self.norm2 = ChannelNorm(channels, **kw)
        self.conv2 = EdgeConv(channels, channels, **kw)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache1, cache2 = cache or (None, None)
        h, cache1 = self.conv1(self.norm1.silu(x), cache1)
        h, cache2 = self.conv2(self.norm2.silu(h), cache2)
        return x + h, (cache1, cache2)


class CausalAttention(nnx.Module):
    """Single-head attention of the positions of each frame to the positions of the same frame and of all earlier
    frames.

    The cache has keys and values, with space for the longest video. It also has the number of cached frames, as an
    array with five axes. The attention is computed frame by frame, so that the logits of all pairs of positions are
    never in memory together.
    """

    def __init__(self, channels: int, max_latent_frames: int, **kw):
        self.norm = ChannelNorm(channels, **kw)
        self.q = linear(channels, channels, CONV_AXES, **kw)
        self.k = linear(channels, channels, CONV_AXES, **kw)
        self.v = linear(channels, channels, CONV_AXES, **kw)
        self.out = linear(channels, channels, CONV_AXES, **kw)
        self.max_latent_frames = max_latent_frames
        self.dtype = kw["dtype"]

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        batch, frames, height, width, channels = x.shape
        y = self.norm(x)
        q, k, v = (to_operand_dtype(project(y), self.dtype) for project in (self.q, self.k, self.v))
        if cache is None:
            cached_frames, keys, values = 0, k, v
            padding = ((0, 0), (0, self.max_latent_frames - frames), (0, 0), (0, 0), (0, 0))
            cache = (jnp.pad(k, padding), jnp.pad(v, padding), jnp.full((1,) * 5, frames, jnp.int32))
        else:
            keys, values, count = cache
            cached_frames = count.reshape(())
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(cached, new, cached_frames, 1)
                for cached, new in ((keys, k), (values, v))
            )
            cache = (keys, values, count + frames)
        positions = height * width
        keys, values = (a.reshape(batch, -1, 1, channels) for a in (keys, values))

        def attend(frame: Array) -> Float[Array, "B L 1 C"]:
            key_mask = jnp.arange(keys.shape[1]) < (cached_frames + frame + 1) * positions
            key_mask = jnp.broadcast_to(key_mask, keys.shape[:2])
            return attention(q[:, frame].reshape(batch, positions, 1, channels), keys, values, key_mask=key_mask)

        y = jnp.moveaxis(jax.lax.map(attend, jnp.arange(frames)), 0, 1)  # [B T H·W 1 C]
        return x + self.out(y.reshape(x.shape)), cache


class MidBlock(nnx.Module):
    """Attention between two residual blocks, at the lowest resolution."""

    def __init__(self, channels: int, max_latent_frames: int, **kw):
        self.res1 = ResBlock(channels, **kw)
        self.attention = CausalAttention(channels, max_latent_frames, **kw)
        self.res2 = ResBlock(channels, **kw)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache1, cache_attention, cache2 = cache or (None, None, None)
        x, cache1 = self.res1(x, cache1)
        x, cache_attention = self.attention(x, cache_attention)
        x, cache2 = self.res2(x, cache2)
        return x, (cache1, cache_attention, cache2)


def space_to_depth(x: Chunk, frames: int) -> Chunk:
    """Move groups of `frames` × 2 × 2 positions into channels, in the order frame, row, column, channel."""
    batch, t, height, width, channels = x.shape
    x = x.reshape(batch, t // frames, frames, height // 2, 2, width // 2, 2, channels)
    x = jnp.transpose(x, (0, 1, 3, 5, 2, 4, 6, 7))  # [B T H W ft 2 2 C]
    return x.reshape(*x.shape[:4], -1)


def depth_to_space(x: Chunk, frames: int) -> Chunk:
    """Invert `space_to_depth`."""
    batch, t, height, width, channels = x.shape
    x = x.reshape(batch, t, height, width, frames, 2, 2, channels // (4 * frames))
    x = jnp.transpose(x, (0, 1, 4, 2, 5, 3, 6, 7))  # [B T ft H 2 W 2 C]
    return x.reshape(batch, t * frames, 2 * height, 2 * width, -1)


def grouped_mean(x: Chunk, channels: int) -> Chunk:
    """Average groups of neighbouring channels. The result has `channels` channels."""
    return x.reshape(*x.shape[:4], channels, -1).mean(axis=-1)


def resample_first_frame_alone(resample, x: Chunk, y: Chunk, cache: Cache, temporal: bool) -> Chunk:
    """Call `resample(x, y, frames)`, where `frames` is the number of frames in a group. If `temporal` is True, frames
    form groups of two, except the first frame of a video, which is a group by itself."""
    if not temporal or cache is not None:
        return resample(x, y, 1 + temporal)
    first = resample(x[:, :1], y[:, :1], 1)
    return jnp.concatenate([first, resample(x[:, 1:], y[:, 1:], 2)], axis=1) if x.shape[1] > 1 else first


class Downsample(nnx.Module):
    """Halve height and width. If `temporal` is True, also halve the number of frames after the first frame. The
    shortcut averages values."""

    def __init__(self, channels_in: int, channels_out: int, temporal: bool, **kw):
        self.conv = EdgeConv(channels_in, channels_out // (8 if temporal else 4), **kw)
        self.channels = channels_out
        self.temporal = temporal

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        y, new_cache = self.conv(x, cache)
        return resample_first_frame_alone(self.resample, x, y, cache, self.temporal), new_cache

    def resample(self, x: Chunk, y: Chunk, frames: int) -> Chunk:
        """Move positions of the convolution's result into channels, and add the shortcut. For a single frame, repeat
        the channels."""
        y = space_to_depth(y, frames)
        y = jnp.tile(y, self.channels // y.shape[-1])
        return y + grouped_mean(space_to_depth(x, frames), self.channels)


class Upsample(nnx.Module):
    """Double height and width. If `temporal` is True, also double the number of frames after the first frame. The
    shortcut repeats values."""

    def __init__(self, channels_in: int, channels_out: int, temporal: bool, **kw):
        self.conv = EdgeConv(channels_in, channels_out * (8 if temporal else 4), **kw)
        self.channels = channels_out
        self.temporal = temporal

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        y, new_cache = self.conv(x, cache)
        return resample_first_frame_alone(self.resample, x, y, cache, self.temporal), new_cache

    def resample(self, x: Chunk, y: Chunk, frames: int) -> Chunk:
        """Move channels of the convolution's result into positions, and add the shortcut. For a single frame, drop the
        channels that are not needed.

        If `temporal` is True, the shortcut first moves channels into positions and then repeats channels. Otherwise it
        repeats channels first.
        """
        y = depth_to_space(y, frames)[..., : self.channels]
        if self.temporal:
            x = depth_to_space(x, frames)
            return y + x.repeat(self.channels // x.shape[-1], axis=-1)
        return y + depth_to_space(x.repeat(4 * self.channels // x.shape[-1], axis=-1), frames)


class Level(nnx.Module):
    """The residual blocks of one resolution, then the resampling to the next resolution if there is one."""

    def __init__(self, channels: int, res_blocks: int, resample: nnx.Module | None, **kw):
        self.res = nnx.List([ResBlock(channels, **kw) for _ in range(res_blocks)])
        self.resample = nnx.data(resample)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache_res, cache_resample = cache or (None, None)
        x, cache_res = run_layers(self.res, x, cache_res)
        if self.resample is not None:
            x, cache_resample = self.resample(x, cache_resample)
        return x, (cache_res, cache_resample)


class Encoder(nnx.Module):
    """Encode pixels as the mean and log-variance of latents."""

    def __init__(self, config: VAEConfig, **kw):
        first, *_, last = config.channels
        spatial_levels, temporal = config.num_halving_levels
        downsamplers = [
            Downsample(a, b, level >= spatial_levels - temporal, **kw) if level < spatial_levels else None
            for level, (a, b) in enumerate(pairwise((*config.channels, 0)))
        ]
        self.conv_in = EdgeConv(3, first, **kw)
        self.levels = nnx.List(
            [
                Level(size, config.res_blocks, down, **kw)
                for size, down in zip(config.channels, downsamplers, strict=True)
            ]
        )
        self.mid = MidBlock(last, config.max_latent_frames, **kw)
        self.norm_out = ChannelNorm(last, **kw)
        self.conv_out = EdgeConv(last, 2 * config.latent_channels, **kw)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache_in, cache_levels, cache_mid, cache_out = cache or [None] * 4
        x, cache_in = self.conv_in(x, cache_in)
        x, cache_levels = run_layers(self.levels, x, cache_levels)
        x, cache_mid = self.mid(x, cache_mid)
        y, cache_out = self.conv_out(self.norm_out.silu(x), cache_out)
        return y + grouped_mean(x, y.shape[-1]), (cache_in, cache_levels, cache_mid, cache_out)


class Decoder(nnx.Module):
    """Decode latents to pixels."""

    def __init__(self, config: VAEConfig, **kw):
        first, *_, last = sizes = config.channels[::-1]
        spatial_levels, temporal = config.num_halving_levels
        upsamplers = [
            Upsample(a, b, level < temporal, **kw) if level < spatial_levels else None
            for level, (a, b) in enumerate(pairwise((*sizes, 0)))
        ]
        self.conv_in = EdgeConv(config.latent_channels, first, **kw)
        self.mid = MidBlock(first, config.max_latent_frames, **kw)
        self.levels = nnx.List(
            [Level(size, config.res_blocks + 1, up, **kw) for size, up in zip(sizes, upsamplers, strict=True)]
        )
        self.norm_out = ChannelNorm(last, **kw)
        kw |= {"dtype": jnp.float32}  # avoid rounding frames before they become 8-bit
        self.conv_out = EdgeConv(last, 3, **kw)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache_in, cache_mid, cache_levels, cache_out = cache or [None] * 4
        h, cache_in = self.conv_in(x, cache_in)
        x = h + x.repeat(h.shape[-1] // x.shape[-1], axis=-1)
        x, cache_mid = self.mid(x, cache_mid)
        x, cache_levels = run_layers(self.levels, x, cache_levels)
        x, cache_out = self.conv_out(self.norm_out.silu(x), cache_out)
        return x, (cache_in, cache_mid, cache_levels, cache_out)


class HunyuanVideoVAE(Autoencoder):
    """HunyuanVideo 1.5's autoencoder: videos [B T H W 3] in [-1, 1] to scaled latents [B T H W C] and back."""

    def __init__(self, config: VAEConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config = config
        self.dtype = dtype
        self.encoder = Encoder(config, **kw)
        self.decoder = Decoder(config, **kw)

    def encode_chunk(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        """Encode frames as scaled latents, which are the mode of the posterior. The number of frames is 4n + 1 in the
        first chunk, for which `cache` is None, and 4n in later chunks."""
        h, cache = self.encoder(x.astype(self.dtype), cache)
        mean, _ = jnp.split(h.astype(jnp.float32), 2, axis=-1)
        return mean * self.config.scale, cache

    def decode_chunk(self, z: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        """Decode any number of latent frames to frames in float32, in about [-1, 1]."""
        h = (z.astype(jnp.float32) / self.config.scale).astype(self.dtype)
        x, cache = self.decoder(h, cache)
        return x.astype(jnp.float32), cache
