# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=true, reportIncompatibleVariableOverride=true
"""Wan Animate: a character follows a pose clip and a clip of a face, segment by segment.

With a background clip and its mask, the character replaces the person in the background clip. Before the steps of a
segment, the transformer computes the keys and values of the face once. The first latent frame is the character's
picture. This frame is dropped after the last step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, UInt8
from PIL import Image

from wanjax.errors import SettingError
from wanjax.execution import program
from wanjax.kernels.compiler_options import fast_matmul_options, matmul_options
from wanjax.layers.flops import attention_flops, linear_flops
from wanjax.layers.rope import Rope
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import BACKGROUND, CONTROL_VIDEO, FACE, MASK
from wanjax.media.pictures import Pictures, fit_to_size, size_for_area
from wanjax.models.wan.config import PoseTransformerConfig
from wanjax.models.wan.pose import PoseContext
from wanjax.pipelines.denoiser import LatentArray, Preparation, join
from wanjax.pipelines.guidance import Groups, group_prompts
from wanjax.pipelines.model import ForwardCost, ModelSpec
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.validation import Shape
from wanjax.pipelines.video_shape import VIDEO_SHAPE_TENSOR
from wanjax.pipelines.wan.character import CHARACTER, CharacterToVideo, previous_segment_frames, segment_shape
from wanjax.pipelines.wan.conditioning import GREY, WanConditioning, frame_channels
from wanjax.pipelines.wan.denoisers import ChannelConcatDenoiser, Velocity, Video, channels_last
from wanjax.pipelines.wan.letterbox import LANCZOS, letterbox
from wanjax.pipelines.wan.segments import Segments, full_segments
from wanjax.pipelines.windows import Window

POSE_CLIP = CONTROL_VIDEO.needed._replace(noun="a pose clip")
CLIPS = (POSE_CLIP.name, FACE.name, BACKGROUND.name, MASK.name)


class PoseInputs(NamedTuple):
    """The inputs that the forward passes for all prompts share.

    Args:
        rope: RoPE's tables.
        condition: The encoded condition, [B T H W C].
        pose: A latent frame of zeros, then the latents of the pose clip, [B T H W C].
    """

    rope: Rope
    condition: Any
    pose: Any


class PoseDenoiser(ChannelConcatDenoiser):
    """A denoiser that also gets the latents of a pose clip."""

    def predict(
        self,
        network: Any,
        x: Video,
        t: Float[Array, "B"],
        prompt: PoseContext,
        shared: PoseInputs,
        blocks: BlockCache = NO_BLOCK_CACHE,
        dense: bool | None = None,
    ) -> Velocity:
        condition, pose = (jnp.broadcast_to(y, (len(x), *y.shape[1:])) for y in (shared.condition, shared.pose))
        return self.velocity(network, x, t, prompt, shared.rope, condition, pose=pose, cache=blocks)


@dataclass(frozen=True)
class PoseSegments(Segments):
    """The segments of a pose clip. Every clip is extended by playing it backwards and forwards."""

    def video_shape(self, pictures: Pictures, settings: Settings, *, is_limited: bool) -> Mapping[str, int]:
        for present, missing in ((BACKGROUND, MASK), (MASK, BACKGROUND)):
            if present.name in pictures and missing.name not in pictures:
                problem = f"{present.noun} without {missing.noun} does not say what to replace"
                raise SettingError(f"{problem}: give {missing.option} too, or leave {present.option} out", missing.name)
        return super().video_shape(pictures, settings, is_limited=is_limited)

    def pictures(
        self,
        window: Window,
        settings: Settings,
        pictures: Pictures,
        previous_frames: Any,
        continuation_input: str | None,
    ) -> Pictures:
        clips = {name: pictures[name] for name in CLIPS if name in pictures}
        count = len(clips[POSE_CLIP.name])
        segment_clips = {name: x[full_segments(count, len(x), settings)[window.index]] for name, x in clips.items()}
        return pictures.with_inputs(**segment_clips, previous_frames=previous_frames)


@program(matmul_options, fast_options=fast_matmul_options)
def make_pose_context(
    static: tuple[Any, Groups],
    x: Float[Array, "B T H W C"],
    weights: Any,
    prompts: tuple[Float[Array, "B S E"], Float[Array, "_B _S _E"]],
    condition: Float[Array, "B _C _T H W"],
    features: Float[Array, "_B _S _E"],
    pose: Float[Array, "_B C _T H W"],
    faces: UInt8[Array, "_B _T _H _W 3"],
    nag: Float32[Array, "3"] | None = None,
) -> tuple[tuple[PoseContext, ...], PoseInputs]:
    """Return the keys and values for each forward pass, and the inputs that all forward passes share.

    The forward pass for a negative prompt sees a black face.

    Args:
        static: The network's definition, and how the prompts are grouped.
        x: The latents of the videos.
        weights: The network's weights.
        prompts: The features of the prompts and of the negative prompts.
        condition: The encoded condition.
        features: The features of the character's picture.
        pose: The latents of the pose clip.
        faces: The pictures of the face.
        nag: The scale, tau and alpha of normalized attention guidance; None without it.
    """
    graphdef, groups = static
    transformer = nnx.merge(graphdef, weights)
    face = transformer.face_tokens(transformer.motions(faces))
    no_face = transformer.motions(jnp.zeros_like(faces[:, :1]))
    no_face = transformer.face_tokens(jnp.repeat(no_face, faces.shape[1], axis=1))

    def context(text: Float[Array, "B S E"], *shared: Array) -> PoseContext:
        return transformer.context(text, *(jnp.broadcast_to(y, (len(text), *y.shape[1:])) for y in shared))

    def for_each_video(y: Array) -> Array:
        return jnp.broadcast_to(y, (len(x), *y.shape[1:]))

    pairs = list(zip(prompts, map(for_each_video, (face, no_face)), strict=True))
    contexts = tuple(context(text, features, tokens) for text, tokens in group_prompts(pairs, groups))
    if nag is not None:
        negative = context(group_prompts((prompts[1], prompts[1]), groups)[0], features, face)
        contexts = (contexts[0].with_nag(negative, nag), *contexts[1:])
    pose = jnp.pad(pose, [(0, 0), (0, 0), (1, 0), (0, 0), (0, 0)])
    return contexts, PoseInputs(transformer.rope(transformer.grid(x)), channels_last(condition), channels_last(pose))


class PoseToVideo(CharacterToVideo):
    """Model that makes a video from a character's picture, a pose clip and a clip of a face. The character takes the
    poses and the face's expressions.

    With a background and a mask, the video shows the background where the mask is black. The condition is a mask of the
    known pixels, and the latents of a clip. The clip has the character's picture, the last frames of the previous
    segment, and then the background or, without a background, grey.
    """

    task = "character animation and replacement"
    inputs = (CHARACTER, POSE_CLIP, FACE.needed, BACKGROUND, MASK)

    @cached_property
    def spec(self) -> ModelSpec:
        return replace(super().spec, windowing=PoseSegments())

    @property
    def denoiser(self) -> PoseDenoiser:
        return PoseDenoiser()

    @property
    def pose_config(self) -> PoseTransformerConfig:
        """The transformer's config."""
        assert isinstance(self.transformer, PoseTransformerConfig)
        return self.transformer

    def cost(self, settings: Settings, conditioning: WanConditioning | None = None) -> ForwardCost:
        """Count the work of one forward pass, including the picture's frame and the face adapters."""
        config, work = self.pose_config, super().cost(settings, conditioning)
        adapter = 2 * linear_flops(work.num_tokens, config.width, config.width)
        adapter += attention_flops(work.num_tokens, config.face_tokens, config.width)
        return work._replace(flops={**work.flops, "face_adapters": config.face_adapters * adapter})

    def size_for(self, picture: tuple[int, int, int], settings: Settings) -> tuple[int, int]:
        """Return the pose clip's size. If the area in the settings is smaller, return a size of this area with the
        clip's proportions.

        Args:
            picture: The shape of the pose clip's frames.
            settings: The settings of the video.
        """
        area = min(settings.height * settings.width, picture[0] * picture[1])
        return size_for_area(picture, area, self.spec.size_multiple)

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        side = self.pose_config.face_size
        return {**super().picture_shapes(settings), "face_pictures": (1, settings.frames, side, side, 3)}

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        def encode(frames: Any) -> Any:
            return self.encode_clip(runtime, frames, tiling)

        def stretch_frames(name: str) -> Float32[np.ndarray, "T _H _W 3"]:
            frames = [fit_to_size(frame, size, "stretch") for frame in pictures[name]]
            return np.stack(frames).astype(np.float32) / np.float32(255)

        size, side, follows_diffusers = settings.size, self.pose_config.face_size, settings.follow == "diffusers"
        image = letterbox(pictures["image"], size, LANCZOS, larger_bar_first=follows_diffusers)
        encoder_image = pictures["image"] if follows_diffusers else image
        previous_frames = previous_segment_frames(pictures, settings)
        has_background = BACKGROUND.name in pictures
        clip = stretch_frames(BACKGROUND.name) if has_background else np.full((settings.frames, *size, 3), GREY)
        clip[: len(previous_frames)] = previous_frames
        latents = runtime.call(join, 2, (encode([image.astype(np.float32) / np.float32(255)]), encode(clip)))
        faces = [fit_to_size(face, (side, side), "stretch") for face in pictures[FACE.name]]
        return {
            "condition": runtime.call(
                join, 1, (self._mask_channels(pictures, len(previous_frames), settings), latents)
            ),
            "image_embeds": self.encode_images(runtime, [encoder_image], reference_impl=settings.follow),
            "clip_latents": encode(stretch_frames(POSE_CLIP.name)),
            "face_pictures": np.stack(faces)[None],
            VIDEO_SHAPE_TENSOR: segment_shape(settings),
        }

    def _mask_channels(
        self, pictures: Pictures, num_previous: int, settings: Settings
    ) -> Float32[np.ndarray, "1 C T H W"]:
        """Return the condition's mask: 1 for the picture and for the frames of the previous segment, then 1 where the
        user's mask keeps the background."""
        keep_mask = np.zeros((settings.frames, *self.spec.latent_shape(settings)[3:]), np.float32)
        if (mask := pictures.clip(MASK.name)) is not None:
            step = self.vae.spatial_factor  # the first pixel of each latent position counts
            pixels = np.stack([fit_to_size(frame, settings.size, "stretch")[::step, ::step] for frame in mask])
            grey = pixels[..., 0] if settings.follow == "official" else np.stack(list(map(_luma, pixels)))
            keep_mask = 1 - grey.astype(np.float32) / np.float32(255)
        keep_mask[:num_previous] = 1
        channels = frame_channels(keep_mask, self.vae.temporal_factor)
        return np.concatenate([np.ones_like(channels[:, :1]), channels], axis=1)[None]

    def prepare(
        self,
        runtime: Runtime,
        network: SplitNetwork,
        conditioning: WanConditioning,
        x: LatentArray,
        preparation: Preparation,
    ) -> tuple[tuple[Any, ...], PoseInputs]:
        arguments = conditioning[:2], conditioning.condition, conditioning.image_embeds, conditioning.clip_latents
        static = network.graphdef, preparation.groups
        inputs = *arguments, conditioning.face_pictures, preparation.nag
        return runtime.call(make_pose_context, static, x, network.weights, *inputs)


def _luma(picture: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "H W"]:
    return np.asarray(Image.fromarray(picture).convert("L"))
