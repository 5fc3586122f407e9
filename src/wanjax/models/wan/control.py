# SPDX-License-Identifier: Apache-2.0
"""Wan's diffusion transformer that a control clip steers (Jiang et al., VACE, 2025, arXiv:2503.07598).

A second, shorter stream of blocks runs beside the text-to-video transformer's. It starts as the sum of the control clip
and the noisy latents, and every few blocks it adds a hint to the latents. The reference is diffusers'
models/transformers/transformer_wan_vace.py, which computes all hints before the first block; here each is computed
where it is used, so that memory holds one at a time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.kernels.attention import AUTO, Attention
from wanjax.layers.embeddings import sinusoid
from wanjax.layers.linear import linear
from wanjax.layers.mlp import MLP, gelu_tanh
from wanjax.layers.modulation import gated_add, modulate, split_modulation
from wanjax.layers.norms import layer_norm
from wanjax.layers.patch import patch_grid, patchify, unpatchify
from wanjax.layers.rope import Rope, rope_3d
from wanjax.layers.stack import Through, block_at, grouped, map_blocks, scan_blocks, stack, through_all, trunk_of
from wanjax.models.wan.config import ControlTransformerConfig
from wanjax.models.wan.transformer import (
    Block,
    Context,
    CrossAttention,
    SelfAttention,
    Tokens,
    modulation_table,
    shard_stacked,
    time_mlp,
)


class ControlContext(NamedTuple):
    """Keys and values of the prompt, for the blocks of the latents and for those of the control stream."""

    blocks: Context
    control_blocks: Context


class ControlBlock(nnx.Module):
    """The text-to-video transformer's block, for the control stream, and the projection of its hints."""

    def __init__(self, config: ControlTransformerConfig, attention: Attention, **kw):
        width = config.width
        self.norm1 = layer_norm(width, config.eps, affine=False, **kw)
        self.self_attn = SelfAttention(config, attention, **kw)
        self.norm2 = layer_norm(width, config.eps, affine=True, **kw)
        self.cross_attn = CrossAttention(config, attention, **kw)
        self.norm3 = layer_norm(width, config.eps, affine=False, **kw)
        self.mlp = MLP((width, config.mlp_dim, width), ("embed", "mlp", "embed"), gelu_tanh, **kw)
        self.table = modulation_table(6, width, kw["rngs"])
        self.hint = linear(width, width, ("mlp", "embed"), **kw)
        self.dtype = kw["dtype"]

    def __call__(self, x: Tokens, context: Context, mod: Float[Array, "B 1 6 E"], rope: Rope) -> Tokens:
        """The control stream after this block; `hint(x)` is what it then adds to the latents."""
        self_mod, mlp_mod = split_modulation(mod + self.table[...][None, None])
        y = modulate(self.norm1(x), self_mod.shift, self_mod.scale).astype(self.dtype)
        x = gated_add(x, self.self_attn(y, rope), self_mod.gate)
        x = x + self.cross_attn(self.norm2(x).astype(self.dtype), context).astype(x.dtype)
        y = modulate(self.norm3(x), mlp_mod.shift, mlp_mod.scale).astype(self.dtype)
        return gated_add(x, self.mlp(y), mlp_mod.gate)


class WanControlTransformer(nnx.Module):
    """Predicts the velocity of latents at timesteps t in [0, 1000] for encoded prompts [B S E] and a control clip.

    `control` [B T H W C] has the frames, height and width of the latents, and channels of its own.
    """

    def __init__(
        self,
        config: ControlTransformerConfig,
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
        self.blocks = stack(lambda rngs: Block(config, attention, **{**kw, "rngs": rngs}), config.layers, rngs)
        self.norm_out = layer_norm(width, config.eps, affine=False, **kw)
        self.table = modulation_table(2, width, rngs)
        self.proj_out = linear(width, cells * config.channels_out, ("embed", None), **kw)
        self.control_embed = linear(cells * config.control_channels, width, (None, "embed"), **kw)
        self.control_in = linear(width, width, ("mlp", "embed"), **kw)
        self.control_blocks = stack(
            lambda rngs: ControlBlock(config, attention, **{**kw, "rngs": rngs}), config.control_blocks, rngs
        )

    def context(self, text: Float[Array, "B S _E"]) -> ControlContext:
        """Keys and values of encoded prompts [B S E] in every block of both streams: [layers B S E]."""
        text = self.text_embed(text.astype(self.dtype))
        stacks = self.blocks, self.control_blocks
        keys = (map_blocks(stack, lambda block: block.cross_attn.context(text)) for stack in stacks)
        return shard_stacked(ControlContext(*keys), self.config.heads)

    def grid(self, latents: Float[Array, "B T H W C"]) -> tuple[int, int, int]:
        """The number of patches along frames, height and width."""
        return patch_grid(latents, self.config.patch)

    def rope(self, grid: tuple[int, int, int]) -> Rope:
        """Tables of RoPE for a grid of patches."""
        return rope_3d(grid, self.config.rope_channels)

    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Float[Array, "B"],
        context: ControlContext,
        rope: Rope,
        control: Float[Array, "B T H W _C"],
        *,
        through: Through = through_all,
    ) -> Float[Array, "B T H W _C"]:
        """`context` and `rope` come from the methods of these names; `through` runs the blocks."""
        grid = self.grid(latents)
        x = self.patch_embed(patchify(latents.astype(self.dtype), self.config.patch))  # [B L E]
        control = self.control_embed(patchify(control.astype(self.dtype), self.config.patch))
        control = self.control_in(control) + x
        time = self.time_embed(sinusoid(t, self.config.frequency_dim))[:, None]  # [B 1 E]
        mod = self.time_proj(jax.nn.silu(time)).reshape(-1, 1, 6, self.config.width)

        def run(block: Block | ControlBlock, x: Tokens, context: Context) -> Tokens:
            return block(x, context, mod, rope)

        def run_group(
            blocks: tuple[ControlBlock, Block],
            streams: tuple[Tokens, Tokens],
            control_context: Context,
            contexts: Context,
        ) -> tuple[Tokens, Tokens]:
            """A control block, the block that takes its hint, and the blocks up to the next hint."""
            (control_block, group), (x, control) = blocks, streams
            control = run(control_block, control, control_context)
            x = run(block_at(group, 0), x, block_at(contexts, 0)) + control_block.hint(control)
            x = scan_blocks(block_at(group, slice(1, None)), run, x, block_at(contexts, slice(1, None)))
            return x, control

        groups, contexts = grouped((self.blocks, context.blocks), self.config.control_blocks)
        trunk = trunk_of((self.control_blocks, groups), run_group, context.control_blocks, contexts)
        x, _ = through(trunk, (x, control))

        shift, scale = (time + row for row in jnp.split(self.table[...][None], 2, axis=1))
        x = self.proj_out(modulate(self.norm_out(x), shift, scale).astype(self.dtype))
        return unpatchify(x, grid, self.config.patch)
