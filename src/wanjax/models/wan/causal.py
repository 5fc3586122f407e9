# SPDX-License-Identifier: Apache-2.0
"""Wan's diffusion transformer that makes a video chunk by chunk (Huang et al., Self Forcing, 2025, arXiv:2506.08009).

A chunk of latent frames is denoised like a whole video, except that its tokens also attend to the keys and values of
earlier chunks, in a KV cache. When a chunk is finished, one more forward pass at timestep 0 computes its keys and
values for the cache. Positions in time continue from chunk to chunk, so cached keys do not change. If the cache is
full, a new chunk overwrites the oldest chunk. The reference is wan/modules/causal_model.py of guandeh17/Self-Forcing,
which shifts the cache instead.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from wanjax.dims import readable_signature
from wanjax.kernels.attention import attention_to_cache
from wanjax.kernels.attention.kv_cache import CacheSlot, KVCache, empty_cache
from wanjax.layers.embeddings import Timesteps, broadcast_timesteps, context_of
from wanjax.layers.heads import join_heads, split_heads
from wanjax.layers.modulation import modulate
from wanjax.layers.patch import patchify, unpatchify
from wanjax.layers.placement import on_weights_mesh
from wanjax.layers.residual import NormedTokens, Residual, Tokens, project, project_heads, project_values, shared_input
from wanjax.layers.rope import Angles, Rope, angles, rope_from_angles
from wanjax.layers.stack import scan_with_results
from wanjax.models.wan.config import CausalTransformerConfig
from wanjax.models.wan.transformer import (
    AttentionLayer,
    Block,
    Context,
    WanTransformer,
)


class CausalSelfAttention(AttentionLayer):
    """Attention of the tokens of a chunk to the chunk and to the KV cache. RoPE rotates q and k."""

    @jax.named_scope("self_attention")
    def __call__(
        self,
        inputs: Tokens | NormedTokens,
        rope: Rope,
        kv_cache: KVCache,
        slot: CacheSlot,
        *,
        residual: Residual | None = None,
    ) -> tuple[Tokens, KVCache]:
        """Return the output, plus the residual if there is one. Also return the keys and values of the chunk."""
        x: Any = shared_input(inputs, self.q, self.k, self.v)
        q = split_heads(project_heads(self.q, x, self.q_norm, rope), self.heads)  # [B L N D]
        k = split_heads(project_heads(self.k, x, self.k_norm, rope), self.heads)
        v = split_heads(project_values(self.v, x), self.heads)
        q, k = q.astype(self.dtype), k.astype(self.dtype)
        options = {"length": rope.length, "implementation": self.attention}
        out, chunk_kv = attention_to_cache(q, k, v, kv_cache, slot, **options)
        return project(self.out, join_heads(out), residual), chunk_kv


class CausalBlock(Block):
    """The block of the text-to-video transformer, with self-attention that also attends to earlier chunks."""

    self_attention = CausalSelfAttention


@readable_signature
class WanCausalTransformer(WanTransformer):
    """Predict the velocity of a chunk of latents [B T H W C] at timesteps t in [0, 1000] for encoded prompts [B S E].

    velocity, chunk_kv = transformer(latents, t, text)

    This call is for the first chunk of a video. Later chunks also need `time`, `kv_cache` and `slot`.
    """

    config: CausalTransformerConfig
    block = CausalBlock

    def empty_kv_cache(self, latents: Float[Array, "B T H W C"]) -> KVCache:
        """Create an empty KV cache for chunks with the shape of these latents."""
        frames, height, width = self.grid(latents)
        rows = self.config.slots * frames * height * width
        config = self.config
        return empty_cache(config.layers, latents.shape[0], rows, config.heads, config.head_dim, self.dtype)

    def rope(self, grid: tuple[int, int, int], time: Angles) -> Rope:
        """Compute the tables of RoPE for a grid of patches. `time` has the angles of the frames."""
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
        kv_cache: KVCache | None = None,
        slot: CacheSlot | None = None,
    ) -> tuple[Float[Array, "B T H W _C"], KVCache]:
        """Predict the velocity. Also return the keys and values of the chunk.

        Args:
            latents: Noisy latents of a chunk.
            t: Timesteps in [0, 1000].
            context: Encoded prompts, or the result of the method `context`.
            time: The angles of the chunk's frames, from `angles_at`; by default the angles of the first chunk.
            kv_cache: Keys and values of earlier chunks; empty by default.
            slot: The slot of this chunk in the cache, from `slot_of`; by default the first slot.

        Raises:
            WanjaxError: The latents have another number of channels.
        """
        grid = self.grid(latents)
        context = context_of(context, self.context, len(latents))
        kv_cache, slot = kv_cache or self.empty_kv_cache(latents), slot or slot_of(self.config, 0, prod(grid))
        rope = self.rope(grid, time or angles_at(self.config, 0))
        x = self.patch_embed(patchify(latents.astype(self.dtype), self.config.patch, self.config.channels_in))
        embedded = self.time_embed(broadcast_timesteps(t, len(latents)))[:, None]  # [B 1 E]
        mod = self.time_proj(jax.nn.silu(embedded)).reshape(-1, 1, 6, self.config.width)

        def run(block: CausalBlock, x: Tokens, context: Context, kv_cache: KVCache) -> tuple[Tokens, KVCache]:
            return block(x, context, mod, rope, kv_cache, slot)

        x, chunk_kv = scan_with_results(self.blocks, run, x, context, kv_cache)

        shift, scale = (embedded + row for row in jnp.split(self.table[...][None], 2, axis=1))
        x = self.proj_out(modulate(self.norm_out(x), shift, scale).astype(self.dtype))
        return unpatchify(x, grid, self.config.patch), chunk_kv


def angles_at(config: CausalTransformerConfig, chunk: int) -> Angles:
    """Return the angles in time of the frames of the chunk with the index `chunk`."""
    frames = config.chunk_frames // config.patch[0]
    return angles(range(chunk * frames, (chunk + 1) * frames), config.rope_channels[0])


def slot_of(config: CausalTransformerConfig, chunk: int, num_tokens: int) -> CacheSlot:
    """Return the slot in the KV cache of the chunk with the index `chunk`. A chunk has `num_tokens` tokens."""
    return CacheSlot(np.int32(config.slot(chunk) * num_tokens), np.int32(min(chunk + 1, config.slots)))
