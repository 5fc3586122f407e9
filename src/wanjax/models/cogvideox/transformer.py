# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's diffusion transformer, for text to video and for image to video.

Patches of the latents and tokens of the prompt form one sequence with self-attention. Both kinds of tokens use the same
projections. Their shifts, scales and gates are computed separately from the timestep. The projected prompt and the
positions are the same in every step. A pipeline therefore computes them once per video, by the methods `context` and
`positions`. A forward pass without these arguments computes them itself. The reference is diffusers'
models/transformers/cogvideox_transformer_3d.py.
"""

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32

from wanjax.dims import readable_signature
from wanjax.kernels.attention import AUTO, AttentionConfig, attention
from wanjax.layers.embeddings import TimeEmbed, Timesteps, broadcast_timesteps, checked_text, context_of
from wanjax.layers.guided_attention import apply_nag
from wanjax.layers.heads import join_heads, split_heads
from wanjax.layers.linear import linear
from wanjax.layers.mlp import MLP, gelu_tanh
from wanjax.layers.modulation import Modulation, modulate
from wanjax.layers.norms import layer_norm
from wanjax.layers.patch import patch_grid, patchify, unpatchify
from wanjax.layers.placement import on_weights_mesh
from wanjax.layers.residual import NormedTokens, Residual, Tokens, project, project_values, shared_input
from wanjax.layers.rope import Rope, head_norm_and_rope
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache, scan_blocks, stack
from wanjax.models.cogvideox.config import Grid, TransformerConfig
from wanjax.models.cogvideox.positions import POSITION_EMBEDDINGS, Positions, rope_tables
from wanjax.sharding import shard_tokens

HEAD_EPS = 1e-6  # epsilon of the norms of q and k; the other norms use the config's epsilon
OFFSET = 2.0  # the offset of all checkpoints


class Context(NamedTuple):
    """Encoded prompts, projected to the transformer's width.

    `nag` has the parameters of `apply_nag`. If it is not None, the second half of `text` has the negative prompts, and
    each video is computed with both prompts.
    """

    text: Float[Array, "B S E"]
    nag: Float32[Array, "3"] | None = None


class JointAttention(nnx.Module):
    """Attention of all tokens of the video and the text to all tokens."""

    def __init__(self, config: TransformerConfig, attention: AttentionConfig, **kw):
        width = config.width
        self.q = linear(width, width, ("embed", "heads"), **kw)
        self.k = linear(width, width, ("embed", "heads"), **kw)
        self.v = linear(width, width, ("embed", "heads"), **kw)
        self.out = linear(width, width, ("heads", "embed"), **kw)
        self.q_norm = layer_norm(config.head_dim, HEAD_EPS, affine=True, **kw)
        self.k_norm = layer_norm(config.head_dim, HEAD_EPS, affine=True, **kw)
        self.heads = config.heads
        self.attention = attention

    @jax.named_scope("self_attention")
    def __call__(
        self,
        inputs: Tokens | NormedTokens,
        rope: Rope,
        text: Bool[Array, " L"],
        nag: Float32[Array, "3"] | None,
        *,
        residual: Residual | None = None,
    ) -> Tokens:
        """Return the output, plus the residual if there is one. `text` is the mask of the text tokens. `nag` has the
        parameters that guide the video's tokens away from the negative prompts.
        """
        x: Any = shared_input(inputs, self.q, self.k, self.v)
        q = split_heads(head_norm_and_rope(self.q(x), self.q_norm, rope), self.heads)  # [B L N D]
        k = split_heads(head_norm_and_rope(self.k(x), self.k_norm, rope), self.heads)
        v = split_heads(project_values(self.v, x), self.heads)
        y = join_heads(attention(q, k, v, kv_length=rope.length, implementation=self.attention))
        if nag is not None:
            prompt, negative = jnp.split(y, 2)
            y = jnp.where(text[:, None], y, jnp.tile(apply_nag(prompt, negative, nag), (2, 1, 1)))
        return project(self.out, y, residual)


class Block(nnx.Module):
    """Joint attention and an MLP. The timestep modulates both, with different modulations for video tokens and text
    tokens."""

    def __init__(self, config: TransformerConfig, attention: AttentionConfig, **kw):
        width = config.width
        self.attn_mod = time_projection(config, 6, **kw)
        self.norm1 = layer_norm(width, config.eps, affine=True, **kw)
        self.attn = JointAttention(config, attention, **kw)
        self.mlp_mod = time_projection(config, 6, **kw)
        self.norm2 = layer_norm(width, config.eps, affine=True, **kw)
        self.mlp = MLP((width, config.mlp_dim, width), ("embed", "mlp", "embed"), gelu_tanh, **kw)
        self.dtype = kw["dtype"]

    def projections(self) -> list[nnx.Module]:
        """Return the projections of the tokens."""
        return [self.attn.q, self.attn.k, self.attn.v, self.attn.out, self.mlp.up, self.mlp.down]

    def __call__(
        self,
        x: Tokens,
        time: Float32[Array, "B _E"],
        rope: Rope,
        text: Bool[Array, " L"],
        nag: Float32[Array, "3"] | None = None,
    ) -> Tokens:
        """Compute the block. `text` is the mask of the text tokens."""
        attn_mod, mlp_mod = split_by_token_kind(self.attn_mod(time)), split_by_token_kind(self.mlp_mod(time))
        y = NormedTokens(x, self.norm1, self.dtype, attn_mod.shift, attn_mod.scale, text)
        x = self.attn(y, rope, text, nag, residual=Residual(x, attn_mod.gate, text))
        y = NormedTokens(x, self.norm2, self.dtype, mlp_mod.shift, mlp_mod.scale, text)
        return self.mlp(y, Residual(x, mlp_mod.gate, text))


class OffsetTimeEmbed(TimeEmbed):
    """Embed timesteps, and add the embedding of a constant offset."""

    def __init__(self, channels: int, width: int, offset_width: int, rngs: nnx.Rngs):
        super().__init__(channels, width, rngs)
        self.offset = TimeEmbed(offset_width, offset_width, rngs)

    def __call__(self, t: Float[Array, " B"]) -> Float32[Array, "B _E"]:
        return super().__call__(t) + self.offset(jnp.full((1,), OFFSET, jnp.float32))


@readable_signature
class CogVideoXTransformer(nnx.Module):
    """Predict v of latents [B T H W C] at timesteps t in [0, 1000) for encoded prompts [B S E].

    v = transformer(latents, t, text)

    For image to video, the channels are the video's latents and then the image's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        attention: AttentionConfig = AUTO,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        """`attention` is the implementation of attention; AUTO chooses it by platform and shape."""
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        width, patch_volume = config.width, config.patch_volume
        self.config = config
        self.dtype = dtype
        self.patch_embed = linear(patch_volume * config.channels_in, width, (None, "embed"), **kw)
        self.text_embed = linear(config.text_width, width, ("text", "embed"), **kw)
        self.added_positions = POSITION_EMBEDDINGS[config.added](config, **kw)
        self.time_embed = (
            TimeEmbed(width, config.time_width, rngs)
            if config.offset_width is None
            else OffsetTimeEmbed(width, config.time_width, config.offset_width, rngs)
        )
        self.blocks = stack(lambda rngs: Block(config, attention, **{**kw, "rngs": rngs}), config.layers, rngs)
        self.norm_final = layer_norm(width, config.eps, affine=True, **kw)
        self.out_mod = time_projection(config, 2, **kw)
        self.norm_out = layer_norm(width, config.eps, affine=True, **kw)
        self.proj_out = linear(width, patch_volume * config.channels_out, ("embed", None), **kw)

    def context(self, text: Float[Array, "B S _E"]) -> Context:
        """Project encoded prompts [B S E] to the transformer's width."""
        return Context(self.text_embed(checked_text(text, self.config.text_width).astype(self.dtype)))

    def grid(self, latents: Float[Array, "B T H W C"]) -> Grid:
        """The number of patches along frames, height and width."""
        return patch_grid(latents, self.config.patch)

    def positions(self, grid: Grid, num_text_tokens: int) -> Positions:
        """Return the positions of a grid of patches and of `num_text_tokens` text tokens.

        Raises WanjaxError if the height or width differs from that of a learned table.
        """
        return Positions(rope_tables(self.config, grid, num_text_tokens), self.added_positions(grid, num_text_tokens))

    @on_weights_mesh
    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Timesteps,
        context: Float[Array, "B S _E"] | Context,
        positions: Positions | None = None,
        *,
        cache: BlockCache = NO_BLOCK_CACHE,
    ) -> Float[Array, "B T H W _C"]:
        """Predict v.

        Args:
            latents: Noisy latents.
            t: Timesteps in [0, 1000).
            context: Encoded prompts, or the result of the method `context`.
            positions: The result of the method `positions`; computed from the latents and prompts by default.
            cache: A step cache, which can store tokens between blocks.

        Raises:
            WanjaxError: The latents have another number of channels.
        """
        config, grid, num_videos = self.config, self.grid(latents), len(latents)
        context, t = (
            context_of(context, self.context, num_videos),
            broadcast_timesteps(t, num_videos),
        )
        if context.nag is not None:  # two sequences for each video: one with the prompt, one with the negative prompt
            latents, t = jnp.concatenate([latents, latents]), jnp.concatenate([t, t])
        positions = positions or self.positions(grid, context.text.shape[1])
        video = self.patch_embed(patchify(latents.astype(self.dtype), config.patch, config.channels_in))
        x = jnp.concatenate([video[:, : prod(grid)], context.text], axis=1)
        x = shard_tokens(x, ("batch", "length", "embed"))  # [B L E]
        x = x if positions.added is None else x + positions.added.astype(x.dtype)
        text = shard_tokens(jnp.arange(positions.rope.length) >= prod(grid), ("length",))
        time = jax.nn.silu(self.time_embed(t))

        def run(block: Block, x: Tokens) -> Tokens:
            return block(x, time, positions.rope, text, context.nag)

        for part in cache.parts(self.config.layers):
            x = scan_blocks(self.blocks, run, cache.before(part, x), part=part, projections=Block.projections)
        x = cache.after(x)
        if context.nag is not None:  # the video's tokens are equal in both sequences
            x, time = x[:num_videos], time[:num_videos]

        shift, scale = jnp.split(self.out_mod(time)[:, None], 2, axis=-1)
        x = self.norm_out(self.norm_final(x))
        x = self.proj_out(modulate(x, shift, scale).astype(self.dtype))
        return unpatchify(x, grid, self.config.patch)


def time_projection(config: TransformerConfig, rows: int, **kw: Any) -> nnx.Module:
    """Make a projection of the timestep's embedding to rows of shifts, scales and gates, in float32."""
    return linear(config.time_width, rows * config.width, (None, "mlp"), **{**kw, "dtype": jnp.float32})


def split_by_token_kind(mod: Float32[Array, "B _E"]) -> Modulation:
    """Split a modulation into two modulations on the second axis: first for video tokens, then for text tokens."""
    kinds = mod.reshape(len(mod), 2, 3, -1)
    return Modulation(*(kinds[:, :, row] for row in range(3)))
