# SPDX-License-Identifier: Apache-2.0
"""Wan's diffusion transformer for text to video.

Latents become patches; each block is self-attention over all patches of all frames, cross-attention to the prompt,
and an MLP, the first and last modulated by the timestep. What no step changes, the prompt's keys and values in every
block and the tables of RoPE, is made once for a video: `context` and `rope`. The reference is diffusers'
models/transformers/transformer_wan.py and, for what stays in float32, the official wan/modules/model.py.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.kernels.attention import attention
from wanjax.kernels.heads import apart
from wanjax.layers.embeddings import sinusoid
from wanjax.layers.linear import linear, map_blocks, scan_blocks, stack
from wanjax.layers.mlp import MLP, gelu_tanh
from wanjax.layers.modulation import Clean, gated_add, modulate, split_modulation
from wanjax.layers.norms import layer_norm, rms_norm
from wanjax.layers.patch import patchify, unpatchify
from wanjax.layers.rope import Rope, normed_rope, rope_3d
from wanjax.models.wan.config import TransformerConfig
from wanjax.sharding import constrain, spread

Tokens = Float[Array, "B L E"]


class Context(NamedTuple):
    """Keys and values in cross-attention, heads side by side; those of all blocks have a leading axis."""

    k: Float[Array, "... B S E"]
    v: Float[Array, "... B S E"]


class Attention(nnx.Module):
    """What self- and cross-attention have alike: projections, and norms of q and k over all heads together."""

    def __init__(self, config: TransformerConfig, implementation: str | None, **kw):
        self.q = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.k = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.v = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.out = linear(config.width, config.width, ("heads", "embed"), **kw)
        self.q_norm = rms_norm(config.width, config.eps, **kw)
        self.k_norm = rms_norm(config.width, config.eps, **kw)
        self.heads = config.heads
        self.dtype = kw["dtype"]
        self.implementation = implementation

    def attend(
        self,
        q: Float[Array, "B L N D"],
        k: Float[Array, "B _S N D"],
        v: Float[Array, "B _S N D"],
        keys: int | None = None,
    ) -> Float[Array, "B L E"]:
        q, k = q.astype(self.dtype), k.astype(self.dtype)  # norms and rope hand over float32
        return join_heads(attention(q, k, v, keys=keys, implementation=self.implementation))


class SelfAttention(Attention):
    """Attention of every token to every token, with q and k turned by position."""

    @jax.named_scope("self_attention")
    def __call__(self, x: Tokens, rope: Rope) -> Tokens:
        q = split_heads(normed_rope(self.q(x), self.q_norm, rope), self.heads)  # [B L N D]
        k = split_heads(normed_rope(self.k(x), self.k_norm, rope), self.heads)
        v = split_heads(apart(self.v(x)), self.heads)
        return self.out(self.attend(q, k, v, rope.length))


class CrossAttention(Attention):
    """Attention of every token to the prompt; tiles that are chosen are for self-attention's length alone."""

    def __init__(self, config: TransformerConfig, implementation: str | None, **kw):
        super().__init__(config, implementation and implementation.partition(":")[0], **kw)

    def context(self, text: Float[Array, "B S E"]) -> Context:
        """What queries ask of a prompt."""
        return Context(self.kept(self.k_norm(self.k(text))), self.kept(self.v(text)))

    def kept(self, x: Float[Array, "B _S E"]) -> Float[Array, "B _S E"]:
        """Keys or values where the queries will ask for them: all on every device, or by heads."""
        x = split_heads(x.astype(self.dtype), self.heads)  # [B S N D]
        return join_heads(constrain(x, ("batch", None, "heads", None)))

    @jax.named_scope("cross_attention")
    def __call__(self, x: Tokens, context: Context) -> Tokens:
        q = split_heads(self.q_norm(self.q(x)), self.heads)  # [B L N D]
        k, v = (split_heads(keys, self.heads) for keys in context)  # [B S N D]
        return self.out(self.attend(q, k, v))


class Block(nnx.Module):
    def __init__(self, config: TransformerConfig, implementation: str | None, **kw):
        width = config.width
        self.norm1 = layer_norm(width, config.eps, affine=False, **kw)
        self.self_attn = SelfAttention(config, implementation, **kw)
        self.norm2 = layer_norm(width, config.eps, affine=True, **kw)
        self.cross_attn = CrossAttention(config, implementation, **kw)
        self.norm3 = layer_norm(width, config.eps, affine=False, **kw)
        self.mlp = MLP((width, config.mlp_dim, width), ("embed", "mlp", "embed"), gelu_tanh, **kw)
        self.table = modulation_table(6, width, kw["rngs"])
        self.dtype = kw["dtype"]

    def __call__(
        self,
        x: Tokens,
        context: Context,
        mod: Float[Array, "B _T 6 E"],
        rope: Rope,
        clean: Clean = None,
    ) -> Tokens:
        self_mod, mlp_mod = split_modulation(mod + self.table[...][None, None])
        y = modulate(self.norm1(x), self_mod.shift, self_mod.scale, clean).astype(self.dtype)
        x = gated_add(x, self.self_attn(y, rope), self_mod.gate, clean)
        x = x + self.cross_attn(self.norm2(x).astype(self.dtype), context).astype(x.dtype)
        y = modulate(self.norm3(x), mlp_mod.shift, mlp_mod.scale, clean).astype(self.dtype)
        return gated_add(x, self.mlp(y), mlp_mod.gate, clean)


class WanTransformer(nnx.Module):
    """Predicts the velocity of latents [B T H W C] at timesteps t in [0, 1000] for encoded prompts [B S E].

        velocity = transformer(latents, t, transformer.context(text), transformer.rope(transformer.grid(latents)))

    Transformers that see more than the prompt have what this one has, blocks of a type of their own, and more.
    """

    block_type: type[Any] = Block

    def __init__(
        self,
        config: TransformerConfig,
        *,
        attention: str | None = None,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        """`attention` names an implementation of it; None picks by platform and shape."""
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        width = config.width
        cells = config.patch[0] * config.patch[1] * config.patch[2]
        self.config = config
        self.dtype = dtype
        self.patch_embed = linear(cells * config.channels_in, width, (None, "embed"), **kw)
        self.text_embed = MLP((config.text_width, width, width), ("text", "mlp", "embed"), gelu_tanh, **kw)
        # the timestep's path is too sensitive for less than float32; its first half is kept in it too
        float32 = {**kw, "dtype": jnp.float32}
        self.time_embed = MLP(
            (config.frequency_dim, width, width),
            (None, "mlp", "embed"),
            jax.nn.silu,
            **{**float32, "param_dtype": jnp.float32},
        )
        self.time_proj = linear(width, 6 * width, ("embed", "mlp"), **float32)
        self.blocks = stack(
            lambda rngs: self.block_type(config, attention, **{**kw, "rngs": rngs}), config.layers, rngs
        )
        self.norm_out = layer_norm(width, config.eps, affine=False, **kw)
        self.table = modulation_table(2, width, rngs)
        self.proj_out = linear(width, cells * config.channels_out, ("embed", None), **kw)

    def rope(self, grid: tuple[int, int, int]) -> Rope:
        """Position tables for a grid of (frames, height, width) patches: 44, 42, 42 of 128 channels go to T, H, W."""
        third = 2 * (self.config.head_dim // 6)
        return rope_3d(grid, (self.config.head_dim - 2 * third, third, third))

    def context(self, text: Float[Array, "B S _E"]) -> Any:
        """What the blocks' cross-attention asks of encoded prompts [B S E]: keys and values [layers B S E]."""
        text = self.text_embed(text.astype(self.dtype))
        return map_blocks(self.blocks, lambda block: block.cross_attn.context(text))

    def grid(self, latents: Float[Array, "B T H W C"]) -> tuple[int, int, int]:
        pt, ph, pw = self.config.patch
        return latents.shape[1] // pt, latents.shape[2] // ph, latents.shape[3] // pw

    def clean_tokens(self, grid: tuple[int, int, int], frames: int) -> Clean:
        """Marks the tokens of the first `frames` latent frames; None where there are none to mark."""
        tokens = jnp.arange(math.prod(grid))
        clean = tokens < frames // self.config.patch[0] * grid[1] * grid[2]
        return spread(clean, ("length",)) if frames else None

    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Float[Array, "B"],
        context: Context,
        rope: Rope,
        *,
        clean_frames: int = 0,
    ) -> Float[Array, "B T H W _C"]:
        """`context` and `rope` are those of the methods; the first `clean_frames` latent frames hold no noise.

        These are at timestep 0, whatever t.
        """
        grid = self.grid(latents)
        clean = self.clean_tokens(grid, clean_frames)
        timesteps = t[:, None] if clean is None else jnp.stack([t, jnp.zeros_like(t)], axis=1)
        x = self.patch_embed(patchify(latents.astype(self.dtype), self.config.patch))  # [B L E]
        time = self.time_embed(sinusoid(timesteps.reshape(-1), self.config.frequency_dim))
        time = time.reshape(*timesteps.shape, self.config.width)  # [B 1 E], of two timesteps [B 2 E]
        mod = self.time_proj(jax.nn.silu(time)).reshape(*timesteps.shape, 6, self.config.width)

        x = scan_blocks(self.blocks, lambda block, x, context: block(x, context, mod, rope, clean), x, context)

        shift, scale = (time + row for row in jnp.split(self.table[...][None], 2, axis=1))
        x = self.proj_out(modulate(self.norm_out(x), shift, scale, clean).astype(self.dtype))
        return unpatchify(x, grid, self.config.patch)


def split_heads(x: Float[Array, "B L E"], heads: int) -> Float[Array, "B L N D"]:
    return x.reshape(*x.shape[:2], heads, -1)


def join_heads(x: Float[Array, "B L N D"]) -> Float[Array, "B L E"]:
    return x.reshape(*x.shape[:2], -1)


def modulation_table(rows: int, width: int, rngs: nnx.Rngs) -> nnx.Param:
    """What is added to the timestep's shifts, scales and gates, learnt for each block; kept in float32."""
    init = nnx.with_partitioning(nnx.initializers.normal(stddev=width**-0.5), (None, "embed"))
    return nnx.Param(init(rngs.params(), (rows, width), jnp.float32))
