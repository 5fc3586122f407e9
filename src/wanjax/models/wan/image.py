# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1's diffusion transformer for image to video, and for first and last frame to video.

This transformer differs from the text-to-video transformer in two ways. The latents have extra channels for the
condition: a mask and the latents of the input frames. Cross-attention also attends to CLIP features of the image, with
a separate softmax. The reference is diffusers' models/transformers/transformer_wan.py.
"""

from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Float32

from wanjax.dims import readable_signature
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import AUTO, AttentionConfig, Radial
from wanjax.layers.embeddings import Timesteps, checked_text, context_of
from wanjax.layers.heads import split_heads
from wanjax.layers.linear import linear
from wanjax.layers.mlp import MLP, gelu
from wanjax.layers.norms import layer_norm, rms_norm
from wanjax.layers.placement import on_weights_mesh, param
from wanjax.layers.residual import NormedTokens, Residual, Tokens, project, project_heads
from wanjax.layers.rope import Rope
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache, map_blocks
from wanjax.models.wan.config import ImageTransformerConfig
from wanjax.models.wan.transformer import (
    Block,
    Context,
    CrossAttention,
    WanTransformer,
    shard_kv,
    shard_stacked_kv,
)

ImageTokens = Float[Array, "B _S E"]  # 257 tokens for one image, 514 for a first and a last image


class ImageContext(NamedTuple):
    """Keys and values of the prompt, and keys and values of the image."""

    text: Context
    image: Context

    def with_nag(self, negative: "ImageContext", nag: Float32[Array, "3"]) -> "ImageContext":
        """Add a negative prompt for normalized attention guidance."""
        return self._replace(text=self.text.with_nag(negative.text, nag))


class ImageCrossAttention(CrossAttention):
    """The sum of the attention to the prompt and the attention to the image, with the same queries."""

    def __init__(self, config: ImageTransformerConfig, attention: AttentionConfig, **kw):
        super().__init__(config, attention, **kw)
        self.image_k = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.image_v = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.image_k_norm = rms_norm(config.width, config.eps, **kw)

    def image_context(self, image: ImageTokens) -> Context:
        """Compute keys and values of an image, which are the same in every step."""
        k = shard_kv(self.image_k_norm(self.image_k(image)).astype(self.dtype), self.heads)
        return Context(k, shard_kv(self.image_v(image).astype(self.dtype), self.heads))

    @jax.named_scope("cross_attention")
    def __call__(
        self, inputs: Tokens | NormedTokens, context: ImageContext, *, residual: Residual | None = None
    ) -> Tokens:
        """Return the output, plus the residual if there is one."""
        q = split_heads(project_heads(self.q, inputs, self.q_norm), self.heads)  # [B L N D]
        image_k, image_v = (split_heads(x, self.heads) for x in context.image[:2])  # [B S N D]
        y = self.attend_to_prompt(q, context.text) + self.attend(q, image_k, image_v)
        return project(self.out, y, residual)


class ImageBlock(Block):
    """The block of the text-to-video transformer, with cross-attention that also attends to the image."""

    cross_attention = ImageCrossAttention


class ImageEmbed(nnx.Module):
    """Project features of images to the transformer's width. Learned positions distinguish the first and the last
    image."""

    def __init__(self, config: ImageTransformerConfig, **kw):
        # The epsilon of these norms differs from the config's epsilon, which is for the blocks
        width_in, width, eps = config.image_width, config.width, 1e-5
        positions, options = config.image_positions, {"dtype": kw["param_dtype"], "rngs": kw["rngs"]}
        zeros = nnx.initializers.zeros_init()  # the initial value, as in the reference
        self.positions = nnx.data(
            None if positions is None else param(zeros, (positions, width_in), (None, None), **options)
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


@readable_signature
class WanImageTransformer(WanTransformer):
    """Predict the velocity of latents at timesteps t in [0, 1000] for encoded prompts and images [B S E].

    velocity = transformer(latents, t, text, image=image)

    The channels of `latents` [B T H W C] are the video's latents, then the condition: a mask and the latents of the
    input frames.
    """

    block = ImageBlock

    def __init__(self, config: ImageTransformerConfig, *, attention: AttentionConfig = AUTO, **kw):
        super().__init__(config, attention=attention, **kw)
        self.image_embed = ImageEmbed(config, **kw)

    def context(self, text: Float[Array, "B S _E"], image: Float[Array, "B _S _E"]) -> ImageContext:
        """Compute keys and values of encoded prompts and images [B S E] for every block: [layers B S E]."""
        text = self.text_embed(checked_text(text, self.config.text_width).astype(self.dtype))
        image = self.image_embed(image)
        context = map_blocks(
            self.blocks,
            lambda block: ImageContext(block.cross_attn.context(text), block.cross_attn.image_context(image)),
        )
        return shard_stacked_kv(context, self.config.heads)

    @on_weights_mesh
    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Timesteps,
        context: Float[Array, "B S _E"] | ImageContext,
        rope: Rope | None = None,
        *,
        image: Float[Array, "B _S _E"] | None = None,
        mask: Radial | None = None,
        cache: BlockCache = NO_BLOCK_CACHE,
    ) -> Float[Array, "B T H W _C"]:
        """Predict the velocity as `WanTransformer` does. If `context` has encoded prompts, `image` is also needed."""

        def with_image(text: Float[Array, "B S E"]) -> ImageContext:
            if image is None:
                raise WanjaxError("encoded prompts need the features of an image: pass image=FEATURES, [B S E]")
            return self.context(text, image)

        return super().__call__(latents, t, context_of(context, with_image, len(latents)), rope, mask=mask, cache=cache)
