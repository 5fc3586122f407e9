# SPDX-License-Identifier: Apache-2.0
"""The pipeline: three stages from a prompt to a video, encode, denoise and decode, each of which can run alone.

Plain arrays connect the stages. All families share this class and differ in its `model`. A causal model makes a
video in chunks of latent frames, in one run, and can deliver the frames of each chunk before it begins the next:

    for each chunk:
        denoise it from noise, by the steps of the schedule
        run the network over the finished chunk once more, which updates the key-value cache
        decode it, and deliver its frames

Every chunk runs the same programs and the cache has a fixed size, so a video may have any length.
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
from wanjax.errors import SettingError, WanjaxError, WanjaxWarning, near_names, repr_short
from wanjax.execution import EXECUTE, Program, Strategy, Value
from wanjax.figures import quantity
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.kernels.compiler_options import SAFE
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import INPUTS, REFERENCES, check_inputs
from wanjax.media.metadata import TABLE
from wanjax.media.pictures import Clip, Pictures, read_pictures
from wanjax.media.video import Video
from wanjax.pipelines.caching.cache_tables import table_digest
from wanjax.pipelines.caching.rules import check_apart
from wanjax.pipelines.components import Components
from wanjax.pipelines.denoiser import draw, join, stream_of
from wanjax.pipelines.family import lines, named_sizes
from wanjax.pipelines.frames import AnyLatents, Frames, GivenFrames, GivenLatents, chunk_count, encode_clip
from wanjax.pipelines.guidance import check_rule
from wanjax.pipelines.keywords import (
    CallKeywords,
    InputKeywords,
    SettingsKeywords,
    knows_keywords,
    spelled_out,
)
from wanjax.pipelines.memory import check_video
from wanjax.pipelines.model import Conditioning, VideoModel, check_fits, min_step_bytes, truncations, with_scheduler
from wanjax.pipelines.noise_inputs import INITIAL, NoiseInput, checked_noise_inputs
from wanjax.pipelines.observers import CallbackObserver, Observer, ProgressObserver, Step, Switch, SwitchObserver
from wanjax.pipelines.other_names import right_name, unknown_keyword
from wanjax.pipelines.previews.latent_preview import LatentPreview, fit_colours
from wanjax.pipelines.request import PreparedRequest, check_one_way
from wanjax.pipelines.resume import ResumeObserver
from wanjax.pipelines.run import Run
from wanjax.pipelines.runtime import Runtime
from wanjax.pipelines.seeds import check_count, check_seeds, checked_seed, resolve_seeds, seed_to_key_data
from wanjax.pipelines.settings import LOADED, Settings, no_setting, schema, sides
from wanjax.pipelines.text.tokenizer import Truncation
from wanjax.pipelines.tiny_decoder import read_tiny_decoder
from wanjax.pipelines.tracing import check_decoding, check_denoising, check_encoding, check_making
from wanjax.pipelines.validation import (
    check_conditioning_type,
    check_frames,
    check_latents,
    check_loaded,
    check_prompt,
    check_streams,
    check_strength,
    check_tiling,
    on_host,
)
from wanjax.pipelines.video_metadata import devices_of, make_metadata, nameable
from wanjax.pipelines.video_shape import encoded_shape
from wanjax.pipelines.windows import CONTROL, check_single_window
from wanjax.schedulers import Scheduler, name_of
from wanjax.sharding import Partitioner, one_device

Stop = Callable[[Step], bool | None]


class Component:
    """An attribute of a pipeline: the component of its name, which is loaded at first use."""

    def __set_name__(self, owner: type, name: str):
        self.name = name

    def __get__(self, pipe: Any, owner: type) -> Any:
        return self if pipe is None else pipe.components.get(self.name)

    def __set__(self, pipe: Any, value: object) -> None:
        raise AttributeError(
            f"pipe.{self.name} cannot be replaced: nnx.update(pipe.{self.name}, state) sets its weights, and "
            "wanjax.load(FOLDER) loads a checkpoint with another one"
        )


class Named(type):
    """The type of a class that answers names of other libraries, such as `from_pretrained`, with what to give here."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise AttributeError(right_name(name) or f"type object {cls.__name__!r} has no attribute {name!r}")


@final
@readable
class Pipeline(metaclass=Named):
    """A function from prompts, and pictures if the model takes them, to videos.

    `wanjax.load` makes one. Call it for a video, or use its three stages: `encode`, `denoise` and `decode`. The
    networks are attributes (`text_encoder`, `transformer`, `vae` ...): each loads at first use and can be used alone.

    Attributes:
        components: The checkpoint's networks and tokenizers, by name.
        model: The model: its specification and the functions of its family.
        defaults: The settings that a call overrides.
        sizes: The model's own sizes by name, each as (height, width).
        progress: Whether stages show their progress on stderr: True, False, or None for a terminal and a notebook.
        strategy: Whether programs are executed, or traced for a plan.
    """

    tokenizer, tokenizer_2 = Component(), Component()
    text_encoder, text_encoder_2 = Component(), Component()
    transformer, transformer_2 = Component(), Component()
    image_encoder, image_processor, feature_extractor = Component(), Component(), Component()
    vae = Component()

    components: Components
    model: VideoModel[Any]
    defaults: Settings
    partitioner: Partitioner
    compiler: str
    sizes: dict[str, tuple[int, int]]
    progress: bool | None
    strategy: Strategy
    _latent_preview: LatentPreview | None

    def __init__(
        self,
        components: Components,
        model: VideoModel[Any],
        defaults: Settings,
        partitioner: Partitioner | None = None,
        compiler: str = SAFE,
        published: Sequence[tuple[int, int]] = (),
    ):
        """Make a pipeline of parts; `wanjax.load` is the usual way.

        Args:
            components: The checkpoint's networks and tokenizers.
            model: The model of the family.
            defaults: The settings that a call overrides.
            partitioner: A mesh with its sharding rules. None is JAX's first device.
            compiler: The name of a set of compiler options.
            published: Sizes (height, width) that the model's authors name beside the default one.
        """
        self.components = components
        self.model = model
        self.defaults = defaults
        self.partitioner = one_device() if partitioner is None else partitioner
        self.compiler = compiler
        self.sizes = named_sizes(model, defaults, published)
        self.progress = None
        self.strategy = EXECUTE
        self._latent_preview = None

    @property
    def attention(self) -> AttentionConfig:
        """The denoiser's attention: the one that `load` was given, or the one that it was trained with."""
        return self.model.spec.attention(self.components.options.get("attention", AUTO))

    @property
    def scheduler(self) -> Scheduler:
        """The solver; set it to another by name or as a value. Raises WanjaxError where it does not fit the model."""
        return self.model.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: str | Scheduler) -> None:
        self.model = with_scheduler(self.model, scheduler)

    def with_solver(self, name: str | None) -> "Pipeline":
        """Return a pipeline with another solver that shares the rest; this one for None and for its own solver.

        Args:
            name: The solver, such as "euler".

        Raises:
            WanjaxError: The solver does not fit the model.
        """
        if name in (None, name_of(self.scheduler)):
            return self
        pipe = self.under(self.strategy)
        pipe.scheduler = name
        return pipe

    def free(self, *names: str) -> None:
        """Free the memory of components, which load again at their next use.

        Args:
            names: Names such as "transformer". None at all frees every component.

        Raises:
            WanjaxError: The pipeline has no component of that name.
        """
        self.components.free(*names)

    @overload
    def __call__(  # pyright: ignore[reportOverlappingOverload]  # a text is a sequence of texts too
        self, prompt: str, *, seeds: None = None, **keywords: Unpack[CallKeywords]
    ) -> Video: ...

    @overload
    def __call__(self, prompt: str, *, seeds: Sequence[int], **keywords: Unpack[CallKeywords]) -> list[Video]: ...

    @overload
    def __call__(
        self, prompt: Sequence[str], *, seeds: Sequence[int] | None = None, **keywords: Unpack[CallKeywords]
    ) -> list[Video]: ...

    @spelled_out(CallKeywords)
    def __call__(
        self, prompt: str | Sequence[str], *, seeds: Sequence[int] | None = None, **keywords: Unpack[CallKeywords]
    ) -> Video | list[Video]:
        """Make a video from a prompt, or a list of videos from several prompts or seeds.

        Args:
            prompt: What the video shows. Of a sequence of prompts, each makes a video.
            seeds: Makes a video of each seed, for each prompt. None is the one `seed` of the settings.
            **keywords: Settings and pictures; None is the model's own value. `noise`, `callback`, `tiling` and
                `batch_guidance` are those of `videos`.

        Returns:
            A `Video`; a list of them for a sequence of prompts, and where `seeds` are given.

        Raises:
            WanjaxError: A value is invalid, or is of no use to this model.
            Cancelled: The callback returned False.
        """
        several = _is_several(prompt)
        prompts: Sequence[Any] = prompt if several else [prompt]
        videos = self.videos(prompts, seeds=seeds, **keywords)
        return list(videos) if several or seeds is not None else next(videos)

    @spelled_out(InputKeywords)
    def videos(
        self,
        prompts: Sequence[str],
        *,
        negative_prompt: str | None = None,
        seeds: Sequence[int] | None = None,
        noise: NoiseInput | None = None,
        callback: Stop | None = None,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        skip: Callable[[Mapping[str, Any]], bool] | None = None,
        **keywords: Unpack[InputKeywords],
    ) -> Iterator[Video]:
        """Iterate over a video for each prompt and seed, prompt by prompt, made as you ask for it.

        Each prompt is encoded once. The mesh's axis `dp` decides how many videos are denoised at once.

        Args:
            prompts: What the videos show.
            negative_prompt: What they should not show. None is the model's own.
            seeds: Makes a video of each seed, for each prompt. None is the one `seed` of the settings.
            noise: Random arrays in place of those of the seed, as for `denoise`: for one video alone.
            callback: Called after each step with a `Step`, which holds the latents of all videos that are denoised at
                once. If it returns False, `Cancelled` is raised.
            tiling: Encode pictures and decode latents tile by tile, which saves memory.
            batch_guidance: Run both prompts of a step as one batch.
            skip: Called with the metadata of each video before any is made. It returns True for one to leave out.
            **keywords: Settings and pictures. None is the model's own value.

        Returns:
            An iterator over `Video`s.

        Raises:
            WanjaxError: A value is invalid, or is of no use to this model. Nothing was made then.
        """
        if isinstance(prompts, str):  # whose letters would be prompts
            raise WanjaxError(
                f"prompts is the text {repr_short(prompts)}: give a list of prompts, or call pipe(prompt)"
            )
        prompts = [check_prompt(prompt) for prompt in prompts]
        if not prompts:
            raise WanjaxError("prompts is given as []: give one prompt or more")
        check_seeds(seeds)
        check_count(1 if seeds is None else len(seeds), len(prompts))
        pictures, chosen = self.prepare(negative_prompt=negative_prompt, **keywords)
        numbers = [chosen.seed] if seeds is None else [checked_seed(seed) for seed in seeds]
        video_settings = [chosen.updated({"prompt": prompt, "seed": seed}) for prompt in prompts for seed in numbers]
        if noise is not None:  # before a prompt is encoded, which may take long
            if len(video_settings) != 1:
                raise WanjaxError(f"one noise is given for {len(video_settings)} videos: it makes one video")
            checked_noise_inputs(noise, self.draws(chosen, len(pictures.picture_list("references"))))
        check_tiling(tiling, self.model.vae)
        sources = {name: nameable(keywords.get(name), array) for name, array in pictures.items()}
        options: dict[str, Any] = {"tiling": tiling, "batch_guidance": batch_guidance}
        requests = [PreparedRequest(x, self.metadata(x, sources | {"noise": noise}, **options)) for x in video_settings]
        if skip:
            requests = [request for request in requests if not skip(request.metadata)]
        if requests:
            check_making(self, chosen, pictures, **options)
        return self._videos_of(
            Run(self, requests, pictures, noise=noise, observers=self._observers(callback), **options)
        )

    def _videos_of(self, run: Run) -> Iterator[Video]:
        """Yield the videos of a run."""
        for request, frames in run:
            with run.decode_stage(request):
                video = np.concatenate([np.asarray(chunk) for chunk in frames])
            yield Video(video, request.settings.fps, request.metadata)

    @spelled_out(InputKeywords)
    def prepare(self, **keywords: Any) -> tuple[Pictures, Settings]:
        """Read the pictures, and complete the settings of a video.

        Without a size, the video has the proportions of `image` or `video` and about the default area; a size in lines,
        such as 480p, sets that area. Without `frames`, it has the length of `video`.

        Args:
            **keywords: Settings and pictures. A picture is a file, an image of Pillow, or a uint8 array [H W 3] of
                NumPy or JAX. A clip is a file, a sequence of pictures, or a uint8 array [T H W 3].

        Returns:
            The pictures, read, and the settings.

        Raises:
            WanjaxError: A picture cannot be read, is missing or is of no use to the model, or a setting is invalid.

        Warns:
            WanjaxWarning: `image` and `video` are given together, with how the model uses each.
        """
        spec = self.model.spec
        settings = {name: value for name, value in keywords.items() if name not in INPUTS and name not in spec.takes}
        sources = {name: on_host(keywords[name]) for name in keywords.keys() - settings if keywords[name] is not None}
        if not sources.get(REFERENCES.name, True):  # an empty list
            del sources[REFERENCES.name]
        requested = self.settings(**settings)
        check_inputs(sources, requested.model, spec.task, spec.inputs)
        pictures = read_pictures(sources, spec.inputs, frames=self._clip_frames(requested), fps=requested.fps)
        spec.check_pictures(pictures, requested)
        if {"image", "video"} <= pictures.keys() and (explanation := spec.picture_beside_clip):
            warnings.warn(f"a picture and a clip are given together: {explanation}", WanjaxWarning, stacklevel=3)
        self._check_strength(requested, pictures.get("video"))
        if "video" in pictures and spec.begins_from_video:
            check_rule(requested.guidance_rule, requested.guided, requested.strong_steps)
        complete = requested.updated(self._shape_of(pictures, requested, settings))
        self.check_memory(complete)
        return pictures, complete

    def _clip_frames(self, requested: Settings) -> int:
        """Return how many frames of a clip are used: of a control clip all windows', else the first's."""
        return requested.length if self.model.spec.continued_by == CONTROL else requested.frames

    def check_memory(self, settings: Settings) -> None:
        """Raise WanjaxError where a video cannot fit into the devices' memory; check nothing in a plan.

        Args:
            settings: Settings of the video.
        """
        sizes = self.components.sizes
        if weights := max((sizes.get(name, 0) for name in self.model.spec.denoisers), default=0):
            check_video(settings, weights, min_step_bytes(self.model, settings), self.partitioner.mesh.size)

    def _check_strength(self, requested: Settings, video: Any) -> None:
        """Raise WanjaxError for a strength without a video, and for a model that cannot begin from one."""
        if requested.strength != self.defaults.strength:
            check_strength(requested, video=video is not None, starts_from_video=self.model.spec.begins_from_video)

    def _shape_of(self, pictures: Pictures, requested: Settings, settings: Mapping[str, Any]) -> dict[str, int]:
        """Return the height, width and frames that follow from the pictures, where `settings` has none."""
        shape: dict[str, int] = {}
        by_lines = settings.get("size") == lines(requested.size)
        if pictures.first is not None and (by_lines or not settings.keys() & {"size", "height", "width"}):
            shape |= dict(zip(("height", "width"), self.model.size_for(pictures.first.shape, requested), strict=True))
        needed = self._clip_frames(requested)
        if (clip := pictures.clip("video")) is not None and (count := len(clip)) < needed:
            if settings.get("frames") or needed > requested.frames:
                problem = f"the video has {quantity(count, 'frame')} where {needed} are needed"
                raise SettingError(f"{problem}: give a longer one, or ask for fewer frames", "video")
            factor = self.model.vae.temporal_factor
            shape["frames"] = (count - 1) // factor * factor + 1
            if shape["frames"] == 1:
                problem = f"the video has {quantity(count, 'frame')} where {factor + 1} are the fewest"
                advice = "give a longer one, or a picture as image, or ask for a video of 1 frame"
                raise SettingError(f"{problem}: {advice}", "video")
        return shape

    @spelled_out(SettingsKeywords)
    def settings(self, *, size: tuple[int, int] | str | None = None, **settings: Any) -> Any:
        """Return the settings of a video: the model's defaults, overridden by the keywords.

        Args:
            size: (height, width), a text such as "832x480", width first, or a name in the model's `sizes`.
            **settings: Other settings. A `seed` of "random" or -1 draws one below 2^32.

        Returns:
            The settings, of the family's type.

        Raises:
            WanjaxError: A setting is unknown or invalid, or would change what is loaded, as `dtype` would.
        """
        settings = dict(self.model.spec.implied(settings))
        if settings.get("then"):
            settings["then"] = schema(Settings)["then"].read(settings["then"])
            if settings.get("windows") is None:
                settings["windows"] = 1 + len(settings["then"].splitlines())
        if size is not None:
            check_one_way({**settings, "size": size})
            settings |= sides(size, self.sizes)
        defaults, fields = self.defaults.to_json(), schema(type(self.defaults))
        for name in sorted(settings.keys() - defaults.keys()):
            if name not in fields:
                raise unknown_keyword(name, ("size", *defaults), of_call=CallKeywords.__annotations__)
            if settings[name] is not None:
                raise no_setting(name, self.defaults.model, defaults)
        check_loaded(self.defaults, {name: settings.pop(name) for name in LOADED if name in settings})
        if settings.get("seed") is not None:
            settings |= {"seed": checked_seed(settings["seed"])}
        chosen = self.defaults.updated(settings)
        self.model.spec.check_settings(chosen)
        check_apart(chosen.cache, self.partitioner.size("dp") > 1)
        return replace(chosen, cache=self.model.spec.cache_rule(chosen))

    @spelled_out(InputKeywords)
    def encode(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        *,
        tiling: Tiling | None = None,
        **keywords: Unpack[InputKeywords],
    ) -> Conditioning:
        """Encode a prompt, a negative prompt and pictures: the first stage.

        Args:
            prompt: What the video shows.
            negative_prompt: What it should not show. None is the model's own.
            tiling: Encode pictures tile by tile, which saves memory.
            **keywords: Settings and pictures. With pictures, `size` and `frames` are those of the video to be denoised.

        Returns:
            A named tuple of arrays, the family's conditioning.

        Raises:
            WanjaxError: A value is invalid, or is of no use to this model.
        """
        pictures, chosen = self.prepare(prompt=check_prompt(prompt), negative_prompt=negative_prompt, **keywords)
        check_single_window(chosen, "encode")
        check_encoding(self, chosen, pictures, tiling=tiling)
        run = Run(self, [PreparedRequest(chosen)], pictures, tiling=tiling, observers=self._observers(None))
        return run.encode()[chosen.prompt]

    def encode_prompts(
        self, prompt: str, negative_prompt: str | None = None, *, follow: str | None = None
    ) -> Conditioning:
        """Encode a prompt and a negative prompt by the text encoders alone.

        Args:
            prompt: The prompt.
            negative_prompt: None is the model's own.
            follow: Which reference implementation to match; None is the model's default.
        """
        texts = {"prompt": check_prompt(prompt), "negative_prompt": negative_prompt, "follow": follow}
        return self.model.encode_text(self.runtime, self.defaults.updated(texts))

    def truncations(self, prompt: str, *, follow: str | None = None) -> Sequence[Truncation]:
        """Return the parts of a prompt that the tokenizers cut off.

        Args:
            prompt: The prompt.
            follow: Which reference implementation to match; None is the model's default.
        """
        return truncations(self.model, self.runtime, prompt, follow or self.defaults.follow)

    def draws(self, settings: Settings, references: int = 0) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a video's random arrays by name: those that `noise` may hold.

        Args:
            settings: Settings of the video.
            references: Latent frames of reference pictures.
        """
        check_single_window(settings, "given noise")
        return self.model.spec.noise_inputs(settings, references)

    def noise(self, settings: Settings, references: int = 0) -> Float[Array, "B C T H W"]:
        """Return the seed's initial noise, float32 [1 C T H W].

        Args:
            settings: Settings of the video.
            references: Latent frames of reference pictures.
        """
        return self.call(draw, self.draws(settings, references)[INITIAL], seed_to_key_data([settings.seed]))

    @spelled_out(SettingsKeywords)
    def denoise(
        self,
        conditioning: Conditioning,
        *,
        noise: NoiseInput | None = None,
        callback: Stop | None = None,
        switched: Callable[[Switch], Any] | None = None,
        batch_guidance: bool = False,
        seeds: Sequence[int] | None = None,
        keep: str | Path | None = None,
        continued: Callable[[int, int], Any] | None = None,
        **settings: Unpack[SettingsKeywords],
    ) -> Any:
        """Denoise latents from noise: the second stage.

        Under guidance the network runs twice a step; once, on a batch of both prompts, with `batch_guidance` or on a
        mesh whose axis `dp` splits them.

        Args:
            conditioning: What `encode` returned; for several `seeds`, with a prompt for each on its first axis.
            noise: The initial noise [1 C T H W], or a mapping of any of the arrays that `draws` names. None is the
                seed's.
            callback: Called after each step with a `Step`, perhaps before the device has finished it. If it returns
                False, `Cancelled` is raised.
            switched: Called with a `Switch` when a second network takes over.
            batch_guidance: Run both prompts of a step as one batch.
            seeds: Makes a video of each seed. None is the one `seed` of the settings.
            keep: A file. The same call after a stop goes on from the last step that it holds. A model of several passes
                keeps a file for each beside it; a causal model keeps none.
            continued: Called with the steps that are done, and with all, when the run goes on from `keep`.
            **settings: Settings of the video. None is the model's own value, or that for which pictures were encoded.

        Returns:
            Latents [B C T H W], float32 and normalised, a video for each seed; a mapping of them for a model with
            several streams of latents.

        Raises:
            WanjaxError: A shape does not fit the video, a setting is invalid, or latents are not finite after a step.
            Cancelled: The callback returned False.
        """
        chosen = self._settings_for(conditioning, dict(settings))
        seeds = resolve_seeds([settings.get("seed")], [chosen.seed]) if seeds is None else resolve_seeds(seeds)
        observers = [*self._observers(callback), *([SwitchObserver(switched)] if switched else [])]
        if keep is not None:
            self.model.spec.check_whole(chosen.model, "a file to continue from")
            observers.append(ResumeObserver(keep, self.partitioner, continued))
        check_denoising(self, conditioning, chosen, videos=len(seeds), batch_guidance=batch_guidance)
        run = Run(self, [PreparedRequest(chosen)], noise=noise, batch_guidance=batch_guidance, observers=observers)
        with run.stage("denoise"):
            latent_chunks = tuple(run.latents(conditioning, chosen, seeds))
        return latent_chunks[0] if len(latent_chunks) == 1 else self.call(join, 2, latent_chunks)

    def _observers(self, callback: Stop | None) -> list[Observer]:
        """Return the observers of a run: its progress, and the callback if there is one.

        Raises WanjaxError for a callback that cannot be called.
        """
        if callback is not None and not callable(callback):
            raise WanjaxError(f"callback is given as {repr_short(callback)}: give a function that takes a Step")
        return [ProgressObserver(self.progress), *([CallbackObserver(callback)] if callback else [])]

    def _settings_for(self, conditioning: Conditioning, settings: dict[str, Any]) -> Any:
        """Return the settings of a video of this output of `encode`; raise WanjaxError where the two do not fit.

        A size or length that is missing is that for which pictures were encoded.
        """
        check_conditioning_type(conditioning, self.model.conditioning_type)
        settings = {name: value for name, value in settings.items() if value is not None}
        for name in sorted(settings.keys() & {"prompt", "negative_prompt"}):
            if settings[name] in ("", getattr(self.defaults, name)):
                continue  # as in all settings of a video that has none of its own
            raise SettingError(f"{name} has no effect on encoded prompts: give it to `encode`", name)
        latents = [x for x in conditioning if x is not None and x.ndim == 5]
        if (shape := encoded_shape(conditioning)) is not None:
            settings = {"frames": shape.frames} | settings
            settings = ({} if "size" in settings else {"height": shape.height, "width": shape.width}) | settings
        elif latents and not settings.keys() & {"size", "height", "width"}:
            settings["size"] = tuple(self.model.vae.spatial_factor * cells for cells in latents[0].shape[3:])
        chosen = self.settings(**settings)
        check_single_window(chosen, "denoise")
        check_fits(self.model, conditioning, chosen)
        self._check_strength(chosen, getattr(conditioning, "video_latents", None))
        return chosen

    @spelled_out(InputKeywords)
    def stream(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        noise: NoiseInput | None = None,
        callback: Stop | None = None,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        **keywords: Unpack[InputKeywords],
    ) -> Iterator[Clip]:
        """Iterate over the frames of a video in chunks, each made as you ask for it. For causal models.

        The frames are those of a call for one video with the same keywords.

        Args:
            prompt: What the video shows.
            negative_prompt: What it should not show. None is the model's own.
            noise: Random arrays in place of those of the seed, as for `denoise`.
            callback: Called after each step with a `Step`. If it returns False, `Cancelled` is raised.
            tiling: Decode tile by tile, which saves memory.
            batch_guidance: Run both prompts of a step as one batch.
            **keywords: Settings and pictures. None is the model's own value.

        Returns:
            An iterator over uint8 arrays [T H W 3].

        Raises:
            WanjaxError: A value is invalid, or the model makes a video as a whole.
        """
        self.model.spec.check_streams(self.defaults.model)
        check_tiling(tiling, self.model.vae)
        pictures, chosen = self.prepare(prompt=check_prompt(prompt), negative_prompt=negative_prompt, **keywords)
        resolve_seeds([keywords.get("seed")], [chosen.seed])
        checked_noise_inputs(noise, self.draws(chosen))
        options: dict[str, Any] = {"tiling": tiling, "batch_guidance": batch_guidance}
        check_making(self, chosen, pictures, **options)
        run = Run(
            self, [PreparedRequest(chosen)], pictures, noise=noise, observers=self._observers(callback), **options
        )
        return (np.asarray(clip) for _, frames in run for clip in frames)

    @spelled_out(SettingsKeywords)
    def denoise_chunks(
        self,
        conditioning: Conditioning,
        *,
        noise: NoiseInput | None = None,
        callback: Stop | None = None,
        batch_guidance: bool = False,
        seeds: Sequence[int] | None = None,
        **settings: Unpack[SettingsKeywords],
    ) -> Iterator[AnyLatents]:
        """Iterate over the latents [B C T H W] of a video in chunks, each made as you ask for it. For causal models.

        `denoise` joins the chunks.

        Args:
            conditioning: The output of `encode`.
            noise: Noise in place of the seed's: the initial noise, or arrays by name.
            callback: Called after each step with a `Step`, which has the latents of one chunk; False ends the run.
            batch_guidance: Whether both prompts run in one forward.
            seeds: A seed for each video; None is the one of the settings.
            settings: The settings.
        """
        self.model.spec.check_streams(self.defaults.model)
        chosen = self._settings_for(conditioning, dict(settings))
        seeds = resolve_seeds([settings.get("seed")], [chosen.seed]) if seeds is None else resolve_seeds(seeds)
        checked_noise_inputs(noise, self.model.spec.noise_inputs(chosen, videos=len(seeds)))
        observers = [CallbackObserver(callback)] if callback else []
        run = Run(self, [PreparedRequest(chosen)], noise=noise, batch_guidance=batch_guidance, observers=observers)
        return run.latents(conditioning, chosen, seeds)

    def decode_stream(self, latent_chunks: Iterable[GivenLatents], *, tiling: Tiling | None = None) -> Iterator[Clip]:
        """Yield the frames, uint8 [T H W 3], of each chunk of latents [1 C T H W] as it comes.

        Args:
            latent_chunks: Latents of consecutive chunks.
            tiling: Decode tile by tile, which saves memory.
        """
        self.model.spec.check_streams(self.defaults.model)
        for frames in Run(self, [], tiling=tiling).frames(iter(latent_chunks)):
            yield np.asarray(frames)

    def preview_with(self, file: str | Path) -> None:
        """Make previews with a tiny decoder from now on.

        Args:
            file: A decoder of TAEHV for the model's latents.

        Raises:
            WanjaxError: The file is not such a decoder.
        """
        self._latent_preview = read_tiny_decoder(file, self.model.spec.latent_shape(self.defaults)[1])

    def latent_preview(self) -> LatentPreview:
        """Return the maker of previews: the decoder of `preview_with`, or a linear map from latents to colours.

        The first call fits the map, by encoding a small clip; it frees the autoencoder if that was not loaded.
        """
        if self._latent_preview is None:
            loaded, config = self.components.has("vae"), self.model.vae
            self._latent_preview = fit_colours(self.encode_video, config.spatial_factor, config.temporal_factor)
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
        """Decode latents to frames: the third stage.

        Args:
            latents: What `denoise` returned, of one video: [1 C T H W], or a mapping for several streams.
            dtype: uint8, or a float dtype for values in [0, 1].
            tiling: Decode tile by tile, which saves memory. `Tiling()` has the sizes that the model's authors chose.
            callback: Called with the chunks that are decoded, and with all.
            seed: The seed of the noise that some decoders take.

        Returns:
            Frames [T H W 3].

        Raises:
            WanjaxError: The latents do not fit the model, or are not finite.
        """
        chunks, total = [], self.chunks(latents)
        check_tiling(tiling, self.model.vae)
        check_decoding(self, stream_of(latents).shape, tiling=tiling)
        run = Run(self, [], tiling=tiling, observers=self._observers(None))
        with run.stage("decode"):
            for chunk in run.frames([latents], dtype, seed=seed):
                chunks.append(np.asarray(chunk))
                if callback:
                    callback(len(chunks), total)
        return np.concatenate(chunks)

    def chunks(self, latents: AnyLatents) -> int:
        """Return in how many chunks latents [1 C T H W] are decoded.

        Args:
            latents: Latents of one video.
        """
        self._check_latents(latents)
        frames = stream_of(latents).shape[2]
        return chunk_count(frames, self.model.spec.decode_lengths(frames))

    def decode_chunks(
        self,
        latents: AnyLatents,
        dtype: DTypeLike = jnp.uint8,
        *,
        tiling: Tiling | None = None,
        seed: int | None = None,
    ) -> Iterator[Frames]:
        """Yield the frames of each chunk of latents; at most two chunks are in memory.

        Args:
            latents: Latents of one video, [1 C T H W] or streams.
            dtype: Of the frames: uint8, or a float in [0, 1].
            tiling: Decode tile by tile, which saves memory.
            seed: Of a decoder that takes noise; None is the model's default.
        """
        self._check_latents(latents)
        check_tiling(tiling, self.model.vae)
        check_decoding(self, stream_of(latents).shape, tiling=tiling)
        yield from Run(self, [], tiling=tiling).frames([latents], dtype, seed=seed)

    def _check_latents(self, latents: Any) -> None:
        """Raise WanjaxError unless latents are those of one video of the model."""
        check_streams(latents, self.model.spec.latent_streams, self.defaults.model)
        check_latents(stream_of(latents), self.model.vae.latent_channels)

    def encode_video(self, frames: GivenFrames, *, tiling: Tiling | None = None) -> Float[Value, "1 C _T _H _W"]:
        """Encode frames to latents, which `decode` inverts but for what the autoencoder loses.

        Args:
            frames: [T H W 3] or a list of [H W 3], uint8 or floats in [0, 1].
            tiling: Encode tile by tile, which saves memory.

        Returns:
            Latents [1 C T H W], float32.

        Raises:
            WanjaxError: The autoencoder does not take this number or size of frames.
        """
        config = self.model.vae
        check_frames(frames)
        check_tiling(tiling, config, config.spatial_factor // config.patch)
        count, (height, width, _) = len(frames), frames[0].shape
        self.defaults.updated({"frames": count, "height": height, "width": width}).check(
            spatial=config.spatial_factor, temporal=config.temporal_factor
        )
        self.model.spec.check_length(count, self.defaults.model)
        return encode_clip(self.runtime.components.get("vae"), frames, tiling, self.call)

    def metadata(
        self,
        settings: Settings,
        sources: Mapping[str, Any],
        *,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        digests: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the metadata of a video, everything that shapes it, as JSON.

        Args:
            settings: The video's settings.
            sources: Its pictures, clips and noise by name, as files or arrays.
            tiling: The tiling of its pictures and frames.
            batch_guidance: Whether both prompts of a step run as one batch.
            digests: SHA-256 digests of pictures and clips in a store, by URL.
        """
        table, tables = self.model.spec.cache_rule(settings).table, self.model.tables
        tables = tables.for_image_input if sources.get("image") is not None else tables
        return make_metadata(
            settings,
            sources,
            loaded=self.components.metadata,
            scheduler=self.scheduler,
            partitioner=self.partitioner,
            tiling=check_tiling(tiling, self.model.vae),
            batch_guidance=batch_guidance,
            digests={**(digests or {}), **({TABLE: table_digest(tables, table)} if table else {})},
        )

    @property
    def runtime(self) -> Runtime:
        """Components, mesh, compiler options and strategy: what the model's functions take."""
        return Runtime(self.components, self.partitioner, self.compiler, self.strategy)

    def call(self, program: Program, static: Any, *arguments: Any) -> Any:
        """Call a program on the pipeline's devices.

        Args:
            program: The program.
            static: A hashable value; a new one compiles anew.
            arguments: Trees of arrays.
        """
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
        """Return a pipeline with another strategy, and other components if given, that shares the rest.

        Args:
            strategy: What to do with programs.
            components: The networks; None keeps those of before.
        """
        pipe = copy.copy(self)
        pipe.strategy, pipe.components = strategy, components or self.components
        return pipe

    if not TYPE_CHECKING:  # an editor is to see that an attribute is missing

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, with what to use here in place of another library's name."""
            if sentence := right_name(name) or _setting_of_call(name):
                raise AttributeError(sentence)
            names = dir(self)
            if not (name.startswith("_") or name in names) and (near := near_names(name, names, 1)):
                raise AttributeError(f"a pipeline has no {name}: did you mean {near[0]}?")
            return object.__getattribute__(self, name)  # raises the error for which Python came here

        def __setattr__(self, name: str, value: object) -> None:
            """Set an attribute; raise AttributeError for one that there is not, which nothing would ever look at."""
            attributes = [*type(self).__annotations__, *dir(type(self))]
            if name not in attributes:
                right = [one for one in near_names(name, attributes, 1) if not one.startswith("_")]
                near = f"did you mean {right[0]}?" if right else "pipe.progress and pipe.scheduler can be set"
                sentence = right_name(name) or _setting_of_call(name)
                raise AttributeError(sentence or f"a pipeline has no {name} to set: {near}")
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        mesh = "" if self.partitioner.single_device else f" ({self.partitioner}, rules {self.partitioner.rules_name})"
        summary = f"{self.defaults.model}, {self.model.spec.task}, {self.defaults.dtype}"
        lines = [f"{type(self).__name__}: {summary}, on {devices_of(self.partitioner)}{mesh}"]
        lines += [f"  {name}: {self._state_of(name)}" for name in self.components.names]
        return "\n".join([*lines, f"  scheduler: {name_of(self.scheduler)}"])

    def _state_of(self, name: str) -> str:
        """Return whether a component is loaded, and a network's bytes on all devices together."""
        if not self.components.has(name):
            return "not loaded"
        component = self.components.get(name)
        if not isinstance(component, nnx.Module):
            return "loaded"
        weights = jax.tree.leaves(nnx.state(component))
        dtypes = " and ".join(sorted({str(weight.dtype) for weight in weights}))
        return f"loaded, {sum(weight.nbytes for weight in weights) / 1e6:,.1f} MB in {dtypes}"


def _setting_of_call(name: str) -> str | None:
    """Return where to give a setting of a video, which is no attribute of a pipeline; None for any other name."""
    if name not in schema(Settings):
        return None
    call = "pipe(prompt)" if name == "prompt" else f"pipe(prompt, {name}=...)"
    return f"{name} is a setting of a video and not of a pipeline: {call} sets it, and pipe.defaults has the model's"


def _is_several(prompt: object) -> bool:
    """Return whether what is given as a prompt is a sequence of prompts."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
