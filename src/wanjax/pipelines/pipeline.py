# SPDX-License-Identifier: Apache-2.0
"""A pipeline: three stages from a prompt to a video, encode, denoise and decode, each of which can run alone.

Plain arrays connect the stages. All families have this one class, and differ in its `architecture`. A model that makes
a video block by block makes it by the same run, of several blocks, and can deliver the frames of each as it is made:

    for each block of latent frames:
        denoise the block from noise, by the steps of the sampler
        renew what is kept, by a pass over the finished block
        decode the block, and deliver its frames

The programs are the same for every block, and what is kept has a fixed size, so a video may be of any length.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, final, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.dims import readable
from wanjax.errors import WanjaxError, WanjaxWarning, near_names, shown
from wanjax.figures import quantity
from wanjax.kernels.attention import AUTO, Attention
from wanjax.kernels.compiler_options import SAFE
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import INPUTS, REFERENCES, check_inputs
from wanjax.media.pictures import Clip, Pictures, read_pictures
from wanjax.media.records import TABLE
from wanjax.media.videos import Video
from wanjax.pipelines.caching.rules import check_apart
from wanjax.pipelines.caching.tables import table_digest
from wanjax.pipelines.checks import (
    check_encoded,
    check_frames,
    check_latents,
    check_loaded,
    check_prompt,
    check_streams,
    check_strength,
    check_tiling,
    on_host,
)
from wanjax.pipelines.components import Components
from wanjax.pipelines.denoiser import draw, join, stream_of
from wanjax.pipelines.draws import INITIAL, GivenDraws, checked_draws
from wanjax.pipelines.family import lines, named_sizes
from wanjax.pipelines.frames import AnyLatents, Frames, GivenFrames, GivenLatents, chunk_count, encode_clip
from wanjax.pipelines.guidance import check_rule
from wanjax.pipelines.keywords import (
    Called,
    Given,
    GivenSettings,
    knows_keywords,
    spelled_out,
)
from wanjax.pipelines.memory import check_video
from wanjax.pipelines.model import Encoded, VideoModel, check_fits, least_bytes, truncations, with_scheduler
from wanjax.pipelines.observers import CallbackObserver, Observer, ProgressObserver, Step, Switch, SwitchObserver
from wanjax.pipelines.other_names import right_name, unknown_keyword
from wanjax.pipelines.previews.latent_preview import LatentPreview, fitted
from wanjax.pipelines.previews.tiny_decoder import read_tiny_decoder
from wanjax.pipelines.record import devices_of, nameable, record_of
from wanjax.pipelines.recording import check_decoding, check_denoising, check_encoding, check_making
from wanjax.pipelines.request import PreparedRequest, check_one_way
from wanjax.pipelines.resume import ResumeObserver
from wanjax.pipelines.run import Run
from wanjax.pipelines.runtime import Runtime
from wanjax.pipelines.seeds import check_count, check_seeds, checked_seed, resolve_seeds, seed_to_key_data
from wanjax.pipelines.settings import LOADED, Settings, no_setting, schema, sides
from wanjax.pipelines.text.tokenizer import Truncation
from wanjax.pipelines.video_shape import encoded_shape
from wanjax.pipelines.windows import CONTROL, check_alone
from wanjax.programs import EXECUTE, Program, Strategy, Value
from wanjax.schedulers import Scheduler, name_of
from wanjax.sharding import Partitioner, one_device

Stop = Callable[[Step], bool | None]


class Component:
    """An attribute of a pipeline: the component of its name, which is loaded at first use."""

    def __set_name__(self, owner: type, name: str):
        self.name = name

    def __get__(self, pipe: Any, owner: type) -> Any:
        return self if pipe is None else pipe.components.get(self.name)


class Named(type):
    """The type of a class that answers names of other libraries, such as `from_pretrained`, with what to give here."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise AttributeError(right_name(name) or f"type object {cls.__name__!r} has no attribute {name!r}")


@final
@readable
class Pipeline(metaclass=Named):
    """A checkpoint as a function from prompts, and pictures if it takes them, to videos.

    Components are attributes. Each can be used alone, and `free` releases their memory. `architecture` is what its
    family knows of the checkpoint. `sizes` are the model's own by name, as (height, width). `progress` says whether
    stages are shown on stderr while they run: True, False, or None for on a terminal and in a notebook. `strategy` is
    what is done with the pipeline's programs.
    """

    tokenizer, tokenizer_2 = Component(), Component()
    text_encoder, text_encoder_2 = Component(), Component()
    transformer, transformer_2 = Component(), Component()
    image_encoder, image_processor, feature_extractor = Component(), Component(), Component()
    vae = Component()

    def __init__(
        self,
        components: Components,
        architecture: VideoModel,
        defaults: Settings,
        partitioner: Partitioner | None = None,
        compiler: str = SAFE,
        published: Sequence[tuple[int, int]] = (),
    ):
        """Takes the components, the family's value, default settings, and how programs are compiled.

        `partitioner` is a mesh and its rules; None is JAX's first device. `compiler` names a set of compiler options.
        `published` are sizes (height, width) that the model's authors name beside the default one.
        """
        self.components = components
        self.architecture = architecture
        self.defaults = defaults
        self.partitioner = one_device() if partitioner is None else partitioner
        self.compiler = compiler
        self.sizes = named_sizes(architecture, defaults, published)
        self.progress: bool | None = None
        self.strategy: Strategy = EXECUTE
        self._latent_preview: LatentPreview | None = None

    @property
    def attention(self) -> Attention:
        """The attention of the denoiser: what was asked for, or what it was trained with."""
        return self.architecture.spec.attention(self.components.options.get("attention", AUTO))

    @property
    def scheduler(self) -> Scheduler:
        return self.architecture.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: str | Scheduler) -> None:
        """Sets another scheduler, by name or as a value; raises WanjaxError where it does not fit the model."""
        self.architecture = with_scheduler(self.architecture, scheduler)

    def with_solver(self, name: str | None) -> "Pipeline":
        """Returns the pipeline with the solver of this name, and the rest shared; itself for its own, and for None.

        Raises WanjaxError where the solver does not fit the model.
        """
        if name in (None, name_of(self.scheduler)):
            return self
        made = self.under(self.strategy)
        made.scheduler = name
        return made

    def free(self, *names: str) -> None:
        """Drops the named components, or all, until their next use; raises WanjaxError for a name that is none."""
        self.components.free(*names)

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

        The keywords of `prepare` are settings, `size`, which is (height, width) or a name such as 480p, and pictures.
        `noise`, `callback` and `batch_guidance` are those of `denoise`; `tiling` is that of `decode`, for pictures too.
        """
        several = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
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
        callback: Stop | None = None,
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
        prompts = [check_prompt(prompt) for prompt in prompts]
        check_seeds(seeds)
        check_count(1 if seeds is None else len(seeds), len(prompts))
        pictures, chosen = self.prepare(negative_prompt=negative_prompt, **given)
        numbers = [chosen.seed] if seeds is None else [checked_seed(seed) for seed in seeds]
        wanted = [chosen.updated({"prompt": prompt, "seed": seed}) for prompt in prompts for seed in numbers]
        if noise is not None:  # before a prompt is encoded, which may take long
            if len(wanted) != 1:
                raise WanjaxError(f"one noise is given for {len(wanted)} videos: it makes one video")
            checked_draws(noise, self.draws(chosen, len(pictures.several("references"))))
        check_tiling(tiling, self.architecture.vae)
        sources = {name: nameable(given.get(name), array) for name, array in pictures.items()}
        how = {"tiling": tiling, "batch_guidance": batch_guidance}
        requests = [PreparedRequest(x, self.record(x, sources | {"noise": noise}, **how)) for x in wanted]
        if skip:
            requests = [one for one in requests if not skip(one.metadata)]
        if requests:
            check_making(self, chosen, pictures, **how)
        return self._made(Run(self, requests, pictures, noise=noise, observers=self._looking(callback), **how))

    def _made(self, run: Run) -> Iterator[Video]:
        """Yields the videos of a run."""
        for request, frames in run:
            with run.decode_stage(request):
                made = np.concatenate([np.asarray(chunk) for chunk in frames])
            yield Video(made, request.settings.fps, request.metadata)

    @spelled_out(Given)
    def prepare(self, **given: Any) -> tuple[Pictures, Settings]:
        """Reads the pictures, and completes the settings of the video.

        Pictures and clips are files or uint8 arrays, of NumPy or JAX, [H W 3] and [T H W 3]. A size that is not given
        has the proportions of `image` or `video` and about the default area, and one that is given by its lines, as
        480p, has about that area; a length that is not given is that of `video`. Warns of how an `image` and a `video`
        that are given together count. Raises WanjaxError where a picture cannot be read, is of no use to the model or
        is missing, or a setting is invalid.
        """
        spec = self.architecture.spec
        settings = {name: value for name, value in given.items() if name not in INPUTS and name not in spec.takes}
        sources = {name: on_host(given[name]) for name in given.keys() - settings if given[name] is not None}
        if not sources.get(REFERENCES.name, True):  # an empty list
            del sources[REFERENCES.name]
        asked = self.settings(**settings)
        check_inputs(sources, asked.model, spec.task, spec.inputs)
        pictures = read_pictures(sources, spec.inputs, frames=self._clip_frames(asked), fps=asked.fps)
        spec.check_pictures(pictures, asked)
        if {"image", "video"} <= pictures.keys() and (how := spec.picture_beside_clip):
            warnings.warn(f"a picture and a clip are given together: {how}", WanjaxWarning, stacklevel=3)
        self._check_strength(asked, pictures.get("video"))
        if "video" in pictures and spec.begins_from_video:
            check_rule(asked.guidance_rule, asked.guided, asked.strong_steps)
        complete = asked.updated(self._shape_of(pictures, asked, settings))
        self.check_memory(complete)
        return pictures, complete

    def _clip_frames(self, asked: Settings) -> int:
        """Returns the frames that are of use of a clip: a control clip is that of all windows, another of the first."""
        return asked.length if self.architecture.spec.continued_by == CONTROL else asked.frames

    def check_memory(self, settings: Settings) -> None:
        """Raises WanjaxError where a video cannot fit into the memory that there is; does nothing in a plan."""
        sizes = self.components.sizes
        if weights := max((sizes.get(name, 0) for name in self.architecture.spec.denoisers), default=0):
            check_video(settings, weights, least_bytes(self.architecture, settings), self.partitioner.mesh.size)

    def _check_strength(self, asked: Settings, video: Any) -> None:
        """Raises WanjaxError for a strength that is given without a video, or to a model that begins from none."""
        if asked.strength != self.defaults.strength:
            check_strength(asked, video=video is not None, begins=self.architecture.spec.begins_from_video)

    def _shape_of(self, pictures: Pictures, asked: Settings, given: Mapping[str, Any]) -> dict[str, int]:
        """Returns the height, width and frames that follow from the pictures, where they are not given."""
        shape: dict[str, int] = {}
        by_lines = given.get("size") == lines(asked.size)
        if pictures.first is not None and (by_lines or not given.keys() & {"size", "height", "width"}):
            shape |= dict(
                zip(("height", "width"), self.architecture.size_for(pictures.first.shape, asked), strict=True)
            )
        needed = self._clip_frames(asked)
        if (clip := pictures.clip("video")) is not None and (count := len(clip)) < needed:
            if given.get("frames") or needed > asked.frames:
                raise WanjaxError(f"the video has {quantity(count, 'frame')} where {needed} are asked for: give fewer")
            factor = self.architecture.vae.temporal_factor
            shape["frames"] = (count - 1) // factor * factor + 1
            if shape["frames"] == 1:
                raise WanjaxError(
                    f"of {quantity(count, 'frame')} in the video one picture would be made: give it as image, or "
                    "ask for 1 frame"
                )
        return shape

    @spelled_out(GivenSettings)
    def settings(self, *, size: tuple[int, int] | str | None = None, **settings: Any) -> Any:
        """Returns the model's defaults, overridden by the given settings; raises WanjaxError for invalid ones.

        `size` is (height, width), a text such as "832x480", width first, or the name of one of the model's `sizes`. A
        seed of "random" or -1 becomes one drawn at random, below 2^32. The model and the dtypes are those that were
        loaded.
        """
        settings = dict(self.architecture.spec.implied(settings))
        if settings.get("then"):
            settings["then"] = schema(Settings)["then"].read(settings["then"])
            if settings.get("windows") is None:
                settings["windows"] = 1 + len(settings["then"].splitlines())
        if size is not None:
            check_one_way({**settings, "size": size})
            settings |= sides(size, self.sizes)
        own, known = self.defaults.to_json(), schema(type(self.defaults))
        for name in sorted(settings.keys() - own.keys()):
            if name not in known:
                raise unknown_keyword(name, ("size", *own))
            if settings[name] is not None:
                raise no_setting(name, self.defaults.model, own)
        check_loaded(self.defaults, {name: settings.pop(name) for name in LOADED if name in settings})
        if settings.get("seed") is not None:
            settings |= {"seed": checked_seed(settings["seed"])}
        chosen = self.defaults.updated(settings)
        self.architecture.spec.check_settings(chosen)
        check_apart(chosen.cache, self.partitioner.size("dp") > 1)
        return replace(chosen, cache=self.architecture.spec.cache_rule(chosen))

    @spelled_out(Given)
    def encode(
        self, prompt: str, negative_prompt: str | None = None, *, tiling: Tiling | None = None, **given: Unpack[Given]
    ) -> Encoded:
        """Encodes a prompt, the negative prompt (None is the model's default), and pictures.

        The other keywords are those of `prepare`, and `tiling` is that of `encode_video`. With pictures, the size and
        the frames have to be those of the video.
        """
        pictures, chosen = self.prepare(prompt=check_prompt(prompt), negative_prompt=negative_prompt, **given)
        check_alone(chosen, "encode")
        check_encoding(self, chosen, pictures, tiling=tiling)
        run = Run(self, [PreparedRequest(chosen)], pictures, tiling=tiling, observers=self._looking(None))
        return run.encode()[chosen.prompt]

    def encode_prompts(self, prompt: str, negative_prompt: str | None = None, *, follow: str | None = None) -> Encoded:
        """Encodes a prompt and the negative prompt, with the text encoders alone; None is the model's default."""
        given = {"prompt": check_prompt(prompt), "negative_prompt": negative_prompt, "follow": follow}
        return self.architecture.encode_text(self.runtime, self.defaults.updated(given))

    def truncations(self, prompt: str, *, follow: str | None = None) -> Sequence[Truncation]:
        """Returns the parts of a prompt that the model does not read, if any; `follow` None is the model's default."""
        return truncations(self.architecture, self.runtime, prompt, follow or self.defaults.follow)

    def draws(self, settings: Settings, references: int = 0) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes of the random arrays that can be given for a video, by name."""
        check_alone(settings, "given noise")
        return self.architecture.spec.noise_inputs(settings, references)

    def noise(self, settings: Settings, references: int = 0) -> Float[Array, "B C T H W"]:
        """Returns the seed's initial noise [1 C T H W], float32."""
        return self.call(draw, self.draws(settings, references)[INITIAL], seed_to_key_data([settings.seed]))

    @spelled_out(GivenSettings)
    def denoise(
        self,
        encoded: Encoded,
        *,
        noise: GivenDraws | None = None,
        callback: Stop | None = None,
        switched: Callable[[Switch], Any] | None = None,
        batch_guidance: bool = False,
        seeds: Sequence[int] | None = None,
        keep: str | Path | None = None,
        continued: Callable[[int, int], Any] | None = None,
        **settings: Unpack[GivenSettings],
    ) -> Any:
        """Returns latents [1 C T H W], float32 and normalised, from noise (None is the seed's; a mapping may hold all
        that `draws` names); of a model with several streams of latents, a mapping of them. `seeds` makes a video of
        each; `encoded` then has a prompt for each on its first axis.

        Under guidance the network runs twice a step; with `batch_guidance`, or on a mesh whose `dp` splits the prompts,
        once on a batch. `callback` receives every step, perhaps before the device has finished it; if it returns False,
        Cancelled is raised. `switched` is called when another network takes over. Raises WanjaxError where a shape does
        not fit the video, and where latents stop being finite, with the step's number. `keep` is a file from which the
        same call continues after it was stopped; `continued` then receives (done, total). A model that makes videos
        block by block keeps none, and one of several passes keeps a file for each beside it.
        """
        chosen = self._settings_for(encoded, dict(settings))
        seeds = resolve_seeds([settings.get("seed")], [chosen.seed]) if seeds is None else resolve_seeds(seeds)
        observers = [*self._looking(callback), *([SwitchObserver(switched)] if switched else [])]
        if keep is not None:
            self.architecture.spec.check_whole(chosen.model, "a file to continue from")
            observers.append(ResumeObserver(keep, self.partitioner, continued))
        check_denoising(self, encoded, chosen, videos=len(seeds), batch_guidance=batch_guidance)
        run = Run(self, [PreparedRequest(chosen)], noise=noise, batch_guidance=batch_guidance, observers=observers)
        with run.stage("denoise"):
            pieces = tuple(run.latents(encoded, chosen, seeds))
        return pieces[0] if len(pieces) == 1 else self.call(join, 2, pieces)

    def _looking(self, callback: Stop | None) -> list[Observer]:
        """Returns the observers of every run of the library: its progress, and a callback if there is one.

        Raises WanjaxError for a callback that cannot be called.
        """
        if callback is not None and not callable(callback):
            raise WanjaxError(f"callback is given as {shown(callback)}: give a function that takes a Step")
        return [ProgressObserver(self.progress), *([CallbackObserver(callback)] if callback else [])]

    def _settings_for(self, encoded: Encoded, given: dict[str, Any]) -> Any:
        """Returns the settings of a video of this output of `encode`, which has to fit.

        Where no size or length is given it is that for which pictures were encoded.
        """
        check_encoded(encoded, self.architecture.encoded_type)
        given = {name: value for name, value in given.items() if value is not None}
        latents = [x for x in encoded if x is not None and x.ndim == 5]
        if (shape := encoded_shape(encoded)) is not None:
            given = {"frames": shape.frames} | given
            given = ({} if "size" in given else {"height": shape.height, "width": shape.width}) | given
        elif latents and not given.keys() & {"size", "height", "width"}:
            given["size"] = tuple(self.architecture.vae.spatial_factor * cells for cells in latents[0].shape[3:])
        chosen = self.settings(**given)
        check_alone(chosen, "denoise")
        check_fits(self.architecture, encoded, chosen)
        self._check_strength(chosen, getattr(encoded, "video_latents", None))
        return chosen

    @spelled_out(Given)
    def stream(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        noise: GivenDraws | None = None,
        callback: Stop | None = None,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        **given: Unpack[Given],
    ) -> Iterator[Clip]:
        """Returns an iterator over a video's clips, uint8 [T H W 3], one for each block, made when it is asked for.

        The keywords are those of a call for one video, whose frames are the same. Raises WanjaxError where the model
        makes a video as a whole.
        """
        self.architecture.spec.check_streams(self.defaults.model)
        check_tiling(tiling, self.architecture.vae)
        pictures, chosen = self.prepare(prompt=check_prompt(prompt), negative_prompt=negative_prompt, **given)
        resolve_seeds([given.get("seed")], [chosen.seed])
        checked_draws(noise, self.draws(chosen))
        how = {"tiling": tiling, "batch_guidance": batch_guidance}
        check_making(self, chosen, pictures, **how)
        run = Run(self, [PreparedRequest(chosen)], pictures, noise=noise, observers=self._looking(callback), **how)
        return (np.asarray(clip) for _, frames in run for clip in frames)

    @spelled_out(GivenSettings)
    def blocks(
        self,
        encoded: Encoded,
        *,
        noise: GivenDraws | None = None,
        callback: Stop | None = None,
        batch_guidance: bool = False,
        seeds: Sequence[int] | None = None,
        **settings: Unpack[GivenSettings],
    ) -> Iterator[Float[Array, "B C T H W"]]:
        """Returns an iterator over the latents of each block, made when it is asked for.

        The keywords are those of `denoise`, which joins the blocks. `callback` receives the latents of a block.
        """
        self.architecture.spec.check_streams(self.defaults.model)
        chosen = self._settings_for(encoded, dict(settings))
        seeds = resolve_seeds([settings.get("seed")], [chosen.seed]) if seeds is None else resolve_seeds(seeds)
        checked_draws(noise, self.architecture.spec.noise_inputs(chosen, videos=len(seeds)))
        observers = [CallbackObserver(callback)] if callback else []
        run = Run(self, [PreparedRequest(chosen)], noise=noise, batch_guidance=batch_guidance, observers=observers)
        return run.latents(encoded, chosen, seeds)

    def decode_blocks(self, blocks: Iterable[GivenLatents], *, tiling: Tiling | None = None) -> Iterator[Clip]:
        """Yields the frames uint8 [T H W 3] of each block of latents [1 C T H W] as it comes."""
        self.architecture.spec.check_streams(self.defaults.model)
        for frames in Run(self, [], tiling=tiling).frames(iter(blocks)):
            yield np.asarray(frames)

    def preview_with(self, file: str | Path) -> None:
        """Makes previews with a tiny decoder from now on: a file of TAEHV's for the model's latents.

        Raises WanjaxError if the file is none.
        """
        self._latent_preview = read_tiny_decoder(file, self.architecture.spec.latent_shape(self.defaults)[1])

    def latent_preview(self) -> LatentPreview:
        """Returns what makes previews: a tiny decoder if one was given, or a linear map from latents to colours.

        The map is fitted at the first call, which encodes a small clip; the autoencoder is freed if it was not loaded.
        """
        if self._latent_preview is None:
            loaded, config = self.components.has("vae"), self.architecture.vae
            self._latent_preview = fitted(self.encode_video, config.spatial_factor, config.temporal_factor)
            if not loaded:
                self.free("vae")
        return self._latent_preview

    @knows_keywords
    def decode(
        self,
        latents: AnyLatents,
        dtype: DTypeLike = jnp.uint8,
        *,
        tiling: Tiling | None = None,
        callback: Callable[[int, int], Any] | None = None,
        seed: int | None = None,
    ) -> np.ndarray:
        """Decodes latents [1 C T H W] to frames [T H W 3]: uint8, or a float dtype in [0, 1].

        `latents` are what `denoise` returns, of several streams a mapping. `tiling` decodes tile by tile, for frames
        that would not fit in memory: `Tiling()` is the size that the model's authors chose. `callback(done, total)`
        receives the number of chunks. `seed` is that of noise which some decoders take.
        """
        chunks, total = [], self.chunks(latents)
        check_tiling(tiling, self.architecture.vae)
        check_decoding(self, stream_of(latents).shape, tiling=tiling)
        run = Run(self, [], tiling=tiling, observers=self._looking(None))
        with run.stage("decode"):
            for chunk in run.frames([latents], dtype, seed=seed):
                chunks.append(np.asarray(chunk))
                if callback:
                    callback(len(chunks), total)
        return np.concatenate(chunks)

    def chunks(self, latents: AnyLatents) -> int:
        """Returns the number of chunks in which latents [1 C T H W] are decoded."""
        self._check_latents(latents)
        frames = stream_of(latents).shape[2]
        return chunk_count(frames, self.architecture.spec.decoded_at_once(frames))

    def decode_chunks(
        self,
        latents: AnyLatents,
        dtype: DTypeLike = jnp.uint8,
        *,
        tiling: Tiling | None = None,
        seed: int | None = None,
    ) -> Iterator[Frames]:
        """Yields the frames of each chunk of latents; one chunk and the next are in memory."""
        self._check_latents(latents)
        check_tiling(tiling, self.architecture.vae)
        check_decoding(self, stream_of(latents).shape, tiling=tiling)
        yield from Run(self, [], tiling=tiling).frames([latents], dtype, seed=seed)

    def _check_latents(self, latents: Any) -> None:
        """Raises WanjaxError unless latents are those of one video of the model."""
        check_streams(latents, self.architecture.spec.latent_streams, self.defaults.model)
        check_latents(stream_of(latents), self.architecture.vae.latent_channels)

    def encode_video(self, frames: GivenFrames, *, tiling: Tiling | None = None) -> Float[Value, "1 C _T _H _W"]:
        """Encodes frames [T H W 3], or a list of them, uint8 or floats in [0, 1], to latents [1 C T H W] in float32.

        `decode` inverts it, except for what the autoencoder loses; `tiling` is the same. Raises WanjaxError where the
        autoencoder does not accept this number or size of frames.
        """
        config = self.architecture.vae
        check_frames(frames)
        check_tiling(tiling, config, config.spatial_factor // config.patch)
        count, (height, width, _) = len(frames), frames[0].shape
        self.defaults.updated({"frames": count, "height": height, "width": width}).check(
            spatial=config.spatial_factor, temporal=config.temporal_factor
        )
        self.architecture.spec.check_length(count, self.defaults.model)
        return encode_clip(self.runtime.components.get("vae"), frames, tiling, self.call)

    def record(
        self,
        settings: Settings,
        sources: Mapping[str, Any],
        *,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        digests: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Returns everything that shapes a video, as JSON; `sources` are its pictures, clips and noise by name.

        `digests` are those of pictures and clips that are in a store, by their URLs.
        """
        table, tables = self.architecture.spec.cache_rule(settings).table, self.architecture.tables
        tables = tables.of_pictured if sources.get("image") is not None else tables
        return record_of(
            settings,
            sources,
            loaded=self.components.recorded,
            scheduler=self.scheduler,
            partitioner=self.partitioner,
            tiling=check_tiling(tiling, self.architecture.vae),
            batch_guidance=batch_guidance,
            digests={**(digests or {}), **({TABLE: table_digest(tables, table)} if table else {})},
        )

    @property
    def runtime(self) -> Runtime:
        """What the model needs in order to compute."""
        return Runtime(self.components, self.partitioner, self.compiler, self.strategy)

    def call(self, program: Program, static: Any, *arguments: Any) -> Any:
        """Calls a program on the pipeline's devices, and returns its results; `static` is hashable."""
        return self.runtime.call(program, static, *arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipeline":
        """Return a pipeline with networks of its own, which share their weights, immutable arrays, until one is set."""
        pipe = copy.copy(self)
        pipe.components = copy.deepcopy(self.components, memo)
        return pipe

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be pickled: a network's arrays are on this process's devices."""
        raise WanjaxError(
            f"a pipeline cannot be pickled: call wanjax.load({self.defaults.model!r}) in the other process, or send "
            "the arrays of nnx.state(pipe.transformer)"
        )

    def __copy__(self) -> "Pipeline":
        """Return a pipeline that shares everything, until another value is set in it."""
        pipe = object.__new__(Pipeline)
        vars(pipe).update(vars(self))
        return pipe

    def under(self, strategy: Strategy, components: Components | None = None) -> "Pipeline":
        """Returns the pipeline with another strategy, and with other components if given; the rest is shared."""
        pipe = copy.copy(self)
        pipe.strategy, pipe.components = strategy, components or self.components
        return pipe

    if not TYPE_CHECKING:  # an editor is to see that an attribute is missing

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError, which tells what to give for names of other libraries."""
            if sentence := right_name(name):
                raise AttributeError(sentence)
            known = dir(self)
            if not (name.startswith("_") or name in known) and (near := near_names(name, known, 1)):
                raise AttributeError(f"a pipeline has no {name}: {near[0]} is near")
            return object.__getattribute__(self, name)  # raises the error for which Python came here

    def __repr__(self) -> str:
        mesh = "" if self.partitioner.alone else f" ({self.partitioner}, rules {self.partitioner.rules_name})"
        what = f"{self.defaults.model}, {self.architecture.spec.task}, {self.defaults.dtype}"
        lines = [f"{type(self).__name__}: {what}, on {devices_of(self.partitioner)}{mesh}"]
        lines += [f"  {name}: {self._state_of(name)}" for name in self.components.names]
        return "\n".join([*lines, f"  scheduler: {name_of(self.scheduler)}"])

    def _state_of(self, name: str) -> str:
        """Returns whether a component is loaded, and a network's bytes on all devices together."""
        if not self.components.has(name):
            return "not loaded"
        component = self.components.get(name)
        if not isinstance(component, nnx.Module):
            return "loaded"
        weights = jax.tree.leaves(nnx.state(component))
        dtypes = " and ".join(sorted({str(weight.dtype) for weight in weights}))
        return f"loaded, {sum(weight.nbytes for weight in weights) / 1e6:,.1f} MB in {dtypes}"
