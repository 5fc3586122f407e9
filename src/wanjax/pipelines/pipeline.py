# SPDX-License-Identifier: Apache-2.0
"""The pipeline makes a video from a prompt in three stages: encode, denoise and decode. Each stage can run alone.

Plain arrays connect the stages. All families share this class and differ in its `model`. A causal model makes a
video in chunks of latent frames, in one run, and can yield the frames of each chunk before it starts the next:

    for each chunk:
        denoise it from noise, by the steps of the schedule
        run the network once more over the denoised chunk, to update the key-value cache
        decode it, and yield its frames

All chunks run the same programs and the cache has a fixed size, so a video may have any length.
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

from wanjax.dims import readable_signature
from wanjax.errors import SettingError, WanjaxError, WanjaxWarning, near_names, repr_short, user_stack_level
from wanjax.execution import EXECUTE, ArrayOrShape, Program, Strategy
from wanjax.figures import pluralize
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.kernels.compiler_options import SAFE_SET
from wanjax.layers.precision import UNQUANTIZED
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import INPUT_SPECS, REFERENCES, check_inputs
from wanjax.media.margins import add_margins
from wanjax.media.metadata import CACHE_TABLE_KEY
from wanjax.media.pictures import Clip, Pictures, read_pictures, visible_share
from wanjax.media.video import Video
from wanjax.pipelines.caching.cache_tables import table_digest
from wanjax.pipelines.caching.rules import check_separate_forwards
from wanjax.pipelines.components import Components
from wanjax.pipelines.denoiser import draw, join, select_modality
from wanjax.pipelines.family import TrainingDomain, named_sizes, resolution_name
from wanjax.pipelines.frames import AnyLatents, Frames, FramesInput, LatentsInput, chunk_count, encode_clip
from wanjax.pipelines.guidance import check_rule
from wanjax.pipelines.keywords import (
    CALL_KEYWORDS,
    CallKeywords,
    InputKeywords,
    SettingsKeywords,
    check_keywords,
    document_keywords,
)
from wanjax.pipelines.memory import check_video
from wanjax.pipelines.model import (
    Conditioning,
    VideoModel,
    check_compatible,
    min_step_bytes,
    truncations,
    with_scheduler,
)
from wanjax.pipelines.noise_inputs import INITIAL, NoiseInput, checked_noise_inputs
from wanjax.pipelines.notes import guidance_notes, shape_notes, shift_notes, truncation_notes, word_notes
from wanjax.pipelines.observers import CallbackObserver, Observer, ProgressObserver, Step, Switch, SwitchObserver
from wanjax.pipelines.other_names import LOAD_ADVICE, LOAD_KEYWORDS, advice_for, unknown_keyword
from wanjax.pipelines.previews.latent_preview import LatentPreview, fit_colours
from wanjax.pipelines.request import PreparedRequest, check_alternatives
from wanjax.pipelines.resume import ResumeObserver, check_state_file
from wanjax.pipelines.run import Run
from wanjax.pipelines.runtime import Runtime
from wanjax.pipelines.seeds import check_count, check_seeds, checked_seed, resolve_seeds, seed_to_key_data
from wanjax.pipelines.settings import (
    LOAD_SETTINGS,
    SEAM_SETTINGS,
    TORCH,
    Settings,
    missing_setting,
    parse_size,
    schema,
    seams_without_windows,
)
from wanjax.pipelines.text.tokenizer import Truncation
from wanjax.pipelines.tiny_decoder import read_tiny_decoder
from wanjax.pipelines.torch_noise import TorchNoise
from wanjax.pipelines.tracing import check_decode_memory, check_denoise_memory, check_encode_memory, check_run_memory
from wanjax.pipelines.validation import (
    check_conditioning_type,
    check_frame_dtype,
    check_frames,
    check_function,
    check_latents,
    check_loaded,
    check_modalities,
    check_num_prompts,
    check_settings_type,
    check_strength,
    check_tiling,
    checked_prompt,
    checked_prompt_list,
    checked_prompt_text,
    on_host,
)
from wanjax.pipelines.video_metadata import devices_of, make_metadata, paths_or_array
from wanjax.pipelines.video_shape import encoded_shape
from wanjax.pipelines.windows import check_single_window
from wanjax.schedulers import Scheduler, name_of
from wanjax.sharding import Partitioner, one_device_partitioner

MIN_KEPT_SHARE = 0.95  # a warning says that a picture is cropped if a smaller share of it remains
WHOLE_RUN_ADVICE = "make a video of several windows by pipe(prompt)"
StepCallback = Callable[[Step], bool | None]  # a callback that returns False stops the run


class Component:
    """A descriptor for a component of a pipeline, such as `pipe.transformer`. The component loads at first use."""

    def __set_name__(self, owner: type, name: str):
        self.name = name

    def __get__(self, pipe: Any, owner: type) -> Any:
        return self if pipe is None else pipe.components.get(self.name)

    def __set__(self, pipe: Any, value: object) -> None:
        raise AttributeError(
            f"pipe.{self.name} cannot be replaced: set its weights by nnx.update(pipe.{self.name}, state), or load a "
            "checkpoint with another component by wanjax.load(FOLDER)"
        )


class OtherNamesAdvice(type):
    """A metaclass whose errors for calls of other libraries, such as `from_pretrained`, give wanjax's call."""

    if not TYPE_CHECKING:

        def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
            """Build a pipeline from its parts; for the name of a model, raise WanjaxError."""
            if arguments and isinstance(arguments[0], str | Path):
                name = repr_short(str(arguments[0]))
                raise WanjaxError(f"{cls.__name__}({name}) loads no model: call wanjax.load({name})")
            return super().__call__(*arguments, **keywords)

        def __getattr__(cls, name: str) -> Any:
            raise AttributeError(advice_for(name) or f"type object {cls.__name__!r} has no attribute {name!r}")


@final
@readable_signature
class Pipeline(metaclass=OtherNamesAdvice):
    """A loaded model that makes videos from prompts, and from pictures if the model takes them.

    `wanjax.load` returns a pipeline. Call the pipeline to make a video, or call its three stages: `encode`, `denoise`
    and `decode`. The networks are attributes (`text_encoder`, `transformer`, `vae` ...). A network is loaded at its
    first use, and can be used alone.

    Attributes:
        components: The checkpoint's networks and tokenizers, by name.
        model: The model: its specification and the functions of its family.
        defaults: The settings of a call that passes none.
        domain: What a small model was trained on, or None.
        sizes: The model's own sizes by name, each as (height, width).
        progress: Whether stages show their progress on stderr. None shows it on a terminal and in a notebook.
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
    domain: TrainingDomain | None
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
        compiler: str = SAFE_SET,
        published: Sequence[tuple[int, int]] = (),
        domain: TrainingDomain | None = None,
    ):
        """Build a pipeline from its parts. Most callers use `wanjax.load` instead.

        Args:
            components: The checkpoint's networks and tokenizers.
            model: The model of the family.
            defaults: The settings of a call that passes none.
            partitioner: A mesh with its sharding rules. None uses only JAX's first device.
            compiler: The name of a set of compiler options.
            published: Sizes (height, width) that the model's authors recommend, in addition to the default size.
            domain: What a small model was trained on; None for a model that accepts any prompt.
        """
        self.components = components
        self.model = model
        self.defaults = defaults
        self.partitioner = one_device_partitioner() if partitioner is None else partitioner
        self.compiler = compiler
        self.domain = domain
        self.sizes = named_sizes(model, defaults, published)
        self.progress = None
        self.strategy = EXECUTE
        self._latent_preview = None

    @property
    def model_name(self) -> str:
        """The name of the loaded model, as in its settings, such as `wan2.1-t2v-1.3b`."""
        return self.defaults.model

    @property
    def attention(self) -> AttentionConfig:
        """The denoiser's attention: the argument of `load`, by default the attention of the model's training."""
        return self.model.spec.resolve_attention(self.components.options.get("attention", AUTO))

    @property
    def scheduler(self) -> Scheduler:
        """The solver. Assign a name or a scheduler to change it; WanjaxError is raised if it does not fit the model."""
        return self.model.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: str | Scheduler) -> None:
        self.model = with_scheduler(self.model, scheduler)

    def with_solver(self, name: str | None) -> "Pipeline":
        """Return a pipeline that has another solver and shares everything else with this pipeline.

        Args:
            name: The solver, such as "euler". For None and for the current solver, this pipeline itself is returned.

        Raises:
            WanjaxError: The solver does not fit the model.
        """
        if name in (None, name_of(self.scheduler)):
            return self
        pipe = copy.copy(self)
        pipe.scheduler = name
        return pipe

    @check_keywords
    def free(self, *names: str) -> None:
        """Free the memory of components. A freed component loads again at its next use.

        Args:
            names: Names such as "transformer". Without names, every component is freed.

        Raises:
            WanjaxError: The pipeline has no component of that name.
        """
        self.components.free(*names)

    @overload
    def __call__(  # pyright: ignore[reportOverlappingOverload]  # a str is also a sequence of str
        self, prompt: str, *, seeds: None = None, **keywords: Unpack[CallKeywords]
    ) -> Video: ...

    @overload
    def __call__(self, prompt: str, *, seeds: Sequence[int], **keywords: Unpack[CallKeywords]) -> list[Video]: ...

    @overload
    def __call__(
        self, prompt: Sequence[str], *, seeds: Sequence[int] | None = None, **keywords: Unpack[CallKeywords]
    ) -> list[Video]: ...

    @document_keywords(CallKeywords)
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        seeds: Sequence[int] | None = None,
        **keywords: Unpack[CallKeywords],
    ) -> Video | list[Video]:
        """Make a video from a prompt, or a list of videos from several prompts or seeds.

        Args:
            prompt: What the video shows; it is required. A sequence of prompts makes one video per prompt.
            seeds: One video is made per prompt and seed. None uses `seed`. Give only one of `seeds` and `seed`.
            **keywords: Settings and pictures. None uses the model's default. `noise`, `callback`, `tiling` and
                `batch_guidance` are as in `videos`.

        Returns:
            A `Video`, or a list of videos for a sequence of prompts and for `seeds`.

        Raises:
            WanjaxError: A value is invalid, or the model cannot use it.
            Cancelled: The callback returned False.
        """
        if prompt is None:
            if "prompts" in keywords:
                raise unknown_keyword("prompts", ["prompt"])
            raise SettingError('the prompt is missing: call pipe("a red circle"), or pipe("") for no prompt', "prompt")
        is_list = _is_prompt_list(prompt)
        prompts: Sequence[Any] = prompt if is_list else [prompt]
        videos = self.videos(prompts, seeds=seeds, **keywords)
        return list(videos) if is_list or seeds is not None else next(videos)

    @document_keywords(InputKeywords)
    def videos(
        self,
        prompts: Sequence[str],
        *,
        negative_prompt: str | None = None,
        seeds: Sequence[int] | None = None,
        noise: NoiseInput | None = None,
        callback: StepCallback | None = None,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        skip: Callable[[Mapping[str, Any]], bool] | None = None,
        **keywords: Unpack[InputKeywords],
    ) -> Iterator[Video]:
        """Iterate over one video per prompt and seed, prompt by prompt. Each video is made when the iterator reaches
        it.

        Each prompt is encoded once. The mesh's axis `dp` decides how many videos are denoised at once.

        Args:
            prompts: What the videos show.
            negative_prompt: What they should not show. None uses the model's default.
            seeds: One video is made per prompt and seed. None uses `seed`. Give only one of `seeds` and `seed`.
            noise: Random arrays to use instead of the seed's, as in `denoise`. Only for a single video.
            callback: Called after each step with a `Step`, which holds the latents of all videos that are denoised at
                once. If it returns False, `Cancelled` is raised.
            tiling: Encode pictures and decode latents tile by tile, which saves memory.
            batch_guidance: Run both prompts of a step as one batch.
            skip: Called with the metadata of each video before any video is made. A result of True skips that video.
            **keywords: Settings and pictures. None uses the model's default.

        Returns:
            An iterator over `Video`s.

        Raises:
            WanjaxError: A value is invalid, or the model cannot use it. The error is raised before any video is made.

        Warns:
            WanjaxWarning: A prompt is so long that the model does not read its end, the negative prompt or the flow
                shift has no effect, or as in `prepare`.
        """
        prompts = [checked_prompt(prompt) for prompt in checked_prompt_list(prompts)]
        if not prompts:
            raise WanjaxError("prompts must not be empty, got []: give at least one prompt")
        observers = self._create_observers(callback)
        check_function(skip, "skip", "the metadata of a video")
        check_seeds(seeds, keywords.get("seed"))
        check_count(1 if seeds is None else len(seeds), len(prompts))
        pictures, settings = self.prepare(negative_prompt=negative_prompt, **keywords)
        video_seeds = [settings.seed] if seeds is None else [checked_seed(seed) for seed in seeds]
        all_settings = [
            settings.updated({"prompt": prompt, "seed": seed}) for prompt in prompts for seed in video_seeds
        ]
        if noise is not None:  # checked before the prompts are encoded, which may take long
            if len(all_settings) != 1:
                raise WanjaxError(f"noise is for one video, got {len(all_settings)} videos: make one per call")
            if not self.model.spec.windowing.follows_clip:  # else it is checked window by window
                checked_noise_inputs(noise, self.draws(settings, len(pictures.picture_list("references"))))
        check_tiling(tiling, self.model.vae)
        sources = {name: paths_or_array(keywords.get(name), array) for name, array in pictures.items()}
        options: dict[str, Any] = {"tiling": tiling, "batch_guidance": batch_guidance}
        requests = [PreparedRequest(x, self.metadata(x, sources | {"noise": noise}, **options)) for x in all_settings]
        if skip:
            requests = [request for request in requests if not skip(request.metadata)]
        if requests:
            check_run_memory(self, settings, pictures, **options)
            _warn(*self.notes(*(request.settings for request in requests)))
        return self._run_videos(Run(self, requests, pictures, noise=noise, observers=observers, **options))

    def _run_videos(self, run: Run) -> Iterator[Video]:
        """Yield the videos of a run."""
        for request, frames in run:
            with run.decode_stage(request):
                video = np.concatenate([np.asarray(chunk) for chunk in frames])
            yield Video(video, request.settings.fps, request.metadata)

    @document_keywords(InputKeywords)
    def prepare(self, **keywords: Any) -> tuple[Pictures, Settings]:
        """Read the pictures, and complete the settings of a video.

        Without a size, the video has the proportions of `image` or `video` and about the default area. A size such as
        480p sets that area. Without `frames`, the video has the length of `video`.

        Args:
            **keywords: Settings and pictures. A picture is a file, an image of Pillow, or a uint8 array [H W 3] of
                NumPy or JAX. A clip is a file, a sequence of pictures, or a uint8 array [T H W 3].

        Returns:
            The loaded pictures and the settings.

        Raises:
            WanjaxError: A picture is missing, cannot be read or is not supported by the model, or a setting is invalid.

        Warns:
            WanjaxWarning: Both `image` and `video` are given (the warning says how the model uses each), a video of
                several windows starts from a clip, no size is given and the model's nearest size cuts off more than a
                twentieth of the picture, or `resize` is given without a picture.
        """
        spec = self.model.spec
        settings = {
            name: value for name, value in keywords.items() if name not in INPUT_SPECS and name not in spec.input_names
        }
        sources = {name: on_host(keywords[name]) for name in keywords.keys() - settings if keywords[name] is not None}
        if not sources.get(REFERENCES.name, True):  # an empty list
            del sources[REFERENCES.name]
        video_settings = self.settings(**settings)
        check_inputs(sources, video_settings.model, spec.task, spec.inputs)
        frames = self._clip_frames(video_settings, settings)
        pictures = read_pictures(sources, spec.inputs, frames=frames, fps=video_settings.fps)
        pictures = spec.windowing.match_frame_rate(pictures, sources, video_settings)
        if any(video_settings.margins):
            pictures = add_margins(pictures, video_settings.margins)
        spec.check_pictures(pictures, video_settings)
        if {"image", "video"} <= pictures.keys() and (explanation := spec.image_with_video):
            message = f"a picture and a clip are given together: {explanation}"
            _warn(message)
        video_settings = self._with_input_video(video_settings, pictures.get("video"), settings)
        if "video" in pictures and spec.starts_from_video:
            check_rule(video_settings.guidance_rule, video_settings.guided, video_settings.steps_with_strength)
            if (count := video_settings.windows) > 1:
                message = f"only the first of {count} windows starts from the clip: the others continue the video"
                _warn(message)
        shape = self._shape_from_pictures(pictures, video_settings, settings)
        video_settings = video_settings.updated(shape)
        if "height" in shape and (cropping := _describe_cropping(pictures, video_settings)):
            _warn(cropping)
        if not pictures and video_settings.resize != self.defaults.resize:
            message = f"resize {video_settings.resize} has no effect without a picture or a clip"
            _warn(message)
        self.check_memory(video_settings)
        return pictures, video_settings

    def _clip_frames(self, settings: Settings, keywords: Mapping[str, Any]) -> int:
        """Count the used frames of a clip.

        All windows use the frames of a control clip. Only the first window uses the frames of any other clip.
        """
        spec, is_limited = self.model.spec, keywords.get("windows") is not None
        return spec.windowing.clip_frames(settings, spec.continuation_input, is_limited=is_limited)

    def check_memory(self, settings: Settings) -> None:
        """Raise WanjaxError if a video cannot fit into the devices' memory. A pipeline that only traces does not check.

        Args:
            settings: Settings of the video.
        """
        check_settings_type(settings)
        sizes = self.components.sizes
        if weight_bytes := max((sizes.get(name, 0) for name in self.model.spec.denoisers), default=0):
            check_video(settings, weight_bytes, min_step_bytes(self.model, settings), self.partitioner.mesh.size)

    def _with_input_video(self, settings: Any, video: Any, keywords: Mapping[str, Any]) -> Any:
        """Return the settings with the step cache for the steps that remain after those that an input video skips.

        Raises WanjaxError for a strength without an input video, or for a model that cannot start from one, and if the
        step cache reuses none or all of the remaining steps.
        """
        spec = self.model.spec
        if settings.strength != self.defaults.strength:
            check_strength(settings, has_video=video is not None, starts_from_video=spec.starts_from_video)
        if video is None or not spec.starts_from_video:
            return settings
        requested = self.defaults.updated({"cache": keywords.get("cache")}).cache
        return replace(settings, cache=spec.cache_rule(replace(settings, cache=requested), has_video=True))

    def _shape_from_pictures(
        self, pictures: Pictures, settings: Settings, keywords: Mapping[str, Any]
    ) -> dict[str, int]:
        """Derive height, width and frames from the pictures, unless the caller's keywords set them."""
        shape, windowing, picture = dict[str, int](), self.model.spec.windowing, pictures.first
        if windowing.follows_clip:
            is_limited, picture = keywords.get("windows") is not None, pictures["video"][0]
            shape |= windowing.video_shape(pictures, settings, is_limited=is_limited)
        sets_area_only = keywords.get("size") == resolution_name(settings.size)
        if picture is not None and (sets_area_only or not keywords.keys() & {"size", "height", "width"}):
            shape |= dict(zip(("height", "width"), self.model.size_for(picture.shape, settings), strict=True))
        if windowing.follows_clip:
            return shape
        needed_frames = self._clip_frames(settings, keywords)
        if (clip := pictures.clip("video")) is not None and (count := len(clip)) < needed_frames:
            if keywords.get("frames") or needed_frames > settings.frames:
                problem = f"the video has {pluralize(count, 'frame')}, but {needed_frames} are needed"
                raise SettingError(f"{problem}: give a longer video, or fewer frames", "video")
            factor = self.model.vae.temporal_factor
            shape["frames"] = (count - 1) // factor * factor + 1
            if shape["frames"] == 1:
                problem = f"the video has {pluralize(count, 'frame')}, but at least {factor + 1} are needed"
                advice = "give a longer video, or a picture as image, or set frames to 1"
                raise SettingError(f"{problem}: {advice}", "video")
        return shape

    @document_keywords(SettingsKeywords)
    def settings(self, *, size: tuple[int, int] | str | None = None, **settings: Any) -> Any:
        """Return the settings of a video: the model's defaults, overridden by the keywords.

        Args:
            size: (height, width), a text such as "832x480", width first, or a name in the model's `sizes`.
            **settings: Other settings. A `seed` of "random" or -1 draws a seed below 2^32.

        Returns:
            The settings, of the family's type.

        Raises:
            WanjaxError: A setting is unknown or invalid, or differs from the loaded model's, such as a `dtype`.
        """
        settings = dict(self.model.spec.complete_settings(settings))
        if settings.get("then"):
            settings["then"] = schema(Settings)["then"].read(settings["then"])
            if settings.get("windows") is None:
                settings["windows"] = 1 + len(settings["then"].splitlines())
        if size is not None:
            check_alternatives({**settings, "size": size})
            settings |= parse_size(size, self.sizes)
        defaults, fields = self.defaults.to_json(), schema(type(self.defaults))
        for name in sorted(settings.keys() - defaults.keys()):
            if name not in fields:
                raise unknown_keyword(name, ("size", *defaults), of_call=CALL_KEYWORDS)
            if settings[name] is not None:
                raise missing_setting(name, self.model_name, defaults)
        check_loaded(self.defaults, {name: settings.pop(name) for name in LOAD_SETTINGS if name in settings})
        if settings.get("seed") is not None:
            settings |= {"seed": checked_seed(settings["seed"])}
        video_settings = self.defaults.updated(settings)
        self.model.spec.check_settings(video_settings)
        if not self.model.spec.in_windows(video_settings):
            for name in SEAM_SETTINGS:
                if settings.get(name) is not None and getattr(video_settings, name) != getattr(self.defaults, name):
                    raise seams_without_windows(name, "windows", name)
        check_separate_forwards(video_settings.cache, mesh_sizes=self.partitioner.mesh.shape)
        return replace(video_settings, cache=self.model.spec.cache_rule(video_settings))

    @document_keywords(InputKeywords)
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
            negative_prompt: What it should not show. None uses the model's default.
            tiling: Encode pictures tile by tile, which saves memory.
            **keywords: Settings and pictures. Pictures are encoded for a video of this `size` and number of `frames`.
                Settings of the denoising, such as `steps`, have no effect here: give them to `denoise`.

        Returns:
            A named tuple of arrays, the family's conditioning.

        Raises:
            WanjaxError: A value is invalid, or the model cannot use it.

        Warns:
            WanjaxWarning: A prompt is so long that the model does not read its end, or as in `prepare`.
        """
        pictures, settings = self.prepare(prompt=checked_prompt(prompt), negative_prompt=negative_prompt, **keywords)
        check_single_window(settings, "encode", WHOLE_RUN_ADVICE)
        check_encode_memory(self, settings, pictures, tiling=tiling)
        _warn(*self.truncation_notes(settings))
        run = Run(self, [PreparedRequest(settings)], pictures, tiling=tiling, observers=self._create_observers(None))
        return run.encode()[settings.prompt]

    @check_keywords
    def encode_prompts(
        self, prompt: str, negative_prompt: str | None = None, *, follow: str | None = None
    ) -> Conditioning:
        """Encode a prompt and a negative prompt, without pictures.

        Args:
            prompt: The prompt.
            negative_prompt: The negative prompt; None uses the model's default.
            follow: Which reference implementation to match; None is the model's default.
        """
        texts = {"prompt": checked_prompt(prompt), "negative_prompt": negative_prompt, "follow": follow}
        settings = self.defaults.updated(texts)
        _warn(*self.truncation_notes(settings))
        return self.model.encode_text(self.runtime, settings)

    @check_keywords
    def truncations(self, prompt: str, *, follow: str | None = None) -> Sequence[Truncation]:
        """List the parts that the tokenizers cut off from a prompt that is too long.

        Args:
            prompt: The prompt.
            follow: Which reference implementation to match; None is the model's default.
        """
        return truncations(self.model, self.runtime, checked_prompt_text(prompt), follow or self.defaults.follow)

    def truncation_notes(self, *videos: Settings) -> list[str]:
        """Return a note on each prompt and negative prompt of videos that is too long for the model.

        Args:
            videos: The settings of the videos.
        """
        return truncation_notes(self.model, self.runtime, videos, self.defaults.negative_prompt)

    def notes(self, *videos: Settings) -> list[str]:
        """Return notes on settings of videos that are valid but probably not intended. A note says that guidance is off
        only if the negative prompt is not the model's default.

        Args:
            videos: The settings of the videos.
        """
        notes: list[str] = []
        for settings in videos:
            if settings.negative_prompt != self.defaults.negative_prompt:
                notes += guidance_notes(settings)
            notes += shift_notes(self.model, settings, self.defaults.flow_shift)
            notes += shape_notes(self.domain, settings)
            notes += word_notes(self.domain, settings.model, settings.prompts)
        return list(dict.fromkeys([*notes, *self.truncation_notes(*videos)]))

    @check_keywords
    def draws(self, settings: Settings, references: int = 0) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a video's random arrays, by name; the argument `noise` may hold any of them.

        Args:
            settings: The settings of the video.
            references: The number of latent frames of reference pictures.
        """
        check_settings_type(settings)
        check_single_window(settings, "custom noise", "leave out the noise or windows")
        return self.model.spec.noise_inputs(settings, references)

    @check_keywords
    def noise(self, settings: Settings, references: int = 0) -> Float[Array, "B C T H W"]:
        """Draw the initial noise of the settings' seed, float32 [1 C T H W], for a video that does not start from an
        input video.

        Args:
            settings: The settings of the video.
            references: The number of latent frames of reference pictures.
        """
        shape = self.draws(settings, references)[INITIAL]
        if settings.rng != TORCH:
            return self.call(draw, shape, seed_to_key_data([settings.seed]))
        spec = self.model.spec
        torch_noise = TorchNoise([settings.seed], spec.noise_spec, settings.dtype, executes=self.strategy.executes)
        for posterior in spec.posteriors:  # drawn before the initial noise
            if posterior.input_name in spec.required_inputs:
                torch_noise.draw_posterior(self.draws(settings)[posterior.noise_name], settings.vae_dtype)
        return jnp.asarray(torch_noise.draw(shape), jnp.float32)

    @document_keywords(SettingsKeywords)
    def denoise(
        self,
        conditioning: Conditioning,
        *,
        noise: NoiseInput | None = None,
        callback: StepCallback | None = None,
        switched: Callable[[Switch], Any] | None = None,
        batch_guidance: bool = False,
        seeds: Sequence[int] | None = None,
        keep: str | Path | None = None,
        continued: Callable[[int, int], Any] | None = None,
        **settings: Unpack[SettingsKeywords],
    ) -> Any:
        """Denoise latents from noise: the second stage.

        With guidance, each step runs the network twice, once per prompt. With `batch_guidance`, or on a mesh whose axis
        `dp` splits the two prompts, it runs once on a batch of both.

        Args:
            conditioning: The output of `encode`. For several `seeds`, its first axis has one prompt per seed.
            noise: The initial noise [1 C T H W], or a mapping with any of the arrays that `draws` names. None draws the
                noise from the seed.
            callback: Called after each step with a `Step`, perhaps before the device has finished the step. If it
                returns False, `Cancelled` is raised.
            switched: Called with a `Switch` when a second network takes over.
            batch_guidance: Run both prompts of a step as one batch.
            seeds: One video is made per seed. None uses `seed`. Give only one of `seeds` and `seed`.
            keep: A file that stores the state from time to time. If the run stops, the same call resumes from the last
                stored step. The state of another video is replaced; a file without a state is an error. A model of
                several passes uses one file per pass. Causal models do not support it.
            continued: Called with the number of completed steps and of all steps when a run resumes from `keep`.
            **settings: Settings of the video. None uses the model's default, or the value for which pictures were
                encoded.

        Returns:
            Normalised latents [B C T H W], float32, one video per seed. A model with several modalities of latents
            returns a mapping of them.

        Raises:
            WanjaxError: A shape does not fit the video, a setting is invalid, or latents are not finite after a step.
            Cancelled: The callback returned False.
        """
        check_function(switched, "switched", "a Switch")
        check_function(continued, "continued", "the number of completed steps", "the number of all steps")
        video_settings = self._complete_settings(conditioning, dict(settings))
        seeds = resolve_seeds(seeds, settings.get("seed"), video_settings.seed)
        observers = [*self._create_observers(callback), *([SwitchObserver(switched)] if switched else [])]
        if keep is not None:
            self.model.spec.check_not_chunked(video_settings.model, "a file to continue from")
            check_state_file(keep)
            observers.append(ResumeObserver(keep, self.partitioner, continued))
        check_num_prompts(conditioning, len(seeds))
        check_denoise_memory(self, conditioning, video_settings, num_videos=len(seeds), batch_guidance=batch_guidance)
        requests = [PreparedRequest(video_settings)]
        run = Run(self, requests, noise=noise, batch_guidance=batch_guidance, observers=observers)
        with run.stage("denoise"):
            latent_chunks = tuple(run.latents(conditioning, video_settings, seeds))
        return latent_chunks[0] if len(latent_chunks) == 1 else self.call(join, 2, latent_chunks)

    def _create_observers(self, callback: StepCallback | None) -> list[Observer]:
        """Create the observers of a run: one for its progress, and one for the callback if there is a callback.

        Raises WanjaxError for a callback that is not a function of one argument.
        """
        check_function(callback, "callback", "a Step")
        return [ProgressObserver(self.progress), *([CallbackObserver(callback)] if callback else [])]

    def _complete_settings(self, conditioning: Conditioning, settings: dict[str, Any]) -> Any:
        """Complete the settings of a video from the output of `encode`; raise WanjaxError if the two do not match.

        A missing size or number of frames is taken from the encoded pictures.
        """
        check_conditioning_type(conditioning, self.model.conditioning_type)
        settings = {name: value for name, value in settings.items() if value is not None}
        for name in sorted(settings.keys() & {"prompt", "negative_prompt"}):
            if settings[name] in ("", getattr(self.defaults, name)):
                continue  # settings from `pipe.settings()` have these values
            raise SettingError(f"{name} has no effect on encoded prompts: give {name} to `encode`", name)
        latents = [x for x in conditioning if x is not None and x.ndim == 5]
        if (shape := encoded_shape(conditioning)) is not None:
            settings = {"frames": shape.frames} | settings
            settings = ({} if "size" in settings else {"height": shape.height, "width": shape.width}) | settings
        elif latents and not settings.keys() & {"size", "height", "width"}:
            settings["size"] = tuple(self.model.vae.spatial_factor * size for size in latents[0].shape[3:])
        video_settings = self.settings(**settings)
        check_single_window(video_settings, "denoise", WHOLE_RUN_ADVICE)
        check_compatible(self.model, conditioning, video_settings)
        return self._with_input_video(video_settings, getattr(conditioning, "video_latents", None), settings)

    @document_keywords(InputKeywords)
    def stream(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        noise: NoiseInput | None = None,
        callback: StepCallback | None = None,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        **keywords: Unpack[InputKeywords],
    ) -> Iterator[Clip]:
        """Iterate over the frames of a video in chunks. Each chunk is made when the iterator reaches it. Only causal
        models have chunks.

        The frames equal those of `pipe(prompt)` with the same keywords.

        Args:
            prompt: What the video shows.
            negative_prompt: What it should not show. None uses the model's default.
            noise: Random arrays that replace the seed's, as in `denoise`.
            callback: Called after each step with a `Step`. If it returns False, `Cancelled` is raised.
            tiling: Decode tile by tile, which saves memory.
            batch_guidance: Run both prompts of a step as one batch.
            **keywords: Settings and pictures. None uses the model's default.

        Returns:
            An iterator over uint8 arrays [T H W 3].

        Raises:
            WanjaxError: A value is invalid, or the model is not causal.
        """
        self.model.spec.check_chunked(self.model_name)
        check_tiling(tiling, self.model.vae)
        observers = self._create_observers(callback)
        pictures, settings = self.prepare(prompt=checked_prompt(prompt), negative_prompt=negative_prompt, **keywords)
        resolve_seeds(None, keywords.get("seed"), settings.seed)
        checked_noise_inputs(noise, self.draws(settings))
        options: dict[str, Any] = {"tiling": tiling, "batch_guidance": batch_guidance}
        check_run_memory(self, settings, pictures, **options)
        _warn(*self.notes(settings))
        run = Run(
            self,
            [PreparedRequest(settings)],
            pictures,
            noise=noise,
            observers=observers,
            **options,
        )
        return (np.asarray(clip) for _, frames in run for clip in frames)

    @document_keywords(SettingsKeywords)
    def denoise_chunks(
        self,
        conditioning: Conditioning,
        *,
        noise: NoiseInput | None = None,
        callback: StepCallback | None = None,
        batch_guidance: bool = False,
        seeds: Sequence[int] | None = None,
        **settings: Unpack[SettingsKeywords],
    ) -> Iterator[AnyLatents]:
        """Iterate over the latents [B C T H W] of a causal model's video. Each chunk is made when the iterator reaches
        it.

        `denoise` returns the same chunks as one array.

        Args:
            conditioning: The output of `encode`.
            noise: Noise that replaces the seed's: the initial noise, or arrays by name.
            callback: Called after each step with a `Step`, which has the latents of one chunk. A result of False ends
                the run.
            batch_guidance: Whether both prompts run in one forward pass.
            seeds: The seed of each video; None uses the one `seed` of the settings.
            settings: The settings.
        """
        self.model.spec.check_chunked(self.model_name)
        check_function(callback, "callback", "a Step")
        video_settings = self._complete_settings(conditioning, dict(settings))
        seeds = resolve_seeds(seeds, settings.get("seed"), video_settings.seed)
        check_num_prompts(conditioning, len(seeds))
        checked_noise_inputs(noise, self.model.spec.noise_inputs(video_settings, num_videos=len(seeds)))
        requests = [PreparedRequest(video_settings)]
        observers = [CallbackObserver(callback)] if callback else []
        run = Run(self, requests, noise=noise, batch_guidance=batch_guidance, observers=observers)
        return run.latents(conditioning, video_settings, seeds)

    @check_keywords
    def decode_stream(self, latent_chunks: Iterable[LatentsInput], *, tiling: Tiling | None = None) -> Iterator[Clip]:
        """Yield the frames, uint8 [T H W 3], of each chunk of latents [1 C T H W] as soon as it is decoded.

        Args:
            latent_chunks: Latents of consecutive chunks.
            tiling: Decode tile by tile, which saves memory.
        """
        self.model.spec.check_chunked(self.model_name)
        for frames in Run(self, [], tiling=tiling).frames(iter(latent_chunks)):
            yield np.asarray(frames)

    def preview_with(self, file: str | Path) -> None:
        """Use a tiny decoder for all further previews.

        Args:
            file: A TAEHV decoder for the model's latents.

        Raises:
            WanjaxError: The file is not such a decoder.
        """
        self._latent_preview = read_tiny_decoder(file, self.model.spec.latent_shape(self.defaults)[1])

    def latent_preview(self) -> LatentPreview:
        """Return the object that makes previews: the decoder of `preview_with`, or a linear map from latents to
        colours.

        The first call encodes a small clip to fit the map. If the autoencoder is not loaded, the first call loads and
        then frees the autoencoder.
        """
        if self._latent_preview is None:
            was_loaded, config = self.components.has("vae"), self.model.vae
            self._latent_preview = fit_colours(self.encode_video, config.spatial_factor, config.temporal_factor)
            if not was_loaded:
                self.free("vae")
        return self._latent_preview

    @check_keywords
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
            latents: The output of `denoise` for one video: [1 C T H W], or a mapping for several modalities.
            dtype: uint8, or a float dtype for values in [0, 1].
            tiling: Decode tile by tile, which saves memory. `Tiling()` has the sizes that the model's authors chose.
            callback: Called after each chunk with the number of decoded chunks and of all chunks.
            seed: The seed of the noise that some decoders add.

        Returns:
            Frames [T H W 3].

        Raises:
            WanjaxError: The latents do not fit the model, or are not finite.
        """
        check_function(callback, "callback", "the number of decoded chunks", "the number of all chunks")
        check_frame_dtype(dtype)
        chunks, total = [], self.chunks(latents)
        check_tiling(tiling, self.model.vae)
        check_decode_memory(self, select_modality(latents).shape, tiling=tiling)
        run = Run(self, [], tiling=tiling, observers=self._create_observers(None))
        with run.stage("decode"):
            for chunk in run.frames([latents], dtype, seed=seed):
                chunks.append(np.asarray(chunk))
                if callback:
                    callback(len(chunks), total)
        return np.concatenate(chunks)

    @check_keywords
    def chunks(self, latents: AnyLatents) -> int:
        """Count the chunks in which latents [1 C T H W] are decoded.

        Args:
            latents: Latents of one video.
        """
        self._check_latents(latents)
        frames = select_modality(latents).shape[2]
        return chunk_count(frames, self.model.spec.decode_lengths(frames))

    @check_keywords
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
            latents: Latents of one video, [1 C T H W], or a mapping by modality.
            dtype: uint8, or a float dtype for frames in [0, 1].
            tiling: Decode tile by tile, which saves memory.
            seed: The seed of the noise that some decoders add; None is the model's default.
        """
        self._check_latents(latents)
        check_frame_dtype(dtype)
        check_tiling(tiling, self.model.vae)
        check_decode_memory(self, select_modality(latents).shape, tiling=tiling)
        yield from Run(self, [], tiling=tiling).frames([latents], dtype, seed=seed)

    def _check_latents(self, latents: Any) -> None:
        """Raise WanjaxError unless the latents can be the latents of one video of the model."""
        check_modalities(latents, self.model.spec.extra_modalities, self.model_name)
        check_latents(select_modality(latents), self.model.vae.latent_channels)

    @check_keywords
    def encode_video(self, frames: FramesInput, *, tiling: Tiling | None = None) -> Float[ArrayOrShape, "1 C _T _H _W"]:
        """Encode frames to latents. `decode` restores them, with the loss of the autoencoder.

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
        self.model.spec.check_length(count, self.model_name)
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
        """Build the metadata of a video: all inputs and options that determine it, as JSON.

        Args:
            settings: The video's settings.
            sources: Pictures, clips and noise by name, as files or arrays.
            tiling: The tiling for encoding and decoding.
            batch_guidance: Whether both prompts of a step run as one batch.
            digests: SHA-256 digests of remote pictures and clips, by URL.
        """
        table_name, tables = self.model.spec.cache_rule(settings).table_name, self.model.tables
        tables = tables.for_image_input if sources.get("image") is not None else tables
        return make_metadata(
            settings,
            sources,
            loaded=self.components.metadata,
            scheduler=self.scheduler,
            partitioner=self.partitioner,
            tiling=check_tiling(tiling, self.model.vae),
            batch_guidance=batch_guidance,
            digests={**(digests or {}), **({CACHE_TABLE_KEY: table_digest(tables, table_name)} if table_name else {})},
        )

    @property
    def runtime(self) -> Runtime:
        """Components, mesh, compiler options and strategy: the argument of the model's functions."""
        return Runtime(self.components, self.partitioner, self.compiler, self.strategy)

    def call(self, program: Program, static: Any, *arguments: Any) -> Any:
        """Call a program on the pipeline's devices.

        Args:
            program: The program.
            static: A hashable value that the program is compiled for.
            arguments: Trees of arrays.
        """
        return self.runtime.call(program, static, *arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipeline":
        """Copy the networks.

        A copied network shares its weights, which are immutable arrays, until you assign new weights.
        """
        pipe = copy.copy(self)
        pipe.components = copy.deepcopy(self.components, memo)
        return pipe

    def __getstate__(self) -> dict[str, Any]:
        """Raise WanjaxError: a pipeline cannot be pickled, because its arrays are on this process's devices."""
        raise WanjaxError(
            f"a pipeline cannot be pickled: call wanjax.load({self.model_name!r}) in the other process, or send "
            "the arrays of nnx.state(pipe.transformer)"
        )

    def __copy__(self) -> "Pipeline":
        """Return a shallow copy: setting an attribute of the copy does not change this pipeline."""
        pipe = object.__new__(Pipeline)
        vars(pipe).update(vars(self))
        return pipe

    def with_strategy(self, strategy: Strategy, components: Components | None = None) -> "Pipeline":
        """Return a pipeline that has another strategy and shares everything else with this pipeline.

        Args:
            strategy: Whether to execute programs or to trace them.
            components: Other components; None shares the components of this pipeline.
        """
        pipe = copy.copy(self)
        pipe.strategy, pipe.components = strategy, components or self.components
        return pipe

    if not TYPE_CHECKING:  # type checkers do not see this method, so they report unknown attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; for a name of another library, the message says what to use instead."""
            if advice := advice_for(name) or _setting_advice(name):
                raise AttributeError(advice)
            names = dir(self)
            if not (name.startswith("_") or name in names) and (similar := near_names(name, names, 1)):
                raise AttributeError(f"a pipeline has no {name}: did you mean {similar[0]}?")
            return object.__getattribute__(self, name)  # raises the usual AttributeError of Python

        def __setattr__(self, name: str, value: object) -> None:
            """Set an attribute; raise AttributeError for an unknown attribute, because it would have no effect."""
            attributes = [*type(self).__annotations__, *dir(type(self))]
            if name not in attributes:
                similar = [attribute for attribute in near_names(name, attributes, 1) if not attribute.startswith("_")]
                hint = f"did you mean {similar[0]}?" if similar else "you can set pipe.progress and pipe.scheduler"
                advice = advice_for(name) or _setting_advice(name)
                raise AttributeError(advice or f"a pipeline has no attribute {name} to set: {hint}")
            if name == "progress" and not isinstance(value, bool | None):
                raise AttributeError(f"pipe.progress must be True, False or None, got {repr_short(value)}")
            if name in LOAD_KEYWORDS and isinstance(getattr(type(self), name, None), property):
                raise AttributeError(f"pipe.{name} cannot be set: {LOAD_ADVICE.format(name)}")
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        mesh = (
            "" if self.partitioner.is_single_device else f" ({self.partitioner}, rules {self.partitioner.rules_name})"
        )
        precision = "" if self.defaults.precision == UNQUANTIZED.name else f", {self.defaults.precision}"
        summary = f"{self.model_name}, {self.model.spec.task}, {self.defaults.dtype}{precision}"
        lines = [f"{type(self).__name__}: {summary}, on {devices_of(self.partitioner)}{mesh}"]
        lines += [f"  {name}: {self._component_state(name)}" for name in self.components.names]
        return "\n".join([*lines, f"  scheduler: {name_of(self.scheduler)}"])

    def _component_state(self, name: str) -> str:
        """Describe whether a component is loaded, and how many bytes a network has on all devices together."""
        if not self.components.has(name):
            return "not loaded"
        component = self.components.get(name)
        if not isinstance(component, nnx.Module):
            return "loaded"
        weights = jax.tree.leaves(nnx.state(component))
        dtypes = " and ".join(sorted({str(weight.dtype) for weight in weights}))
        return f"loaded, {sum(weight.nbytes for weight in weights) / 1e6:,.1f} MB in {dtypes}"


def _warn(*notes: str) -> None:
    """Issue a WanjaxWarning for each note, at the user's line."""
    for note in notes:
        warnings.warn(note, WanjaxWarning, stacklevel=user_stack_level())


def _describe_cropping(pictures: Pictures, settings: Settings) -> str | None:
    """Say how much of a picture the size of the video cuts off. Return None if enough of the picture remains."""
    picture = pictures.first
    if picture is None or settings.resize != "crop":
        return None
    share, (height, width) = visible_share(picture.shape, settings.size), picture.shape[:2]
    if share >= MIN_KEPT_SHARE:
        return None
    return (
        f"the video has {settings.width}x{settings.height} pixels, for which {1 - share:.0%} of the {width}x{height} "
        "picture is cut off: to keep all of it, give a size of the picture's proportions, or set resize to pad"
    )


def _setting_advice(name: str) -> str | None:
    """Describe how to pass a setting of a video, because a pipeline has no such attribute; None for any other name."""
    if name not in schema(Settings):
        return None
    call = "pipe(prompt)" if name == "prompt" else f"pipe(prompt, {name}=...)"
    return f"{name} is a setting of a video and not of a pipeline: {call} sets it, and pipe.defaults has the default"


def _is_prompt_list(prompt: object) -> bool:
    """Return True for a sequence of prompts, and False for one prompt."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
