# SPDX-License-Identifier: Apache-2.0
"""The embeddings of the three kinds of text tokens of HunyuanVideo 1.5: the prompt, glyphs, and a picture.

Glyphs are quoted text that the video shows as writing. The prompt's tokens are refined by a small transformer, whose
gates depend on the timestep and on the mean of the prompt's features (Ma et al., LI-DiT, 2024, arXiv:2406.11831). The
tokens of glyphs and of a picture are only projected. The reference is diffusers'
models/transformers/transformer_hunyuan_video15.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.attention import AttentionConfig, attention
from wanjax.layers.embeddings import TimeEmbed
from wanjax.layers.heads import join_heads, split_heads
from wanjax.layers.linear import linear
from wanjax.layers.mlp import MLP, gelu
from wanjax.layers.modulation import gated_add
from wanjax.layers.norms import layer_norm
from wanjax.layers.stack import scan_blocks, stack
from wanjax.models.hunyuanvideo.config import TransformerConfig

TextTokens = Float[Array, "B S E"]
Mask = Bool[Array, "B S"]
PROJECTION_EPS = 1e-5  # epsilon of the norms in projections; the blocks use the config's epsilon


class Prompt(NamedTuple):
    """A prompt before it is refined: the projected tokens, and the embedding of their mean."""

    tokens: TextTokens
    mean: Float32[Array, "B E"]


class RefinerBlock(nnx.Module):
    """Self-attention over the prompt's tokens, and an MLP. The gates of both are computed from the timestep and the
    prompt."""

    def __init__(self, config: TransformerConfig, attention: AttentionConfig, **kw):
        width = config.width
        self.norm1 = layer_norm(width, config.eps, affine=True, **kw)
        self.q = linear(width, width, ("embed", "heads"), **kw)
        self.k = linear(width, width, ("embed", "heads"), **kw)
        self.v = linear(width, width, ("embed", "heads"), **kw)
        self.out = linear(width, width, ("heads", "embed"), **kw)
        self.norm2 = layer_norm(width, config.eps, affine=True, **kw)
        self.mlp = MLP((width, config.refiner_mlp_dim, width), ("embed", "mlp", "embed"), jax.nn.silu, **kw)
        self.gates = linear(width, 2 * width, ("embed", "mlp"), **{**kw, "dtype": jnp.float32})
        self.heads = config.heads
        self.dtype = kw["dtype"]
        self.attention = attention.dense_only()

    def __call__(self, x: TextTokens, condition: Float32[Array, "B E"], mask: Mask) -> TextTokens:
        attention_gate, mlp_gate = jnp.split(self.gates(jax.nn.silu(condition))[:, None], 2, axis=-1)  # [B 1 E]
        x = gated_add(x, self.attend(self.norm1(x).astype(self.dtype), mask), attention_gate)
        return gated_add(x, self.mlp(self.norm2(x).astype(self.dtype)), mlp_gate)

    def attend(self, x: TextTokens, mask: Mask) -> TextTokens:
        """Compute attention to the tokens in the mask."""
        q, k, v = (split_heads(project(x), self.heads) for project in (self.q, self.k, self.v))
        y = attention(q, k, v, key_mask=mask, implementation=self.attention)  # [B S N D]
        return self.out(join_heads(y))


class Refiner(nnx.Module):
    """Refine a prompt's tokens at a timestep."""

    def __init__(self, config: TransformerConfig, attention: AttentionConfig, **kw):
        width = config.width
        self.tokens = linear(config.text_width, width, ("text", "embed"), **kw)
        self.time_embed = TimeEmbed(config.frequency_dim, width, kw["rngs"])
        self.mean_embed = MLP(
            (config.text_width, width, width), ("text", "mlp", "embed"), jax.nn.silu, **{**kw, "dtype": jnp.float32}
        )
        self.blocks = stack(
            lambda rngs: RefinerBlock(config, attention, **{**kw, "rngs": rngs}), config.refiner_layers, kw["rngs"]
        )
        self.dtype = kw["dtype"]

    def prompt(self, text: Float[Array, "B S _E"], mask: Mask) -> Prompt:
        """Compute the part of the refiner that does not depend on the timestep: projections of the tokens and of their
        masked mean.

        If no token is in the mask, the mean is zero.
        """
        weight = mask[:, :, None].astype(jnp.float32)
        mean = jnp.sum(text.astype(jnp.float32) * weight, axis=1) / jnp.maximum(jnp.sum(weight, axis=1), 1.0)
        return Prompt(self.tokens(text.astype(self.dtype)), self.mean_embed(mean))

    def __call__(self, prompt: Prompt, t: Float[Array, "B"], mask: Mask) -> TextTokens:
        condition = self.time_embed(t) + prompt.mean
        return scan_blocks(self.blocks, lambda block, x: block(x, condition, mask), prompt.tokens)


class GlyphEmbed(nnx.Module):
    """Project the features of glyphs to the transformer's width."""

    def __init__(self, config: TransformerConfig, **kw):
        hidden = config.glyph_mlp_dim
        self.norm = layer_norm(config.glyph_width, PROJECTION_EPS, affine=True, **kw)
        self.mlp = MLP((config.glyph_width, hidden, hidden), ("text", "mlp", "embed"), gelu, **kw)
        self.out = linear(hidden, config.width, ("mlp", "embed"), **kw)
        self.dtype = kw["dtype"]

    def __call__(self, glyphs: Float[Array, "B S _E"]) -> TextTokens:
        return self.out(gelu(self.mlp(self.norm(glyphs).astype(self.dtype))))


class ImageEmbed(nnx.Module):
    """Project features of a picture to the transformer's width."""

    def __init__(self, config: TransformerConfig, **kw):
        width_in, width = config.image_width, config.width
        self.norm1 = layer_norm(width_in, PROJECTION_EPS, affine=True, **kw)
        self.mlp = MLP((width_in, width_in, width), (None, "mlp", "embed"), gelu, **kw)
        self.norm2 = layer_norm(width, PROJECTION_EPS, affine=True, **kw)
        self.dtype = kw["dtype"]

    def __call__(self, image: Float[Array, "B S _E"]) -> TextTokens:
        return self.norm2(self.mlp(self.norm1(image).astype(self.dtype))).astype(self.dtype)
