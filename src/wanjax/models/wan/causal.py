# SPDX-License-Identifier: Apache-2.0
"""Wan's diffusion transformer that makes a video block by block (Huang et al., Self Forcing, 2025, arXiv:2506.08009).

A block of latent frames is denoised as the text-to-video transformer denoises a video, except that self-attention also
sees keys and values kept of the blocks before. They come from one more pass over the finished block, at timestep 0.
Positions in time go on from block to block, so kept keys stay as they are. The reference is wan/modules/causal_model.py
of guandeh17/Self-Forcing, which shifts its window; here a new block takes the place of the oldest.
"""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from wanjax.dims import readable
from wanjax.kernels.attention import attention_to_cache
from wanjax.kernels.attention.kv_cache import CacheSlot, KVCache, empty_cache
from wanjax.kernels.rotary_heads import pack_for_all_to_all
from wanjax.layers.embeddings import Timesteps, broadcast_timesteps
from wanjax.layers.heads import join_heads, split_heads
from wanjax.layers.modulation import modulate
from wanjax.layers.patch import patchify, unpatchify
from wanjax.layers.placement import on_weights_mesh
from wanjax.layers.rope import Angles, Rope, angles, norm_and_rope, rope_from_angles
from wanjax.layers.stack import scan_with_results
from wanjax.models.wan.config import CausalTransformerConfig
from wanjax.models.wan.transformer import (
    AttentionLayer,
    Block,
    Context,
    Tokens,
    WanTransformer,
)


class CausalSelfAttention(AttentionLayer):
    """Attention of every token of a block to the block and to the kept keys, with q and k rotated by position."""

    @jax.named_scope("self_attention")
    def __call__(self, x: Tokens, rope: Rope, window: KVCache, slot: CacheSlot) -> tuple[Tokens, KVCache]:
        """Also returns the keys and values of the chunk."""
        q = split_heads(norm_and_rope(self.q(x), self.q_norm, rope), self.heads)  # [B L N D]
        k = split_heads(norm_and_rope(self.k(x), self.k_norm, rope), self.heads)
        v = split_heads(pack_for_all_to_all(self.v(x)), self.heads)
        q, k = q.astype(self.dtype), k.astype(self.dtype)
        options = {"length": rope.length, "implementation": self.attention}
        out, chunk = attention_to_cache(q, k, v, window, slot, **options)
        return self.out(join_heads(out)), chunk


class CausalBlock(Block):
    """The text-to-video transformer's block, with self-attention to the blocks of frames before too."""

    self_attention = CausalSelfAttention


@readable
class WanCausalTransformer(WanTransformer):
    """Predicts the velocity of a block of latents [B T H W C] at timesteps t in [0, 1000] for encoded prompts [B S E].

    velocity, chunk = transformer(latents, t, text)

    That is for the first block of a video. A later one is given its angles, the window and its place in it, too.
    """

    config: CausalTransformerConfig
    block = CausalBlock

    def window(self, latents: Float[Array, "B T H W C"]) -> KVCache:
        """An empty window for blocks of these latents: [layers B S N D]."""
        frames, height, width = self.grid(latents)
        rows = self.config.slots * frames * height * width
        config = self.config
        return empty_cache(config.layers, latents.shape[0], rows, config.heads, config.head_dim, self.dtype)

    def rope(self, grid: tuple[int, int, int], time: Angles) -> Rope:
        """Tables of RoPE for a grid of patches, whose angles in time are given."""
        channels = self.config.rope_channels
        return rope_from_angles(
            [time, *(angles(range(size), c) for size, c in zip(grid[1:], channels[1:], strict=True))]
        )

    @on_weights_mesh
    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Timesteps,
        context: Float[Array, "B S _E"] | Context,
        time: Angles | None = None,
        window: KVCache | None = None,
        slot: CacheSlot | None = None,
    ) -> tuple[Float[Array, "B T H W _C"], KVCache]:
        """Also returns the keys and values of the chunk.

        `context` are encoded prompts, or what the method `context` returns. `time` are the angles of the block's frames
        (`angles_at`), `window` holds earlier blocks, and `slot` is where this one goes (`slot_of`); without them the
        block is the first. Raises WanjaxError for latents of other channels.
        """
        grid = self.grid(latents)
        context = context if isinstance(context, tuple) else self.context(context)
        window, slot = window or self.window(latents), slot or slot_of(self.config, 0, prod(grid))
        rope = self.rope(grid, time or angles_at(self.config, 0))
        x = self.patch_embed(patchify(latents.astype(self.dtype), self.config.patch, self.config.channels_in))
        embedded = self.time_embed(broadcast_timesteps(t, len(latents)))[:, None]  # [B 1 E]
        mod = self.time_proj(jax.nn.silu(embedded)).reshape(-1, 1, 6, self.config.width)

        def run(block: CausalBlock, x: Tokens, context: Context, window: KVCache) -> tuple[Tokens, KVCache]:
            return block(x, context, mod, rope, window, slot)

        x, chunk = scan_with_results(self.blocks, run, x, context, window)

        shift, scale = (embedded + row for row in jnp.split(self.table[...][None], 2, axis=1))
        x = self.proj_out(modulate(self.norm_out(x), shift, scale).astype(self.dtype))
        return unpatchify(x, grid, self.config.patch), chunk


def angles_at(config: CausalTransformerConfig, block: int) -> Angles:
    """Return the angles in time of the frames of a block, from 0."""
    frames = config.block_frames // config.patch[0]
    return angles(range(block * frames, (block + 1) * frames), config.rope_channels[0])


def slot_of(config: CausalTransformerConfig, block: int, tokens: int) -> CacheSlot:
    """Return the place in the window of a block, from 0, of this number of tokens."""
    return CacheSlot(np.int32(config.slot(block) * tokens), np.int32(min(block + 1, config.slots)))
