# SPDX-License-Identifier: Apache-2.0
"""Wan's diffusion transformer with a control clip (Jiang et al., VACE, 2025, arXiv:2503.07598).

Beside the blocks of the text-to-video transformer, there is a second, shorter stack of blocks: the control stream. Its
input is the sum of the control clip and the noisy latents. Every few blocks, a projection of its tokens, the hint, is
added to the tokens of the latents. The reference is diffusers' models/transformers/transformer_wan_vace.py, which
computes all hints before the first block. Here each hint is computed just before its use, so that only one hint at a
time is in memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from wanjax.dims import readable_signature
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.layers.embeddings import Timesteps, broadcast_timesteps, checked_text, context_of
from wanjax.layers.linear import linear
from wanjax.layers.modulation import modulate
from wanjax.layers.patch import patchify, unpatchify
from wanjax.layers.placement import on_weights_mesh
from wanjax.layers.residual import Tokens
from wanjax.layers.rope import Rope, check_rope
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache, block_at, group_blocks, map_blocks, scan_blocks, stack
from wanjax.models.wan.config import ControlTransformerConfig
from wanjax.models.wan.transformer import (
    Block,
    Context,
    WanTransformer,
    shard_stacked_kv,
)


class ControlContext(NamedTuple):
    """Keys and values of the prompt, for the blocks of the latents and for the blocks of the control stream."""

    blocks: Context
    control_blocks: Context

    def with_nag(self, negative: "ControlContext", nag: Float32[Array, "3"]) -> "ControlContext":
        """Add a negative prompt for normalized attention guidance."""
        return ControlContext(
            *(stream.with_nag(negative_stream, nag) for stream, negative_stream in zip(self, negative, strict=True))
        )


class ControlBlock(Block):
    """A block of the control stream. The layer `hint` projects the output of the block to the hint for the latents."""

    def __init__(self, config: ControlTransformerConfig, attention: AttentionConfig, **kw):
        super().__init__(config, attention, **kw)
        self.hint = linear(config.width, config.width, ("mlp", "embed"), **kw)


@readable_signature
class WanControlTransformer(WanTransformer):
    """Predict the velocity of latents at timesteps t in [0, 1000] for encoded prompts [B S E] and a control clip.

    velocity = transformer(latents, t, text, control=control)

    `control` [B T H W C] has the frames, height and width of the latents, with its own number of channels.
    """

    config: ControlTransformerConfig

    def __init__(self, config: ControlTransformerConfig, *, attention: AttentionConfig = AUTO, rngs: nnx.Rngs, **kw):
        super().__init__(config, attention=attention, rngs=rngs, **kw)
        width, channels = config.width, config.patch_volume * config.control_channels
        self.control_embed = linear(channels, width, (None, "embed"), rngs=rngs, **kw)
        self.control_in = linear(width, width, ("mlp", "embed"), rngs=rngs, **kw)
        self.control_blocks = stack(
            lambda rngs: ControlBlock(config, attention, rngs=rngs, **kw), config.control_blocks, rngs
        )

    def context(self, text: Float[Array, "B S _E"]) -> ControlContext:
        """Compute keys and values of encoded prompts [B S E] for every block of both streams: [layers B S E]."""
        text = self.text_embed(checked_text(text, self.config.text_width).astype(self.dtype))
        stacks = self.blocks, self.control_blocks
        keys = (map_blocks(stack, lambda block: block.cross_attn.context(text)) for stack in stacks)
        return shard_stacked_kv(ControlContext(*keys), self.config.heads)

    @on_weights_mesh
    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Timesteps,
        context: Float[Array, "B S _E"] | ControlContext,
        rope: Rope | None = None,
        *,
        control: Float[Array, "B T H W _C"],
        cache: BlockCache = NO_BLOCK_CACHE,
    ) -> Float[Array, "B T H W _C"]:
        """Predict the velocity.

        Args:
            latents: Noisy latents.
            t: Timesteps in [0, 1000].
            context: Encoded prompts, or the result of the method `context`.
            rope: The result of the method `rope`; computed from the latents' grid by default.
            control: The control clip.
            cache: A step cache, which can store tokens between blocks.

        Raises:
            WanjaxError: The latents or the control clip have another number of channels.
        """
        config, grid = self.config, self.grid(latents)
        context = context_of(context, self.context, len(latents))
        rope = self.rope(grid) if rope is None else check_rope(rope, grid)
        x = self.patch_embed(patchify(latents.astype(self.dtype), config.patch, config.channels_in))  # [B L E]
        control = self.control_embed(patchify(control.astype(self.dtype), config.patch, config.control_channels))
        control = self.control_in(control) + x
        time = self.time_embed(broadcast_timesteps(t, len(latents)))[:, None]  # [B 1 E]
        mod = self.time_proj(jax.nn.silu(time)).reshape(-1, 1, 6, self.config.width)

        def run(block: Block, x: Tokens, context: Context) -> Tokens:
            return block(x, context, mod, rope)[0]

        def run_group(
            blocks: tuple[ControlBlock, Block],
            streams: tuple[Tokens, Tokens],
            control_context: Context,
            contexts: Context,
        ) -> tuple[Tokens, Tokens]:
            """Run a control block, the block of the latents whose output gets its hint, and the blocks before the next
            hint."""
            (control_block, group), (x, control) = blocks, streams
            control = run(control_block, control, control_context)
            x = run(block_at(group, 0), x, block_at(contexts, 0)) + control_block.hint(control)
            x = scan_blocks(block_at(group, slice(1, None)), run, x, block_at(contexts, slice(1, None)))
            return x, control

        groups, contexts = group_blocks((self.blocks, context.blocks), self.config.control_blocks)
        stacks, streams = (self.control_blocks, groups), (x, control)
        for part in cache.parts(self.config.control_blocks):
            streams = cache.before(part, streams)
            streams = scan_blocks(stacks, run_group, streams, context.control_blocks, contexts, part=part)
        x, _ = cache.after(streams)

        shift, scale = (time + row for row in jnp.split(self.table[...][None], 2, axis=1))
        x = self.proj_out(modulate(self.norm_out(x), shift, scale).astype(self.dtype))
        return unpatchify(x, grid, self.config.patch)
