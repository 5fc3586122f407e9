# SPDX-License-Identifier: Apache-2.0
"""A pipeline: three stages from a prompt to a video, encode, denoise and decode, each of which can run alone.

Plain arrays connect the stages. `Hooks` are the methods that differ from family to family.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.errors import WanjaxError
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import ClipSource, Pictures, PictureSource, read_pictures
from wanjax.media.videos import Video
from wanjax.pipelines.cache_rules import check_apart
from wanjax.pipelines.checks import (
    check_encoded,
    check_frames,
    check_latents,
    check_loaded,
    check_strength,
    check_tiling,
)
from wanjax.pipelines.draws import GivenDraws, checked_draws
from wanjax.pipelines.frames import Frames, GivenFrames, GivenLatents, Latents, chunk_count, encoded
from wanjax.pipelines.hooks import Encoded, Hooks
from wanjax.pipelines.keywords import Called, Given, GivenSettings, knows_keywords, spelled_out, unknown_keyword
from wanjax.pipelines.looking import Calling, Showing, Switching
from wanjax.pipelines.many import Order
from wanjax.pipelines.preview import Look, fitted
from wanjax.pipelines.record import nameable
from wanjax.pipelines.resume import Keeping
from wanjax.pipelines.run import Hook, Run
from wanjax.pipelines.sampler import draw, join
from wanjax.pipelines.seeds import checked_seed, told_seeds, words_of
from wanjax.pipelines.settings import Settings, height_and_width, schema
from wanjax.pipelines.steps import Step, Switch
from wanjax.pipelines.tiny_decoder import read_tiny_decoder
from wanjax.programs import Value


class Pipeline(Hooks):
    """A checkpoint as a function from prompts, and pictures if it takes them, to videos."""

    _colours: Look | None = None

    @overload
    def __call__(self, prompt: str, *, seeds: None = None, **given: Unpack[Called]) -> Video: ...

    @overload
    def __call__(self, prompt: str, *, seeds: Sequence[int], **given: Unpack[Called]) -> list[Video]: ...

    @overload
    def __call__(
        self, prompt: Sequence[str], *, seeds: Sequence[int] | None = None, **given: Unpack[Called]
    ) -> list[Video]: ...

    @spelled_out(Called)
    def __call__(
        self, prompt: str | Sequence[str], *, seeds: Sequence[int] | None = None, **given: Unpack[Called]
    ) -> Video | list[Video]:
        """Makes a video from a prompt; a list of videos from several prompts or `seeds`, as `videos` does.

        The keywords of `prepare` are settings, `size=(height, width)` and pictures. `noise`, `callback` and
        `batch_guidance` are those of `denoise`; `tiling` is that of `decode`, for pictures too.
        """
        several = isinstance(prompt, Sequence) and not isinstance(prompt, str)
        prompts: Sequence[Any] = prompt if several else [prompt]
        made = self.videos(prompts, seeds=seeds, **given)
        return list(made) if several or seeds is not None else next(made)

    @spelled_out(Given)
    def videos(
        self,
        prompts: Sequence[str],
        *,
        negative_prompt: str | None = None,
        seeds: Sequence[int] | None = None,
        noise: GivenDraws | None = None,
        callback: Callable[[Step], bool | None] | None = None,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        skip: Callable[[Mapping[str, Any]], bool] | None = None,
        **given: Unpack[Given],
    ) -> Iterator[Video]:
        """Returns an iterator over a video for each prompt and seed, prompt by prompt, each made when it is asked for.

        `seeds` None is the one seed of the settings. Each prompt is encoded once. As many videos are denoised at once
        as the mesh's axis `dp` splits; `callback` then receives their latents together. `skip` receives the record of
        each video that is to be made, which its metadata will hold, and returns True for one that is not wanted. The
        other keywords are those of a call for one video.
        """
        pictures, chosen = self.prepare(negative_prompt=negative_prompt, **given)
        texts = [self.settings(prompt=prompt).prompt for prompt in prompts]
        numbers = [chosen.seed] if seeds is None else [checked_seed(seed) for seed in seeds]
        wanted = [chosen.updated({"prompt": text, "seed": seed}) for text in texts for seed in numbers]
        if noise is not None:  # before a prompt is encoded, which may take long
            if len(wanted) != 1:
                raise WanjaxError(f"one noise is given for {len(wanted)} videos: it makes one video")
            checked_draws(noise, self.draws(chosen, len(pictures.references)))
        check_tiling(tiling)
        sources = {name: nameable(given.get(name), getattr(pictures, name)) for name in pictures.given()}
        told = {"tiling": tiling, "batch_guidance": batch_guidance}
        orders = [Order(x, self.record(x, sources | {"noise": noise}, **told)) for x in wanted]
        if skip:
            orders = [order for order in orders if not skip(order.record)]
        return self._made(Run(self, orders, pictures, noise=noise, hooks=self._looking(callback), **told))

    def _made(self, run: Run) -> Iterator[Video]:
        """Yields the videos of a run."""
        for order, frames in run:
            with run.stage("decode"):
                made = np.concatenate([np.asarray(chunk) for chunk in frames])
            yield Video(made, order.settings.fps, order.record)

    @spelled_out(Given)
    def prepare(
        self,
        *,
        image: PictureSource | None = None,
        last_image: PictureSource | None = None,
        video: ClipSource | None = None,
        mask: ClipSource | None = None,
        references: Iterable[PictureSource] | None = None,
        **settings: Any,
    ) -> tuple[Pictures, Settings]:
        """Reads the pictures, and completes the settings of the video.

        Pictures and clips are files or uint8 arrays [H W 3] and [T H W 3]. A size that is not given has the proportions
        of `image` or `video` and about the default area; a length that is not given is that of `video`. Raises
        WanjaxError where a picture cannot be read, is of no use to the model or is missing, or a setting is invalid.
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
        self.check_pictures(pictures, asked)
        if asked.strength != self.defaults.strength:
            check_strength(asked, video=pictures.video is not None, begins=self.begins_from_video)
        return pictures, asked.updated(self._shape_of(pictures, asked, settings))

    def _shape_of(self, pictures: Pictures, asked: Settings, given: Mapping[str, Any]) -> dict[str, int]:
        """Returns the height, width and frames that follow from the pictures, where they are not given."""
        shape: dict[str, int] = {}
        if pictures.first is not None and not given.keys() & {"size", "height", "width"}:
            shape |= dict(zip(("height", "width"), self.size_for(pictures.first.shape, asked), strict=True))
        if pictures.video is not None and (count := len(pictures.video)) < asked.frames:
            if given.get("frames"):
                raise WanjaxError(f"the video has {count} frames where {asked.frames} are asked for: fewer would do")
            factor = self.architecture.vae.temporal_factor
            shape["frames"] = (count - 1) // factor * factor + 1
        return shape

    @spelled_out(GivenSettings)
    def settings(self, *, size: tuple[int, int] | None = None, **settings: Any) -> Any:
        """Returns the model's defaults, overridden by the given settings; raises WanjaxError for invalid ones.

        A seed of -1 becomes one drawn at random. The model and the dtype are those that were loaded.
        """
        if size is not None:
            settings |= self._sides(size, settings)
        own, known = self.defaults.to_json(), schema(type(self.defaults))
        for name in sorted(settings.keys() - own.keys()):
            if name not in known:
                raise unknown_keyword(name, ("size", *own))
            if settings[name] is not None:
                raise WanjaxError(f"{name} is no setting of {self.defaults.model}: {', '.join(own)} are")
        check_loaded(self.defaults, settings.pop("model", None), settings.pop("dtype", None))
        if settings.get("seed") is not None:
            settings |= {"seed": checked_seed(settings["seed"])}
        chosen = self.defaults.updated(settings)
        chosen.check(spatial=self.grid, temporal=self.architecture.vae.temporal_factor)
        check_apart(chosen.cache, self.partitioner.size("dp") > 1)
        return replace(chosen, cache=self.architecture.cache_rule(chosen))

    def _sides(self, size: Any, settings: Mapping[str, Any]) -> dict[str, int]:
        """Returns the height and width that a size gives; raises WanjaxError where they are given beside it."""
        if settings.get("height") is not None or settings.get("width") is not None:
            raise WanjaxError("size is given beside height or width: one way is enough")
        return dict(zip(("height", "width"), height_and_width(size), strict=True))

    @property
    def begins_from_video(self) -> bool:
        """True where denoising begins from a given video, up to the strength; False where the video only guides it."""
        return True

    @spelled_out(Given)
    def encode(
        self, prompt: str, negative_prompt: str | None = None, *, tiling: Tiling | None = None, **given: Unpack[Given]
    ) -> Encoded:
        """Encodes a prompt, the negative prompt (None is the model's default), and pictures.

        The other keywords are those of `prepare`, and `tiling` is that of `encode_video`. With pictures, the size and
        the frames have to be those of the video.
        """
        pictures, chosen = self.prepare(prompt=prompt, negative_prompt=negative_prompt, **given)
        run = Run(self, [Order(chosen, {})], pictures, tiling=tiling, hooks=self._looking(None))
        return run.encode()[chosen.prompt]

    def encoded_from(self, tensors: Mapping[str, Array]) -> Encoded:
        """Restores the output of `encode` from its tensors by name; raises WanjaxError where one is missing."""
        optional = self.encoded_type._field_defaults.keys()
        if missing := [name for name in self.encoded_type._fields if name not in tensors and name not in optional]:
            has = ", ".join(tensors) or "none at all"
            raise WanjaxError(f"there is no tensor {missing[0]!r} among the encoded prompts, only {has}: encode again")
        return self.encoded_type(**{name: x for name, x in tensors.items() if name in self.encoded_type._fields})

    def noise(self, settings: Settings, references: int = 0) -> Latents:
        """Returns the seed's initial noise, float32, of the shape `noise_shape`."""
        return self.call(draw, self.noise_shape(settings, references), words_of([settings.seed]))

    @spelled_out(GivenSettings)
    def denoise(
        self,
        encoded: Encoded,
        *,
        noise: GivenDraws | None = None,
        callback: Callable[[Step], bool | None] | None = None,
        switched: Callable[[Switch], Any] | None = None,
        batch_guidance: bool = False,
        seeds: Sequence[int] | None = None,
        keep: str | Path | None = None,
        continued: Callable[[int, int], Any] | None = None,
        **settings: Unpack[GivenSettings],
    ) -> Float[Array, "B C _T H W"]:
        """Returns latents [1 C T H W], float32 and normalised, from noise (None is the seed's; a mapping may hold all
        that `draws` names). `seeds` makes a video of each; `encoded` then has a prompt for each on its first axis.

        Under guidance the network runs twice a step; with `batch_guidance`, or on a mesh whose `dp` splits the prompts,
        once on a batch. `callback` receives every step, perhaps before the device has finished it; if it returns False,
        Cancelled is raised. `switched` is called when another network takes over. Raises WanjaxError where a shape does
        not fit the video, and where latents stop being finite, with the step's number. `keep` is a file from which the
        same call continues after it was stopped, unless the video is made block by block; `continued` receives
        (done, total).
        """
        chosen = self._settings_for(encoded, dict(settings))
        seeds = told_seeds([settings.get("seed")], [chosen.seed]) if seeds is None else told_seeds(seeds)
        hooks = [*self._looking(callback), *([Switching(switched)] if switched else [])]
        if keep is not None:
            hooks.append(Keeping(keep, self.partitioner, continued))
        run = Run(self, [Order(chosen, {})], noise=noise, batch_guidance=batch_guidance, hooks=hooks)
        with run.stage("denoise"):
            pieces = tuple(run.latents(encoded, chosen, seeds))
        return pieces[0] if len(pieces) == 1 else self.call(join, 2, pieces)

    def _looking(self, callback: Callable[[Step], bool | None] | None) -> list[Hook]:
        """Returns the hooks of every run of the library: its progress, and a callback if there is one."""
        return [Showing(self.progress), *([Calling(callback)] if callback else [])]

    def _settings_for(self, encoded: Encoded, given: dict[str, Any]) -> Any:
        """Returns the settings of a video of this output of `encode`, which has to fit.

        Where no size is given it is that of the encoded pictures.
        """
        check_encoded(encoded, self.encoded_type)
        made = [x for x in encoded if x is not None and x.ndim == 5]  # latents
        if made and not given.keys() & {"size", "height", "width"}:
            given["size"] = tuple(self.architecture.vae.spatial_factor * cells for cells in made[0].shape[3:])
        chosen = self.settings(**given)
        self.check_encoded(encoded, chosen)
        return chosen

    def preview_with(self, file: str | Path) -> None:
        """Makes previews with a tiny decoder from now on: a file of TAEHV's for the model's latents.

        Raises WanjaxError if the file is none.
        """
        self._colours = read_tiny_decoder(file, self.architecture.latent_shape(self.defaults)[1])

    def colours(self) -> Look:
        """Returns what makes previews: a tiny decoder if one was given, or a linear map from latents to colours.

        The map is fitted at the first call, which encodes a small clip; the autoencoder is freed if it was not loaded.
        """
        if self._colours is None:
            loaded, config = self.components.has("vae"), self.architecture.vae
            self._colours = fitted(self.encode_video, config.spatial_factor, config.temporal_factor)
            if not loaded:
                self.free("vae")
        return self._colours

    @knows_keywords
    def decode(
        self,
        latents: GivenLatents,
        dtype: DTypeLike = jnp.uint8,
        *,
        tiling: Tiling | None = None,
        callback: Callable[[int, int], Any] | None = None,
    ) -> np.ndarray:
        """Decodes latents [1 C T H W] to frames [T H W 3]: uint8, or a float dtype in [0, 1].

        `tiling` decodes tile by tile, for frames that would not fit in memory: `Tiling()` is the size that the
        model's authors chose. `callback(done, total)` receives the number of chunks.
        """
        chunks, total = [], self.chunks(latents)
        check_tiling(tiling)
        run = Run(self, [], tiling=tiling, hooks=self._looking(None))
        with run.stage("decode"):
            for chunk in run.frames([latents], dtype):
                chunks.append(np.asarray(chunk))
                if callback:
                    callback(len(chunks), total)
        return np.concatenate(chunks)

    def chunks(self, latents: GivenLatents) -> int:
        """Returns the number of chunks in which latents [1 C T H W] are decoded."""
        check_latents(latents, self.architecture.vae.latent_channels)
        frames = latents.shape[2]
        return chunk_count(frames, self.architecture.decoded_at_once(frames))

    def decode_chunks(
        self, latents: GivenLatents, dtype: DTypeLike = jnp.uint8, *, tiling: Tiling | None = None
    ) -> Iterator[Frames]:
        """Yields the frames of each chunk of latents, so that only one chunk is in memory."""
        check_latents(latents, self.architecture.vae.latent_channels)
        check_tiling(tiling)
        yield from Run(self, [], tiling=tiling).frames([latents], dtype)

    def encode_video(self, frames: GivenFrames, *, tiling: Tiling | None = None) -> Float[Value, "1 C _T _H _W"]:
        """Encodes frames [T H W 3], or a list of them, uint8 or floats in [0, 1], to latents [1 C T H W] in float32.

        `decode` inverts it, except for what the autoencoder loses; `tiling` is the same. Raises WanjaxError where the
        autoencoder does not accept this number or size of frames.
        """
        check_frames(frames)
        check_tiling(tiling)
        config = self.architecture.vae
        count, (height, width, _) = len(frames), frames[0].shape
        self.defaults.updated({"frames": count, "height": height, "width": width}).check(
            spatial=config.spatial_factor, temporal=config.temporal_factor
        )
        return encoded(self.vae, frames, tiling, self.call)
