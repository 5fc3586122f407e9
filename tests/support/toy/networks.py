# SPDX-License-Identifier: Apache-2.0
"""The toy family's networks: a table of bytes, a dual stream with a text mask, an autoencoder of another scale."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.kernels.attention import attention as attend
from wanjax.layers.embeddings import sinusoidal_embedding
from wanjax.layers.linear import linear
from wanjax.layers.norms import layer_norm
from wanjax.layers.patch import depth_to_space, patch_grid, patchify, space_to_depth, unpatchify
from wanjax.layers.stack import NO_BLOCK_CACHE, scan_blocks, stack
from wanjax.layers.tiling import Tiling

PATCH = (1, 2, 2)


@dataclass(frozen=True)
class GlyphConfig:
    width: int


@dataclass(frozen=True)
class TransformerConfig:
    layers: int
    heads: int
    head_dim: int
    text_width: int
    glyph_width: int
    channels: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class VAEConfig:
    latent_channels: int
    spatial_factor: int
    temporal_factor: int
    patch: int = 1

    @property
    def tiling(self) -> Tiling:
        return Tiling(16, 12)

    def encode_lengths(self, frames: int) -> tuple[int, int]:
        return 1, self.temporal_factor

    def decode_lengths(self, frames: int) -> tuple[int, int]:
        return 1, 1


class GlyphEncoder(nnx.Module):
    """The second text encoder: a table of bytes."""

    def __init__(self, config: GlyphConfig, **kw):
        self.table = linear(256, config.width, (None, "embed"), bias=False, **kw)

    def __call__(self, ids):
        return self.table(jax.nn.one_hot(ids, 256, dtype=jnp.float32))


class Block(nnx.Module):
    """Two streams, each with projections of its own, that attend to each other."""

    def __init__(self, config: TransformerConfig, attention: AttentionConfig, **kw):
        width, self.heads, self.attention = config.width, config.heads, attention
        self.video_qkv = linear(width, 3 * width, ("embed", "heads"), **kw)
        self.text_qkv = linear(width, 3 * width, ("embed", "heads"), **kw)
        self.video_out = linear(width, width, ("heads", "embed"), **kw)
        self.text_out = linear(width, width, ("heads", "embed"), **kw)
        self.norm = layer_norm(width, 1e-6, affine=False, **kw)
        self.dtype = kw["dtype"]

    def __call__(self, streams, mask):
        x, text = streams
        qkv = [self.text_qkv(self.norm(text).astype(self.dtype)), self.video_qkv(self.norm(x).astype(self.dtype))]
        joined = jnp.concatenate(qkv, axis=1).reshape(len(x), -1, self.heads, 3 * x.shape[-1] // self.heads)
        q, k, v = jnp.split(joined, 3, axis=-1)
        y = attend(q, k, v, key_mask=mask, implementation=self.attention).reshape(len(x), -1, x.shape[-1])
        y_text, y_video = jnp.split(y, [text.shape[1]], axis=1)
        return x + self.video_out(y_video), text + self.text_out(y_text)


class Transformer(nnx.Module):
    """Predicts v of latents [B T H W C] at timesteps t under text tokens and their mask."""

    def __init__(self, config: TransformerConfig, *, attention: AttentionConfig = AUTO, **kw):
        rngs, width, self.config, self.dtype = kw["rngs"], config.width, config, kw["dtype"]
        self.patch_embed = linear(4 * config.channels, width, (None, "embed"), **kw)
        self.text_embed = linear(config.text_width, width, ("text", "embed"), **kw)
        self.glyph_embed = linear(config.glyph_width, width, ("text", "embed"), **kw)
        self.time_embed = linear(8, width, (None, "embed"), **kw)
        self.blocks = stack(lambda rngs: Block(config, attention, **kw | {"rngs": rngs}), config.layers, rngs)
        self.proj_out = linear(width, 4 * config.channels, ("embed", None), **kw)

    def context(self, text, glyphs):
        both = self.text_embed(text.astype(self.dtype)), self.glyph_embed(glyphs.astype(self.dtype))
        return jnp.concatenate(both, axis=1)

    def __call__(self, x, t, text, mask, cache=NO_BLOCK_CACHE):
        grid = patch_grid(x, PATCH)
        tokens = self.patch_embed(patchify(x.astype(self.dtype), PATCH))
        tokens = tokens + self.time_embed(sinusoidal_embedding(t, 8).astype(self.dtype))[:, None]
        real = jnp.arange(tokens.shape[1]) < np.prod(grid)  # on a mesh, zeros are padded at the end
        keys = jnp.concatenate([mask, jnp.broadcast_to(real, (len(x), len(real)))], axis=1)
        streams = tokens, text
        for part in cache.parts(self.config.layers):
            streams = cache.before(part, streams)
            streams = scan_blocks(self.blocks, lambda block, streams: block(streams, keys), streams, part=part)
        tokens, _ = cache.after(streams)
        return unpatchify(self.proj_out(tokens), grid, PATCH)


class VAE(nnx.Module):
    """An autoencoder with a linear layer each way on cells of 4 × 4 pixels of two frames; the first frame is alone."""

    def __init__(self, config: VAEConfig, **kw):
        cells = 3 * config.spatial_factor**2
        self.config = config
        self.encoder = linear(cells, config.latent_channels, ("conv_in", "conv_out"), **kw)
        self.decoder = linear(config.latent_channels, cells, ("conv_in", "conv_out"), **kw)

    def encode_chunk(self, x, cache):
        return self.encoder(space_to_depth(x.mean(axis=1, keepdims=True), self.config.spatial_factor)), ()

    def decode_chunk(self, z, cache):
        x = depth_to_space(self.decoder(z), self.config.spatial_factor)
        return (x if cache is None else jnp.repeat(x, self.config.temporal_factor, axis=1)), ()
