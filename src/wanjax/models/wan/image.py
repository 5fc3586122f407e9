# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1's diffusion transformer for image to video, and for first and last frame to video.

What the text-to-video transformer is, but for two things: the latents come with the channels of a condition, the mask
and the latents of the given frames; and cross-attention asks the image's features (those of a CLIP) as well as the
prompt, each with a softmax of its own. The reference is diffusers' models/transformers/transformer_wan.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.layers.embeddings import sinusoid
from wanjax.layers.linear import linear, map_blocks, scan_blocks
from wanjax.layers.mlp import MLP, gelu, gelu_tanh
from wanjax.layers.modulation import gated_add, modulate, split_modulation
from wanjax.layers.norms import layer_norm, rms_norm
from wanjax.layers.patch import patchify, unpatchify
from wanjax.layers.rope import Rope
from wanjax.models.wan.config import ImageTransformerConfig
from wanjax.models.wan.transformer import (
    Context,
    CrossAttention,
    SelfAttention,
    Tokens,
    WanTransformer,
    modulation_table,
    split_heads,
)

ImageTokens = Float[Array, "B _S E"]  # 257 for an image, 514 for a first and a last one


class ImageContext(NamedTuple):
    """Keys and values of the prompt, and those of the image."""

    text: Context
    image: Context


class ImageCrossAttention(CrossAttention):
    """Attention of every token to the prompt, plus its attention to the image: two softmaxes, one q, one way out."""

    def __init__(self, config: ImageTransformerConfig, implementation: str | None, **kw):
        super().__init__(config, implementation, **kw)
        self.image_k = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.image_v = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.image_k_norm = rms_norm(config.width, config.eps, **kw)

    def image_context(self, image: ImageTokens) -> Context:
        """What queries ask of an image."""
        return Context(self.kept(self.image_k_norm(self.image_k(image))), self.kept(self.image_v(image)))

    @jax.named_scope("cross_attention")
    def __call__(self, x: Tokens, context: ImageContext) -> Tokens:
        q = split_heads(self.q_norm(self.q(x)), self.heads)  # [B L N D]
        k, v = (split_heads(keys, self.heads) for keys in context.text)  # [B S N D]
        image_k, image_v = (split_heads(keys, self.heads) for keys in context.image)
        return self.out(self.attend(q, k, v) + self.attend(q, image_k, image_v))


class ImageBlock(nnx.Module):
    def __init__(self, config: ImageTransformerConfig, implementation: str | None, **kw):
        width = config.width
        self.norm1 = layer_norm(width, config.eps, affine=False, **kw)
        self.self_attn = SelfAttention(config, implementation, **kw)
        self.norm2 = layer_norm(width, config.eps, affine=True, **kw)
        self.cross_attn = ImageCrossAttention(config, implementation, **kw)
        self.norm3 = layer_norm(width, config.eps, affine=False, **kw)
        self.mlp = MLP((width, config.mlp_dim, width), ("embed", "mlp", "embed"), gelu_tanh, **kw)
        self.table = modulation_table(6, width, kw["rngs"])
        self.dtype = kw["dtype"]

    def __call__(self, x: Tokens, context: ImageContext, mod: Float[Array, "B 1 6 E"], rope: Rope) -> Tokens:
        self_mod, mlp_mod = split_modulation(mod + self.table[...][None, None])
        y = modulate(self.norm1(x), self_mod.shift, self_mod.scale).astype(self.dtype)
        x = gated_add(x, self.self_attn(y, rope), self_mod.gate)
        x = x + self.cross_attn(self.norm2(x).astype(self.dtype), context).astype(x.dtype)
        y = modulate(self.norm3(x), mlp_mod.shift, mlp_mod.scale).astype(self.dtype)
        return gated_add(x, self.mlp(y), mlp_mod.gate)


class ImageEmbed(nnx.Module):
    """Features of an image in the transformer's width; those of a first and a last one are told apart by position."""

    def __init__(self, config: ImageTransformerConfig, **kw):
        width_in, width, eps = config.image_width, config.width, 1e-5  # not the config's, which the blocks have
        self.positions = nnx.data(
            None if config.image_positions is None else position_table(config.image_positions, width_in, **kw)
        )
        self.norm1 = layer_norm(width_in, eps, affine=True, **kw)
        self.mlp = MLP((width_in, width_in, width), (None, "mlp", "embed"), gelu, **kw)
        self.norm2 = layer_norm(width, eps, affine=True, **kw)
        self.dtype = kw["dtype"]

    def __call__(self, image: Float[Array, "B _S _E"]) -> ImageTokens:
        x = image.astype(self.dtype)
        if self.positions is not None:
            x = x + self.positions[...][None].astype(self.dtype)
        x = self.mlp(self.norm1(x).astype(self.dtype))
        return self.norm2(x).astype(self.dtype)


class WanImageTransformer(WanTransformer):
    """Predicts the velocity of latents at timesteps t in [0, 1000] for encoded prompts and images [B S E].

    `latents` [B T H W C] are those of the video and behind them, along the channels, the condition.
    """

    block_type = ImageBlock

    def __init__(
        self,
        config: ImageTransformerConfig,
        *,
        attention: str | None = None,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        """`attention` names an implementation of it; None picks by platform and shape."""
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(config, attention=attention, **kw)
        self.image_embed = ImageEmbed(config, **kw)

    def context(self, text: Float[Array, "B S _E"], image: Float[Array, "B _S _E"]) -> ImageContext:
        """What the blocks' cross-attention asks of encoded prompts and images: keys and values [layers B S E]."""
        text, image = self.text_embed(text.astype(self.dtype)), self.image_embed(image)
        return map_blocks(
            self.blocks,
            lambda block: ImageContext(block.cross_attn.context(text), block.cross_attn.image_context(image)),
        )

    def __call__(
        self, latents: Float[Array, "B T H W C"], t: Float[Array, "B"], context: ImageContext, rope: Rope
    ) -> Float[Array, "B T H W _C"]:
        """`context` and `rope` are those of the methods."""
        grid = self.grid(latents)
        x = self.patch_embed(patchify(latents.astype(self.dtype), self.config.patch))  # [B L E]
        time = self.time_embed(sinusoid(t, self.config.frequency_dim))[:, None]  # [B 1 E]
        mod = self.time_proj(jax.nn.silu(time)).reshape(-1, 1, 6, self.config.width)

        x = scan_blocks(self.blocks, lambda block, x, context: block(x, context, mod, rope), x, context)

        shift, scale = (time + row for row in jnp.split(self.table[...][None], 2, axis=1))
        x = self.proj_out(modulate(self.norm_out(x), shift, scale).astype(self.dtype))
        return unpatchify(x, grid, self.config.patch)


def position_table(tokens: int, width: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs, dtype: DTypeLike) -> nnx.Param:
    """What is added to each of the images' features, learnt; zeros before that, as in the reference."""
    del dtype
    init = nnx.with_partitioning(nnx.initializers.zeros_init(), (None, None))
    return nnx.Param(init(rngs.params(), (tokens, width), param_dtype))
