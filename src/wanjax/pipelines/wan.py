# SPDX-License-Identifier: Apache-2.0
"""Videos with Wan: encode the prompt and pictures, denoise latents under guidance, decode them to frames.

The stages are joined by plain arrays, so that each can run, and be freed, alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from wanjax.errors import WanjaxError
from wanjax.io import Video
from wanjax.layers.tiling import Tiling, map_tiles
from wanjax.models.wan.config import TransformerConfig, VAEConfig
from wanjax.pictures import ClipSource, Picture, Pictures, PictureSource, read_pictures, size_within
from wanjax.pipelines.base import Cancelled, Embeddings, InFlight, Parts, Settings, Step
from wanjax.pipelines.experts import Stretch, Switch, stretches, take_over
from wanjax.pipelines.programs import (
    compiled,
    decode_frames,
    decode_to_frames,
    encode_frames,
    encode_images,
    encode_prompts,
    from_frames,
    guided_step,
    make_context,
    to_frames,
)
from wanjax.pipelines.tasks import TEXT_TO_VIDEO, Condition, Task
from wanjax.pipelines.text import TokenBatch, clean_prompt
from wanjax.schedulers import Scheduler, one_step
from wanjax.sharding import Layout, replicate, use

Latents = Float[Array, "B C T H W"]
GivenLatents = Float[Array | np.ndarray, "B C T H W"]
GivenFrames = Shaped[Array | np.ndarray, "T H W 3"] | Sequence[Shaped[np.ndarray, "H W 3"]]
Chunk = Float[Array, "B _T _H _W _C"]  # what goes in and what comes out differ in size


class WanConfigs(NamedTuple):
    """The shapes of the networks, known before their weights are loaded.

    With `experts` there is a second transformer, of the same shape, for the steps of little noise.
    """

    transformer: TransformerConfig
    vae: VAEConfig
    experts: bool = False

    def tokens(self, settings: Settings) -> int:
        """How many tokens a video of these settings is to the transformer."""
        frames = (settings.frames - 1) // self.vae.temporal_factor + 1
        height, width = (pixels // self.vae.spatial_factor for pixels in settings.size)
        return frames * height * width // prod(self.transformer.patch)


class WanPipeline:
    """A Wan checkpoint as a function from prompts, and pictures if its task has them, to videos.

    `text_encoder`, `image_encoder`, `transformer`, `transformer_2`, `vae`, `tokenizer`, `image_processor` and
    `scheduler` are loaded when first used and can be used alone; `free` gives their memory back.
    """

    def __init__(
        self,
        parts: Parts,
        configs: WanConfigs,
        defaults: Settings,
        task: Task = TEXT_TO_VIDEO,
        layout: Layout | None = None,
    ):
        """`layout`: the devices and how arrays lie on them; None for one device."""
        self.parts = parts
        self.configs = configs
        self.task = task
        self.defaults = defaults
        self.layout = layout

    text_encoder = property(lambda self: self.parts.get("text_encoder"))
    image_encoder = property(lambda self: self.parts.get("image_encoder"))
    image_processor = property(lambda self: self.parts.get("image_processor"))
    transformer = property(lambda self: self.parts.get("transformer"))
    transformer_2 = property(lambda self: self.parts.get("transformer_2"))
    vae = property(lambda self: self.parts.get("vae"))
    tokenizer = property(lambda self: self.parts.get("tokenizer"))
    scheduler = property(lambda self: self.parts.get("scheduler"))

    def free(self, *names: str) -> None:
        """Forgets the named parts, or all, until they are next used."""
        self.parts.free(*names)

    def __call__(
        self,
        prompt: str,
        *,
        noise: GivenLatents | None = None,
        callback: Callable[[Step], bool | None] | None = None,
        **given: Any,
    ) -> Video:
        """The video of a prompt. Keywords are those of `prepare`: settings, `size=(height, width)`, and pictures."""
        pictures, chosen = self.prepare(prompt=prompt, **given)
        embeddings = self.encode(**chosen.to_json(), **pictures._asdict())
        latents = self.denoise(embeddings, noise=noise, callback=callback, **chosen.to_json())
        return Video(np.asarray(self.decode(latents)), chosen.fps, chosen.to_json())

    def prepare(
        self,
        *,
        image: PictureSource | None = None,
        last_image: PictureSource | None = None,
        video: ClipSource | None = None,
        mask: ClipSource | None = None,
        references: Iterable[PictureSource] = (),
        **settings: Any,
    ) -> tuple[Pictures, Settings]:
        """The pictures, read, and all settings of the video that is made from them.

        Pictures and clips are files or uint8 arrays [H W 3] and [T H W 3]. Unless they are given, the size takes the
        proportions of `image` or `video`, in about the default's area, and the length is that of `video`. Raises
        WanjaxError where pictures cannot be read, the task has no use for one or lacks one, or settings cannot be.
        """
        asked = self.settings(**settings)
        pictures = read_pictures(
            image=image,
            last_image=last_image,
            video=video,
            mask=mask,
            references=references,
            frames=asked.frames,
            fps=asked.fps,
        )
        self.task.check_pictures(pictures, asked)
        return pictures, asked.updated(self._shape_of(pictures, asked, settings))

    def _shape_of(self, pictures: Pictures, asked: Settings, given: Mapping[str, Any]) -> dict[str, int]:
        """The height, width and frames that the pictures ask for, where none are given."""
        shape: dict[str, int] = {}
        if pictures.first is not None and not given.keys() & {"size", "height", "width"}:
            size = size_within(pictures.first.shape, asked.height * asked.width, self.grid)
            shape |= {"height": size[0], "width": size[1]}
        if pictures.video is not None and (count := len(pictures.video)) < asked.frames:
            if given.get("frames"):
                raise WanjaxError(f"the video has {count} frames where {asked.frames} are asked for: fewer would do")
            factor = self.configs.vae.temporal_factor
            shape["frames"] = (count - 1) // factor * factor + 1
        return shape

    def settings(self, *, size: tuple[int, int] | None = None, **settings: Any) -> Settings:
        """The model's defaults with what is given put in; raises WanjaxError where they cannot be."""
        if size is not None:
            settings |= {"height": size[0], "width": size[1]}
        if unknown := settings.keys() - self.defaults.to_json().keys():
            raise WanjaxError(f"{sorted(unknown)[0]!r} is not a setting: {', '.join(self.defaults.to_json())} are")
        for name in ("guidance_scale_2", "boundary"):
            if settings.get(name) is not None and not self.configs.experts:
                raise WanjaxError(f"{self.defaults.model} has one transformer: {name} is for models with two")
        if self.configs.experts and settings.get("guidance_scale_2") is None:  # one guidance is meant for both
            settings |= {"guidance_scale_2": settings.get("guidance_scale")}
        chosen = self.defaults.updated(settings)
        chosen.check(spatial=self.grid, temporal=self.configs.vae.temporal_factor)
        return chosen

    @property
    def grid(self) -> int:
        """The pixels of which a video's height and width are multiples."""
        return self.configs.vae.spatial_factor * self.configs.transformer.patch[1]

    def tokenize(self, prompt: str) -> TokenBatch:
        """The cleaned prompt's tokens; `truncated[0]` says what was cut, if anything was."""
        return self.tokenizer.tokenize([clean_prompt(prompt)])

    def encode(self, prompt: str, negative_prompt: str | None = None, **given: Any) -> Embeddings:
        """Encodes a prompt and the negative prompt (the model's own where None) to [1 S E] each, and pictures.

        Other keywords are those of `prepare`; where there are pictures, size and frames are to be those of the video.
        """
        pictures, chosen = self.prepare(**given)
        embeddings = self.encode_prompts(prompt, negative_prompt)
        return embeddings._replace(**self.encode_pictures(pictures, chosen))

    def encode_prompts(self, prompt: str, negative_prompt: str | None = None) -> Embeddings:
        """What `encode` makes of the prompts, with the text encoder alone."""
        negative = self.defaults.negative_prompt if negative_prompt is None else negative_prompt
        both = [self.tokenize(text) for text in (prompt, negative)]
        ids, mask = (jnp.asarray(np.concatenate(x)) for x in zip(*((b.ids, b.mask) for b in both), strict=True))
        graphdef, weights = nnx.split(self.text_encoder)
        embeds = self._compiled(encode_prompts)((graphdef,), ids, mask, weights)
        return Embeddings(embeds[:1], embeds[1:])

    def encode_pictures(
        self, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Array]:
        """What `encode` makes of the pictures and settings that `prepare` gave, without the text encoder."""
        return self.task.encode(self, pictures, settings, tiling)

    def encode_images(self, images: Sequence[Picture]) -> Float[Array, "1 S E"]:
        """The features of images one behind the other, by the vision tower of checkpoints that have one."""
        graphdef, weights = nnx.split(self.image_encoder)
        features = self._compiled(encode_images)((graphdef,), jnp.asarray(self.image_processor(images)), weights)
        return features.reshape(1, -1, features.shape[-1])

    def noise(self, settings: Settings, references: int = 0) -> Latents:
        """The initial noise that the seed stands for, float32; each reference picture has a frame of it."""
        return jax.random.normal(jax.random.key(settings.seed), self.latent_shape(settings, references))

    def latent_shape(self, settings: Settings, references: int = 0) -> tuple[int, ...]:
        """The shape [1 C T H W] of the latents of a video, with as many reference pictures before it."""
        config = self.configs.vae
        frames = references + (settings.frames - 1) // config.temporal_factor + 1
        height, width = (pixels // config.spatial_factor for pixels in settings.size)
        return 1, config.latent_channels, frames, height, width

    def denoise(
        self,
        embeddings: Embeddings,
        *,
        noise: GivenLatents | None = None,
        callback: Callable[[Step], bool | None] | None = None,
        switched: Callable[[Switch], Any] | None = None,
        batch_guidance: bool = False,
        **settings: Any,
    ) -> Latents:
        """Latents [1 C T H W], float32 and normalised, from noise (the seed's where None).

        Under guidance the transformer runs twice a step; with `batch_guidance`, and on a mesh whose `dp` shares the two
        runs, once on a batch of two. `callback` sees every step, which the device may still be at; a False from it
        raises Cancelled. `switched` is told when the second of two experts takes over. Raises WanjaxError where the
        noise or the condition has another shape than the video asks for, and where latents stop being finite, naming
        the step; the callback may have seen a few more by then.
        """
        made = [latents for latents in (embeddings.condition, embeddings.video_latents) if latents is not None]
        if made and not settings.keys() & {"size", "height", "width"}:
            settings |= {"size": tuple(self.configs.vae.spatial_factor * cells for cells in made[0].shape[3:])}
        chosen = self.settings(**settings)
        shape = self.latent_shape(chosen)
        self.task.check(embeddings, shape, self.configs.transformer)
        references = self.task.references(embeddings, shape)
        condition = _channels_last(embeddings)
        scheduler = self.scheduler.configured(shift=chosen.flow_shift, sigmas=chosen.sigmas)
        noise = self.noise(chosen, references) if noise is None else self._checked_noise(noise, chosen, references)
        schedule, x = self._begin(scheduler, embeddings, noise, chosen)
        state = scheduler.init(schedule, x)
        x, state, condition = self._on_devices((x, state, condition))
        step = self._compiled(guided_step, donated=(1, 2))
        steps = len(schedule.timesteps)
        in_flight = InFlight(steps)
        for stretch in stretches(schedule.timesteps, chosen):
            graphdef, weights = self._expert(stretch, steps, switched)
            prompts = self._prompts(embeddings, stretch.guidance_scale > 1, batch_guidance)
            contexts, rope = self._compiled(make_context)((graphdef, self.task), x, weights, prompts, condition)
            guidance_scale = jnp.float32(stretch.guidance_scale)
            for index in range(stretch.start, stretch.stop):
                x, state, x0, is_finite = step(
                    (graphdef, self.scheduler, self.task),
                    x,
                    state,
                    weights,
                    contexts,
                    rope,
                    condition,
                    guidance_scale,
                    one_step(schedule, index),
                )
                in_flight.add(index, is_finite)
                t = float(schedule.timesteps[index])
                if callback and callback(Step(index, steps, t, *(jnp.moveaxis(a, -1, 1) for a in (x, x0)))) is False:
                    raise Cancelled(index)
            in_flight.wait()
            del weights, contexts  # lest they stay while the next expert is loaded
        return jnp.moveaxis(self.task.finish(x, condition)[:, references:], -1, 1)

    def _begin(
        self, scheduler: Scheduler, embeddings: Embeddings, noise: Latents, settings: Settings
    ) -> tuple[Any, Float[Array, "B T H W C"]]:
        """The schedule, and the latents at its first noise level; both are late on the way where a video is given."""
        x = jnp.moveaxis(noise.astype(jnp.float32), 1, -1)
        if embeddings.video_latents is None:
            return scheduler.schedule(settings.steps), x
        video = jnp.moveaxis(jnp.asarray(embeddings.video_latents, jnp.float32), 1, -1)
        schedule = scheduler.schedule(settings.steps, skip=settings.steps - _share(settings))
        return schedule, scheduler.noised(schedule, video, x)

    def _prompts(self, embeddings: Embeddings, guided: bool, batched: bool) -> tuple[Float[Array, "B S E"], ...]:
        """Those that the transformer runs on, one after another or as one batch, on every device."""
        prompts = tuple(embeddings[:2]) if guided else (embeddings.prompt_embeds,)
        if batched or (self.layout is not None and self.layout.size("dp") > 1):
            prompts = (jnp.concatenate(prompts),)
        return self._on_devices(prompts)

    def _expert(self, stretch: Stretch, steps: int, switched: Callable[[Switch], Any] | None) -> tuple[Any, Any]:
        """The transformer of a stretch, split."""
        transformer, seconds = take_over(self.parts, stretch.transformer)
        if stretch.start and switched:
            switched(Switch(stretch.transformer, stretch.start, steps, seconds))
        return nnx.split(transformer)

    def _checked_noise(self, noise: GivenLatents, settings: Settings, references: int) -> Latents:
        right = self.latent_shape(settings, references)
        if noise.shape != right:
            raise WanjaxError(f"the noise has the shape {list(noise.shape)} where this video needs {list(right)}")
        return jnp.asarray(noise)

    def decode(
        self,
        latents: GivenLatents,
        dtype: DTypeLike = jnp.uint8,
        *,
        tiling: Tiling | None = None,
        callback: Callable[[int, int], Any] | None = None,
    ) -> np.ndarray:
        """Frames [T H W 3] of latents [1 C T H W]: uint8, or a float dtype in [0, 1].

        `tiling` decodes tile by tile, for frames that would not fit: `Tiling()` is 256 × 256 pixels at a time.
        `callback(done, total)` follows the chunks.
        """
        chunks = []
        for chunk in self.decode_chunks(latents, dtype, tiling=tiling):
            chunks.append(np.asarray(chunk))
            if callback:
                callback(len(chunks), latents.shape[2])
        return np.concatenate(chunks)

    def decode_chunks(
        self, latents: GivenLatents, dtype: DTypeLike = jnp.uint8, *, tiling: Tiling | None = None
    ) -> Iterator[Float[Array, "T H W 3"]]:
        """The frames of each latent frame in turn, while only one chunk is in memory."""
        z = jnp.moveaxis(jnp.asarray(latents), 1, -1)
        config = self.configs.vae
        cells = (config.spatial_factor, config.patch)
        graphdef, weights = nnx.split(self.vae)

        def decode(z: Chunk, cache: Any) -> tuple[Chunk, Any]:
            return self._compiled(decode_frames, donated=(2,))((graphdef,), z, cache, weights)

        cache = None
        for index in range(z.shape[1]):
            latents = z[:, index : index + 1]
            if tiling is None:  # one program, of which frames alone come out
                whole = self._compiled(decode_to_frames, donated=(2,))
                frames, cache = whole((graphdef, jnp.dtype(dtype), config.patch), latents, cache, weights)
            else:
                x, cache = map_tiles(decode, latents, cache, tiling, cells)
                frames = self._compiled(to_frames)((dtype, config.patch), x)
            yield frames

    def encode_video(self, frames: GivenFrames, *, tiling: Tiling | None = None) -> Latents:
        """Latents [1 C T H W], float32, of 4n + 1 frames [T H W 3], or a list, that are uint8 or floats in [0, 1].

        `tiling` is as for `decode`, whose inverse this is but for what the autoencoder loses. Raises WanjaxError where
        the autoencoder cannot take so many frames or frames of such a size.
        """
        config = self.configs.vae
        count, (height, width, _) = len(frames), frames[0].shape
        self.defaults.updated({"frames": count, "height": height, "width": width}).check(
            spatial=config.spatial_factor, temporal=config.temporal_factor
        )
        cells = (1, config.spatial_factor // config.patch)  # tiles are as many cells as they say pixels
        graphdef, weights = nnx.split(self.vae)

        def encode(x: Chunk, cache: Any) -> tuple[Chunk, Any]:
            return self._compiled(encode_frames)((graphdef,), x, cache, weights)

        cache, latents = None, []
        for start in (0, *range(1, count, config.temporal_factor)):
            chunk = np.asarray(frames[start : start + config.temporal_factor if start else 1])
            z, cache = map_tiles(encode, self._compiled(from_frames)((config.patch,), chunk), cache, tiling, cells)
            latents.append(z)
        return jnp.moveaxis(jnp.concatenate(latents, axis=1), -1, 1)

    def _compiled(self, function: Callable, donated: tuple[int, ...] = ()) -> Callable:
        return compiled(function, donated, self.layout)

    def _on_devices(self, arrays: Any) -> Any:
        """The arrays, whole on every device, where those of one executable have to be."""
        with use(self.layout):
            return replicate(arrays)


def _share(settings: Settings) -> int:
    """The steps that are taken from a given video on; raises WanjaxError where there are none."""
    if not (steps := int(settings.steps * settings.strength)):
        least = ceil(1000 / settings.steps) / 1000
        raise WanjaxError(f"a strength of {settings.strength} takes none of {settings.steps} steps: {least} takes one")
    return steps


def _channels_last(embeddings: Embeddings) -> Condition:
    """What `encode` made of pictures, as networks take it."""
    condition = embeddings.condition
    return Condition(
        None if condition is None else jnp.moveaxis(jnp.asarray(condition, jnp.float32), 1, -1),
        embeddings.image_embeds,
    )
