# SPDX-License-Identifier: Apache-2.0
"""Wan's diffusion transformer that a control clip steers (Jiang et al., VACE, 2025, arXiv:2503.07598).

A second, shorter stream of blocks goes along the text-to-video transformer. It begins as the control clip and the
noisy latents together, and at every few blocks gives the latents a hint. The reference is diffusers'
models/transformers/transformer_wan_vace.py, which computes all hints before the first block; here each is computed
where it is used, so that one at a time is in memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.layers.embeddings import sinusoid
from wanjax.layers.linear import grouped, linear, map_blocks, part, scan_blocks, stack
from wanjax.layers.modulation import modulate
from wanjax.layers.patch import patchify, unpatchify
from wanjax.layers.rope import Rope
from wanjax.models.wan.config import ControlTransformerConfig
from wanjax.models.wan.transformer import Block, Context, Tokens, WanTransformer


class ControlContext(NamedTuple):
    """Keys and values of the prompt, for the blocks of the latents and for those of the control stream."""

    blocks: Context
    control_blocks: Context


class ControlBlock(Block):
    """A block of the control stream; `hint` is what the stream then tells the latents."""

    def __init__(self, config: ControlTransformerConfig, implementation: str | None, **kw):
        super().__init__(config, implementation, **kw)
        self.hint = linear(config.width, config.width, ("mlp", "embed"), **kw)


class WanControlTransformer(WanTransformer):
    """Predicts the velocity of latents at timesteps t in [0, 1000] for encoded prompts [B S E] and a control clip.

    `control` is as large as the latents, with channels of its own.
    """

    def __init__(
        self,
        config: ControlTransformerConfig,
        *,
        attention: str | None = None,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        """`attention` names an implementation of it; None picks by platform and shape."""
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(config, attention=attention, **kw)
        self.groups = config.control_blocks
        cells = config.patch[0] * config.patch[1] * config.patch[2]
        self.control_embed = linear(cells * config.control_channels, config.width, (None, "embed"), **kw)
        self.control_in = linear(config.width, config.width, ("mlp", "embed"), **kw)
        self.control_blocks = stack(
            lambda rngs: ControlBlock(config, attention, **{**kw, "rngs": rngs}), config.control_blocks, rngs
        )

    def context(self, text: Float[Array, "B S _E"]) -> ControlContext:
        """What the blocks' cross-attention asks of encoded prompts [B S E]: keys and values [layers B S E]."""
        text = self.text_embed(text.astype(self.dtype))
        stacks = self.blocks, self.control_blocks
        return ControlContext(*(map_blocks(stack, lambda block: block.cross_attn.context(text)) for stack in stacks))

    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Float[Array, "B"],
        context: ControlContext,
        rope: Rope,
        control: Float[Array, "B T H W _C"],
    ) -> Float[Array, "B T H W C"]:
        """`context` and `rope` are those of the methods."""
        grid = self.grid(latents)
        x = self.patch_embed(patchify(latents.astype(self.dtype), self.config.patch))  # [B L E]
        control = self.control_embed(patchify(control.astype(self.dtype), self.config.patch))
        control = self.control_in(control) + x
        time = self.time_embed(sinusoid(t, self.config.frequency_dim))[:, None]  # [B 1 E]
        mod = self.time_proj(jax.nn.silu(time)).reshape(-1, 1, 6, self.config.width)

        def run(block: Block, x: Tokens, context: Context) -> Tokens:
            return block(x, context, mod, rope)

        def group(
            blocks: tuple[ControlBlock, Block],
            streams: tuple[Tokens, Tokens],
            control_context: Context,
            contexts: Context,
        ) -> tuple[Tokens, Tokens]:
            """A control block, the block that it gives a hint to, and those up to the next."""
            (control_block, stride), (x, control) = blocks, streams
            control = run(control_block, control, control_context)
            x = run(part(stride, 0), x, part(contexts, 0)) + control_block.hint(control)
            x = scan_blocks(part(stride, slice(1, None)), run, x, part(contexts, slice(1, None)))
            return x, control

        strides, contexts = grouped((self.blocks, context.blocks), self.groups)
        x, _ = scan_blocks((self.control_blocks, strides), group, (x, control), context.control_blocks, contexts)

        shift, scale = (time + row for row in jnp.split(self.table[...][None], 2, axis=1))
        x = self.proj_out(modulate(self.norm_out(x), shift, scale).astype(self.dtype))
        return unpatchify(x, grid, self.config.patch)
