# SPDX-License-Identifier: Apache-2.0
"""What a Wan checkpoint makes videos from beside the prompt, and how that reaches its transformer.

A checkpoint's own configs say which task is its own (`task_of`). The task turns pictures into the condition that
`encode` hands to `denoise`, and puts the condition beside the latents at every step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from wanjax.errors import WanjaxError
from wanjax.layers.rope import Rope
from wanjax.layers.tiling import Tiling
from wanjax.models.wan.config import ControlTransformerConfig, ImageTransformerConfig, TransformerConfig, VAEConfig
from wanjax.pictures import Picture, Pictures, fit
from wanjax.pipelines.base import Embeddings, Settings

if TYPE_CHECKING:
    from wanjax.pipelines.wan import WanPipeline

PIPELINES = ("WanPipeline", "WanImageToVideoPipeline", "WanVACEPipeline")
NOUNS = {
    "image": "an image",
    "last_image": "a last image",
    "video": "a video",
    "mask": "a mask",
    "references": "reference images",
}
GREY = np.float32(0.5)  # 0 where pixels are in [-1, 1]: what stands for a frame that is not known
Video = Float[Array, "B T H W C"]
Velocity = Float[Array, "B T H W _C"]  # that of the latents alone, without the channels of a condition
Shape = tuple[int | None, ...]  # None for a size that may be any


class Condition(NamedTuple):
    """What pictures were made into, as networks take it; None where the task has no such thing."""

    condition: Any  # [B T H W C]
    image: Any  # [B S E]


@dataclass(frozen=True)
class Task(ABC):
    """A task by its name, the pictures that it takes, and those of them that it cannot do without."""

    name: str
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    optional: ClassVar[tuple[str, ...]] = ()  # of what the pictures become

    def check_pictures(self, pictures: Pictures, settings: Settings) -> None:
        """Raises WanjaxError unless these are what the task takes and needs."""
        given, model = pictures.given(), settings.model
        for name in given:
            if name not in self.takes:
                takes = " and ".join(NOUNS[name] for name in self.takes) or "a prompt alone"
                raise WanjaxError(f"{model} is made for {self.name} and cannot use {NOUNS[name]}: it takes {takes}")
        for name in self.needs:
            if name not in given:
                raise WanjaxError(f"{model} is made for {self.name}: {NOUNS[name]} is needed beside the prompt")
        if pictures.last_image is not None and settings.frames == 1:
            raise WanjaxError("a video of 1 frame has no last image beside the first: 5 frames or more would do")

    def check(self, embeddings: Embeddings, latents: tuple[int, ...], config: TransformerConfig) -> None:
        """Raises WanjaxError unless the condition is the task's, for latents of the shape [1 C T H W]."""
        shapes = self.shapes(latents, config)
        for name, right in shapes.items():
            array = getattr(embeddings, name)
            if array is None and name in self.optional:
                continue
            if array is None:
                raise WanjaxError(f"there is no {name}, which {self.name} needs: encode the pictures with the prompt")
            if any(n not in (size, None) for size, n in zip(array.shape, right, strict=True)):
                wanted = ", ".join("any" if n is None else str(n) for n in right)
                raise WanjaxError(
                    f"the {name} has the shape {list(array.shape)} where this video needs [{wanted}]: encode again, "
                    "with the size and the frames of the video"
                )
        for name in ("condition", "image_embeds", "video_latents"):
            if getattr(embeddings, name) is not None and name not in shapes:
                raise WanjaxError(f"there is a {name}, which {self.name} has no use for: encode the prompt alone")

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        """The fields of `Embeddings` that pictures become, and their shapes for latents [1 C T H W]."""
        return {}

    def encode(
        self, pipe: "WanPipeline", pictures: Pictures, settings: Settings, tiling: Tiling | None
    ) -> Mapping[str, Array]:
        """The fields of `Embeddings` that the pictures become."""
        return {}

    def finish(self, x: Video, given: Condition) -> Video:
        """The latents of the video, from what the last step left."""
        return x

    def references(self, embeddings: Embeddings, latents: tuple[int, ...]) -> int:
        """How many latent frames stand before those of the video while it is denoised, and are dropped then."""
        return 0

    def context(self, transformer: Any, text: Float[Array, "B S E"], given: Condition) -> Any:
        """What the transformer's cross-attention asks of encoded prompts, and of a condition if it sees that."""
        return transformer.context(text)

    @abstractmethod
    def velocity(
        self, transformer: Any, x: Video, t: Float[Array, "B"], context: Any, rope: Rope, given: Condition
    ) -> Velocity:
        """What the transformer predicts for the latents x at timesteps t under a condition."""


class TextToVideo(Task):
    """From noise alone, or from a video under as much noise as the strength asks for."""

    optional = ("video_latents",)

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        return {"video_latents": latents}

    def encode(
        self, pipe: "WanPipeline", pictures: Pictures, settings: Settings, tiling: Tiling | None
    ) -> Mapping[str, Array]:
        if pictures.video is None:
            return {}
        clip = [unit(frame, settings) for frame in pictures.video[: settings.frames]]
        return {"video_latents": pipe.encode_video(clip, tiling=tiling)}

    def velocity(
        self, transformer: Any, x: Video, t: Float[Array, "B"], context: Any, rope: Rope, given: Condition
    ) -> Velocity:
        return transformer(x, t, context, rope)


class FirstFrameToVideo(TextToVideo):
    """The condition, if there is one, is the clean first latent frame: it takes the place of the noise there."""

    optional = ("video_latents", "condition")

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        return {**super().shapes(latents, config), "condition": (*latents[:2], 1, *latents[3:])}

    def encode(
        self, pipe: "WanPipeline", pictures: Pictures, settings: Settings, tiling: Tiling | None
    ) -> Mapping[str, Array]:
        start = super().encode(pipe, pictures, settings, tiling)
        if pictures.image is None:
            return start
        return {**start, "condition": pipe.encode_video([unit(pictures.image, settings)], tiling=tiling)}

    def velocity(
        self, transformer: Any, x: Video, t: Float[Array, "B"], context: Any, rope: Rope, given: Condition
    ) -> Velocity:
        known = 0 if given.condition is None else 1
        return transformer(self.finish(x, given), t, context, rope, clean_frames=known)

    def finish(self, x: Video, given: Condition) -> Video:
        return x if given.condition is None else jnp.concatenate([given.condition, x[:, 1:]], axis=1)


class ImageToVideo(Task):
    """The condition is a clip of the known frames, grey between them: a mask that says which, and its latents."""

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        return {"condition": (1, config.channels_in - latents[1], *latents[2:])}

    def encode(
        self, pipe: "WanPipeline", pictures: Pictures, settings: Settings, tiling: Tiling | None
    ) -> Mapping[str, Array]:
        clip, known = [np.full((*settings.size, 3), GREY)] * settings.frames, []
        for frame, picture in ((0, pictures.image), (settings.frames - 1, pictures.last_image)):
            if picture is not None:
                clip[frame] = unit(picture, settings)
                known.append(frame)
        latents = pipe.encode_video(clip, tiling=tiling)
        mask = known_frames(known, settings.frames, pipe.configs.vae.temporal_factor)
        mask = jnp.broadcast_to(mask[None, :, :, None, None], (1, len(mask), *latents.shape[2:]))
        return {"condition": jnp.concatenate([mask, latents], axis=1)}

    def velocity(
        self, transformer: Any, x: Video, t: Float[Array, "B"], context: Any, rope: Rope, given: Condition
    ) -> Velocity:
        return transformer(jnp.concatenate([x, given.condition], axis=-1), t, context, rope)


class AttendedImageToVideo(ImageToVideo):
    """The transformer also attends to the images, through the features of a vision tower."""

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        assert isinstance(config, ImageTransformerConfig)
        seen = {"image_embeds": (1, config.image_positions, config.image_width)}
        return {**super().shapes(latents, config), **seen}

    def encode(
        self, pipe: "WanPipeline", pictures: Pictures, settings: Settings, tiling: Tiling | None
    ) -> Mapping[str, Array]:
        config = pipe.configs.transformer
        assert isinstance(config, ImageTransformerConfig)
        if (width := pipe.image_encoder.config.width) != config.image_width:
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: its image encoder makes {width} features where its "
                f"transformer takes {config.image_width}"
            )
        images = [
            fit(x, settings.size, settings.resize) for x in (pictures.image, pictures.last_image) if x is not None
        ]
        return {**super().encode(pipe, pictures, settings, tiling), "image_embeds": pipe.encode_images(images)}

    def context(self, transformer: Any, text: Float[Array, "B S E"], given: Condition) -> Any:
        return transformer.context(text, jnp.broadcast_to(given.image, (len(text), *given.image.shape[1:])))


class ControlledVideo(Task):
    """The condition is a clip that steers the video (VACE), and before it in time a frame for each reference picture.

    Its channels are the latents of what the mask leaves as it is, the latents of what it has made anew, and the mask's
    own pixels. No clip is a grey one, and no mask one that has everything made anew.
    """

    def shapes(self, latents: tuple[int, ...], config: TransformerConfig) -> Mapping[str, Shape]:
        assert isinstance(config, ControlTransformerConfig)
        return {"condition": (1, config.control_channels, None, *latents[3:])}

    def check(self, embeddings: Embeddings, latents: tuple[int, ...], config: TransformerConfig) -> None:
        super().check(embeddings, latents, config)
        if (missing := -self.references(embeddings, latents)) > 0:
            raise WanjaxError(f"the condition is {missing} latent frames shorter than the video: encode it again")

    def references(self, embeddings: Embeddings, latents: tuple[int, ...]) -> int:
        assert embeddings.condition is not None
        return embeddings.condition.shape[2] - latents[2]

    def encode(
        self, pipe: "WanPipeline", pictures: Pictures, settings: Settings, tiling: Tiling | None
    ) -> Mapping[str, Array]:
        clip = [np.full((*settings.size, 3), GREY)] * settings.frames
        if pictures.video is not None:
            clip = [unit(frame, settings) for frame in pictures.video[: settings.frames]]
        mask = np.ones((settings.frames, *settings.size), np.float32)
        if pictures.mask is not None:
            mask = np.stack([unit(frame, settings).mean(axis=-1) for frame in pictures.mask[: settings.frames]])
        anew = (mask > 0.5)[..., None]
        kept, made = (
            pipe.encode_video([np.where(a == here, x, GREY) for a, x in zip(anew, clip, strict=True)], tiling=tiling)
            for here in (False, True)
        )
        cells = mask_cells(mask, kept.shape[2], pipe.configs.vae.spatial_factor)
        condition = jnp.concatenate([kept, made, cells[None]], axis=1)
        references = [pipe.encode_video([on_white(x, settings.size)], tiling=tiling) for x in pictures.references]
        rest = [(0, 0), (0, condition.shape[1] - kept.shape[1]), (0, 0), (0, 0), (0, 0)]
        return {"condition": jnp.concatenate([*(jnp.pad(x, rest) for x in references), condition], axis=2)}

    def velocity(
        self, transformer: Any, x: Video, t: Float[Array, "B"], context: Any, rope: Rope, given: Condition
    ) -> Velocity:
        return transformer(x, t, context, rope, given.condition)


TEXT_TO_VIDEO = TextToVideo("text to video", takes=("video",))
FIRST_FRAME_TO_VIDEO = FirstFrameToVideo("text and image to video", takes=("image", "video"))
IMAGE_TO_VIDEO = ImageToVideo("image to video", takes=("image", "last_image"), needs=("image",))
ATTENDED_IMAGE_TO_VIDEO = AttendedImageToVideo("image to video", takes=("image",), needs=("image",))
FIRST_AND_LAST_FRAME = AttendedImageToVideo(
    "first and last frame to video", takes=("image", "last_image"), needs=("image", "last_image")
)
CONTROLLED_VIDEO = ControlledVideo("controlled video (VACE)", takes=("video", "mask", "references"))
TASKS: Mapping[str, Task] = {
    "text": TEXT_TO_VIDEO,
    "first_frame": FIRST_FRAME_TO_VIDEO,
    "image": IMAGE_TO_VIDEO,
    "attended_image": ATTENDED_IMAGE_TO_VIDEO,
    "first_and_last_frame": FIRST_AND_LAST_FRAME,
    "control": CONTROLLED_VIDEO,
}
"""All tasks, by names that files can hold."""


def check_pipeline(index: Mapping[str, Any], name: str) -> None:
    """Raises WanjaxError unless the pipeline that a checkpoint's model_index.json names is one of these."""
    if (kind := index.get("_class_name")) not in PIPELINES:
        raise WanjaxError(f"{name} holds a {kind}: {' or '.join(PIPELINES)} would do")


def task_of(index: Mapping[str, Any], transformer: TransformerConfig, vae: VAEConfig) -> Task:
    """The task of a checkpoint, from its model_index.json and the shapes of its networks.

    Raises WanjaxError where these contradict each other.
    """
    channels = transformer.channels_in
    with_condition = 2 * vae.latent_channels + vae.temporal_factor
    if index.get("expand_timesteps") and channels == vae.latent_channels and type(transformer) is TransformerConfig:
        return FIRST_FRAME_TO_VIDEO
    match index.get("_class_name"):
        case "WanPipeline" if channels == vae.latent_channels and type(transformer) is TransformerConfig:
            return TEXT_TO_VIDEO
        case "WanImageToVideoPipeline" if channels == with_condition and type(transformer) is TransformerConfig:
            return IMAGE_TO_VIDEO
        case "WanImageToVideoPipeline" if channels == with_condition and isinstance(
            transformer, ImageTransformerConfig
        ):
            return ATTENDED_IMAGE_TO_VIDEO if transformer.image_positions is None else FIRST_AND_LAST_FRAME
        case "WanVACEPipeline" if channels == vae.latent_channels and isinstance(transformer, ControlTransformerConfig):
            return CONTROLLED_VIDEO
        case kind:
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: a {kind} whose VAE has {vae.latent_channels} "
                f"channels cannot have a {type(transformer).__name__} with {channels}"
            )


def unit(picture: Picture, settings: Settings) -> Float[np.ndarray, "H W 3"]:
    """The picture in the video's size, from 0 to 1."""
    return fit(picture, settings.size, settings.resize).astype(np.float32) / np.float32(255)


def known_frames(known: Sequence[int], frames: int, factor: int) -> Float[Array, "C T"]:
    """Which frames of a video are known, 1 or 0, as channels of their latent frames.

    A latent frame has a channel for each of its `factor` frames; the first, which has one frame, has it in all.
    """
    flags = np.zeros(frames, np.float32)
    flags[list(known)] = 1
    return jnp.asarray(np.append(np.repeat(flags[:1], factor), flags[1:]).reshape(-1, factor).T)


def mask_cells(mask: Float[np.ndarray, "T H W"], frames: int, factor: int) -> Float[Array, "C _T _H _W"]:
    """A mask's pixels as channels of latent cells, `factor` × `factor` of them, at `frames` of its frames.

    These are the frames in the middle of as many equal stretches, as in the reference.
    """
    count, height, width = mask.shape
    picked = [(2 * i + 1) * count // (2 * frames) for i in range(frames)]
    cells = mask[picked].reshape(frames, height // factor, factor, width // factor, factor)
    return jnp.asarray(cells.transpose(2, 4, 0, 1, 3).reshape(factor**2, frames, height // factor, width // factor))


def on_white(picture: Picture, size: tuple[int, int]) -> Float[np.ndarray, "H W 3"]:
    """The whole picture in the middle of a white page of a (height, width), from 0 to 1.

    It is scaled between its nearest four pixels, as in the reference, and not smoothed as `fit` would.
    """
    height, width, _ = picture.shape
    scale = min(size[0] / height, size[1] / width)
    inner = int(height * scale), int(width * scale)
    scaled = jax.image.resize(picture.astype(np.float32) / np.float32(255), (*inner, 3), "linear", antialias=False)
    top, left = ((outer - within) // 2 for outer, within in zip(size, inner, strict=True))
    page = np.ones((*size, 3), np.float32)
    page[top : top + inner[0], left : left + inner[1]] = scaled
    return page
