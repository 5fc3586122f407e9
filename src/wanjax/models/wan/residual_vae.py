# SPDX-License-Identifier: Apache-2.0
"""The autoencoder of Wan 2.2's 5B model. A latent position covers 16 × 16 pixels of 4 frames, and has 48 channels.

This autoencoder processes chunks like the autoencoder of Wan 2.1 and has the same blocks, with two differences. Its
convolutions work on patches of 2 × 2 pixels. Every level that changes the resolution has a shortcut without weights.
The shortcut averages values in the encoder, and repeats values in the decoder. The reference is diffusers'
models/autoencoders/autoencoder_kl_wan.py with `is_residual`.
"""

from itertools import pairwise

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from wanjax.layers.conv import Cache, Chunk
from wanjax.models.wan.config import VAEConfig
from wanjax.models.wan.vae import Downsample, Level, Upsample, WanVAE

Factors = tuple[int, int]  # factors of frames, and of height and width


def fold_means(x: Float[Array, "B T H W C"], factors: Factors, channels: int) -> Chunk:
    """Fold groups of frames and positions into channels, then average neighbouring channels to get `channels` channels.

    Zeros are added before the first frame, so that the frames form whole groups.
    """
    ft, fs = factors
    x = jnp.pad(x, ((0, 0), (-x.shape[1] % ft, 0), (0, 0), (0, 0), (0, 0)))
    batch, frames, height, width, channels_in = x.shape
    x = x.reshape(batch, frames // ft, ft, height // fs, fs, width // fs, fs, channels_in)
    x = jnp.transpose(x, (0, 1, 3, 5, 7, 2, 4, 6))  # [B T H W C ft fs fs]
    return x.reshape(*x.shape[:4], channels, -1).mean(axis=-1)


def unfold_copies(x: Float[Array, "B T H W C"], factors: Factors, channels: int, *, is_first_chunk: bool) -> Chunk:
    """Repeat channels, and unfold them into frames and positions. With `is_first_chunk`, drop the frames before the
    first real frame."""
    ft, fs = factors
    batch, frames, height, width, channels_in = x.shape
    x = x.repeat(channels * ft * fs * fs // channels_in, axis=-1)
    x = x.reshape(batch, frames, height, width, channels, ft, fs, fs)
    x = jnp.transpose(x, (0, 1, 5, 2, 6, 3, 7, 4))  # [B T ft H fs W fs C]
    x = x.reshape(batch, frames * ft, height * fs, width * fs, channels)
    return x[:, ft - 1 :] if is_first_chunk else x


class DownLevel(Level):
    """A level of the encoder with its shortcut."""

    def __init__(self, channels_in: int, channels_out: int, res_blocks: int, temporal: bool | None, **kw):
        """`temporal` is passed to `Downsample`; None keeps the resolution."""
        down = None if temporal is None else Downsample(channels_out, temporal, **kw)
        super().__init__(channels_in, channels_out, res_blocks, down, **kw)
        self.factors = (1, 1) if temporal is None else (1 + temporal, 2)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        y, cache = super().__call__(x, cache)
        return y + fold_means(x, self.factors, y.shape[-1]), cache


class UpLevel(Level):
    """A level of the decoder with its shortcut."""

    def __init__(self, channels_in: int, channels_out: int, res_blocks: int, temporal: bool, **kw):
        up = Upsample(channels_out, channels_out, temporal, **kw)
        super().__init__(channels_in, channels_out, res_blocks, up, **kw)
        self.factors = (1 + temporal, 2)

    def __call__(self, x: Chunk, cache: Cache) -> tuple[Chunk, Cache]:
        y, new_cache = super().__call__(x, cache)
        return y + unfold_copies(x, self.factors, y.shape[-1], is_first_chunk=cache is None), new_cache


class WanResidualVAE(WanVAE):
    """Wan 2.2's autoencoder: videos [B T H W 3] in [-1, 1] to normalised latents [B T H W C] and back."""

    @staticmethod
    def encoder_levels(config: VAEConfig, **kw) -> list[nnx.Module]:
        temporal = [*config.temporal_downsample, None]
        return [
            DownLevel(a, b, config.res_blocks, t, **kw)
            for (a, b), t in zip(pairwise(config.encoder_sizes), temporal, strict=True)
        ]

    @staticmethod
    def decoder_levels(config: VAEConfig, **kw) -> list[nnx.Module]:
        *upsampled, last = pairwise(config.decoder_sizes)
        temporal = reversed(config.temporal_downsample)
        levels = [UpLevel(a, b, config.res_blocks + 1, t, **kw) for (a, b), t in zip(upsampled, temporal, strict=True)]
        return [*levels, Level(*last, config.res_blocks + 1, None, **kw)]
