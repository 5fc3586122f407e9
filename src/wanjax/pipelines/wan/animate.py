# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=true, reportIncompatibleVariableOverride=true
"""Wan Animate 2: a character moves as in a driving clip, segment by segment.

Before the steps of a segment, the transformer runs once over the segment's part of the clip, and returns the keys and
values of every block. The first latent frame is the character's picture. This frame is dropped after the last step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from wanjax.execution import program
from wanjax.kernels.attention.clip_kv import ClipKV
from wanjax.kernels.compiler_options import fast_matmul_options, matmul_options, scan_options
from wanjax.layers.flops import attention_flops
from wanjax.layers.rope import Rope
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import CONTROL_VIDEO
from wanjax.media.pictures import Pictures
from wanjax.models.wan.animate import AnimateContext
from wanjax.pipelines.denoiser import LatentArray, Preparation, join
from wanjax.pipelines.guidance import Groups
from wanjax.pipelines.model import ForwardCost, ModelSpec
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.tokenizer import TokenBatch
from wanjax.pipelines.validation import FieldShape, Shape
from wanjax.pipelines.video_shape import VIDEO_SHAPE_TENSOR
from wanjax.pipelines.wan.character import CHARACTER, CharacterToVideo, previous_segment_frames, segment_shape
from wanjax.pipelines.wan.conditioning import GREY, WanConditioning, known_frame_mask
from wanjax.pipelines.wan.denoisers import ChannelConcatDenoiser, Velocity, Video
from wanjax.pipelines.wan.letterbox import BICUBIC, BILINEAR, letterbox
from wanjax.pipelines.wan.programs import encode_text, known_condition, make_context
from wanjax.pipelines.wan.segments import ClipSegments

FIRST_FRAME_BIAS = -1.3
"""A number that the authors add to the scores of the keys of a segment's first frame, for distilled weights."""
DRIVING_VIDEO = CONTROL_VIDEO.needed._replace(noun="a driving clip")


class AnimateInputs(NamedTuple):
    """The inputs that the forward passes for all prompts share.

    Args:
        rope: RoPE's tables.
        condition: The encoded condition, [B T H W C].
        clip: The keys and values of the driving clip, in all blocks.
        bias: A number that is added to the scores of the keys of the video's first frame; None adds nothing.
    """

    rope: Rope
    condition: Any
    clip: ClipKV
    bias: Any = None


class AnimateDenoiser(ChannelConcatDenoiser):
    """A denoiser that also attends to the keys and values of a driving clip."""

    def predict(
        self,
        network: Any,
        x: Video,
        t: Float[Array, "B"],
        prompt: AnimateContext,
        shared: AnimateInputs,
        blocks: BlockCache = NO_BLOCK_CACHE,
        dense: bool | None = None,
    ) -> Velocity:
        condition = jnp.broadcast_to(shared.condition, (len(x), *shared.condition.shape[1:]))
        options = {"clip": shared.clip, "bias": None if shared.bias is None else shared.bias[0], "cache": blocks}
        return self.velocity(network, x, t, prompt, shared.rope, condition, **options)


@program(scan_options)
def encode_three_prompts(
    graphdef: Any, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], weights: Any
) -> tuple[Float[Array, "1 S E"], ...]:
    """Encode the prompt, the negative prompt and the clip's prompt.

    Args:
        graphdef: The network's definition.
        ids: The token ids of the three prompts.
        mask: True at real tokens.
        weights: The network's weights.
    """
    embeds = encode_text(nnx.merge(graphdef, weights), ids, mask)
    return embeds[:1], embeds[1:2], embeds[2:]


@program(matmul_options, fast_options=fast_matmul_options)
def compute_clip_keys(
    graphdef: Any,
    weights: Any,
    latents: Float[Array, "1 C T H W"],
    text: Float[Array, "1 S E"],
    features: Float[Array, "1 _S _E"],
) -> ClipKV:
    """Run the transformer over a driving clip, and return the keys and values of all blocks.

    Args:
        graphdef: The network's definition.
        weights: The network's weights.
        latents: The latents of the clip.
        text: The features of the clip's prompt.
        features: The features of the clip's first frame.
    """
    transformer = nnx.merge(graphdef, weights)
    x = jnp.moveaxis(latents.astype(jnp.float32), 1, -1)
    mask = jnp.ones((*x.shape[:-1], transformer.config.channels_in - 2 * x.shape[-1]), x.dtype)
    x = jnp.concatenate([x, mask, x], axis=-1)
    return transformer.clip_kv(x, transformer.context(text, features))


@program(scan_options)
def make_animate_context(
    static: tuple[Any, Groups],
    x: Float[Array, "B T H W C"],
    weights: Any,
    prompts: tuple[Float[Array, "B S E"], Float[Array, "_B _S _E"]],
    condition: Float[Array, "B _C _T H W"],
    features: Float[Array, "_B _S _E"],
    nag: Float32[Array, "3"] | None = None,
) -> tuple[tuple[AnimateContext, ...], Rope, Float[Array, "B T H W _C"]]:
    """Return the results of `make_context`, but with the number of negative prompts in each forward pass.

    Args:
        static: The network's definition, and how the prompts are grouped.
        x: The latents of the videos.
        weights: The network's weights.
        prompts: The features of the prompts and of the negative prompts.
        condition: The encoded condition.
        features: The features of the character's picture.
        nag: The scale, tau and alpha of normalized attention guidance; None without it.
    """
    contexts, shared = make_context.function(static, x, weights, prompts, condition, features, nag)
    num_videos, batch = len(prompts[0]), static[1].batch
    negatives = (num_videos,) if batch > 1 else (0, num_videos)
    animate_contexts = tuple(AnimateContext(keys, count) for keys, count in zip(contexts, negatives, strict=False))
    return animate_contexts, shared.rope, shared.condition


@dataclass(frozen=True, kw_only=True)
class CharacterAnimation(CharacterToVideo):
    """Model that makes a video from a character's picture and a driving clip. The character moves as in the clip.

    Args:
        distilled: Whether the weights were distilled for few steps without guidance.
    """

    task = "character animation"
    inputs = (CHARACTER, DRIVING_VIDEO)
    optional = ("first_frame_bias",)
    skips_blocks = False

    distilled: bool = False

    @cached_property
    def spec(self) -> ModelSpec:
        base = super().spec
        return replace(base, windowing=ClipSegments(base.size_multiple), supports_int8_attention=False)

    @property
    def denoiser(self) -> AnimateDenoiser:
        return AnimateDenoiser()

    def cost(self, settings: Settings, conditioning: WanConditioning | None = None) -> ForwardCost:
        """Count the work of one forward pass, including the picture's frame and the attention to the clip."""
        work, frames = super().cost(settings, conditioning), self.spec.latent_shape(settings)[2]
        frame_tokens = work.num_tokens // (frames + 1)
        clip_scores = work.num_layers * attention_flops(frames * frame_tokens, frame_tokens, work.width)
        flops = {**work.flops, "self_attention": work.flops["self_attention"] + clip_scores}
        return work._replace(attention_flops=work.attention_flops + clip_scores, flops=flops, has_single_sequence=False)

    def size_for(self, picture: tuple[int, int, int], settings: Settings) -> tuple[int, int]:
        """Return the size unchanged. The size only gives an area; `ClipSegments` computes the sides.

        Args:
            picture: The shape of the image.
            settings: The settings of the video.
        """
        return settings.size

    def tokenize(self, runtime: Runtime, prompts: Sequence[str], reference_impl: str) -> tuple[TokenBatch, ...]:
        """Tokenize prompts. diffusers does not clean them.

        Args:
            runtime: Networks, devices and strategy.
            prompts: The texts.
            reference_impl: Which reference implementation to match, as in the settings.
        """
        if reference_impl == "diffusers":
            return (runtime.components.get("tokenizer").tokenize(list(prompts)),)
        return super().tokenize(runtime, prompts, reference_impl)

    def encode_text(self, runtime: Runtime, settings: Settings) -> WanConditioning:
        texts = [settings.prompt, settings.negative_prompt, settings.clip_prompt or ""]
        [batch] = self.tokenize(runtime, texts, settings.follow)
        graphdef, weights = runtime.split("text_encoder")
        *prompts, clip_prompt = runtime.call(encode_three_prompts, graphdef, batch.ids, batch.mask, weights)
        return WanConditioning(*prompts, clip_prompt_embeds=clip_prompt)

    def conditioning_shapes(self, conditioning: WanConditioning, settings: Settings) -> Mapping[str, FieldShape]:
        shapes = super().conditioning_shapes(conditioning, settings)
        return {**shapes, "clip_prompt_embeds": shapes["prompt_embeds"]}

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        shapes = super().picture_shapes(settings)
        return {**shapes, "clip_image_embeds": shapes["image_embeds"], "first_frame_bias": (1,)}

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        def encode(frames: Any) -> Any:
            return self.encode_clip(runtime, frames, tiling)

        def embed(picture: Any) -> Any:  # both reference implementations stretch the whole picture
            return self.encode_images(runtime, [picture], reference_impl="official")

        size, byte = settings.size, np.float32(255)
        image = letterbox(pictures["image"], size, BICUBIC)
        clip = np.stack([letterbox(frame, size, BILINEAR) for frame in pictures["video"]])
        previous_frames = previous_segment_frames(pictures, settings)
        unknown = np.full((settings.frames - len(previous_frames), *size, 3), GREY)
        mask = known_frame_mask(range(len(previous_frames)), settings.frames, self.vae.temporal_factor)
        conditions = (
            runtime.call(known_condition, None, encode([image / byte]), known_frame_mask([0], 1, len(mask))),
            runtime.call(known_condition, None, encode(np.concatenate([previous_frames, unknown])), mask),
        )
        has_bias = self.distilled and settings.follow == "official"
        return {
            "condition": runtime.call(join, 2, conditions),
            "image_embeds": embed(image),
            "clip_latents": encode(clip / byte),
            "clip_image_embeds": embed(letterbox(pictures["clip_image"], size, BILINEAR)),
            "first_frame_bias": np.array([FIRST_FRAME_BIAS], np.float32) if has_bias else None,
            VIDEO_SHAPE_TENSOR: segment_shape(settings),
        }

    def prepare(
        self,
        runtime: Runtime,
        network: SplitNetwork,
        conditioning: WanConditioning,
        x: LatentArray,
        preparation: Preparation,
    ) -> tuple[tuple[Any, ...], AnimateInputs]:
        clip_inputs = conditioning.clip_latents, conditioning.clip_prompt_embeds, conditioning.clip_image_embeds
        clip = runtime.call(compute_clip_keys, network.graphdef, network.weights, *clip_inputs)
        arguments = conditioning[:2], conditioning.condition, conditioning.image_embeds, preparation.nag
        static = network.graphdef, preparation.groups
        contexts, rope, condition = runtime.call(make_animate_context, static, x, network.weights, *arguments)
        return contexts, AnimateInputs(rope, condition, clip, conditioning.first_frame_bias)
