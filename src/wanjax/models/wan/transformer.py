# SPDX-License-Identifier: Apache-2.0
"""Wan's diffusion transformer for text to video.

The latents are split into patches. Each block has self-attention over the patches of all frames, cross-attention to the
prompt, and an MLP. The timestep modulates the self-attention and the MLP. The prompt's keys and values in every block
and the tables of RoPE are the same in every step. A pipeline therefore computes them once per video, by the methods
`context` and `rope`. A forward pass without these arguments computes them itself. The reference is diffusers'
models/transformers/transformer_wan.py. The choice of which values are float32 follows the official
wan/modules/model.py.
"""

import math
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wanjax.dims import readable_signature
from wanjax.errors import WanjaxError
from wanjax.figures import pluralize
from wanjax.kernels.attention import AUTO, AttentionConfig, Projection, Radial, attention, sparse_linear_attention
from wanjax.layers.embeddings import TimeEmbed, Timesteps, broadcast_timesteps, checked_text, context_of
from wanjax.layers.guided_attention import apply_nag
from wanjax.layers.heads import join_heads, split_heads
from wanjax.layers.linear import gather_kernels, linear
from wanjax.layers.mlp import MLP, gelu_tanh
from wanjax.layers.modulation import SecondMask, modulate, split_modulation
from wanjax.layers.norms import layer_norm, rms_norm
from wanjax.layers.patch import patch_grid, patchify, unpatchify
from wanjax.layers.placement import on_weights_mesh, param
from wanjax.layers.residual import NormedTokens, Residual, Tokens, project, project_heads, project_values, shared_input
from wanjax.layers.rope import Rope, check_rope, rope_3d
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache, map_blocks, scan_blocks, stack
from wanjax.models.wan.config import TransformerConfig
from wanjax.sharding import constrain, constrain_to, current_partitioner, shard_tokens

StackedArrays = TypeVar("StackedArrays")  # a pytree of arrays [layers B S E]


class NegativePrompt(NamedTuple):
    """Keys and values of a negative prompt for normalized attention guidance, and the parameters of `apply_nag`."""

    k: Float[Array, "... B S E"]
    v: Float[Array, "... B S E"]
    nag: Float32[Array, "... 3"]


class Context(NamedTuple):
    """Keys and values of cross-attention, with concatenated heads. For stacked blocks, there is a leading axis."""

    k: Float[Array, "... B S E"]
    v: Float[Array, "... B S E"]
    negative: NegativePrompt | None = None

    def with_nag(self, negative: "Context", nag: Float32[Array, "3"]) -> "Context":
        """Add a negative prompt for normalized attention guidance, in all stacked blocks."""
        nag_per_block = jnp.broadcast_to(nag, (len(self.k), *nag.shape))
        return self._replace(negative=NegativePrompt(negative.k, negative.v, nag_per_block))


class AttentionLayer(nnx.Module):
    """The projections of self- and cross-attention, and the norms of q and k over all heads together."""

    def __init__(self, config: TransformerConfig, attention: AttentionConfig, **kw):
        self.q = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.k = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.v = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.out = linear(config.width, config.width, ("heads", "embed"), **kw)
        self.q_norm = rms_norm(config.width, config.eps, **kw)
        self.k_norm = rms_norm(config.width, config.eps, **kw)
        self.heads = config.heads
        self.dtype = kw["dtype"]
        self.attention = attention

    def attend(
        self,
        q: Float[Array, "B L N D"],
        k: Float[Array, "B S N D"],
        v: Float[Array, "B S N D"],
        kv_length: int | None = None,
        mask: Radial | None = None,
    ) -> Float[Array, "B L E"]:
        """Compute attention in the compute dtype and join its heads. Only the first `kv_length` keys are used."""
        q, k = q.astype(self.dtype), k.astype(self.dtype)  # norms return float32
        return join_heads(attention(q, k, v, kv_length=kv_length, window=mask, implementation=self.attention))


class SelfAttention(AttentionLayer):
    """Attention of every token to every token, or to the tokens in a mask. RoPE rotates q and k.

    `proj_l` is the projection of sparse-linear attention, initialised with zeros. Only networks that were trained with
    this attention have it.
    """

    def __init__(self, config: TransformerConfig, attention: AttentionConfig, **kw):
        super().__init__(config, attention, **kw)
        sizes, zeros = (config.head_dim, config.head_dim, (None, None)), nnx.initializers.zeros_init()
        self.proj_l = nnx.data(linear(*sizes, kernel_init=zeros, **kw) if config.sparse_linear else None)

    def attend(
        self,
        q: Float[Array, "B L N D"],
        k: Float[Array, "B S N D"],
        v: Float[Array, "B S N D"],
        kv_length: int | None = None,
        mask: Radial | None = None,
    ) -> Float[Array, "B L E"]:
        if self.attention.sparse is None:
            return super().attend(q, k, v, kv_length, mask)
        q, k = q.astype(self.dtype), k.astype(self.dtype)
        weights: Any = self.proj_l
        projection = Projection(*(x[...].astype(self.dtype) for x in (weights.kernel, weights.bias)))
        return join_heads(sparse_linear_attention(q, k, v, projection, self.attention.sparse, kv_length=kv_length))

    @jax.named_scope("self_attention")
    def __call__(
        self,
        inputs: Tokens | NormedTokens,
        rope: Rope,
        mask: Radial | None = None,
        *,
        residual: Residual | None = None,
    ) -> tuple[Tokens, None]:
        """Return the output, plus the residual if there is one, and None.

        Subclasses return keys and values in place of None.
        """
        x: Any = shared_input(inputs, self.q, self.k, self.v)
        to_q, to_k, to_v = gather_kernels(self.q, self.k, self.v)
        # norm and RoPE are one call, because on TPUs one kernel computes both; two calls would copy q and k twice
        q = split_heads(project_heads(to_q, x, self.q_norm, rope), self.heads)  # [B L N D]
        k = split_heads(project_heads(to_k, x, self.k_norm, rope), self.heads)
        v = split_heads(project_values(to_v, x), self.heads)
        return project(self.out, self.attend(q, k, v, rope.length, mask), residual), None


class CrossAttention(AttentionLayer):
    """Attention of every token to the prompt."""

    def __init__(self, config: TransformerConfig, attention: AttentionConfig, **kw):
        super().__init__(config, attention.dense_only(), **kw)

    def context(self, text: Float[Array, "B S E"]) -> Context:
        """Compute keys and values of a prompt, which are the same in every step."""
        k = shard_kv(self.k_norm(self.k(text)).astype(self.dtype), self.heads)
        return Context(k, shard_kv(self.v(text).astype(self.dtype), self.heads))

    @jax.named_scope("cross_attention")
    def __call__(self, inputs: Tokens | NormedTokens, context: Context, *, residual: Residual | None = None) -> Tokens:
        """Return the output, plus the residual if there is one."""
        q = split_heads(project_heads(self.q, inputs, self.q_norm), self.heads)  # [B L N D]
        return project(self.out, self.attend_to_prompt(q, context), residual)

    def attend_to_prompt(self, q: Float[Array, "B L N D"], context: Context) -> Tokens:
        """Compute the attention to the prompt. If there is a negative prompt, apply normalized attention guidance."""
        k, v = (split_heads(x, self.heads) for x in context[:2])  # [B S N D]
        y = self.attend(q, k, v)
        if context.negative is None:
            return y
        k, v = (split_heads(x, self.heads) for x in context.negative[:2])
        return apply_nag(y, self.attend(q, k, v), context.negative.nag)


class Block(nnx.Module):
    """Self-attention, cross-attention to the prompt, and an MLP. The timestep modulates the self-attention and the
    MLP."""

    self_attention: ClassVar[Any] = SelfAttention
    cross_attention: ClassVar[Any] = CrossAttention

    def __init__(self, config: TransformerConfig, attention: AttentionConfig, **kw):
        width = config.width
        self.norm1 = layer_norm(width, config.eps, affine=False, **kw)
        self.self_attn = self.self_attention(config, attention, **kw)
        self.norm2 = layer_norm(width, config.eps, affine=True, **kw)
        self.cross_attn = self.cross_attention(config, attention, **kw)
        self.norm3 = layer_norm(width, config.eps, affine=False, **kw)
        self.mlp = MLP((width, config.mlp_dim, width), ("embed", "mlp", "embed"), gelu_tanh, **kw)
        self.table = modulation_table(6, width, kw["rngs"])
        self.dtype = kw["dtype"]

    def projections(self) -> list[nnx.Module]:
        """Return the projections of the video's tokens. The projections of the prompt run only once per video."""
        attn, cross_attn = self.self_attn, self.cross_attn
        return [attn.q, attn.k, attn.v, attn.out, cross_attn.q, cross_attn.out, self.mlp.up, self.mlp.down]

    def __call__(
        self,
        x: Tokens,
        context: Any,
        mod: Float[Array, "B _T 6 E"],
        *attention_args: Any,
        clean_mask: SecondMask = None,
    ) -> tuple[Tokens, Any]:
        """Return the output, and the second result of the self-attention: keys and values, or None."""
        self_mod, mlp_mod = split_modulation(mod + self.table[...][None, None])
        y = NormedTokens(x, self.norm1, self.dtype, self_mod.shift, self_mod.scale, clean_mask)
        x, kv = self.self_attn(y, *attention_args, residual=Residual(x, self_mod.gate, clean_mask))
        x = self.cross_attn(NormedTokens(x, self.norm2, self.dtype), context, residual=Residual(x))
        y = NormedTokens(x, self.norm3, self.dtype, mlp_mod.shift, mlp_mod.scale, clean_mask)
        return self.mlp(y, Residual(x, mlp_mod.gate, clean_mask)), kv


@readable_signature
class WanTransformer(nnx.Module):
    """Predict the velocity of latents [B T H W C] at timesteps t in [0, 1000] for encoded prompts [B S E].

    velocity = transformer(latents, t, text)
    """

    block: ClassVar[type[Block]] = Block

    def __init__(
        self,
        config: TransformerConfig,
        *,
        attention: AttentionConfig = AUTO,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        """Create the network. `attention` is the kind of attention. AUTO means the kind with which the network was
        trained. The platform and the shapes then determine the implementation."""
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        width, patch_volume, attention = config.width, config.patch_volume, config.resolve_attention(attention)
        self.config = config
        self.attention = attention
        self.dtype = dtype
        self.patch_embed = linear(patch_volume * config.channels_in, width, (None, "embed"), **kw)
        self.text_embed = MLP((config.text_width, width, width), ("text", "mlp", "embed"), gelu_tanh, **kw)
        self.time_embed = TimeEmbed(config.frequency_dim, width, rngs)
        self.time_proj = linear(width, 6 * width, ("embed", "mlp"), **{**kw, "dtype": jnp.float32})
        self.blocks = stack(lambda rngs: self.block(config, attention, **{**kw, "rngs": rngs}), config.layers, rngs)
        self.norm_out = layer_norm(width, config.eps, affine=False, **kw)
        self.table = modulation_table(2, width, rngs)
        self.proj_out = linear(width, patch_volume * config.channels_out, ("embed", None), **kw)

    def context(self, text: Float[Array, "B S _E"]) -> Context:
        """Compute keys and values of encoded prompts [B S E] for every block: [layers B S E]."""
        text = self.text_embed(checked_text(text, self.config.text_width).astype(self.dtype))
        return shard_stacked_kv(
            map_blocks(self.blocks, lambda block: block.cross_attn.context(text)), self.config.heads
        )

    def grid(self, latents: Float[Array, "B T H W C"]) -> tuple[int, int, int]:
        """The number of patches along frames, height and width."""
        return patch_grid(latents, self.config.patch)

    def rope(self, grid: tuple[int, int, int]) -> Rope:
        """Compute the tables of RoPE for a grid of patches."""
        return rope_3d(grid, self.config.rope_channels)

    def mask(self, grid: tuple[int, int, int]) -> Radial | None:
        """Return the mask of radial self-attention over a grid of patches, or None for dense attention."""
        return self.attention.mask(grid)

    @on_weights_mesh
    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Timesteps,
        context: Float[Array, "B S _E"] | tuple[Any, ...],
        rope: Rope | None = None,
        *,
        clean_frames: int = 0,
        mask: Radial | None = None,
        cache: BlockCache = NO_BLOCK_CACHE,
    ) -> Float[Array, "B T H W _C"]:
        """Predict the velocity.

        Args:
            latents: Noisy latents.
            t: Timesteps in [0, 1000].
            context: Encoded prompts, or the result of the method `context`.
            rope: The result of the method `rope`; computed from the latents' grid by default.
            clean_frames: The first `clean_frames` latent frames have no noise. Their tokens have timestep 0.
            mask: The result of the method `mask`; dense attention by default. The first block is always dense.
            cache: A step cache, which can store tokens between blocks.

        Raises:
            WanjaxError: The latents have another number of channels.
        """
        config, grid = self.config, self.grid(latents)
        context = context_of(context, self.context, len(latents))
        rope, t = self.rope(grid) if rope is None else check_rope(rope, grid), broadcast_timesteps(t, len(latents))
        if clean_frames not in range(latents.shape[1] + 1):
            problem = f"clean_frames is {clean_frames}, and the latents have {pluralize(latents.shape[1], 'frame')}"
            raise WanjaxError(f"{problem}: give a whole number of these frames")
        clean_mask = clean_token_mask(grid, clean_frames // config.patch[0])
        timesteps = t[:, None] if clean_mask is None else jnp.stack([t, jnp.zeros_like(t)], axis=1)
        x = self.patch_embed(patchify(latents.astype(self.dtype), config.patch, config.channels_in))  # [B L E]
        time = self.time_embed(timesteps.reshape(-1))
        time = time.reshape(*timesteps.shape, config.width)  # [B 1 E], or [B 2 E] for two timesteps
        mod = self.time_proj(jax.nn.silu(time)).reshape(*timesteps.shape, 6, config.width)
        mod = constrain(mod, ("batch", None, None, None))  # blocks slice its rows

        def run(mask: Radial | None, block: Block, x: Tokens, context: Any) -> Tokens:
            return block(x, context, mod, rope, mask, clean_mask=clean_mask)[0]

        for part in cache.parts(config.layers, 1 if mask else 0):
            part_mask = mask if part.start else None  # the first block is dense
            run_block, x = partial(run, part_mask), cache.before(part, x)
            x = scan_blocks(self.blocks, run_block, x, context, part=part, projections=self.block.projections)
        x = cache.after(x)

        shift, scale = (time + row for row in jnp.split(self.table[...][None], 2, axis=1))
        x = self.proj_out(modulate(self.norm_out(x), shift, scale, clean_mask).astype(self.dtype))
        return unpatchify(x, grid, config.patch)


def shard_kv(x: Float[Array, "B S E"], heads: int) -> Float[Array, "B S E"]:
    """Constrain keys or values to the sharding that attention needs: sharded by heads if the queries are, else
    replicated."""
    return join_heads(constrain(split_heads(x, heads), ("batch", None, "heads", None)))


def shard_stacked_kv(kv: StackedArrays, heads: int) -> StackedArrays:
    """Constrain the keys and values of all blocks [layers B S E] as `shard_kv` does for one block."""

    def shard(x: Float[Array, "_B B S E"]) -> Float[Array, "_B B S E"]:
        return constrain_to(
            x, current_partitioner().activation_spec((None, "batch", None, "heads"), (*x.shape[:3], heads))
        )

    return jax.tree.map(shard, kv)


def modulation_table(rows: int, width: int, rngs: nnx.Rngs) -> nnx.Param:
    """Create a learned float32 table. Its rows are added to the shifts, scales and gates of the timestep."""
    normal = nnx.initializers.normal(stddev=width**-0.5)
    return param(normal, (rows, width), (None, "embed"), dtype=jnp.float32, rngs=rngs)


def clean_token_mask(grid: tuple[int, int, int], frames: int) -> SecondMask:
    """Return a mask of the tokens of the first `frames` frames of patches, or None for 0 frames."""
    is_clean = jnp.arange(math.prod(grid)) < frames * grid[1] * grid[2]
    return shard_tokens(is_clean, ("length",)) if frames else None
