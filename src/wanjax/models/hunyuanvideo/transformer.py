# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo 1.5's diffusion transformer, for text to video and for a picture to video.

There are two streams of tokens: of the video, and of its text. In each block, the streams have separate weights and
attend to each other. The text stream has the prompt's tokens, then the tokens of glyphs and of a picture, if there are
any. Glyphs are quoted text that the video shows. The text stream has no positions, so the order of its tokens does not
matter. Its real tokens come first, so that their number determines which tokens are padding. The reference is
diffusers' models/transformers/transformer_hunyuan_video15.py. It has another order of tokens, with the same result.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from wanjax.dims import readable_signature
from wanjax.kernels.attention import AUTO, AttentionConfig, Radial, VideoTextPair, joint_attention
from wanjax.layers.embeddings import TimeEmbed, Timesteps, broadcast_timesteps, checked_text, context_of
from wanjax.layers.guided_attention import apply_nag
from wanjax.layers.heads import join_heads, split_heads
from wanjax.layers.linear import Linear, linear
from wanjax.layers.mlp import MLP, gelu_tanh
from wanjax.layers.modulation import Modulation, modulate, split_modulation
from wanjax.layers.norms import layer_norm, rms_norm
from wanjax.layers.patch import patch_grid, patchify, unpatchify
from wanjax.layers.placement import on_weights_mesh, param
from wanjax.layers.residual import NormedTokens, Residual, Tokens, project, project_heads, project_values, shared_input
from wanjax.layers.rope import Rope, check_rope, rope_3d
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache, scan_blocks, stack
from wanjax.models.hunyuanvideo.config import TransformerConfig
from wanjax.models.hunyuanvideo.refiner import GlyphEmbed, ImageEmbed, Prompt, Refiner, TextTokens
from wanjax.sharding import shard_tokens

DECAY = 0.95  # the decay of radial attention that its authors use for HunyuanVideo
PATCH = (1, 1, 1)  # a token is one latent position
PROMPT, GLYPHS, IMAGE = range(3)  # rows of `kinds`, which has an embedding for each kind of text tokens
TextStream = Float[Array, "_B S E"]  # one text for each video; with negative prompts, two texts
Time = Float32[Array, "B E"]
TextLengths = Int32[Array, " B"]


class Context(NamedTuple):
    """The part of a video's text that is the same in every step.

    Attributes:
        prompt: The prompt before it is refined.
        extra_tokens: The embedded tokens of glyphs and of a picture; may be empty.
        mask: The mask [B S + _S] of the real tokens, of the prompt and then of `extra_tokens`.
        nag: The parameters of `apply_nag`, or None. With parameters, the second half of the batch has the negative
            prompts, and each video attends to both texts.
    """

    prompt: Prompt
    extra_tokens: Float[Array, "B _S E"]
    mask: Bool[Array, "B _S"]
    nag: Float32[Array, "3"] | None = None

    @property
    def text_lengths(self) -> "TextLengths":
        """The number of real tokens of each example."""
        return self.mask.sum(axis=1, dtype=jnp.int32)

    def repeat_per_text(self, x: Float[Array, "B ..."]) -> Float[Array, "_B ..."]:
        """Repeat the values of videos for each of their texts: twice if there are negative prompts."""
        return x if self.nag is None else jnp.concatenate([x, x])


class Streams(NamedTuple):
    """The tokens of a video and of its text between two blocks. On several devices each stream ends with padding.

    The real tokens of the text come first.
    """

    video: Tokens
    text: TextStream


class JointAttention(nnx.Module):
    """Joint attention over both streams, which have separate projections. RoPE rotates only video tokens."""

    def __init__(self, config: TransformerConfig, attention: AttentionConfig, **kw):
        width = config.width
        self.q = linear(width, width, ("embed", "heads"), **kw)
        self.k = linear(width, width, ("embed", "heads"), **kw)
        self.v = linear(width, width, ("embed", "heads"), **kw)
        self.out = linear(width, width, ("heads", "embed"), **kw)
        self.text_q = linear(width, width, ("embed", "heads"), **kw)
        self.text_k = linear(width, width, ("embed", "heads"), **kw)
        self.text_v = linear(width, width, ("embed", "heads"), **kw)
        self.text_out = linear(width, width, ("heads", "embed"), **kw)
        self.q_norm = rms_norm(config.head_dim, config.eps, **kw, axis="head_dim")
        self.k_norm = rms_norm(config.head_dim, config.eps, **kw, axis="head_dim")
        self.text_q_norm = rms_norm(config.head_dim, config.eps, **kw, axis="head_dim")
        self.text_k_norm = rms_norm(config.head_dim, config.eps, **kw, axis="head_dim")
        self.heads = config.heads
        self.dtype = kw["dtype"]
        self.attention = attention

    @jax.named_scope("joint_attention")
    def __call__(
        self,
        inputs: Tokens | NormedTokens,
        text_inputs: TextStream | NormedTokens,
        rope: Rope,
        context: Context,
        mask: Radial | None = None,
        *,
        residual: tuple[Residual | None, Residual | None] = (None, None),
    ) -> tuple[Tokens, TextStream]:
        """Return the outputs of both streams, each plus its residual if there is one.

        `context` has the number of real text tokens, and the parameters for negative prompts.
        """
        x: Any = shared_input(inputs, self.q, self.k, self.v)
        text: Any = shared_input(text_inputs, self.text_q, self.text_k, self.text_v)
        q = split_heads(project_heads(self.q, x, self.q_norm, rope), self.heads)  # [B L N D]
        k = split_heads(project_heads(self.k, x, self.k_norm, rope), self.heads)
        v = split_heads(project_values(self.v, x), self.heads)
        text_q = split_heads(project_heads(self.text_q, text, self.text_q_norm), self.heads)  # [B S N D]
        text_k = split_heads(project_heads(self.text_k, text, self.text_k_norm), self.heads)
        text_v = split_heads(self.text_v(text), self.heads)
        pairs = (q, text_q), (k, text_k), (v, text_v)
        qkv_pairs = (
            VideoTextPair(context.repeat_per_text(a.astype(self.dtype)), b.astype(self.dtype)) for a, b in pairs
        )
        y = joint_attention(
            *qkv_pairs,
            length=rope.length,
            text_lengths=context.text_lengths,
            window=mask,
            implementation=self.attention,
        )
        y, text_y = map(join_heads, y)
        if context.nag is not None:
            prompt, negative = jnp.split(y, 2)
            y = apply_nag(prompt, negative, context.nag)
        return project(self.out, y, residual[0]), project(self.text_out, text_y, residual[1])


class Block(nnx.Module):
    """Joint attention, and an MLP for each of the two streams. The timestep modulates the attention and the MLPs."""

    def __init__(self, config: TransformerConfig, attention: AttentionConfig, **kw):
        width, mlp = config.width, (config.width, config.mlp_dim, config.width)
        self.mod = modulation(6, width, **kw)
        self.text_mod = modulation(6, width, **kw)
        self.norm1 = layer_norm(width, config.eps, affine=False, **kw)
        self.text_norm1 = layer_norm(width, config.eps, affine=False, **kw)
        self.attn = JointAttention(config, attention, **kw)
        self.norm2 = layer_norm(width, config.eps, affine=False, **kw)
        self.text_norm2 = layer_norm(width, config.eps, affine=False, **kw)
        self.mlp = MLP(mlp, ("embed", "mlp", "embed"), gelu_tanh, **kw)
        self.text_mlp = MLP(mlp, ("embed", "mlp", "embed"), gelu_tanh, **kw)
        self.dtype = kw["dtype"]

    def projections(self) -> list[nnx.Module]:
        """Return the projections of both streams."""
        attn, mlps = self.attn, (self.mlp, self.text_mlp)
        video, text = (attn.q, attn.k, attn.v, attn.out), (attn.text_q, attn.text_k, attn.text_v, attn.text_out)
        return [*video, *text, *(projection for mlp in mlps for projection in (mlp.up, mlp.down))]

    def __call__(
        self, streams: Streams, time: Time, rope: Rope, context: Context, mask: Radial | None = None
    ) -> Streams:
        x, text = streams
        attn_mod, mlp_mod = block_modulations(self.mod, time)
        text_attn_mod, text_mlp_mod = block_modulations(self.text_mod, context.repeat_per_text(time))
        y = NormedTokens(x, self.norm1, self.dtype, attn_mod.shift, attn_mod.scale)
        text_y = NormedTokens(text, self.text_norm1, self.dtype, text_attn_mod.shift, text_attn_mod.scale)
        residuals = Residual(x, attn_mod.gate), Residual(text, text_attn_mod.gate)
        x, text = self.attn(y, text_y, rope, context, mask, residual=residuals)
        y = NormedTokens(x, self.norm2, self.dtype, mlp_mod.shift, mlp_mod.scale)
        text_y = NormedTokens(text, self.text_norm2, self.dtype, text_mlp_mod.shift, text_mlp_mod.scale)
        return Streams(self.mlp(y, Residual(x, mlp_mod.gate)), self.text_mlp(text_y, Residual(text, text_mlp_mod.gate)))


@readable_signature
class HunyuanVideoTransformer(nnx.Module):
    """Predict the velocity of latents at timesteps t in [0, 1000] for encoded texts.

    velocity = transformer(latents, t, text, text_mask=mask)

    The channels of `latents` [B T H W C] are the video's latents, then the condition: the latents of an input frame and
    a mask, or zeros. `embed` and `head` are the parts of the forward pass before and after the blocks.
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
        width = config.width
        self.config = config
        self.attention = attention
        self.dtype = dtype
        self.patch_embed = linear(config.channels_in, width, (None, "embed"), **kw)
        self.time_embed = TimeEmbed(config.frequency_dim, width, rngs)
        self.next_time_embed = nnx.data(TimeEmbed(config.frequency_dim, width, rngs) if config.uses_meanflow else None)
        self.refiner = Refiner(config, attention, **kw)
        self.glyph_embed = GlyphEmbed(config, **kw)
        self.image_embed = ImageEmbed(config, **kw)
        zeros, kinds = nnx.initializers.zeros_init(), (3, width)  # an embedding for each kind of text tokens
        self.kinds = param(zeros, kinds, (None, "embed"), dtype=jnp.float32, rngs=rngs)
        self.blocks = stack(lambda rngs: Block(config, attention, **{**kw, "rngs": rngs}), config.layers - 1, rngs)
        self.last_block = Block(config, attention, **kw)
        self.norm_out = layer_norm(width, config.eps, affine=False, **kw)
        self.mod_out = modulation(2, width, **kw)
        self.proj_out = linear(width, config.channels_out, ("embed", None), **kw)

    def context(
        self,
        text: Float[Array, "B S _E"],
        mask: Bool[Array, "B S"] | None = None,
        glyphs: tuple[Float[Array, "B _S _E"], Bool[Array, "B _S"]] | None = None,
        image: Float[Array, "B _S _E"] | None = None,
    ) -> Context:
        """Embed the text of a video in the transformer's width.

        Without `glyphs` or `image`, the context has fewer tokens. The result of the transformer is the same as if these
        tokens were masked.

        Args:
            text: Features of the prompt.
            mask: The mask of the prompt's real tokens; by default all tokens are real.
            glyphs: Features of glyphs, and their mask.
            image: Features of a picture.
        """
        text = checked_text(text, self.config.text_width)
        mask = jnp.ones(text.shape[:2], bool) if mask is None else mask
        extra_tokens, masks = [jnp.zeros((len(text), 0, self.config.width), self.dtype)], [mask]
        if glyphs is not None:
            extra_tokens.append(self._add_kind(self.glyph_embed(glyphs[0]), GLYPHS))
            masks.append(glyphs[1])
        if image is not None:
            extra_tokens.append(self._add_kind(self.image_embed(image), IMAGE))
            masks.append(jnp.ones(image.shape[:2], bool))
        prompt = self.refiner.prompt(text, mask)
        return Context(prompt, jnp.concatenate(extra_tokens, axis=1), jnp.concatenate(masks, axis=1))

    def _add_kind(self, tokens: TextTokens, kind: int) -> TextTokens:
        """Add the embedding of a kind of text tokens."""
        return tokens + self.kinds[...][kind][None, None].astype(tokens.dtype)

    def grid(self, latents: Float[Array, "B T H W C"]) -> tuple[int, int, int]:
        """The number of tokens along frames, height and width."""
        return patch_grid(latents, PATCH)

    def rope(self, grid: tuple[int, int, int], contexts: Sequence[Context] = ()) -> Rope:
        """Compute the tables of RoPE for a grid of tokens.

        The tables, and so the video, are padded so that joint attention can write the text of each context there.
        """
        room = max((context.mask.shape[1] for context in contexts), default=0)
        return rope_3d(grid, self.config.rope_channels, self.config.rope_theta, room=room)

    def mask(self, grid: tuple[int, int, int]) -> Radial | None:
        """Return the mask of radial joint attention over a grid of tokens, or None for dense attention.

        The first frame is not an attention sink. The authors of radial attention use this mask for HunyuanVideo.
        """
        return self.attention.mask(grid, decay=DECAY, has_sink=False)

    def time(self, t: Float[Array, "B"], t_next: Float[Array, "B"] | None = None) -> Time:
        """Embed timesteps. A network with `uses_meanflow` also needs `t_next`, the timesteps at which the step ends."""
        time = self.time_embed(t)
        if self.next_time_embed is None:
            return time
        assert t_next is not None, "a network with meanflow needs t_next"
        return time + self.next_time_embed(t_next)

    def embed(self, latents: Float[Array, "B T H W C"], t: Float[Array, "B"], context: Context, rope: Rope) -> Streams:
        """Compute both streams before the first block. The video is padded as the tables of `rope` are."""
        prompt = self.refiner(
            context.prompt, context.repeat_per_text(t), context.mask[:, : context.prompt.tokens.shape[1]]
        )
        text = jnp.concatenate([self._add_kind(prompt, PROMPT), context.extra_tokens.astype(prompt.dtype)], axis=1)
        text = move_real_tokens_first(text, context.mask)
        patches = patchify(latents.astype(self.dtype), PATCH, self.config.channels_in, length=len(rope.cos))
        x = self.patch_embed(patches)  # [B L E]
        return Streams(x, shard_tokens(text, ("batch", "length", None)))

    def head(self, x: Tokens, time: Time, grid: tuple[int, int, int]) -> Float[Array, "B T H W C"]:
        """Compute the velocity from the video's tokens after the last block."""
        scale, shift = jnp.split(self.mod_out(jax.nn.silu(time))[:, None], 2, axis=-1)  # [B 1 E]
        x = self.proj_out(modulate(self.norm_out(x), shift, scale).astype(self.dtype))
        return unpatchify(x, grid, PATCH)

    @on_weights_mesh
    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Timesteps,
        context: Float[Array, "B S _E"] | Context,
        rope: Rope | None = None,
        t_next: Timesteps | None = None,
        *,
        text_mask: Bool[Array, "B S"] | None = None,
        mask: Radial | None = None,
        cache: BlockCache = NO_BLOCK_CACHE,
    ) -> Float[Array, "B T H W _C"]:
        """Predict the velocity.

        Args:
            latents: Noisy latents, with the condition.
            t: Timesteps in [0, 1000].
            context: Encoded prompts, or the result of the method `context`.
            rope: The result of the method `rope`; computed from the latents' grid by default.
            t_next: The timesteps at which the step ends, for a network with `uses_meanflow`.
            text_mask: The mask of the real tokens, if `context` has encoded prompts.
            mask: The result of the method `mask`; dense attention by default. The first block is always dense.
            cache: A step cache, which can store both streams between blocks.

        Raises:
            WanjaxError: The latents have another number of channels.
        """
        context = context_of(context, lambda text: self.context(text, text_mask), len(latents))
        grid, t = self.grid(latents), broadcast_timesteps(t, len(latents))
        rope = self.rope(grid, [context]) if rope is None else check_rope(rope, grid)
        t_next = None if t_next is None else broadcast_timesteps(t_next, len(latents))
        time, last_index = self.time(t, t_next), self.config.layers - 1

        def run(mask: Radial | None, block: Block, streams: Streams) -> Streams:
            return block(streams, time, rope, context, mask)

        streams = self.embed(latents, t, context, rope)
        for part in cache.parts(self.config.layers, 1 if mask else 0, last_index):
            streams, apply = cache.before(part, streams), partial(run, mask if part.start else None)
            if part.start == last_index:
                streams = apply(self.last_block, streams)
            else:
                streams = scan_blocks(self.blocks, apply, streams, part=part, projections=Block.projections)
        return self.head(cache.after(streams).video, time, self.grid(latents))


def modulation(rows: int, width: int, **kw) -> Linear:
    """Make a projection of the timestep to shifts, scales and gates, which computes in float32."""
    return linear(width, rows * width, ("embed", "mlp"), **{**kw, "dtype": jnp.float32})


def block_modulations(mod: Linear, time: Time) -> tuple[Modulation, Modulation]:
    """Compute the modulations of a stream's attention and of its MLP."""
    return split_modulation(mod(jax.nn.silu(time)).reshape(len(time), 1, 6, -1))


def move_real_tokens_first(text: Float[Array, "B S E"], mask: Bool[Array, "B S"]) -> Float[Array, "B S E"]:
    """Move the tokens in the mask to the front. The order of these tokens, and of the other tokens, does not change.

    Text tokens have no positions, so their order does not matter. With the real tokens first, attention kernels need
    only the number of real tokens, not a mask.
    """
    return jnp.take_along_axis(text, jnp.argsort(~mask, axis=1, stable=True)[:, :, None], axis=1)
