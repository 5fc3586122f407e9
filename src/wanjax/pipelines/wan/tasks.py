# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=true, reportIncompatibleVariableOverride=true
"""Wan's models: one class for each task, which defines the input images and clips and how they are encoded."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from math import prod
from typing import Any

import numpy as np
from jaxtyping import Float

from wanjax.errors import WanjaxError
from wanjax.execution import ArrayOrShape
from wanjax.layers.flops import attention_flops
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import CONTROL_VIDEO, IMAGE, LAST_IMAGE, MASK, REFERENCES, VIDEO
from wanjax.media.pictures import PictureOfAnySize, Pictures, fit_to_size
from wanjax.models.wan.causal import angles_at, slot_of
from wanjax.models.wan.config import (
    CausalTransformerConfig,
    ControlTransformerConfig,
    ImageTransformerConfig,
    forward_flops,
)
from wanjax.pipelines.denoiser import Denoiser, LatentArray, ModelInputs, Preparation
from wanjax.pipelines.model import ForwardCost
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.validation import Shape
from wanjax.pipelines.wan.causal_programs import CausalInputs, CausalPast, begin_past, renew
from wanjax.pipelines.wan.conditioning import (
    GREY,
    WanConditioning,
    fit_on_white,
    fit_to_unit_range,
    known_frame_mask,
    mask_to_channels,
)
from wanjax.pipelines.wan.denoisers import (
    CausalDenoiser,
    ChannelConcatDenoiser,
    ControlDenoiser,
    FirstFrameChannelConcatDenoiser,
    FirstFrameDenoiser,
)
from wanjax.pipelines.wan.model import WanModel
from wanjax.pipelines.wan.programs import TEXT_LENGTH, control_condition, encode_images, known_condition, resize


class TextToVideo(WanModel):
    """Text to video. Starts from noise, or from an input video with noise added (see `strength`)."""

    inputs = (VIDEO,)
    optional = ("video_latents",)

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        return {"video_latents": self.spec.latent_shape(settings)}

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        if (clip := pictures.clip("video")) is None:
            return {}
        frames = [fit_to_unit_range(frame, settings) for frame in clip[: settings.frames]]
        return {"video_latents": self.encode_clip(runtime, frames, tiling)}


class CausalTextToVideo(WanModel):
    """Text to video, chunk by chunk, from noise alone. Each chunk attends to the keys and values of earlier chunks."""

    task = "text to video in chunks"
    radial = False
    skips_blocks = False

    @property
    def denoiser(self) -> Denoiser:
        return CausalDenoiser()

    @property
    def causal_config(self) -> CausalTransformerConfig:
        """The transformer's config."""
        assert isinstance(self.transformer, CausalTransformerConfig)
        return self.transformer

    @property
    def chunk_frames(self) -> int:
        return self.causal_config.chunk_frames

    def cost(self, settings: Settings, conditioning: WanConditioning | None = None) -> ForwardCost:
        """Count the work of one forward pass of a chunk, once the attention window is full."""
        config, (_, _, _, *latent_size) = self.causal_config, self.spec.latent_shape(settings)
        tokens = prod((config.chunk_frames, *latent_size)) // config.patch_volume
        flops = dict(forward_flops(config, tokens=tokens, text_tokens=TEXT_LENGTH))
        scores = config.layers * attention_flops(tokens, config.slots * tokens, config.width)
        flops["self_attention"] += scores - config.layers * attention_flops(tokens, tokens, config.width)
        return ForwardCost(tokens, config.layers, config.heads, config.width, scores, flops)

    def prepare(
        self,
        runtime: Runtime,
        network: SplitNetwork,
        conditioning: WanConditioning,
        x: LatentArray,
        preparation: Preparation,
    ) -> tuple[tuple[Any, ...], CausalInputs]:
        _, nag, chunk, past = preparation
        negative = () if nag is None else (conditioning.negative_prompt_embeds, nag)
        arguments = x, network.weights, conditioning.prompt_embeds, *negative
        past_chunks: CausalPast = (
            past if isinstance(past, CausalPast) else runtime.call(begin_past, network.graphdef, *arguments)
        )
        slot = slot_of(self.causal_config, chunk, prod(x.shape[1:4]) // self.causal_config.patch_volume)
        return (past_chunks.context,), CausalInputs(angles_at(self.causal_config, chunk), past_chunks.window, slot)

    def update_past(self, runtime: Runtime, network: SplitNetwork, inputs: ModelInputs, x: LatentArray) -> CausalPast:
        [context], (time, window, slot) = inputs.prompts, inputs.shared
        new_window = runtime.call(renew, network.graphdef, window, x, network.weights, context, time, slot)
        return CausalPast(context, new_window)


class FirstFrameToVideo(TextToVideo):
    """Text and image to video. The condition, if any, is the clean first latent frame.

    The clean frame replaces the noise of that frame.
    """

    task = "text and image to video"
    inputs = (IMAGE, VIDEO)
    optional = ("video_latents", "condition")

    @property
    def denoiser(self) -> Denoiser:
        return FirstFrameDenoiser()

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        batch, channels, _, *latent_size = self.spec.latent_shape(settings)
        return {**super().picture_shapes(settings), "condition": (batch, channels, 1, *latent_size)}

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        clip_fields = super().encode_inputs(runtime, pictures, settings, tiling=tiling)
        if (picture := pictures.picture("image")) is None:
            return clip_fields
        return {
            **clip_fields,
            "condition": self.encode_clip(runtime, [fit_to_unit_range(picture, settings)], tiling),
        }


class ImageToVideo(WanModel):
    """Image to video. The condition is a mask of the known frames and the latents of a clip. Unknown frames of the clip
    are grey."""

    task = "image to video"
    inputs = (IMAGE.needed, LAST_IMAGE)

    @property
    def denoiser(self) -> Denoiser:
        return ChannelConcatDenoiser()

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        _, channels, *latent_size = self.spec.latent_shape(settings)
        return {"condition": (1, self.transformer.channels_in - channels, *latent_size)}

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        clip, indices = [np.full((*settings.size, 3), GREY)] * settings.frames, []
        for frame, name in ((0, "image"), (settings.frames - 1, "last_image")):
            if (picture := pictures.picture(name)) is not None:
                clip[frame] = fit_to_unit_range(picture, settings)
                indices.append(frame)
        mask = known_frame_mask(indices, settings.frames, self.vae.temporal_factor)
        return {"condition": runtime.call(known_condition, None, self.encode_clip(runtime, clip, tiling), mask)}


class ImageToVideoWithEncoder(ImageToVideo):
    """Image to video with cross-attention to image features from a vision tower.

    The tower gets the images in their original size, not in the video's size, as in both references.
    """

    inputs = (IMAGE.needed,)

    @property
    def image_config(self) -> ImageTransformerConfig:
        """The transformer's config."""
        assert isinstance(self.transformer, ImageTransformerConfig)
        return self.transformer

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        features = (1, self.image_config.image_positions, self.image_config.image_width)
        return {**super().picture_shapes(settings), "image_embeds": features}

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        features = self.encode_images(
            runtime, self.images_to_encode(pictures, settings), reference_impl=settings.follow
        )
        if (width := features.shape[-1]) != self.image_config.image_width:
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: its image encoder makes {width} features, but its "
                f"transformer takes {self.image_config.image_width}"
            )
        return {**super().encode_inputs(runtime, pictures, settings, tiling=tiling), "image_embeds": features}

    def images_to_encode(self, pictures: Pictures, settings: Settings) -> list[PictureOfAnySize]:
        """Select the images that the vision tower encodes.

        Args:
            pictures: The pictures and clips of the request.
            settings: Settings of the video.
        """
        return [pictures[name] for name in ("image", "last_image") if name in pictures]

    def encode_images(
        self, runtime: Runtime, images: Sequence[PictureOfAnySize], *, reference_impl: str
    ) -> Float[ArrayOrShape, "1 S E"]:
        """Encode images with the checkpoint's vision tower, and concatenate their features along the token axis.

        The official code scales the whole image to the tower's size; diffusers crops the centre of the image.

        Args:
            runtime: Networks, devices and strategy.
            images: The images, of any size.
            reference_impl: Which reference implementation to match, as in the settings.
        """
        graphdef, weights = runtime.split("image_encoder")
        pixel_values = runtime.components.get("image_processor")(images, stretch=reference_impl == "official")
        return runtime.call(encode_images, graphdef, pixel_values, weights)


class FirstAndLastFrameToVideo(ImageToVideoWithEncoder):
    """First and last frame to video. The features of the two images have learned positions."""

    task = "first and last frame to video"
    inputs = (IMAGE.needed, LAST_IMAGE.needed)


class Inpainting(ImageToVideo):
    """Text to video, optionally from a first image or from a first and a last image (Wan Fun InP).

    Unknown frames are handled as in image to video. Without images the whole condition is zeros, and nothing is
    encoded. Follows pipeline_wan_fun_inpaint.py and pipeline_wan2_2_fun_inpaint.py of aigc-apps/VideoX-Fun.
    """

    task = "text, and first and last frame, to video"
    inputs = (IMAGE, LAST_IMAGE)
    optional = ("condition", "image_embeds")

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        return super().encode_inputs(runtime, pictures, settings, tiling=tiling) if "image" in pictures else {}


class InpaintingWithEncoder(Inpainting, ImageToVideoWithEncoder):
    """`Inpainting` with cross-attention to the first image, in the video's size.

    Without an image, the features are zeros.
    """

    def images_to_encode(self, pictures: Pictures, settings: Settings) -> list[PictureOfAnySize]:
        return [fit_to_size(pictures["image"], settings.size, settings.resize)]


class FirstFrameInpainting(Inpainting):
    """`Inpainting` with Wan 2.2's autoencoder. The first latent frame also stays without noise."""

    @property
    def denoiser(self) -> Denoiser:
        return FirstFrameChannelConcatDenoiser()


class ControlledVideo(WanModel):
    """Controlled video (VACE). The condition is a control clip, preceded by one latent frame per reference image.

    The condition's channels are the latents of the pixels that the mask keeps, the latents of the pixels that the mask
    replaces, and the mask itself. Without a clip, the clip is grey. Without a mask, the model replaces all pixels. A
    first and a last image replace the clip's first and last frame, and the mask keeps these frames.
    """

    task = "controlled video (VACE)"
    inputs = (IMAGE, LAST_IMAGE, CONTROL_VIDEO, MASK, REFERENCES)
    radial = False
    skips_blocks = False

    @property
    def denoiser(self) -> Denoiser:
        return ControlDenoiser()

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        assert isinstance(self.transformer, ControlTransformerConfig)
        _, _, _, *latent_size = self.spec.latent_shape(settings)
        return {"condition": (1, self.transformer.control_channels, None, *latent_size)}

    def leading_frames(self, conditioning: WanConditioning, settings: Settings) -> int:
        assert conditioning.condition is not None
        return conditioning.condition.shape[2] - self.spec.latent_shape(settings)[2]

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        grey = np.full((*settings.size, 3), GREY, np.float32)
        clip = [grey] * settings.frames
        if (control_frames := pictures.clip("video")) is not None:
            clip = [fit_to_unit_range(frame, settings) for frame in control_frames[: settings.frames]]
        mask = np.broadcast_to(np.ones((), np.float32), (settings.frames, *settings.size))
        repaint_mask = np.broadcast_to(np.ones((), bool), (*mask.shape, 1))
        if (masks := pictures.clip("mask")) is not None:
            mask = np.stack([fit_to_unit_range(frame, settings).mean(axis=-1) for frame in masks[: settings.frames]])
        end_frames = {
            index: fit_to_unit_range(picture, settings)
            for index, name in ((0, "image"), (settings.frames - 1, "last_image"))
            if (picture := pictures.picture(name)) is not None
        }
        if end_frames:
            mask = mask.copy()
            mask[list(end_frames)] = 0
            clip = [end_frames.get(index, frame) for index, frame in enumerate(clip)]
        if masks is not None or end_frames:
            repaint_mask = (mask > 0.5)[..., None]

        def masked_frame(repainting: bool, repaint_mask: np.ndarray, frame: np.ndarray) -> np.ndarray:
            # copies only frames with masked pixels, because most frames have none
            if repaint_mask.all() or not repaint_mask.any():
                return frame if repaint_mask.flat[0] == repainting else grey
            return np.where(repaint_mask == repainting, frame, grey)

        def encode_frames(frames: list[np.ndarray]) -> Any:
            all_same = all(frame is frames[0] for frame in frames)  # without a mask, no copies are needed
            clip = np.broadcast_to(frames[0], (len(frames), *frames[0].shape)) if all_same else frames
            return self.encode_clip(runtime, clip, tiling)

        def resize_on_host(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
            """Resize an image and return it on the host; return zeros while a run is traced."""
            return runtime.strategy.to_host(runtime.call(resize, size, picture), np.zeros((*size, 3), np.float32))

        unchanged, changed = (
            encode_frames(list(map(partial(masked_frame, repainting), repaint_mask, clip)))
            for repainting in (False, True)
        )
        mask_channels = mask_to_channels(mask, unchanged.shape[2], self.vae.spatial_factor)
        padded_references = [
            fit_on_white(picture, settings.size, resize_on_host) for picture in pictures.picture_list("references")
        ]
        references = [self.encode_clip(runtime, [padded], tiling) for padded in padded_references]
        return {"condition": runtime.call(control_condition, None, (unchanged, changed, *references), mask_channels)}


def as_class(kind: type[WanModel], model: WanModel, **changes: Any) -> WanModel:
    """Create a model of another class that has the fields of `model`.

    Args:
        kind: The other class.
        model: The model.
        changes: Fields with new values.
    """
    return kind(**{field.name: getattr(model, field.name) for field in fields(model)} | changes)
