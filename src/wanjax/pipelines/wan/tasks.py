# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=true, reportIncompatibleVariableOverride=true
"""Wan's models by what they make: the pictures that each takes, and what becomes of them.

`model_of` reads the kind of a checkpoint from its configs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from math import prod
from typing import Any

import numpy as np
from jaxtyping import Float

from wanjax.checkpoints.network_kinds import network as network_in
from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError
from wanjax.execution import Value
from wanjax.layers.flops import attention_flops
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import CONTROL_VIDEO, IMAGE, LAST_IMAGE, MASK, REFERENCES, VIDEO
from wanjax.media.pictures import PictureOfAnySize, Pictures, fit
from wanjax.models.wan.causal import angles_at, slot_of
from wanjax.models.wan.config import (
    CausalTransformerConfig,
    ControlTransformerConfig,
    ImageTransformerConfig,
    ResidualVAEConfig,
    TransformerConfig,
    VAEConfig,
    forward_flops,
)
from wanjax.pipelines.denoiser import Denoiser, LatentArray, ModelInputs, Preparation
from wanjax.pipelines.model import Cost
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.validation import Shape
from wanjax.pipelines.wan.causal_programs import CausalInputs, Past, begin_past, renew
from wanjax.pipelines.wan.conditioning import GREY, WanConditioning, known_frames, mask_cells, on_white, unit
from wanjax.pipelines.wan.denoisers import (
    CausalDenoiser,
    ConditionedDenoiser,
    ControlDenoiser,
    FirstFrameConditionedDenoiser,
    FirstFrameDenoiser,
)
from wanjax.pipelines.wan.model import EXPERTS, WanModel
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.pipelines.wan.programs import TEXT_LENGTH, control_condition, encode_images, known_condition, resize
from wanjax.schedulers import Consistency, from_config

CAUSAL_PIPELINES = (
    "WanCausalDMDPipeline",
    "CausalForcingPipeline",
    "WanCausalForcingPipeline",
)
THREE_STEPS = Consistency(timesteps=(1000.0, 757.0, 522.0))
"""The scheduler of models distilled as FastWan, whose scheduler_config.json is that of the model before."""


class TextToVideo(WanModel):
    """Text to video, from noise alone or from a given video with noise added up to the strength."""

    inputs = (VIDEO,)
    optional = ("video_latents",)

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        return {"video_latents": self.spec.latent_shape(settings)}

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        if (clip := pictures.clip("video")) is None:
            return {}
        frames = [unit(frame, settings) for frame in clip[: settings.frames]]
        return {"video_latents": self.encode_clip(runtime, frames, tiling)}


class CausalTextToVideo(WanModel):
    """Text to video, chunk by chunk, from noise alone: each from the keys and values of those before it."""

    task = "text to video by blocks"
    radial = False

    @property
    def denoiser(self) -> Denoiser:
        return CausalDenoiser()

    @property
    def causal(self) -> CausalTransformerConfig:
        """The transformer's config."""
        assert isinstance(self.transformer, CausalTransformerConfig)
        return self.transformer

    @property
    def chunk_frames(self) -> int:
        return self.causal.block_frames

    def cost(self, settings: Settings, conditioning: WanConditioning | None = None) -> Cost:
        """Return the work of one forward for a chunk that sees a full window."""
        config, (_, _, _, *cells) = self.causal, self.spec.latent_shape(settings)
        tokens = prod((config.block_frames, *cells)) // config.patch_cells
        flops = dict(forward_flops(config, tokens=tokens, text=TEXT_LENGTH))
        scores = config.layers * attention_flops(tokens, config.slots * tokens, config.width)
        flops["self_attention"] += scores - config.layers * attention_flops(tokens, tokens, config.width)
        return Cost(tokens, config.layers, config.heads, config.width, scores, flops)

    def prepare(
        self,
        runtime: Runtime,
        network: SplitNetwork,
        conditioning: WanConditioning,
        x: LatentArray,
        purpose: Preparation,
    ) -> tuple[tuple[Any, ...], CausalInputs]:
        _, nag, chunk, memory = purpose
        negative = () if nag is None else (conditioning.negative_prompt_embeds, nag)
        arguments = x, network.weights, conditioning.prompt_embeds, *negative
        past: Past = memory if isinstance(memory, Past) else runtime.call(begin_past, network.graphdef, *arguments)
        slot = slot_of(self.causal, chunk, prod(x.shape[1:4]) // self.causal.patch_cells)
        return (past.context,), CausalInputs(angles_at(self.causal, chunk), past.window, slot)

    def update_memory(self, runtime: Runtime, network: SplitNetwork, inputs: ModelInputs, x: LatentArray) -> Past:
        [context], (time, window, slot) = inputs.prompts, inputs.shared
        renewed = runtime.call(renew, network.graphdef, window, x, network.weights, context, time, slot)
        return Past(context, renewed)


class FirstFrameToVideo(TextToVideo):
    """Text and image to video; the condition, if any, is the clean first latent frame, which replaces the noise."""

    task = "text and image to video"
    inputs = (IMAGE, VIDEO)
    optional = ("video_latents", "condition")

    @property
    def denoiser(self) -> Denoiser:
        return FirstFrameDenoiser()

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        batch, channels, _, *cells = self.spec.latent_shape(settings)
        return {**super().picture_shapes(settings), "condition": (batch, channels, 1, *cells)}

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        start = super().encode_inputs(runtime, pictures, settings, tiling=tiling)
        if (picture := pictures.picture("image")) is None:
            return start
        return {**start, "condition": self.encode_clip(runtime, [unit(picture, settings)], tiling)}


class ImageToVideo(WanModel):
    """Image to video; the condition is a mask of the known frames, and the latents of a clip with grey others."""

    task = "image to video"
    inputs = (IMAGE.needed, LAST_IMAGE)

    @property
    def denoiser(self) -> Denoiser:
        return ConditionedDenoiser()

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        _, channels, *cells = self.spec.latent_shape(settings)
        return {"condition": (1, self.transformer.channels_in - channels, *cells)}

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        clip, indices = [np.full((*settings.size, 3), GREY)] * settings.frames, []
        for frame, name in ((0, "image"), (settings.frames - 1, "last_image")):
            if (picture := pictures.picture(name)) is not None:
                clip[frame] = unit(picture, settings)
                indices.append(frame)
        mask = known_frames(indices, settings.frames, self.vae.temporal_factor)
        return {"condition": runtime.call(known_condition, None, self.encode_clip(runtime, clip, tiling), mask)}


class AttendedImageToVideo(ImageToVideo):
    """Image to video, with cross-attention to the images' features by a vision tower.

    The tower sees the images as they were given, whatever the video's size, as in both references.
    """

    inputs = (IMAGE.needed,)

    @property
    def attended(self) -> ImageTransformerConfig:
        """The transformer's config."""
        assert isinstance(self.transformer, ImageTransformerConfig)
        return self.transformer

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        features = (1, self.attended.image_positions, self.attended.image_width)
        return {**super().picture_shapes(settings), "image_embeds": features}

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        features = self.encode_images(runtime, self.attended_images(pictures, settings), follow=settings.follow)
        if (width := features.shape[-1]) != self.attended.image_width:
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: its image encoder makes {width} features where its "
                f"transformer takes {self.attended.image_width}"
            )
        return {**super().encode_inputs(runtime, pictures, settings, tiling=tiling), "image_embeds": features}

    def attended_images(self, pictures: Pictures, settings: Settings) -> list[PictureOfAnySize]:
        """Return the pictures that the vision tower is shown.

        Args:
            pictures: The pictures and clips of the request.
            settings: Settings of the video.
        """
        return [pictures[name] for name in ("image", "last_image") if name in pictures]

    def encode_images(
        self, runtime: Runtime, images: Sequence[PictureOfAnySize], *, follow: str
    ) -> Float[Value, "1 S E"]:
        """Return the features of images, joined along the sequence, by the checkpoint's vision tower.

        The authors show it the whole of a picture, and diffusers the middle.

        Args:
            runtime: Networks, devices and strategy.
            images: The images, of any size.
            follow: Which reference implementation to match, as in the settings.
        """
        graphdef, weights = runtime.split("image_encoder")
        shown = runtime.components.get("image_processor")(images, whole=follow == "official")
        return runtime.call(encode_images, graphdef, shown, weights)


class FirstAndLastFrameToVideo(AttendedImageToVideo):
    """The same from two pictures, whose features have positions of their own."""

    task = "first and last frame to video"
    inputs = (IMAGE.needed, LAST_IMAGE.needed)


class Inpainting(ImageToVideo):
    """Text to video, or from a first picture, or from a first and a last one (Wan Fun InP).

    What is unknown is made as in image to video. Without pictures the condition is zeros, the latents too: nothing is
    encoded. Follows pipeline_wan_fun_inpaint.py and pipeline_wan2_2_fun_inpaint.py of aigc-apps/VideoX-Fun.
    """

    task = "text, and first and last frame, to video"
    inputs = (IMAGE, LAST_IMAGE)
    optional = ("condition", "image_embeds")

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        return super().encode_inputs(runtime, pictures, settings, tiling=tiling) if "image" in pictures else {}


class AttendedInpainting(Inpainting, AttendedImageToVideo):
    """The same with cross-attention to the first picture, in the video's size; its features are zeros without one."""

    def attended_images(self, pictures: Pictures, settings: Settings) -> list[PictureOfAnySize]:
        return [fit(pictures["image"], settings.size, settings.resize)]


class FirstFrameInpainting(Inpainting):
    """The same with Wan 2.2's autoencoder, where the first latent frame is kept free of noise too."""

    @property
    def denoiser(self) -> Denoiser:
        return FirstFrameConditionedDenoiser()


class ControlledVideo(WanModel):
    """Controlled video (VACE); the condition is a control clip, after one latent frame for each reference picture.

    Its channels are the latents of the pixels that the mask keeps, the latents of those that it replaces, and the
    mask's own pixels. A missing clip is grey; a missing mask replaces everything.
    """

    task = "controlled video (VACE)"
    inputs = (CONTROL_VIDEO, MASK, REFERENCES)
    radial = False

    @property
    def denoiser(self) -> Denoiser:
        return ControlDenoiser()

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        assert isinstance(self.transformer, ControlTransformerConfig)
        _, _, _, *cells = self.spec.latent_shape(settings)
        return {"condition": (1, self.transformer.control_channels, None, *cells)}

    def leading_frames(self, conditioning: WanConditioning, settings: Settings) -> int:
        assert conditioning.condition is not None
        return conditioning.condition.shape[2] - self.spec.latent_shape(settings)[2]

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        grey = np.full((*settings.size, 3), GREY, np.float32)
        clip = [grey] * settings.frames
        if (frames_of_clip := pictures.clip("video")) is not None:
            clip = [unit(frame, settings) for frame in frames_of_clip[: settings.frames]]
        mask = np.broadcast_to(np.ones((), np.float32), (settings.frames, *settings.size))
        anew = np.broadcast_to(np.ones((), bool), (*mask.shape, 1))
        if (masks := pictures.clip("mask")) is not None:
            mask = np.stack([unit(frame, settings).mean(axis=-1) for frame in masks[: settings.frames]])
            anew = (mask > 0.5)[..., None]

        def part(here: bool, anew: np.ndarray, frame: np.ndarray) -> np.ndarray:
            if anew.all() or not anew.any():  # most frames, whose pixels are taken as they are
                return frame if anew.flat[0] == here else grey
            return np.where(anew == here, frame, grey)

        def latents(frames: list[np.ndarray]) -> Any:
            same = all(frame is frames[0] for frame in frames)  # of which no copies are made
            clip = np.broadcast_to(frames[0], (len(frames), *frames[0].shape)) if same else frames
            return self.encode_clip(runtime, clip, tiling)

        def resized(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
            """Return a picture of another size on the host; one of zeros where a run is traced."""
            return runtime.strategy.read(runtime.call(resize, size, picture), np.zeros((*size, 3), np.float32))

        unchanged, repainted = (latents(list(map(partial(part, here), anew, clip))) for here in (False, True))
        cells = mask_cells(mask, unchanged.shape[2], self.vae.spatial_factor)
        pages = [on_white(picture, settings.size, resized) for picture in pictures.picture_list("references")]
        references = [self.encode_clip(runtime, [page], tiling) for page in pages]
        return {"condition": runtime.call(control_condition, None, (unchanged, repainted, *references), cells)}


def converted(kind: type[WanModel], model: WanModel, **changes: Any) -> WanModel:
    """Return a model of another kind, with the networks of this one but for changes.

    Args:
        kind: The class of the other kind.
        model: The model.
        changes: Fields with other values.
    """
    return kind(**{field.name: getattr(model, field.name) for field in fields(model)} | changes)


def model_of(source: Source, encoders: bool = False) -> WanModel:
    """Read a model from a checkpoint's configs, those of its encoders if asked.

    Raises WanjaxError where the configs contradict each other.

    Args:
        source: The checkpoint.
        encoders: Whether to read the configs of the encoders too.
    """

    def config(component: str) -> Any:
        return network_in(source, component, NETWORKS).config

    def encoder(component: str) -> Any:
        return config(component) if encoders and component in source.components else None

    transformer, vae, kind = config("transformer"), config("vae"), source.index.get("_class_name")
    experts = EXPERTS[1] in source.components
    if experts and config(EXPERTS[1]) != transformer:
        raise WanjaxError(f"the two transformers of {source.name} differ in their config.json: experts are alike")
    return _kind_of(source.index, transformer, vae)(
        text_encoder=encoder("text_encoder"),
        transformer=transformer,
        vae=vae,
        image_encoder=encoder("image_encoder"),
        experts=experts,
        scheduler=THREE_STEPS if kind == "WanDMDPipeline" else from_config(source["scheduler"].config()),
    )


def _kind_of(index: Mapping[str, Any], transformer: TransformerConfig, vae: VAEConfig) -> type[WanModel]:
    """Return the kind of a checkpoint, from its model_index.json and its networks' configs.

    Raises WanjaxError where these contradict each other.
    """
    channels, plain = transformer.channels_in, type(transformer) is TransformerConfig
    alone = channels == vae.latent_channels
    conditioned = channels == 2 * vae.latent_channels + vae.temporal_factor
    residual = isinstance(vae, ResidualVAEConfig)
    if index.get("expand_timesteps") and alone and plain:
        return FirstFrameToVideo
    if isinstance(transformer, CausalTransformerConfig) and alone:
        return CausalTextToVideo
    match index.get("_class_name"):
        case "WanDMDPipeline" if alone and residual:
            return FirstFrameToVideo
        case "WanPipeline" | "WanDMDPipeline" if alone and plain:
            return TextToVideo
        case "WanImageToVideoPipeline" if conditioned and plain:
            return ImageToVideo
        case "WanImageToVideoPipeline" if conditioned and isinstance(transformer, ImageTransformerConfig):
            return AttendedImageToVideo if transformer.image_positions is None else FirstAndLastFrameToVideo
        case "WanFunInpaintPipeline" if conditioned and isinstance(transformer, ImageTransformerConfig):
            return AttendedInpainting
        case "WanFunInpaintPipeline" if conditioned and plain:
            return FirstFrameInpainting if residual else Inpainting
        case "WanVACEPipeline" if alone and isinstance(transformer, ControlTransformerConfig):
            return ControlledVideo
        case name:
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: a {name} whose VAE has {vae.latent_channels} "
                f"channels cannot have a {type(transformer).__name__} with {channels}"
            )
