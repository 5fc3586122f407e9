# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1's diffusion transformer for image to video, and for first and last frame to video.

It differs from the text-to-video transformer in two ways. The latents come with the channels of a condition: a mask and
the latents of the given frames. Cross-attention attends to features of the image (a CLIP's) as well as to the prompt,
each with a softmax of its own. The reference is diffusers' models/transformers/transformer_wan.py.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.kernels.attention import AUTO, Attention, Radial
from wanjax.layers.embeddings import sinusoid
from wanjax.layers.linear import linear
from wanjax.layers.mlp import MLP, gelu, gelu_tanh
from wanjax.layers.modulation import gated_add, modulate, split_modulation
from wanjax.layers.norms import layer_norm, rms_norm
from wanjax.layers.patch import patch_grid, patchify, unpatchify
from wanjax.layers.placement import with_axes
from wanjax.layers.rope import Rope, rope_3d
from wanjax.layers.stack import Through, map_blocks, stack, through_all, trunk_of
from wanjax.models.wan.config import ImageTransformerConfig
from wanjax.models.wan.transformer import (
    AttentionLayer,
    Context,
    SelfAttention,
    Tokens,
    modulation_table,
    shard_keys,
    shard_stacked,
    split_heads,
    time_mlp,
)

ImageTokens = Float[Array, "B _S E"]  # 257 for an image, 514 for a first and a last one


class ImageContext(NamedTuple):
    """Keys and values of the prompt, and those of the image."""

    text: Context
    image: Context


class ImageCrossAttention(AttentionLayer):
    """Attention of every token to the prompt plus its attention to the image: two softmaxes of one query."""

    def __init__(self, config: ImageTransformerConfig, attention: Attention, **kw):
        super().__init__(config, attention.plain(), **kw)
        self.image_k = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.image_v = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.image_k_norm = rms_norm(config.width, config.eps, **kw)

    def context(self, text: Float[Array, "B S E"]) -> Context:
        """Keys and values of a prompt, which are the same in every step."""
        k = shard_keys(self.k_norm(self.k(text)).astype(self.dtype), self.heads)
        return Context(k, shard_keys(self.v(text).astype(self.dtype), self.heads))

    def image_context(self, image: ImageTokens) -> Context:
        """Keys and values of an image, which are the same in every step."""
        k = shard_keys(self.image_k_norm(self.image_k(image)).astype(self.dtype), self.heads)
        return Context(k, shard_keys(self.image_v(image).astype(self.dtype), self.heads))

    @jax.named_scope("cross_attention")
    def __call__(self, x: Tokens, context: ImageContext) -> Tokens:
        q = split_heads(self.q_norm(self.q(x)), self.heads)  # [B L N D]
        k, v = (split_heads(keys, self.heads) for keys in context.text)  # [B S N D]
        image_k, image_v = (split_heads(keys, self.heads) for keys in context.image)
        return self.out(self.attend(q, k, v) + self.attend(q, image_k, image_v))


class ImageBlock(nnx.Module):
    """The text-to-video transformer's block, with cross-attention to the image too."""

    def __init__(self, config: ImageTransformerConfig, attention: Attention, **kw):
        width = config.width
        self.norm1 = layer_norm(width, config.eps, affine=False, **kw)
        self.self_attn = SelfAttention(config, attention, **kw)
        self.norm2 = layer_norm(width, config.eps, affine=True, **kw)
        self.cross_attn = ImageCrossAttention(config, attention, **kw)
        self.norm3 = layer_norm(width, config.eps, affine=False, **kw)
        self.mlp = MLP((width, config.mlp_dim, width), ("embed", "mlp", "embed"), gelu_tanh, **kw)
        self.table = modulation_table(6, width, kw["rngs"])
        self.dtype = kw["dtype"]

    def __call__(
        self, x: Tokens, context: ImageContext, mod: Float[Array, "B 1 6 E"], rope: Rope, mask: Radial | None = None
    ) -> Tokens:
        self_mod, mlp_mod = split_modulation(mod + self.table[...][None, None])
        y = modulate(self.norm1(x), self_mod.shift, self_mod.scale).astype(self.dtype)
        x = gated_add(x, self.self_attn(y, rope, mask), self_mod.gate)
        x = x + self.cross_attn(self.norm2(x).astype(self.dtype), context).astype(x.dtype)
        y = modulate(self.norm3(x), mlp_mod.shift, mlp_mod.scale).astype(self.dtype)
        return gated_add(x, self.mlp(y), mlp_mod.gate)


class ImageEmbed(nnx.Module):
    """Features of an image, in the transformer's width; positions tell a first image from a last one."""

    def __init__(self, config: ImageTransformerConfig, **kw):
        width_in, width, eps = config.image_width, config.width, 1e-5  # the blocks have another eps, the config's
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


class WanImageTransformer(nnx.Module):
    """Predicts the velocity of latents at timesteps t in [0, 1000] for encoded prompts and images [B S E].

    `latents` [B T H W C] are those of the video and, after them along the channels, the condition: a mask and the
    latents of the given frames.
    """

    def __init__(
        self,
        config: ImageTransformerConfig,
        *,
        attention: Attention = AUTO,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        """`attention` is how tokens attend; AUTO chooses by platform and shape."""
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        width, cells = config.width, config.patch_cells
        self.config = config
        self.attention = attention
        self.dtype = dtype
        self.patch_embed = linear(cells * config.channels_in, width, (None, "embed"), **kw)
        self.text_embed = MLP((config.text_width, width, width), ("text", "mlp", "embed"), gelu_tanh, **kw)
        self.time_embed = time_mlp(config, rngs)
        self.time_proj = linear(width, 6 * width, ("embed", "mlp"), **{**kw, "dtype": jnp.float32})
        self.blocks = stack(lambda rngs: ImageBlock(config, attention, **{**kw, "rngs": rngs}), config.layers, rngs)
        self.norm_out = layer_norm(width, config.eps, affine=False, **kw)
        self.table = modulation_table(2, width, rngs)
        self.proj_out = linear(width, cells * config.channels_out, ("embed", None), **kw)
        self.image_embed = ImageEmbed(config, **kw)

    def context(self, text: Float[Array, "B S _E"], image: Float[Array, "B _S _E"]) -> ImageContext:
        """Keys and values of encoded prompts and images [B S E] in every block: [layers B S E]."""
        text, image = self.text_embed(text.astype(self.dtype)), self.image_embed(image)
        keys = map_blocks(
            self.blocks,
            lambda block: ImageContext(block.cross_attn.context(text), block.cross_attn.image_context(image)),
        )
        return shard_stacked(keys, self.config.heads)

    def grid(self, latents: Float[Array, "B T H W C"]) -> tuple[int, int, int]:
        """The number of patches along frames, height and width."""
        return patch_grid(latents, self.config.patch)

    def rope(self, grid: tuple[int, int, int]) -> Rope:
        """Tables of RoPE for a grid of patches."""
        return rope_3d(grid, self.config.rope_channels)

    def mask(self, grid: tuple[int, int, int]) -> Radial | None:
        """The mask of radial self-attention over a grid of patches; None where all see all."""
        return self.attention.mask(grid)

    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Float[Array, "B"],
        context: ImageContext,
        rope: Rope,
        *,
        mask: Radial | None = None,
        through: Through = through_all,
    ) -> Float[Array, "B T H W _C"]:
        """`context`, `rope` and `mask` come from the methods of these names; `through` runs the blocks."""
        grid = self.grid(latents)
        x = self.patch_embed(patchify(latents.astype(self.dtype), self.config.patch))  # [B L E]
        time = self.time_embed(sinusoid(t, self.config.frequency_dim))[:, None]  # [B 1 E]
        mod = self.time_proj(jax.nn.silu(time)).reshape(-1, 1, 6, self.config.width)

        def run(block: ImageBlock, x: Tokens, context: ImageContext, mask: Radial | None = mask) -> Tokens:
            return block(x, context, mod, rope, mask)

        first = None if mask is None else partial(run, mask=None)
        x = through(trunk_of(self.blocks, run, context, first=first), x)

        shift, scale = (time + row for row in jnp.split(self.table[...][None], 2, axis=1))
        x = self.proj_out(modulate(self.norm_out(x), shift, scale).astype(self.dtype))
        return unpatchify(x, grid, self.config.patch)


def position_table(tokens: int, width: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs, dtype: DTypeLike) -> nnx.Param:
    """Learned positions of the features of all images; zeros before training, as in the reference."""
    del dtype
    init = with_axes(nnx.initializers.zeros_init(), (None, None))
    return nnx.Param(init(rngs.params(), (tokens, width), param_dtype))
