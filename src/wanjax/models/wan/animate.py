# SPDX-License-Identifier: Apache-2.0
"""Wan Animate 2's diffusion transformer: a character moves as in a driving clip.

Its weights have the shapes of the image-to-video transformer. Before the first step, the transformer computes the keys
and values of the driving clip in every block, by one forward pass at timestep 1. In each step, the tokens of latent
frame f also attend to the clip's tokens of latent frame f - 1. The first latent frame is the character's picture. Its
tokens do not attend to the clip. The reference is diffusers' models/transformers/transformer_wan_animate_2.py.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from wanjax.dims import readable_signature
from wanjax.kernels.attention import kernel_with_lse
from wanjax.kernels.attention.clip_kv import ClipKV, attention_with_frames, shard_clip_kv, store_clip_kv
from wanjax.layers.embeddings import Timesteps, broadcast_timesteps
from wanjax.layers.heads import join_heads, split_heads
from wanjax.layers.modulation import modulate
from wanjax.layers.patch import patchify, unpatchify
from wanjax.layers.placement import on_weights_mesh
from wanjax.layers.quantized import QuantizedLinear
from wanjax.layers.residual import NormedTokens, Residual, Tokens, project, project_heads, project_values, shared_input
from wanjax.layers.rope import Rope, rope_3d
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache, scan_blocks, scan_with_results
from wanjax.models.wan.config import AnimateTransformerConfig
from wanjax.models.wan.image import ImageBlock, ImageContext, WanImageTransformer
from wanjax.models.wan.transformer import SelfAttention

SKIPPED_BLOCK = 9  # this block is skipped for negative prompts, as in the reference
CLIP_TIMESTEP = 1.0  # the timestep at which the keys and values of a clip are computed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AnimateContext:
    """Keys and values of prompts and of the character's picture.

    Attributes:
        kv: The keys and values.
        num_negative: The number of negative prompts, which are the last prompts of the batch.
    """

    kv: ImageContext
    num_negative: int = field(metadata={"static": True})


class AnimateSelfAttention(SelfAttention):
    """Self-attention. If there is a clip, tokens also attend to the clip's tokens of their frame."""

    @jax.named_scope("self_attention")
    def __call__(
        self,
        inputs: Tokens | NormedTokens,
        rope: Rope,
        clip: ClipKV | None = None,
        bias: Float[Array, ""] | None = None,
        *,
        residual: Residual | None = None,
    ) -> tuple[Tokens, ClipKV | None]:
        """Return the output. Without `clip`, also return the keys and values, which later calls take as `clip`.

        Args:
            inputs: The tokens.
            rope: The tables of RoPE.
            clip: The keys and values of the clip; None for the clip itself.
            bias: A number that is added to the scores of the keys of frame 1, or None.
            residual: The tokens to which the output is added.
        """
        x: Any = shared_input(inputs, self.q, self.k, self.v)
        q = split_heads(project_heads(self.q, x, self.q_norm, rope), self.heads).astype(self.dtype)  # [B L N D]
        k = split_heads(project_heads(self.k, x, self.k_norm, rope), self.heads).astype(self.dtype)
        v = split_heads(project_values(self.v, x), self.heads)
        if clip is None:
            in_int8 = isinstance(self.k, QuantizedLinear) and self.k.activations == "int8"
            stored_kv = store_clip_kv(k, v, rope.length, in_int8=in_int8)
            return project(self.out, self.attend(q, k, v, rope.length), residual), stored_kv
        kernel, sizes = kernel_with_lse(q, k, v, self.attention), {"length": rope.length}
        sizes["frame_tokens"] = rope.length - clip.k.shape[1]  # the clip has one frame less than the video
        out = attention_with_frames(kernel, q, k, v, clip, bias=bias, **sizes)
        return project(self.out, join_heads(out), residual), None


class AnimateBlock(ImageBlock):
    """The block of the image-to-video transformer, with self-attention that also attends to a clip."""

    self_attention = AnimateSelfAttention


@readable_signature
class WanAnimateTransformer(WanImageTransformer):
    """Predict the velocity of latents at timesteps t in [0, 1000] for a clip, encoded prompts and a picture [B S E].

    clip = transformer.clip_kv(clip_latents, transformer.context(clip_text, clip_image))
    velocity = transformer(latents, t, AnimateContext(transformer.context(text, image), 0), clip=clip)

    The channels of `latents` [B T H W C] are the video's latents, then the condition: a mask and the latents of the
    input frames. The first latent frame is the character's picture. The clip has one latent frame less than the video.
    """

    config: AnimateTransformerConfig
    block = AnimateBlock

    def clip_rope(self, grid: tuple[int, int, int]) -> Rope:
        """Compute the tables of RoPE for the clip's grid of patches."""
        offsets = [size if offset == -1 else offset for size, offset in zip(grid, self.config.clip_offset, strict=True)]
        positions = [offset + np.arange(size, dtype=np.float64) for size, offset in zip(grid, offsets, strict=True)]
        return rope_3d(grid, self.config.rope_channels, positions=positions)

    @on_weights_mesh
    def clip_kv(self, latents: Float[Array, "B T H W C"], context: ImageContext) -> ClipKV:
        """Compute the keys and values of a driving clip in every block: [layers 1 S E].

        Args:
            latents: The latents of one clip, a mask of ones, and the latents again.
            context: The result of the method `context` for the clip's prompt and its first frame.
        """
        config, grid = self.config, self.grid(latents)
        rope = self.clip_rope(grid)
        x = self.patch_embed(patchify(latents.astype(self.dtype), config.patch, config.channels_in))  # [B L E]
        time = self.time_embed(jnp.full((len(latents),), CLIP_TIMESTEP))[:, None]  # [B 1 E]
        mod = self.time_proj(jax.nn.silu(time)).reshape(-1, 1, 6, config.width)

        def run(block: AnimateBlock, x: Tokens, context: ImageContext) -> tuple[Tokens, ClipKV]:
            return block(x, context, mod, rope)

        _, clip_kv = scan_with_results(self.blocks, run, x, context)
        return shard_clip_kv(clip_kv, config.heads)

    @on_weights_mesh
    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Timesteps,
        context: AnimateContext,
        rope: Rope | None = None,
        *,
        clip: ClipKV,
        bias: Float[Array, ""] | None = None,
        cache: BlockCache = NO_BLOCK_CACHE,
    ) -> Float[Array, "B T H W _C"]:
        """Predict the velocity.

        Args:
            latents: Noisy latents of the picture's frame and of the video, with their condition.
            t: Timesteps in [0, 1000].
            context: The keys and values of the prompts and of the picture.
            rope: The result of the method `rope`; computed from the latents' grid by default.
            clip: The result of the method `clip_kv`.
            bias: A number that is added to the scores of the keys of the video's first frame, or None.
            cache: A step cache, which can store tokens between blocks.

        Raises:
            WanjaxError: The latents have another number of channels.
        """
        config, grid, num_negative = self.config, self.grid(latents), context.num_negative
        rope = rope or self.rope(grid)
        x = self.patch_embed(patchify(latents.astype(self.dtype), config.patch, config.channels_in))  # [B L E]
        time = self.time_embed(broadcast_timesteps(t, len(latents)))[:, None]  # [B 1 E]
        mod = self.time_proj(jax.nn.silu(time)).reshape(-1, 1, 6, config.width)
        has_skipped_block = num_negative > 0 and config.layers > SKIPPED_BLOCK
        skipped_part = range(SKIPPED_BLOCK, SKIPPED_BLOCK + 1) if has_skipped_block else range(0)

        def run(block: AnimateBlock, x: Tokens, context: ImageContext, clip: ClipKV) -> Tokens:
            return block(x, context, mod, rope, clip, bias)[0]

        for part in cache.parts(config.layers, *({skipped_part.start, skipped_part.stop} if skipped_part else ())):
            x = cache.before(part, x)
            if part != skipped_part or num_negative < len(x):
                y = scan_blocks(self.blocks, run, x, context.kv, clip, part=part, projections=self.block.projections)
                x = y if part != skipped_part else jnp.where(_is_negative(len(x), num_negative), x, y)
        x = cache.after(x)

        shift, scale = (time + row for row in jnp.split(self.table[...][None], 2, axis=1))
        x = self.proj_out(modulate(self.norm_out(x), shift, scale).astype(self.dtype))
        return unpatchify(x, grid, config.patch)


def _is_negative(num_prompts: int, num_negative: int) -> Bool[Array, "B 1 1"]:
    """Return a mask of the negative prompts of a batch, which are its last prompts."""
    return (jnp.arange(num_prompts) >= num_prompts - num_negative)[:, None, None]
