# SPDX-License-Identifier: Apache-2.0
"""Wan Animate's diffusion transformer: a character follows a pose clip and a clip of a face.

It is the image-to-video transformer with two additions. The embedded patches of the pose clip are added to the embedded
patches of the latents. Every few blocks, a face adapter attends to the face tokens. The first latent frame is the
character's picture, which has no pose and no face. The reference is diffusers'
models/transformers/transformer_wan_animate.py. It computes the face tokens in every step, but here `motions`,
`face_tokens` and `context` are called only once per segment.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Shaped

from wanjax.dims import readable_signature
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.layers.embeddings import Timesteps, broadcast_timesteps
from wanjax.layers.linear import linear
from wanjax.layers.modulation import modulate
from wanjax.layers.patch import patchify, unpatchify
from wanjax.layers.placement import on_weights_mesh
from wanjax.layers.residual import Tokens
from wanjax.layers.rope import Rope
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache, block_at, group_blocks, map_blocks, scan_blocks, stack
from wanjax.models.wan.config import PoseTransformerConfig
from wanjax.models.wan.faces import (
    FACE_BATCH_SIZE,
    FaceAdapter,
    FaceEncoder,
    FaceTokens,
    MotionEncoder,
    same_frame_bias,
)
from wanjax.models.wan.image import ImageBlock, ImageContext, WanImageTransformer
from wanjax.models.wan.transformer import Context, clean_token_mask, shard_stacked_kv


class PoseContext(NamedTuple):
    """Keys and values of prompts and of the character's picture in all blocks, and of faces in all adapters."""

    blocks: ImageContext
    faces: Context

    def with_nag(self, negative: "PoseContext", nag: Float32[Array, "3"]) -> "PoseContext":
        """Add a negative prompt for normalized attention guidance."""
        return self._replace(blocks=self.blocks.with_nag(negative.blocks, nag))


@readable_signature
class WanPoseTransformer(WanImageTransformer):
    """Predict the velocity of latents at timesteps t in [0, 1000] for encoded prompts, a picture, faces and poses.

    faces = transformer.face_tokens(transformer.motions(face_pictures))
    context = transformer.context(text, image, faces)
    velocity = transformer(latents, t, context, pose=pose)

    The channels of `latents` [B T H W C] are the video's latents, then the condition: a mask and the latents of the
    input frames. The first latent frame is the character's picture. `pose` has the latents' frames, height and width;
    its first frame is not used.
    """

    config: PoseTransformerConfig

    def __init__(self, config: PoseTransformerConfig, *, attention: AttentionConfig = AUTO, rngs: nnx.Rngs, **kw):
        super().__init__(config, attention=attention, rngs=rngs, **kw)
        channels = config.patch_volume * config.channels_out
        self.pose_embed = linear(channels, config.width, (None, "embed"), rngs=rngs, **kw)
        self.motion_encoder = MotionEncoder(config, rngs=rngs, **kw)
        self.face_encoder = FaceEncoder(config, rngs=rngs, **kw)
        self.face_adapters = stack(lambda rngs: FaceAdapter(config, rngs=rngs, **kw), config.face_adapters, rngs)

    @on_weights_mesh
    def motions(self, faces: Shaped[Array, "B T H W 3"]) -> Float32[Array, "B T _E"]:
        """Compute the motion vector of each picture of a face. Pixels are 8-bit numbers."""

        def encode(face: Shaped[Array, "H W 3"]) -> Float32[Array, " _E"]:
            return self.motion_encoder(face.astype(jnp.float32)[None] / 127.5 - 1.0)[0]

        batch, frames, *sides = faces.shape
        motions = jax.lax.map(encode, faces.reshape(-1, *sides), batch_size=FACE_BATCH_SIZE)
        return motions.reshape(batch, frames, -1)

    @on_weights_mesh
    def face_tokens(self, motions: Float32[Array, "B T _E"]) -> FaceTokens:
        """Compute the face tokens of each latent frame [B T S E] from the motion vectors of 4n + 1 frames.

        The first latent frame is the character's picture, whose face tokens are zeros.
        """
        return jnp.pad(self.face_encoder(motions), [(0, 0), (1, 0), (0, 0), (0, 0)])

    def context(self, text: Float[Array, "B S _E"], image: Float[Array, "B _S _E"], faces: FaceTokens) -> PoseContext:
        """Compute keys and values of encoded prompts, images and face tokens for every block and every adapter."""
        faces = faces.reshape(len(faces), -1, faces.shape[-1])  # [B S E]
        face_keys = map_blocks(self.face_adapters, lambda adapter: adapter.context(faces))
        return PoseContext(super().context(text, image), shard_stacked_kv(face_keys, self.config.heads))

    @on_weights_mesh
    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        t: Timesteps,
        context: PoseContext,
        rope: Rope | None = None,
        *,
        pose: Float[Array, "B T H W _C"],
        cache: BlockCache = NO_BLOCK_CACHE,
    ) -> Float[Array, "B T H W _C"]:
        """Predict the velocity.

        Args:
            latents: Noisy latents of the picture's frame and of the video, with their condition.
            t: Timesteps in [0, 1000].
            context: The result of the method `context`.
            rope: The result of the method `rope`; computed from the latents' grid by default.
            pose: A latent frame that is not used, then the latents of the pose clip.
            cache: A step cache, which can store tokens between blocks.

        Raises:
            WanjaxError: The latents or the pose clip have another number of channels.
        """
        config, grid = self.config, self.grid(latents)
        rope = rope or self.rope(grid)
        x = self.patch_embed(patchify(latents.astype(self.dtype), config.patch, config.channels_in))  # [B L E]
        pose = self.pose_embed(patchify(pose.astype(self.dtype), config.patch, config.channels_out))
        is_picture: Any = clean_token_mask(grid, 1)
        x = jnp.where(is_picture[None, :, None], x, x + pose)
        time = self.time_embed(broadcast_timesteps(t, len(latents)))[:, None]  # [B 1 E]
        mod = self.time_proj(jax.nn.silu(time)).reshape(-1, 1, 6, config.width)
        face_bias = same_frame_bias(x.shape[1], grid[1] * grid[2], context.faces.k.shape[2], config.face_tokens)

        def run(block: ImageBlock, x: Tokens, context: ImageContext) -> Tokens:
            return block(x, context, mod, rope)[0]

        def run_group(
            blocks: tuple[FaceAdapter, ImageBlock], x: Tokens, faces: Context, contexts: ImageContext
        ) -> Tokens:
            """Run a block, the adapter after it, and the other blocks of the group."""
            adapter, group = blocks
            x = run(block_at(group, 0), x, block_at(contexts, 0))
            x = adapter(x, faces, face_bias)
            return scan_blocks(block_at(group, slice(1, None)), run, x, block_at(contexts, slice(1, None)))

        groups, contexts = group_blocks((self.blocks, context.blocks), config.face_adapters)
        for part in cache.parts(config.face_adapters):
            x = cache.before(part, x)
            x = scan_blocks((self.face_adapters, groups), run_group, x, context.faces, contexts, part=part)
        x = cache.after(x)

        shift, scale = (time + row for row in jnp.split(self.table[...][None], 2, axis=1))
        x = self.proj_out(modulate(self.norm_out(x), shift, scale).astype(self.dtype))
        return unpatchify(x, grid, config.patch)
