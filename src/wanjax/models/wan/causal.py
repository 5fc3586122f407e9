# SPDX-License-Identifier: Apache-2.0
"""Wan's diffusion transformer that makes a video block by block (Huang et al., Self Forcing, 2025, arXiv:2506.08009).

A block of latent frames is denoised as the text-to-video transformer denoises a video, except that self-attention also
sees keys and values kept of the blocks before. They come from one more pass over the finished block, at timestep 0.
Positions in time go on from block to block, so kept keys stay as they are. The reference is wan/modules/causal_model.py
of guandeh17/Self-Forcing, which shifts its window; here a new block takes the place of the oldest.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.kernels.attention import AUTO, Attention, attention_to_kept
from wanjax.kernels.attention.kept import Kept, Place, empty_window
from wanjax.kernels.heads import pack_for_all_to_all
from wanjax.layers.embeddings import sinusoid
from wanjax.layers.linear import linear
from wanjax.layers.mlp import MLP, gelu_tanh
from wanjax.layers.modulation import gated_add, modulate, split_modulation
from wanjax.layers.norms import layer_norm
from wanjax.layers.patch import patch_grid, patchify, unpatchify
from wanjax.layers.rope import Rope, Turns, norm_and_rope, rope_of, turns
from wanjax.layers.stack import map_blocks, scan_keeping, stack
from wanjax.models.wan.config import CausalTransformerConfig
from wanjax.models.wan.transformer import (
    AttentionLayer,
    Context,
    CrossAttention,
    Tokens,
    join_heads,
    modulation_table,
    shard_stacked,
    split_heads,
    time_mlp,
)


class CausalSelfAttention(AttentionLayer):
    """Attention of every token of a block to the block and to the kept keys, with q and k rotated by position."""

    @jax.named_scope("self_attention")
    def __call__(self, x: Tokens, rope: Rope, window: Kept, place: Place) -> tuple[Tokens, Kept]:
        """Returns also what a window keeps of the block."""
        q = split_heads(norm_and_rope(self.q(x), self.q_norm, rope), self.heads)  # [B L N D]
        k = split_heads(norm_and_rope(self.k(x), self.k_norm, rope), self.heads)
        v = split_heads(pack_for_all_to_all(self.v(x)), self.heads)
        q, k = q.astype(self.dtype), k.astype(self.dtype)
        options = {"length": rope.length, "implementation": self.attention}
        out, kept = attention_to_kept(q, k, v, window, place, **options)
        return self.out(join_heads(out)), kept


class CausalBlock(nnx.Module):
    """The text-to-video transformer's block, with self-attention to the blocks of frames before too."""

    def __init__(self, config: CausalTransformerConfig, attention: Attention, **kw):
        width = config.width
        self.norm1 = layer_norm(width, config.eps, affine=False, **kw)
        self.self_attn = CausalSelfAttention(config, attention, **kw)
        self.norm2 = layer_norm(width, config.eps, affine=True, **kw)
        self.cross_attn = CrossAttention(config, attention, **kw)
        self.norm3 = layer_norm(width, config.eps, affine=False, **kw)
        self.mlp = MLP((width, config.mlp_dim, width), ("embed", "mlp", "embed"), gelu_tanh, **kw)
        self.table = modulation_table(6, width, kw["rngs"])
        self.dtype = kw["dtype"]

    def __call__(
        self, x: Tokens, context: Context, window: Kept, mod: Float[Array, "B 1 6 E"], rope: Rope, place: Place
    ) -> tuple[Tokens, Kept]:
        self_mod, mlp_mod = split_modulation(mod + self.table[...][None, None])
        y = modulate(self.norm1(x), self_mod.shift, self_mod.scale).astype(self.dtype)
        y, kept = self.self_attn(y, rope, window, place)
        x = gated_add(x, y, self_mod.gate)
        x = x + self.cross_attn(self.norm2(x).astype(self.dtype), context).astype(x.dtype)
        y = modulate(self.norm3(x), mlp_mod.shift, mlp_mod.scale).astype(self.dtype)
        return gated_add(x, self.mlp(y), mlp_mod.gate), kept


class WanCausalTransformer(nnx.Module):
    """Predicts the velocity of a block of latents [B T H W C] at timesteps t in [0, 1000] for encoded prompts [B S E].

    velocity, kept = transformer(latents, t, transformer.context(text), turns, transformer.window(batch, rows), place)
    """

    def __init__(
        self,
        config: CausalTransformerConfig,
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
        self.blocks = stack(lambda rngs: CausalBlock(config, attention, **{**kw, "rngs": rngs}), config.layers, rngs)
        self.norm_out = layer_norm(width, config.eps, affine=False, **kw)
        self.table = modulation_table(2, width, rngs)
        self.proj_out = linear(width, cells * config.channels_out, ("embed", None), **kw)

    def context(self, text: Float[Array, "B S _E"]) -> Context:
        """Keys and values of encoded prompts [B S E] in every block of the network: [layers B S E]."""
        text = self.text_embed(text.astype(self.dtype))
        return shard_stacked(map_blocks(self.blocks, lambda block: block.cross_attn.context(text)), self.config.heads)

    def grid(self, latents: Float[Array, "B T H W C"]) -> tuple[int, int, int]:
        """The number of patches along frames, height and width."""
        return patch_grid(latents, self.config.patch)

    def window(self, latents: Float[Array, "B T H W C"]) -> Kept:
        """An empty window for blocks of these latents: [layers B S N D]."""
        frames, height, width = self.grid(latents)
        rows = self.config.slots * frames * height * width
        config = self.config
        return empty_window(config.layers, latents.shape[0], rows, config.heads, config.head_dim, self.dtype)

    def rope(self, grid: tuple[int, int, int], time: Turns) -> Rope:
        """Tables of RoPE for a grid of patches, whose turns in time are given."""
        channels = self.config.rope_channels
        return rope_of([time, *(turns(range(size), c) for size, c in zip(grid[1:], channels[1:], strict=True))])

    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Float[Array, "B"],
        context: Context,
        time: Turns,
        window: Kept,
        place: Place,
    ) -> tuple[Float[Array, "B T H W _C"], Kept]:
        """Returns also what a window keeps of the block. `time` are the turns of the block's frames, of `turns_at`."""
        grid = self.grid(latents)
        rope = self.rope(grid, time)
        x = self.patch_embed(patchify(latents.astype(self.dtype), self.config.patch))  # [B L E]
        embedded = self.time_embed(sinusoid(t, self.config.frequency_dim))[:, None]  # [B 1 E]
        mod = self.time_proj(jax.nn.silu(embedded)).reshape(-1, 1, 6, self.config.width)

        def run(block: CausalBlock, x: Tokens, context: Context, window: Kept) -> tuple[Tokens, Kept]:
            return block(x, context, window, mod, rope, place)

        x, kept = scan_keeping(self.blocks, run, x, context, window)

        shift, scale = (embedded + row for row in jnp.split(self.table[...][None], 2, axis=1))
        x = self.proj_out(modulate(self.norm_out(x), shift, scale).astype(self.dtype))
        return unpatchify(x, grid, self.config.patch), kept


def turns_at(config: CausalTransformerConfig, block: int) -> Turns:
    """Returns the turns in time of the frames of a block, from 0."""
    frames = config.block_frames // config.patch[0]
    return turns(range(block * frames, (block + 1) * frames), config.rope_channels[0])


def place_of(config: CausalTransformerConfig, block: int, tokens: int) -> Place:
    """Returns the place in the window of a block, from 0, of this number of tokens."""
    return Place(np.int32(config.slot(block) * tokens), np.int32(min(block + 1, config.slots)))
