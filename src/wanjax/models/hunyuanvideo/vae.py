# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo 1.5's causal video autoencoder: 16 × 16 pixels of 4 frames to a latent cell, the first frame alone.

It streams. The first call receives the first frame or latent frame, perhaps with others after it, and `None`. Each
later call receives a chunk (a multiple of 4 frames to encode, latent frames to decode) and the cache that the call
before returned: a pytree of the last frames that each convolution saw, and of the keys and values of all frames in the
middle. The numbers are those of the whole clip at once, up to the config's `longest`. The reference is diffusers'
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
from wanjax.layers.conv import CONV_AXES, Cache, Chunk, RepeatingConv, run_layers, to_operand_dtype
from wanjax.layers.linear import linear
from wanjax.layers.norms import ChannelNorm
from wanjax.models.hunyuanvideo.vae_config import VAEConfig
from wanjax.sharding import replicate


class EdgeConv(RepeatingConv):
    """A causal convolution, 3 × 3 × 3, whose padding repeats the outermost cells, and the first frame before it."""

    def __call__(
        self, x: Float[Array, "B T H W C"], past: Float[Array, "B _T H W C"] | None
    ) -> tuple[Float[Array, "B T H W _C"], Float[Array, "B _T H W C"]]:
        """The output of a chunk, and the frames to keep for the next."""
        x = to_operand_dtype(x, self.dtype)
        past = self.initial_frames(x) if past is None else past
        y, next_past = super().__call__(x, past)
        return y + self.beyond(jnp.concatenate([past, x], axis=1)).astype(y.dtype), next_past

    def beyond(self, x: Float[Array, "B _T H W C"]) -> Float32[Array, "B T H W _C"]:
        """The products with cells beyond the four edges, which count as zeros in the convolution itself.

        Padding the frames would copy them and, where several devices share their width, move nearly all cells.
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
    """A convolution over frames and the cells of one row or column; `padding` is that of its two ends. Float32.

    Every device computes it whole: it is small, and sharding it would send as much, in many small parts.
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
    """Two causal convolutions, each after a norm and SiLU, beside the identity."""

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
    """Single-head attention of the cells of each frame to those of the same and all earlier frames.

    The cache holds keys and values with room for the longest video, and the number of frames seen, as an array with as
    many axes as the others. Frames attend one after another, so that memory holds no product of all cells with all.
    """

    def __init__(self, channels: int, longest: int, **kw):
        self.norm = ChannelNorm(channels, **kw)
        self.q = linear(channels, channels, CONV_AXES, **kw)
        self.k = linear(channels, channels, CONV_AXES, **kw)
        self.v = linear(channels, channels, CONV_AXES, **kw)
        self.out = linear(channels, channels, CONV_AXES, **kw)
        self.longest = longest
        self.dtype = kw["dtype"]

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        batch, frames, height, width, channels = x.shape
        y = self.norm(x)
        q, k, v = (to_operand_dtype(project(y), self.dtype) for project in (self.q, self.k, self.v))
        if cache is None:
            seen, keys, values = 0, k, v
            room = ((0, 0), (0, self.longest - frames), (0, 0), (0, 0), (0, 0))
            cache = (jnp.pad(k, room), jnp.pad(v, room), jnp.full((1,) * 5, frames, jnp.int32))
        else:
            keys, values, count = cache
            seen = count.reshape(())
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(past, new, seen, 1) for past, new in ((keys, k), (values, v))
            )
            cache = (keys, values, count + frames)
        cells = height * width
        keys, values = (a.reshape(batch, -1, 1, channels) for a in (keys, values))

        def attend(frame: Array) -> Float[Array, "B L 1 C"]:
            live = jnp.arange(keys.shape[1]) < (seen + frame + 1) * cells
            live = jnp.broadcast_to(live, keys.shape[:2])
            return attention(q[:, frame].reshape(batch, cells, 1, channels), keys, values, key_mask=live)

        y = jnp.moveaxis(jax.lax.map(attend, jnp.arange(frames)), 0, 1)  # [B T H·W 1 C]
        return x + self.out(y.reshape(x.shape)), cache


class MidBlock(nnx.Module):
    """Attention between two residual blocks, at the lowest resolution."""

    def __init__(self, channels: int, longest: int, **kw):
        self.res1 = ResBlock(channels, **kw)
        self.attention = CausalAttention(channels, longest, **kw)
        self.res2 = ResBlock(channels, **kw)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache1, cache_attention, cache2 = cache or (None, None, None)
        x, cache1 = self.res1(x, cache1)
        x, cache_attention = self.attention(x, cache_attention)
        x, cache2 = self.res2(x, cache2)
        return x, (cache1, cache_attention, cache2)


def fold(x: Chunk, frames: int) -> Chunk:
    """Folds blocks of `frames` × 2 × 2 cells into channels: frame, row, column, and the channel fastest."""
    batch, t, height, width, channels = x.shape
    x = x.reshape(batch, t // frames, frames, height // 2, 2, width // 2, 2, channels)
    x = jnp.transpose(x, (0, 1, 3, 5, 2, 4, 6, 7))  # [B T H W ft 2 2 C]
    return x.reshape(*x.shape[:4], -1)


def unfold(x: Chunk, frames: int) -> Chunk:
    """The inverse of `fold`."""
    batch, t, height, width, channels = x.shape
    x = x.reshape(batch, t, height, width, frames, 2, 2, channels // (4 * frames))
    x = jnp.transpose(x, (0, 1, 4, 2, 5, 3, 6, 7))  # [B T ft H 2 W 2 C]
    return x.reshape(batch, t * frames, 2 * height, 2 * width, -1)


def grouped_mean(x: Chunk, channels: int) -> Chunk:
    """Average neighbouring channels, down to a number of channels."""
    return x.reshape(*x.shape[:4], channels, -1).mean(axis=-1)


def first_apart(resample, x: Chunk, y: Chunk, cache: Cache, temporal: bool) -> Chunk:
    """Return `resample(x, y, frames)` with blocks of one frame for the video's first, and of two for the others."""
    if not temporal or cache is not None:
        return resample(x, y, 1 + temporal)
    first = resample(x[:, :1], y[:, :1], 1)
    return jnp.concatenate([first, resample(x[:, 1:], y[:, 1:], 2)], axis=1) if x.shape[1] > 1 else first


class Downsample(nnx.Module):
    """Halves height and width and, if `temporal`, the number of frames after the first; means are the shortcut."""

    def __init__(self, channels_in: int, channels_out: int, temporal: bool, **kw):
        self.conv = EdgeConv(channels_in, channels_out // (8 if temporal else 4), **kw)
        self.channels = channels_out
        self.temporal = temporal

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        y, new_cache = self.conv(x, cache)
        return first_apart(self.resample, x, y, cache, self.temporal), new_cache

    def resample(self, x: Chunk, y: Chunk, frames: int) -> Chunk:
        """The folded convolution, which comes twice where a frame is alone, plus the shortcut."""
        y = fold(y, frames)
        y = jnp.tile(y, self.channels // y.shape[-1])
        return y + grouped_mean(fold(x, frames), self.channels)


class Upsample(nnx.Module):
    """Doubles height and width and, if `temporal`, the number of frames after the first; copies are the shortcut."""

    def __init__(self, channels_in: int, channels_out: int, temporal: bool, **kw):
        self.conv = EdgeConv(channels_in, channels_out * (8 if temporal else 4), **kw)
        self.channels = channels_out
        self.temporal = temporal

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        y, new_cache = self.conv(x, cache)
        return first_apart(self.resample, x, y, cache, self.temporal), new_cache

    def resample(self, x: Chunk, y: Chunk, frames: int) -> Chunk:
        """The unfolded convolution, half of it where a frame is alone, plus the shortcut.

        Channels are copied after they are unfolded in time too, and before they are unfolded in space alone.
        """
        y = unfold(y, frames)[..., : self.channels]
        if self.temporal:
            x = unfold(x, frames)
            return y + x.repeat(self.channels // x.shape[-1], axis=-1)
        return y + unfold(x.repeat(4 * self.channels // x.shape[-1], axis=-1), frames)


class Level(nnx.Module):
    """The residual blocks of one resolution, then the change to the next resolution if there is one."""

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
    """Pixels, through the levels, to the mean and log-variance of latents."""

    def __init__(self, config: VAEConfig, **kw):
        first, *_, last = config.channels
        halvings, temporal = config.halvings
        downs = [
            Downsample(a, b, level >= halvings - temporal, **kw) if level < halvings else None
            for level, (a, b) in enumerate(pairwise((*config.channels, 0)))
        ]
        self.conv_in = EdgeConv(3, first, **kw)
        self.levels = nnx.List(
            [Level(size, config.res_blocks, down, **kw) for size, down in zip(config.channels, downs, strict=True)]
        )
        self.mid = MidBlock(last, config.longest, **kw)
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
    """Latents, through the levels, to pixels."""

    def __init__(self, config: VAEConfig, **kw):
        first, *_, last = sizes = config.channels[::-1]
        halvings, temporal = config.halvings
        ups = [
            Upsample(a, b, level < temporal, **kw) if level < halvings else None
            for level, (a, b) in enumerate(pairwise((*sizes, 0)))
        ]
        self.conv_in = EdgeConv(config.latent_channels, first, **kw)
        self.mid = MidBlock(first, config.longest, **kw)
        self.levels = nnx.List(
            [Level(size, config.res_blocks + 1, up, **kw) for size, up in zip(sizes, ups, strict=True)]
        )
        self.norm_out = ChannelNorm(last, **kw)
        kw |= {"dtype": jnp.float32}  # frames are not rounded before they are 8 bits
        self.conv_out = EdgeConv(last, 3, **kw)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        cache_in, cache_mid, cache_levels, cache_out = cache or [None] * 4
        h, cache_in = self.conv_in(x, cache_in)
        x = h + x.repeat(h.shape[-1] // x.shape[-1], axis=-1)
        x, cache_mid = self.mid(x, cache_mid)
        x, cache_levels = run_layers(self.levels, x, cache_levels)
        x, cache_out = self.conv_out(self.norm_out.silu(x), cache_out)
        return x, (cache_in, cache_mid, cache_levels, cache_out)


class HunyuanVideoVAE(nnx.Module):
    """HunyuanVideo 1.5's autoencoder: videos [B T H W 3] in [-1, 1] to scaled latents [B T H W C] and back."""

    def __init__(self, config: VAEConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config = config
        self.dtype = dtype
        self.encoder = Encoder(config, **kw)
        self.decoder = Decoder(config, **kw)

    def encode_cells(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        """Encode frames, 4n + 1 if `cache` is None and 4n after, as scaled latents: the mode of the posterior."""
        h, cache = self.encoder(x.astype(self.dtype), cache)
        mean, _ = jnp.split(h.astype(jnp.float32), 2, axis=-1)
        return mean * self.config.scale, cache

    def decode_cells(self, z: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        """Decode any number of latent frames to frames in about [-1, 1], float32."""
        h = (z.astype(jnp.float32) / self.config.scale).astype(self.dtype)
        x, cache = self.decoder(h, cache)
        return x.astype(jnp.float32), cache
