# SPDX-License-Identifier: Apache-2.0
"""The tasks of Wan's checkpoints: the pictures that each takes, and the arrays that the transformer receives for them.

`task_of` reads the task from a checkpoint's configs. `Task.encode` turns pictures into arrays, and `Task.velocity`
passes them to the transformer at every step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from wanjax.errors import WanjaxError
from wanjax.layers.rope import Rope
from wanjax.media.pictures import Picture, PictureOfAnySize, Pictures, fit
from wanjax.models.wan.config import (
    CausalTransformerConfig,
    ControlTransformerConfig,
    ImageTransformerConfig,
    ResidualVAEConfig,
    TransformerConfig,
    VAEConfig,
)
from wanjax.pipelines.checks import Shape, check_fields
from wanjax.pipelines.settings import Settings

CAUSAL_PIPELINES = (
    "WanCausalDMDPipeline",
    "CausalForcingPipeline",
    "WanCausalForcingPipeline",
)
GREY = np.float32(0.5)  # 0 for pixels in [-1, 1]: the colour of unknown frames
Video = Float[Array, "B T H W C"]
Velocity = Float[Array, "B T H W _C"]  # for the latents' channels, without those of a condition


class WanEncoded(NamedTuple):
    """The output of `encode` for a prompt, the negative prompt and pictures; each array has a first axis of size 1.

    Videos that are made together have a prompt each on that axis, and share the pictures. `prompt_embeds` and
    `negative_prompt_embeds` are zeros after their last tokens. `condition` joins the latents and has their shape except
    for its channels and frames; `image_embeds` are features of images; `video_latents` are the video from which
    denoising starts, before noise is added. `video_shape` is what they were encoded for, a `VideoShape`.
    """

    prompt_embeds: Float[Array, "B S E"]
    negative_prompt_embeds: Float[Array, "_B _S _E"]
    condition: Float[Array, "1 C T H W"] | None = None
    image_embeds: Float[Array, "1 _S _E"] | None = None
    video_latents: Float[Array, "1 _C _T _H _W"] | None = None
    video_shape: Int[Array | np.ndarray, "_B 4"] | None = None


class PictureInputs(NamedTuple):
    """Pictures as inputs of the transformer; a field is None where the task does not use it.

    `latents` [B T H W C] join those of the video or replace some of them; `features` [B S E] are context of
    cross-attention.
    """

    latents: Any = None
    features: Any = None


Resized = Callable[[np.ndarray, tuple[int, int]], np.ndarray]  # of a picture [H W 3] and a (height, width)


class Encoders(NamedTuple):
    """The encoders of a task, clips to latents, images to features, a condition; the configs of the networks.

    `resized` scales a picture of floats as the reference scales those that a video is to show.
    """

    video: Callable[[Sequence[np.ndarray] | np.ndarray], Any]  # [1 C T H W]
    images: Callable[[Sequence[PictureOfAnySize]], Any]  # [1 S E]
    condition: Callable[[tuple[Any, ...], np.ndarray], Any]  # [1 C T H W]
    resized: Resized
    transformer: TransformerConfig
    vae: VAEConfig


@dataclass(frozen=True)
class Task(ABC):
    """A task: its name, the pictures that it takes, and those that it needs."""

    name: str
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    optional: ClassVar[tuple[str, ...]] = ()  # fields of `WanEncoded` that may be None
    begins_from_video: ClassVar[bool] = False  # denoising begins from a given video, with noise up to the strength

    def check(self, encoded: WanEncoded, latents: tuple[int, ...], config: TransformerConfig) -> None:
        """Raises WanjaxError unless the encoded pictures fit the task and latents of the shape [1 C T H W]."""
        names = ("condition", "image_embeds", "video_latents")
        check_fields(encoded, names, self.shapes(latents, config), optional=self.optional, purpose=self.name)

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        """Returns the fields of `WanEncoded` that hold pictures, by their shapes for latents [1 C T H W]."""
        return {}

    def encode(self, encoders: Encoders, pictures: Pictures, settings: Settings) -> Mapping[str, Any]:
        """Encodes the pictures; returns fields of `WanEncoded`."""
        return {}

    def condition(self, clips: tuple[Any, ...], mask: Any) -> Float[Array, "1 _C _T H W"]:
        """Returns the condition that encoded clips [1 C T H W] and a mask become."""
        raise AssertionError(f"the task {self.name} has no condition but an encoded clip")

    def finish(self, x: Video, pictures: PictureInputs) -> Video:
        """Returns the latents of the video, from those of the last step."""
        return x

    def references(self, encoded: WanEncoded, latents: tuple[int, ...]) -> int:
        """Returns the number of reference latent frames, which are denoised before the video's and then dropped."""
        return 0

    def context(self, transformer: Any, text: Float[Array, "B S E"], pictures: PictureInputs) -> Any:
        """Returns the keys and values of cross-attention, from encoded prompts and the features of pictures."""
        return transformer.context(text)

    @abstractmethod
    def velocity(
        self,
        transformer: Any,
        x: Video,
        t: Float[Array, "B"],
        context: Any,
        rope: Rope,
        pictures: PictureInputs,
        **how: Any,
    ) -> Velocity:
        """Returns the velocity that the transformer predicts for latents x at timesteps t.

        `how` are further keywords of the transformer's forward.
        """


class TextToVideo(Task):
    """Text to video, from noise alone or from a given video with noise added up to the strength."""

    optional = ("video_latents",)
    begins_from_video = True

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        return {"video_latents": latents}

    def encode(self, encoders: Encoders, pictures: Pictures, settings: Settings) -> Mapping[str, Any]:
        if pictures.video is None:
            return {}
        clip = [unit(frame, settings) for frame in pictures.video[: settings.frames]]
        return {"video_latents": encoders.video(clip)}

    def velocity(
        self,
        transformer: Any,
        x: Video,
        t: Float[Array, "B"],
        context: Any,
        rope: Rope,
        pictures: PictureInputs,
        **how: Any,
    ) -> Velocity:
        return transformer(x, t, context, rope, **how)


class CausalTextToVideo(TextToVideo):
    """Text to video, block by block, from noise alone."""

    optional = ()
    begins_from_video = False

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        return {}


class FirstFrameToVideo(TextToVideo):
    """Text and image to video; the condition, if any, is the clean first latent frame, which replaces the noise."""

    optional = ("video_latents", "condition")

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        return {**super().shapes(latents, config), "condition": (*latents[:2], 1, *latents[3:])}

    def encode(self, encoders: Encoders, pictures: Pictures, settings: Settings) -> Mapping[str, Any]:
        start = super().encode(encoders, pictures, settings)
        if pictures.image is None:
            return start
        return {**start, "condition": encoders.video([unit(pictures.image, settings)])}

    def velocity(
        self,
        transformer: Any,
        x: Video,
        t: Float[Array, "B"],
        context: Any,
        rope: Rope,
        pictures: PictureInputs,
        **how: Any,
    ) -> Velocity:
        known = 0 if pictures.latents is None else 1
        return transformer(self.finish(x, pictures), t, context, rope, clean_frames=known, **how)

    def finish(self, x: Video, pictures: PictureInputs) -> Video:
        return x if pictures.latents is None else with_first(x, pictures.latents)


class ImageToVideo(Task):
    """Image to video; the condition is a mask of the known frames, and the latents of a clip with grey others."""

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        return {"condition": (1, config.channels_in - latents[1], *latents[2:])}

    def encode(self, encoders: Encoders, pictures: Pictures, settings: Settings) -> Mapping[str, Any]:
        clip, known = [np.full((*settings.size, 3), GREY)] * settings.frames, []
        for frame, picture in ((0, pictures.image), (settings.frames - 1, pictures.last_image)):
            if picture is not None:
                clip[frame] = unit(picture, settings)
                known.append(frame)
        mask = known_frames(known, settings.frames, encoders.vae.temporal_factor)
        return {"condition": encoders.condition((encoders.video(clip),), mask)}

    def condition(self, clips: tuple[Any, ...], mask: Any) -> Float[Array, "1 _C _T H W"]:
        [latents] = clips
        mask = jnp.broadcast_to(mask[None, :, :, None, None], (1, len(mask), *latents.shape[2:]))
        return jnp.concatenate([mask, latents], axis=1)

    def velocity(
        self,
        transformer: Any,
        x: Video,
        t: Float[Array, "B"],
        context: Any,
        rope: Rope,
        pictures: PictureInputs,
        **how: Any,
    ) -> Velocity:
        return transformer(with_condition(x, pictures, transformer), t, context, rope, **how)


class AttendedImageToVideo(ImageToVideo):
    """Image to video, with cross-attention to the images' features by a vision tower.

    The tower sees the images as they were given, whatever the video's size, as in both references.
    """

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        assert isinstance(config, ImageTransformerConfig)
        seen = {"image_embeds": (1, config.image_positions, config.image_width)}
        return {**super().shapes(latents, config), **seen}

    def encode(self, encoders: Encoders, pictures: Pictures, settings: Settings) -> Mapping[str, Any]:
        config = encoders.transformer
        assert isinstance(config, ImageTransformerConfig)
        features = encoders.images(self.seen(pictures, settings))
        if (made := features.shape[-1]) != config.image_width:
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: its image encoder makes {made} features where its "
                f"transformer takes {config.image_width}"
            )
        return {**super().encode(encoders, pictures, settings), "image_embeds": features}

    def seen(self, pictures: Pictures, settings: Settings) -> list[PictureOfAnySize]:
        """Returns the pictures that the vision tower is shown."""
        return [picture for picture in (pictures.image, pictures.last_image) if picture is not None]

    def context(self, transformer: Any, text: Float[Array, "B S E"], pictures: PictureInputs) -> Any:
        return transformer.context(text, jnp.broadcast_to(pictures.features, (len(text), *pictures.features.shape[1:])))


class Inpainting(ImageToVideo):
    """Text to video, or from a first picture, or from a first and a last one (Wan Fun InP).

    What is unknown is made as in image to video. Without pictures the condition is zeros, the latents too: nothing is
    encoded. Follows pipeline_wan_fun_inpaint.py and pipeline_wan2_2_fun_inpaint.py of aigc-apps/VideoX-Fun.
    """

    optional = ("condition", "image_embeds")

    def encode(self, encoders: Encoders, pictures: Pictures, settings: Settings) -> Mapping[str, Any]:
        return {} if pictures.image is None else super().encode(encoders, pictures, settings)


class AttendedInpainting(Inpainting, AttendedImageToVideo):
    """The same with cross-attention to the first picture, in the video's size; its features are zeros without one."""

    def seen(self, pictures: Pictures, settings: Settings) -> list[PictureOfAnySize]:
        assert pictures.image is not None
        return [fit(pictures.image, settings.size, settings.resize)]

    def context(self, transformer: Any, text: Float[Array, "B S E"], pictures: PictureInputs) -> Any:
        if pictures.features is None:  # attention to one token is attention to any number of equal ones
            zeros = jnp.zeros((1, 1, transformer.config.image_width), jnp.float32)
            pictures = pictures._replace(features=zeros)
        return super().context(transformer, text, pictures)


class FirstFrameInpainting(Inpainting):
    """The same with Wan 2.2's autoencoder, where the first latent frame is kept free of noise too."""

    def velocity(
        self,
        transformer: Any,
        x: Video,
        t: Float[Array, "B"],
        context: Any,
        rope: Rope,
        pictures: PictureInputs,
        **how: Any,
    ) -> Velocity:
        known = 0 if pictures.latents is None else 1
        x = self.finish(x, pictures)
        return super().velocity(transformer, x, t, context, rope, pictures, clean_frames=known, **how)

    def finish(self, x: Video, pictures: PictureInputs) -> Video:
        return x if pictures.latents is None else with_first(x, pictures.latents[:, :1, :, :, -x.shape[-1] :])


class ControlledVideo(Task):
    """Controlled video (VACE); the condition is a control clip, after one latent frame for each reference picture.

    Its channels are the latents of the pixels that the mask keeps, the latents of those that it replaces, and the
    mask's own pixels. A missing clip is grey; a missing mask replaces everything.
    """

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        assert isinstance(config, ControlTransformerConfig)
        return {"condition": (1, config.control_channels, None, *latents[3:])}

    def check(self, encoded: WanEncoded, latents: tuple[int, ...], config: TransformerConfig) -> None:
        super().check(encoded, latents, config)
        if (missing := -self.references(encoded, latents)) > 0:
            raise WanjaxError(f"the condition is {missing} latent frames shorter than the video: encode it again")

    def references(self, encoded: WanEncoded, latents: tuple[int, ...]) -> int:
        assert encoded.condition is not None
        return encoded.condition.shape[2] - latents[2]

    def encode(self, encoders: Encoders, pictures: Pictures, settings: Settings) -> Mapping[str, Any]:
        grey = np.full((*settings.size, 3), GREY, np.float32)
        clip = [grey] * settings.frames
        if pictures.video is not None:
            clip = [unit(frame, settings) for frame in pictures.video[: settings.frames]]
        mask = np.broadcast_to(np.ones((), np.float32), (settings.frames, *settings.size))
        anew = np.broadcast_to(np.ones((), bool), (*mask.shape, 1))
        if pictures.mask is not None:
            mask = np.stack([unit(frame, settings).mean(axis=-1) for frame in pictures.mask[: settings.frames]])
            anew = (mask > 0.5)[..., None]

        def part(here: bool, anew: np.ndarray, frame: np.ndarray) -> np.ndarray:
            if anew.all() or not anew.any():  # most frames, whose pixels are taken as they are
                return frame if anew.flat[0] == here else grey
            return np.where(anew == here, frame, grey)

        def video(frames: list[np.ndarray]) -> Any:
            same = all(frame is frames[0] for frame in frames)  # of which no copies are made
            return encoders.video(np.broadcast_to(frames[0], (len(frames), *frames[0].shape)) if same else frames)

        kept, made = (video(list(map(partial(part, here), anew, clip))) for here in (False, True))
        cells = mask_cells(mask, kept.shape[2], encoders.vae.spatial_factor)
        references = [encoders.video([on_white(x, settings.size, encoders.resized)]) for x in pictures.references]
        return {"condition": encoders.condition((kept, made, *references), cells)}

    def condition(self, clips: tuple[Any, ...], mask: Any) -> Float[Array, "1 _C _T H W"]:
        kept, made, *references = clips
        condition = jnp.concatenate([kept, made, mask[None]], axis=1)
        rest = [(0, 0), (0, condition.shape[1] - kept.shape[1]), (0, 0), (0, 0), (0, 0)]
        return jnp.concatenate([*(jnp.pad(x, rest) for x in references), condition], axis=2)

    def velocity(
        self,
        transformer: Any,
        x: Video,
        t: Float[Array, "B"],
        context: Any,
        rope: Rope,
        pictures: PictureInputs,
        **how: Any,
    ) -> Velocity:
        return transformer(x, t, context, rope, control=pictures.latents, **how)


TEXT_TO_VIDEO = TextToVideo("text to video", takes=("video",))
FIRST_FRAME_TO_VIDEO = FirstFrameToVideo("text and image to video", takes=("image", "video"))
IMAGE_TO_VIDEO = ImageToVideo("image to video", takes=("image", "last_image"), needs=("image",))
ATTENDED_IMAGE_TO_VIDEO = AttendedImageToVideo("image to video", takes=("image",), needs=("image",))
FIRST_AND_LAST_FRAME = AttendedImageToVideo(
    "first and last frame to video", takes=("image", "last_image"), needs=("image", "last_image")
)
INPAINTING, ATTENDED_INPAINTING, FIRST_FRAME_INPAINTING = (
    kind("text, and first and last frame, to video", takes=("image", "last_image"))
    for kind in (Inpainting, AttendedInpainting, FirstFrameInpainting)
)
BLOCK_BY_BLOCK = CausalTextToVideo("text to video by blocks")
CONTROLLED_VIDEO = ControlledVideo("controlled video (VACE)", takes=("video", "mask", "references"))


def task_of(index: Mapping[str, Any], transformer: TransformerConfig, vae: VAEConfig) -> Task:
    """Returns the task of a checkpoint, from its model_index.json and its networks' configs.

    Raises WanjaxError where these contradict each other.
    """
    channels = transformer.channels_in
    with_condition = 2 * vae.latent_channels + vae.temporal_factor
    if index.get("expand_timesteps") and channels == vae.latent_channels and type(transformer) is TransformerConfig:
        return FIRST_FRAME_TO_VIDEO
    if isinstance(transformer, CausalTransformerConfig) and channels == vae.latent_channels:
        return BLOCK_BY_BLOCK
    match index.get("_class_name"):
        case "WanDMDPipeline" if channels == vae.latent_channels and isinstance(vae, ResidualVAEConfig):
            return FIRST_FRAME_TO_VIDEO
        case "WanPipeline" | "WanDMDPipeline" if (
            channels == vae.latent_channels and type(transformer) is TransformerConfig
        ):
            return TEXT_TO_VIDEO
        case "WanImageToVideoPipeline" if channels == with_condition and type(transformer) is TransformerConfig:
            return IMAGE_TO_VIDEO
        case "WanImageToVideoPipeline" if channels == with_condition and isinstance(
            transformer, ImageTransformerConfig
        ):
            return ATTENDED_IMAGE_TO_VIDEO if transformer.image_positions is None else FIRST_AND_LAST_FRAME
        case "WanFunInpaintPipeline" if channels == with_condition and isinstance(transformer, ImageTransformerConfig):
            return ATTENDED_INPAINTING
        case "WanFunInpaintPipeline" if channels == with_condition and type(transformer) is TransformerConfig:
            return FIRST_FRAME_INPAINTING if isinstance(vae, ResidualVAEConfig) else INPAINTING
        case "WanVACEPipeline" if channels == vae.latent_channels and isinstance(transformer, ControlTransformerConfig):
            return CONTROLLED_VIDEO
        case kind:
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: a {kind} whose VAE has {vae.latent_channels} "
                f"channels cannot have a {type(transformer).__name__} with {channels}"
            )


def with_condition(x: Video, pictures: PictureInputs, transformer: Any) -> Float[Array, "B T H W _C"]:
    """Returns latents with the channels of their condition, which are zeros where there is none."""
    condition = pictures.latents
    if condition is None:
        condition = jnp.zeros((*x.shape[:-1], transformer.config.channels_in - x.shape[-1]), x.dtype)
    return jnp.concatenate([x, condition], axis=-1)


def with_first(x: Video, first: Float[Array, "_B 1 H W C"]) -> Video:
    """Returns latents with another first frame."""
    return jnp.concatenate([jnp.broadcast_to(first, (len(x), *first.shape[1:])), x[:, 1:]], axis=1)


def unit(picture: Picture, settings: Settings) -> Float[np.ndarray, "_H _W 3"]:
    """Returns the picture in the video's size, in [0, 1]."""
    return fit(picture, settings.size, settings.resize).astype(np.float32) / np.float32(255)


def known_frames(known: Sequence[int], frames: int, factor: int) -> Float[np.ndarray, "C T"]:
    """Returns the mask of a video's known frames, 1 or 0, as channels of the latent frames.

    A latent frame has one channel for each of its `factor` frames. The first latent frame has one frame, which fills
    all its channels.
    """
    flags = np.zeros(frames, np.float32)
    flags[list(known)] = 1
    return np.append(np.repeat(flags[:1], factor), flags[1:]).reshape(-1, factor).T


def mask_cells(mask: Float[np.ndarray, "T H W"], frames: int, factor: int) -> Float[np.ndarray, "C _T _H _W"]:
    """Returns a mask's pixels as `factor` × `factor` channels of latent cells, at `frames` of its frames.

    The chosen frames are the middles of `frames` equal intervals, as in the reference.
    """
    count, height, width = mask.shape
    picked = [(2 * i + 1) * count // (2 * frames) for i in range(frames)]
    cells = mask[picked].reshape(frames, height // factor, factor, width // factor, factor)
    return cells.transpose(2, 4, 0, 1, 3).reshape(factor**2, frames, height // factor, width // factor)


def on_white(picture: Picture, size: tuple[int, int], resized: Resized) -> Float[np.ndarray, "_H _W 3"]:
    """Returns the whole picture, in [0, 1], in the middle of a white page of size (height, width)."""
    height, width, _ = picture.shape
    scale = min(size[0] / height, size[1] / width)
    inner = int(height * scale), int(width * scale)
    scaled = resized(picture.astype(np.float32) / np.float32(255), inner)
    top, left = ((outer - within) // 2 for outer, within in zip(size, inner, strict=True))
    page = np.ones((*size, 3), np.float32)
    page[top : top + inner[0], left : left + inner[1]] = scaled
    return page
