# SPDX-License-Identifier: Apache-2.0
"""The interface between the library and a family of models: `ModelSpec` for data, and `VideoModel` for methods.

A family implements a `VideoModel`, whose methods run on the host, and a `denoiser.Denoiser`, whose methods are traced.
`ModelSpec` has the methods that need only data. No family overrides them.
"""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.checkpoints.network_kinds import Config
from wanjax.errors import SettingError, UnsupportedError, WanjaxError, WanjaxWarning
from wanjax.execution import ArrayOrShape
from wanjax.figures import pluralize
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import InputSpec
from wanjax.media.pictures import Pictures, size_for_area
from wanjax.pipelines.caching.cache_tables import NO_TABLES, CacheTables
from wanjax.pipelines.caching.rules import NONE, AutoRule, CacheRule, resolve_rule, warn_nothing_reused
from wanjax.pipelines.denoiser import Denoiser, ModelInputs, Posterior, Preparation, pad_front, select_modality
from wanjax.pipelines.frames import AnyLatents, Decoded, decode_latents
from wanjax.pipelines.guidance import CLASSIFIER_FREE, check_rule, dynamic_scales
from wanjax.pipelines.noise_inputs import INITIAL, STEP_NOISE, VIDEO, noise_name
from wanjax.pipelines.phases import Phase
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.pipelines.settings import SIGMA_SCHEDULES, Settings
from wanjax.pipelines.text.tokenizer import TokenBatch, Truncation
from wanjax.pipelines.torch_noise import NoiseSpec
from wanjax.pipelines.validation import FieldShape, check_conditioning
from wanjax.pipelines.video_shape import encoded_shape
from wanjax.pipelines.windows import CONTROL_INPUT, IMAGE_INPUT, Windowing
from wanjax.schedulers import Scheduler, resolve
from wanjax.schedulers.base import TRAIN_STEPS, Schedule

Shape = tuple[int, ...]
Field = ArrayOrShape | np.ndarray  # the value of a field in `encode`'s output
ConditioningSelf = TypeVar("ConditioningSelf")
OLD_TEXT_LENGTH = 226  # a wrong prompt length, in files from scripts that preceded wanjax


@runtime_checkable
class Conditioning(Protocol):
    """The output of `encode`: a NamedTuple that a family defines. Each field is None or an array [1 ...]."""

    def __iter__(self) -> Iterator[Field | None]: ...

    def _asdict(self) -> dict[str, Field | None]: ...

    def _replace(self: ConditioningSelf, **fields: Any) -> ConditioningSelf: ...


ConditioningT = TypeVar("ConditioningT", bound=Conditioning)  # the type that a family defines


@runtime_checkable
class VAEConfig(Protocol):
    """The part of an autoencoder's config that shared code uses.

    Args:
        latent_channels: The number of channels of its latents.
        spatial_factor: The number of pixels per latent position along height and width.
        temporal_factor: The number of frames per latent frame, except the first latent frame, which has one frame.
        patch: The number of pixels per patch along height and width; the encoder's convolutions read patches.
        tiling: The default tiling, for frames that are decoded in tiles.
    """

    @property
    def latent_channels(self) -> int: ...

    @property
    def spatial_factor(self) -> int: ...

    @property
    def temporal_factor(self) -> int: ...

    @property
    def patch(self) -> int: ...

    @property
    def tiling(self) -> Tiling: ...

    def decode_lengths(self, frames: int) -> tuple[int, int]:
        """Return the number of latent frames in the first decoded chunk of a video, and in each later one.

        Args:
            frames: The number of latent frames of the video.
        """
        ...


class ForwardCost(NamedTuple):
    """The work of one forward pass of the denoiser for one prompt, for plans and profiles.

    Args:
        num_tokens: The length of self-attention's sequence.
        num_layers: The number of blocks of the network.
        num_heads: The number of attention heads.
        width: The number of channels of a token.
        attention_flops: The operations of self-attention's two products; a multiply-add counts as two.
        flops: The operations by part of the network.
        has_single_sequence: Whether self-attention is over a single sequence. TPUs can then use ring attention.
    """

    num_tokens: int
    num_layers: int
    num_heads: int
    width: int
    attention_flops: int
    flops: Mapping[str, int]
    has_single_sequence: bool = False


class ModalitySpec(NamedTuple):
    """Latents [B C L] that are denoised together with a video's, such as the latents of its sound.

    Args:
        channels: The number of channels, C.
        per_second: The length L for each second of the video.
    """

    channels: int
    per_second: float


class SamplingPass(NamedTuple):
    """One pass of denoising over a video. Later passes start from the latents of the previous pass, with added noise.

    Args:
        divisor: The height and width of the video are divided by this number in the pass.
        steps: The number of steps of the schedule; None uses the settings.
        strength: The share of the steps that run, starting from the level of the added noise.
        guidance_scale: The guidance scale of all steps; None uses the settings.
        denoisers: The components among `ModelSpec.denoisers` that run the steps; empty for all.
    """

    divisor: int = 1
    steps: int | None = None
    strength: float | None = None
    guidance_scale: float | None = None
    denoisers: tuple[str, ...] = ()


class Chunk(NamedTuple):
    """The frames of a video that are denoised together.

    Args:
        index: The index of the chunk, from 0.
        num_chunks: The number of chunks of the video.
        frames: The latent frames of the chunk.
    """

    index: int
    num_chunks: int
    frames: range

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.num_chunks


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The data that shared code needs to know about a checkpoint.

    Args:
        task: The task, in words.
        size_multiple: Height and width must be multiples of this number of pixels.
        vae: The autoencoder's config.
        scheduler: The solver.
        networks: The networks' configs that were read, by component.
        cache_tables: The tables for step caches.
        denoisers: The names of the denoising networks, which all have the same shapes. Each step uses one network.
        inputs: The inputs besides the prompt.
        has_two_reference_implementations: True if the authors' code and diffusers differ. The setting `follow` then
            selects one of them.
        supports_radial: True if the denoiser's self-attention can be radial.
        supports_sparse_linear: True if the denoiser supports the extra projection of sparse-linear attention.
        supports_int8_attention: True if the product of self-attention's queries and keys can be in int8: heads of 128,
            all keys.
        trained_attention: The attention that the model was trained with.
        frame_multiple: Latent frames are padded at the front to a multiple of this number, and cut at the end.
        chunk_frames: The number of latent frames in a chunk of a causal model; 0 if a video is denoised as a whole.
        max_frames: The maximum number of frames that the autoencoder can encode or decode.
        fixed_size: The only supported (height, width); None if any size is supported.
        windowing: How the model makes videos of several windows.
        posteriors: The encoded images or videos whose latents are sampled from the autoencoder's posterior.
        noise_spec: How the reference draws noise, for the setting `rng`.
        extra_modalities: The other modalities, by name, such as sound, whose latents are denoised with the video. Empty
            if `chunk_frames` is not 0.
        passes: The passes in which a video is denoised. A single pass if `chunk_frames` is not 0.
        text_length: The number of tokens in `prompt_embeds`, if it is the same for all prompts.
        skippable_blocks: The number of the denoiser's blocks, if a prediction can skip some of them, else 0.
        config_entries: The entries that `with_attention` adds to the config.json of the denoiser.
    """

    task: str
    size_multiple: int
    vae: VAEConfig
    scheduler: Scheduler
    networks: Mapping[str, Config]
    cache_tables: CacheTables = NO_TABLES
    denoisers: tuple[str, ...] = ("transformer",)
    inputs: tuple[InputSpec, ...] = ()
    has_two_reference_implementations: bool = False
    supports_radial: bool = False
    supports_sparse_linear: bool = False
    supports_int8_attention: bool = False
    trained_attention: AttentionConfig = AUTO
    frame_multiple: int = 1
    chunk_frames: int = 0
    max_frames: int | None = None
    fixed_size: tuple[int, int] | None = None
    windowing: Windowing = field(default_factory=Windowing)
    posteriors: tuple[Posterior, ...] = ()
    noise_spec: NoiseSpec = field(default_factory=NoiseSpec)
    extra_modalities: Mapping[str, ModalitySpec] = field(default_factory=dict[str, ModalitySpec])
    passes: tuple[SamplingPass, ...] = (SamplingPass(),)
    text_length: int | None = None
    skippable_blocks: int = 0
    config_entries: Mapping[str, object] = field(default_factory=dict[str, object])

    # ---- inputs and tasks

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of all inputs."""
        return tuple(spec.name for spec in self.inputs)

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """The names of the required inputs."""
        return tuple(spec.name for spec in self.inputs if spec.required)

    @property
    def starts_from_video(self) -> bool:
        """True if denoising starts from an input video; False if a video is only a control signal."""
        return any((spec.name, spec.background) == (VIDEO, "white") for spec in self.inputs)

    @property
    def is_chunked(self) -> bool:
        """True if a video is denoised chunk by chunk. Frames are then available before the video is complete."""
        return self.chunk_frames > 0

    @property
    def has_experts(self) -> bool:
        """True if two networks share the steps of a pass."""
        return len(self.denoisers) > 1 and not any(sampling_pass.denoisers for sampling_pass in self.passes)

    @property
    def chunk_length(self) -> int:
        """The number of frames (not latent frames) in a chunk after the first; 0 if a video is denoised as a whole."""
        return self.chunk_frames * self.vae.temporal_factor

    @property
    def image_with_video(self) -> str | None:
        """How the model combines a first image and a clip, as text; None if it does not accept both together."""
        if not {"image", "video"} <= set(self.input_names) or self.windowing.follows_clip:
            return None
        use = "start from" if self.starts_from_video else "are guided by"
        return f"the picture is the first frame and sets the size, and the later frames {use} the clip"

    @property
    def continuation_input(self) -> str | None:
        """The input through which the next window gets the last frames: `image` or `video`.

        None if windows are not supported.
        """
        if self.windowing.follows_clip:
            return CONTROL_INPUT
        if self.is_chunked or set(self.required_inputs) - {IMAGE_INPUT}:
            return None
        return CONTROL_INPUT if "mask" in self.input_names else IMAGE_INPUT if IMAGE_INPUT in self.input_names else None

    @property
    def tasks(self) -> list[str]:
        """Short texts, each about an input or a mode that the model supports."""
        is_supported = {
            "text": not self.required_inputs,
            "a first picture": "image" in self.input_names and "last_image" not in self.required_inputs,
            "a first and a last picture": "last_image" in self.input_names,
            "a clip": self.starts_from_video,
            "a control clip": "video" in self.input_names and not self.starts_from_video,
            "a mask": "mask" in self.input_names,
            "reference pictures": "references" in self.input_names,
            "a stream, chunk by chunk": self.is_chunked,
            "long videos, in windows": self.continuation_input is not None,
        }
        return [task for task, supported in is_supported.items() if supported]

    def in_windows(self, settings: Settings) -> bool:
        """Return True if a video is made window by window, each from encoding to decoding.

        Args:
            settings: The settings of the video.
        """
        return settings.windows > 1 or self.windowing.follows_clip

    def complete_settings(self, settings: Mapping[str, object]) -> Mapping[str, object]:
        """Add settings whose defaults depend on other settings.

        `sigmas` defaults to the value of `follow`. The second expert's guidance scale defaults to the first expert's.

        Args:
            settings: The values of settings by name.
        """
        complete = {**settings}
        if (
            self.has_two_reference_implementations
            and "sigma_schedule" in self._schedule_parameters
            and settings.get("sigmas") is None
        ):
            complete["sigmas"] = settings.get("follow")
        if self.has_experts and settings.get("guidance_scale_2") is None:
            complete["guidance_scale_2"] = settings.get("guidance_scale")
        return complete

    # ---- checks

    def check_settings(self, settings: Settings) -> None:
        """Raise WanjaxError if the model does not support these settings.

        Args:
            settings: The settings of the video.
        """
        settings.check(spatial=self.size_multiple, temporal=self.vae.temporal_factor)
        self.check_length(settings.frames, settings.model)
        self._check_steps(settings)
        self.windowing.check(settings, self.continuation_input)
        check_rule(settings.guidance_rule, settings.guided, settings.steps)
        self._check_skipped_blocks(settings)
        if self.fixed_size and settings.size != self.fixed_size:
            raise WanjaxError(
                f"{settings.model} only supports {self.fixed_size[1]}x{self.fixed_size[0]}, for which it has learned "
                f"positions, got {settings.width}x{settings.height}: leave the size out"
            )
        if self.is_chunked:
            self._check_chunks(settings)

    def _check_steps(self, settings: Settings) -> None:
        """Raise SettingError for noise levels that the model does not have, and for a `boundary_step` above the number
        of steps.
        """
        if settings.sigmas is not None and settings.sigmas not in self.sigma_schedules:
            choices = " or ".join(self.sigma_schedules)
            raise SettingError(
                f"{settings.model} has no noise levels of its own for {settings.sigmas}: "
                + (f"use sigmas {choices}" if choices else "leave sigmas out"),
                "sigmas",
            )
        if (settings.boundary_step or 0) > settings.steps:
            raise SettingError(
                f"boundary_step must be at most the number of steps, {settings.steps}, got {settings.boundary_step}: "
                "give a lower one, or leave it out",
                "boundary_step",
            )

    def _check_skipped_blocks(self, settings: Settings) -> None:
        """Raise SettingError for blocks that the model cannot skip, and for skipped blocks together with a step
        cache."""
        rule, count = settings.guidance_rule, self.skippable_blocks
        if not (blocks := rule.skipped_blocks):
            return
        if not count:
            problem = f"{settings.model} cannot skip blocks, got {rule}: leave skip out"
        elif blocks[-1] >= count or len(blocks) == count:
            problem = f"{settings.model} has the blocks 0 to {count - 1}, got {rule}: skip some of them"
        elif settings.cache.name != "none":
            problem = f"the step cache {settings.cache} does not support {rule}: leave one of them out"
        else:
            return
        raise SettingError(problem, "guidance_rule")

    def _check_chunks(self, settings: Settings) -> None:
        """Raise WanjaxError if the frames do not fill whole chunks, or if the guidance scale is not 1."""
        chunk, factor = self.chunk_frames, self.vae.temporal_factor
        frames = self.latent_shape(settings)[2]
        if frames % chunk:
            lengths = [(n * chunk - 1) * factor + 1 for n in (frames // chunk, frames // chunk + 1) if n]
            raise WanjaxError(
                f"{settings.model} makes videos in chunks of {pluralize(chunk, 'latent frame')}, got "
                f"{pluralize(settings.frames, 'frame')} ({pluralize(frames, 'latent frame')}): use "
                f"{' or '.join(map(str, lengths))} frames"
            )
        if settings.guided:
            raise WanjaxError(
                f"{settings.model} was distilled without guidance: leave the guidance scale at 1, its default"
            )

    def check_length(self, frames: int, model: str) -> None:
        """Raise WanjaxError for more frames than the autoencoder can encode or decode in one video.

        Args:
            frames: The number of frames of the video.
            model: The name of the model, for the message.
        """
        if self.max_frames is not None and frames > self.max_frames:
            raise WanjaxError(f"{frames} frames are too many for {model}: use at most {self.max_frames}")

    def check_pictures(self, pictures: Pictures, settings: Settings) -> None:
        """Raise WanjaxError if the images of a request do not fit each other or the settings.

        Args:
            pictures: The images and clips of the request.
            settings: The settings of the video.
        """
        if "last_image" in pictures and "image" not in pictures:
            raise WanjaxError(f"there is a last image without a first: {settings.model} needs both, or only the first")
        if "last_image" in pictures and settings.frames == 1:
            raise WanjaxError("a video of 1 frame cannot have a first and a last image: use 5 frames or more")

    def check_not_chunked(self, model: str, feature: str) -> None:
        """Raise WanjaxError if a video is denoised chunk by chunk.

        Args:
            model: The name of the model, for the message.
            feature: The feature that does not support chunks, for the message.
        """
        if self.is_chunked:
            raise WanjaxError(
                f"{model} makes videos chunk by chunk, which {feature} does not support: use another model"
            )

    def check_trainable(self, settings: Settings) -> None:
        """Raise WanjaxError if training does not support the model.

        Args:
            settings: The settings of the model.
        """
        model = settings.model
        self.check_not_chunked(model, "training")
        if self.windowing.follows_clip:
            raise WanjaxError(f"{model} follows a driving clip, which training does not support: use another model")
        if self.extra_modalities:
            modalities = " and ".join(self.extra_modalities)
            raise WanjaxError(
                f"{model} makes {modalities} too, which training does not support: use a model of video only"
            )

    def check_chunked(self, model: str) -> None:
        """Raise WanjaxError unless a video is denoised chunk by chunk.

        Args:
            model: The name of the model, for the message.
        """
        if not self.is_chunked:
            raise WanjaxError(f"{model} makes a video as a whole, so there are no chunks to stream: use pipe(prompt)")

    # ---- shapes

    def latent_shape(self, settings: Settings) -> Shape:
        """Return the shape [1 C T H W] of a video's latents.

        Args:
            settings: The settings of the video.
        """
        frames = (settings.frames - 1) // self.vae.temporal_factor + 1
        height, width = (pixels // self.vae.spatial_factor for pixels in settings.size)
        return 1, self.vae.latent_channels, frames, height, width

    def modality_shapes(self, settings: Settings) -> dict[str, Shape]:
        """Return the shapes [1 C L] of the other latents that are denoised with the video's latents, by name.

        Args:
            settings: The settings of the video.
        """
        seconds = settings.frames / settings.fps
        return {
            name: (1, modality.channels, round(seconds * modality.per_second))
            for name, modality in self.extra_modalities.items()
        }

    def denoised_frames(self, frames: int) -> int:
        """Round a number of latent frames up to a multiple of `frame_multiple`.

        The added frames are dropped at the end.

        Args:
            frames: The number of latent frames of the video.
        """
        return frames + -frames % self.frame_multiple

    def noise_shape(self, settings: Settings, references: int = 0) -> Shape:
        """Return the shape [1 C T H W] of the initial noise.

        The noise includes frames that are dropped after denoising.

        Args:
            settings: The settings of the video.
            references: The number of latent frames of reference images.
        """
        batch, channels, frames, height, width = self.latent_shape(settings)
        return batch, channels, references + self.denoised_frames(frames), height, width

    def noise_shapes(self, settings: Settings, references: int = 0, num_videos: int = 1) -> dict[str, Shape]:
        """Return the shapes of the initial noise of a batch of videos in one pass, by modality.

        Args:
            settings: The settings of the pass.
            references: The number of latent frames of reference images.
            num_videos: The number of videos in the batch.
        """
        shapes = {VIDEO: self.noise_shape(settings, references), **self.modality_shapes(settings)}
        return {name: (num_videos, *shape[1:]) for name, shape in shapes.items()}

    def noise_inputs(self, settings: Settings, references: int = 0, num_videos: int = 1) -> Mapping[str, Shape]:
        """Return the shapes of all noise that a caller can provide for a batch of videos, by name.

        `step_noise` has a row for each step of the settings. If denoising starts from an input video, the rows of the
        skipped steps are not used.

        Args:
            settings: The settings of the video.
            references: The number of latent frames of reference images.
            num_videos: The number of videos in the batch.
        """
        _, channels, frames, *latent_size = self.latent_shape(settings)
        shapes = {}
        for pass_index, pass_settings in enumerate(self.passes_of(settings)):
            for name, shape in self.noise_shapes(pass_settings, references, num_videos).items():
                shapes[noise_name(name, INITIAL, pass_index)] = shape
                if self.scheduler.stochastic:
                    shapes[noise_name(name, STEP_NOISE, pass_index)] = (pass_settings.steps, *shape)
        for posterior in self.posteriors:
            if posterior.input_name in self.input_names:
                count = 1 if posterior.input_name == "image" else frames
                shapes[posterior.noise_name] = (num_videos, channels, count, *latent_size)
        return shapes

    def to_training_latents(self, latents: Float[Array, "B C T H W"]) -> Float[Array, "B _T H W C"]:
        """Convert the latents of encoded videos to the layout and length that the network is trained on.

        Args:
            latents: The normalised latents of encoded videos.
        """
        return pad_front(jnp.moveaxis(latents, 1, -1), self.denoised_frames(latents.shape[2]))

    def decode_lengths(self, frames: int) -> tuple[int, int]:
        """Return the number of latent frames in the first decoded chunk of a video, and in each later one.

        Args:
            frames: The number of latent frames of the video.
        """
        return (self.chunk_frames, self.chunk_frames) if self.is_chunked else self.vae.decode_lengths(frames)

    def chunks(self, frames: int) -> list[Chunk]:
        """Divide the latent frames of a video into chunks. Most models have a single chunk.

        Args:
            frames: The number of latent frames of the video.
        """
        size = self.chunk_frames or frames
        count = frames // size
        return [Chunk(index, count, range(index * size, (index + 1) * size)) for index in range(count)]

    # ---- steps

    def passes_of(self, settings: Settings) -> list[Settings]:
        """Return the settings of each pass, which follow from the settings of the video.

        Later passes have few steps and no step cache.

        Args:
            settings: The settings of the video.
        """
        return [self._pass_settings(index, sampling_pass, settings) for index, sampling_pass in enumerate(self.passes)]

    def _pass_settings(self, pass_index: int, sampling_pass: SamplingPass, settings: Settings) -> Settings:
        changes: dict[str, object] = {
            "height": settings.height // sampling_pass.divisor,
            "width": settings.width // sampling_pass.divisor,
        }
        changes |= {"steps": sampling_pass.steps or settings.steps} | ({"cache": NONE} if pass_index else {})
        if sampling_pass.strength is not None:
            changes["strength"] = sampling_pass.strength
        if sampling_pass.guidance_scale is not None:
            changes |= {
                "guidance_scale": sampling_pass.guidance_scale,
                "guidance_scale_2": None,
                "dynamic_guidance": False,
            }
            if settings.guidance_rule.needs_scale and sampling_pass.guidance_scale <= 1:
                changes["guidance_rule"] = CLASSIFIER_FREE
        return replace(settings, **changes)

    @property
    def _schedule_parameters(self) -> set[str]:
        return set(inspect.signature(self.scheduler.schedule).parameters)

    @property
    def sigma_schedules(self) -> tuple[str, ...]:
        """The values of the setting `sigmas` that give this model different noise levels. Empty if the model lacks the
        setting."""
        if "sigma_schedule" not in self._schedule_parameters:
            return ()
        return tuple(name for name in SIGMA_SCHEDULES if self.has_two_reference_implementations or name != "diffusers")

    def schedule_options(self, settings: Settings) -> Mapping[str, float | str]:
        """Return the settings that determine the noise levels. They are keyword arguments of the scheduler's
        `schedule`.

        Args:
            settings: The settings of the video.
        """
        options = {"shift": settings.flow_shift, "sigma_schedule": settings.sigmas, "follow": settings.follow}
        return {
            name: value for name, value in options.items() if value is not None and name in self._schedule_parameters
        }

    def schedule(self, settings: Settings, conditioning: Conditioning | None = None) -> Schedule:
        """Compute the noise levels of the steps, on the host.

        A video that starts from an input video skips the first steps.

        Args:
            settings: The settings of the pass.
            conditioning: The output of `encode`, which may contain an input video. With None, denoising starts from
                noise.
        """
        return self._schedule(settings, has_video=getattr(conditioning, "video_latents", None) is not None)

    def _schedule(self, settings: Settings, *, has_video: bool) -> Schedule:
        skipped = settings.steps - settings.steps_with_strength if has_video else 0
        return self.scheduler.schedule(settings.steps, skip=skipped, **self.schedule_options(settings))

    def phases(self, schedule: Schedule, settings: Settings, pass_index: int = 0) -> tuple[Phase, ...]:
        """Divide the steps into phases, one for each network, with their guidance scales.

        Args:
            schedule: The noise levels of the steps.
            settings: The settings of the video.
            pass_index: The index of the pass, from 0.
        """
        return phases_of(self.passes[pass_index].denoisers or self.denoisers, np.asarray(schedule.timesteps), settings)

    def noise_range(self, network: str, settings: Settings) -> tuple[float, float]:
        """Return the lowest and highest noise level (0 to 1) at which a network denoises.

        Args:
            network: The name of the component.
            settings: The settings of the video.
        """
        if not self.has_experts or settings.boundary is None:
            return 0.0, 1.0
        return (settings.boundary, 1.0) if network == self.denoisers[0] else (0.0, settings.boundary)

    def tables_for(self, conditioning: Conditioning) -> CacheTables:
        """Return the step cache tables for a video with this conditioning.

        Args:
            conditioning: The output of `encode`.
        """
        return (
            self.cache_tables if getattr(conditioning, "condition", None) is None else self.cache_tables.for_image_input
        )

    def cache_rule(self, settings: Settings, *, has_video: bool = False) -> CacheRule:
        """Complete the rule of the settings' step cache; raise WanjaxError if the model does not support it.

        Args:
            settings: The settings of the video.
            has_video: Whether the video starts from an input video, and skips steps.
        """
        if self.is_chunked:
            if isinstance(settings.cache, AutoRule):
                warn_nothing_reused(settings.steps)
            elif settings.cache != NONE:
                raise WanjaxError(f"{settings.model} has too few steps for a step cache: leave {settings.cache} out")
            return NONE
        first_pass = self.passes_of(settings)[0]

        def phases_for(steps: int) -> tuple[Phase, ...]:
            settings_with_steps = replace(first_pass, steps=steps)
            return self.phases(self._schedule(settings_with_steps, has_video=has_video), settings_with_steps)

        return resolve_rule(settings.cache, phases_for, first_pass.steps, self.cache_tables, settings.model)

    def reused_steps(self, settings: Settings) -> tuple[bool, ...]:
        """Return a boolean for each step of the first pass: whether the step reuses, or may reuse, cached values.

        Args:
            settings: The settings of the video.
        """
        first_pass = self.passes_of(settings)[0]
        rule, phases = self.cache_rule(settings), self.phases(self.schedule(first_pass), first_pass)
        return tuple(reuses for phase in phases for reuses in rule.reused(phase, self.cache_tables))

    def resolve_attention(self, requested: AttentionConfig) -> AttentionConfig:
        """Resolve the requested attention: AUTO becomes the attention that the model was trained with.

        Args:
            requested: The requested attention.
        """
        return self.trained_attention if requested == AUTO else requested


@dataclass(frozen=True, kw_only=True)
class VideoModel(ABC, Generic[ConditioningT]):
    """The methods of a model. Holds the checkpoint's configs, but not its weights.

    Methods that compute receive a `Runtime`.

    A family implements the abstract methods, and overrides other methods if it differs.

    Args:
        vae: The config of the autoencoder.
        scheduler: The checkpoint's scheduler.
        tables: The checkpoint's tables for step caches.
    """

    conditioning_type: ClassVar[type[Any]]
    """The type that `encode` returns, a NamedTuple. Its fields are the tensors in the file of the encode stage.

    A type with fields for images also has the field `video_shape`, whose default is None. A run sets it
    (`pipelines/video_shape`).
    """

    vae: VAEConfig
    scheduler: Scheduler
    tables: CacheTables = NO_TABLES

    @cached_property
    def spec(self) -> ModelSpec:
        """The description of the model for shared code. A family defines it."""
        raise NotImplementedError

    @property
    @abstractmethod
    def denoiser(self) -> Denoiser:
        """The traced part of the model."""

    @abstractmethod
    def encode_text(self, runtime: Runtime, settings: Settings) -> ConditioningT:
        """Encode the prompt and the negative prompt in the settings, with text encoders only.

        Args:
            runtime: The networks, devices and strategy.
            settings: The settings of the video.
        """

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Field | None]:
        """Encode the images and clips of a request, without text encoders; return fields of `conditioning_type`.

        Args:
            runtime: The networks, devices and strategy.
            pictures: The images and clips of the request.
            settings: The settings of the video.
            tiling: The tiles in which to encode, which saves memory; None encodes whole frames.
        """
        return {}

    @abstractmethod
    def conditioning_shapes(self, conditioning: ConditioningT, settings: Settings) -> Mapping[str, FieldShape]:
        """Return the expected shapes of conditioning fields, for a video of these settings.

        Fields for prompts have no default. If the result lacks such a field, the caller does not check its shape.
        Fields for images have a default. If the result lacks such a field, the value of the field must be None.

        Args:
            conditioning: The conditioning. Some sizes may have any value that agrees between fields. Such sizes are
                read from the conditioning.
            settings: The settings of the video.
        """

    @abstractmethod
    def prepare(
        self, runtime: Runtime, network: SplitNetwork, conditioning: ConditioningT, x: Any, preparation: Preparation
    ) -> tuple[tuple[object, ...], object]:
        """Compute the values that all steps of a network share: the context of each forward pass, and the inputs that
        all forward passes share.

        Args:
            runtime: Calls programs.
            network: The network of the phase.
            conditioning: The output of `encode`, for a batch of videos.
            x: The latents; only their shape is used.
            preparation: The number of forward passes, and further options.
        """

    def update_past(self, runtime: Runtime, network: SplitNetwork, inputs: ModelInputs, x: Any) -> object:
        """Compute what the next chunk needs from the finished chunks, such as keys and values.

        May reuse buffers of `inputs`.

        Args:
            runtime: The networks, devices and strategy.
            network: The definition and weights of the denoiser.
            inputs: The inputs of the chunk's steps.
            x: The latents of the finished chunk.
        """
        return None

    @abstractmethod
    def cost(self, settings: Settings, conditioning: ConditioningT | None = None) -> ForwardCost:
        """Count the work of one forward pass of the denoiser.

        Args:
            settings: The settings of the video.
            conditioning: The output of `encode`; None assumes the prompt length of plans.
        """

    def refine(self, runtime: Runtime, conditioning: ConditioningT, latents: AnyLatents) -> ConditioningT:
        """Compute the conditioning of the next pass from the conditioning and the latents of a finished pass.

        The next pass starts from the latents in the field `video_latents`. For another modality, it starts from the
        field `NAME_latents`. The shapes of these fields are the shapes of the next pass. The default implementation
        keeps the latents unchanged, for two passes of the same size.

        Args:
            runtime: The networks, devices and strategy.
            conditioning: The conditioning of the finished pass.
            latents: The latents of the finished pass, [B C T H W], or a mapping by modality.
        """
        modalities = latents if isinstance(latents, Mapping) else {VIDEO: latents}
        return conditioning._replace(**{f"{name}_latents": x for name, x in modalities.items()})

    def decode(
        self,
        runtime: Runtime,
        latent_chunks: Iterable[AnyLatents],
        *,
        seed: int = 0,
        dtype: DTypeLike = jnp.uint8,
        tiling: Tiling | None = None,
        video: int = 0,
    ) -> Iterator[Decoded]:
        """Decode a video lazily, chunk by chunk. By default the autoencoder decodes the video.

        Args:
            runtime: Calls programs.
            latent_chunks: The latents of consecutive frames, [B C T H W], or a mapping by modality. An iterator if the
                model denoises chunk by chunk; otherwise a list of one item.
            seed: The seed for a decoder that adds noise.
            dtype: The dtype of the frames.
            tiling: The tiling with all sizes set; None decodes whole frames.
            video: The index of the video in the batch.

        Returns:
            Decoded chunks. `ModelSpec.decode_lengths` gives the number of latent frames of each chunk.
        """
        latent_list: Any = latent_chunks  # indexed only if the latents are a list
        chunk_lengths = self.spec.decode_lengths(self.spec.chunk_frames or select_modality(latent_list[0]).shape[2])
        decoder = runtime.components.get(runtime.components.decoder)
        video_chunks = map(select_modality, latent_chunks)
        return map(Decoded, decode_latents(decoder, video_chunks, chunk_lengths, dtype, tiling, runtime.call, video))

    def tokenize(self, runtime: Runtime, prompts: Sequence[str], reference_impl: str) -> tuple[TokenBatch, ...]:
        """Tokenize prompts for each text encoder.

        Args:
            runtime: The networks, devices and strategy.
            prompts: The texts to tokenize.
            reference_impl: Which reference implementation to match, as in the settings.
        """
        return (runtime.components.get("tokenizer").tokenize(prompts),)

    def leading_frames(self, conditioning: ConditioningT, settings: Settings) -> int:
        """Return the number of latent frames for reference images.

        The reference frames precede the video's latent frames and are dropped later.

        Args:
            conditioning: The output of `encode`.
            settings: The settings of the video.
        """
        return 0

    def size_for(self, picture: tuple[int, int, int], settings: Settings) -> tuple[int, int]:
        """Choose the size of a video for an image, if the user gives no size.

        Args:
            picture: The shape of the image, [H W 3].
            settings: The settings of the video; their size only limits the area.
        """
        return self.spec.fixed_size or size_for_area(picture, settings.height * settings.width, self.spec.size_multiple)


def phases_of(
    denoisers: Sequence[str], timesteps: Float[np.ndarray, " steps"], settings: Settings
) -> tuple[Phase, ...]:
    """Divide the steps into phases, one for each expert.

    The second expert runs the steps below the noise level `boundary`. If `boundary_step` is set, the second expert runs
    all steps after the first `boundary_step` steps.

    Args:
        denoisers: The names of the networks, with the network for high noise first.
        timesteps: The timesteps of the schedule, in descending order.
        settings: The settings of the video.
    """
    total, skipped, scale = len(timesteps), settings.steps - len(timesteps), settings.guidance_scale
    if settings.dynamic_guidance and settings.guided:
        scales = tuple(dynamic_scales(scale, timesteps, settings.steps))
        return (Phase(denoisers[0], 0, scales, total, 0, skipped, tuple(timesteps.tolist())),)
    if len(denoisers) > 1 and settings.boundary_step:
        high_noise_steps = max(0, settings.boundary_step - skipped)
    elif len(denoisers) > 1 and settings.boundary is not None:
        high_noise_steps = int(np.sum(timesteps >= settings.boundary * TRAIN_STEPS))
    else:
        return (Phase(denoisers[0], 0, (scale,) * total, total, 0, skipped, tuple(timesteps.tolist())),)
    scale_2 = scale if settings.guidance_scale_2 is None else settings.guidance_scale_2
    expert_steps = [
        (denoisers[0], 0, (scale,) * high_noise_steps),
        (denoisers[1], high_noise_steps, (scale_2,) * (total - high_noise_steps)),
    ]
    return tuple(
        Phase(name, start, scales, total, index, skipped, tuple(timesteps[start : start + len(scales)].tolist()))
        for index, (name, start, scales) in enumerate(phase for phase in expert_steps if phase[2])
    )


def with_scheduler(model: VideoModel[Any], scheduler: str | Scheduler) -> VideoModel[Any]:
    """Return the model with another scheduler; raise WanjaxError if the model does not support it.

    Args:
        model: The model.
        scheduler: A scheduler, or its name with options.
    """
    return replace(model, scheduler=resolve(scheduler, model.scheduler))


def min_step_bytes(model: VideoModel[Any], settings: Settings) -> int:
    """Return a lower bound of the bytes that a step needs in addition to the weights. The bound holds for every kernel.

    The bound counts the tokens of one layer, and their queries, keys and values. It is 0 for a video that is denoised
    chunk by chunk.

    Args:
        model: The model.
        settings: The settings of the video.
    """
    if model.spec.is_chunked:
        return 0
    work = model.cost(settings)
    return 4 * work.num_tokens * work.width * jnp.dtype(settings.dtype).itemsize


def truncations(model: VideoModel[Any], runtime: Runtime, text: str, reference_impl: str) -> Sequence[Truncation]:
    """List the part of a text that each text encoder's tokenizer cuts off because the text is too long.

    Args:
        model: The model.
        runtime: The networks, devices and strategy.
        text: A prompt or a negative prompt.
        reference_impl: Which reference implementation to match, as in the settings.
    """
    batches = model.tokenize(runtime, [text], reference_impl)
    return tuple(truncation for batch in batches for truncation in batch.truncated if truncation)


def check_compatible(model: VideoModel[ConditioningT], conditioning: ConditioningT, settings: Settings) -> None:
    """Raise WanjaxError unless this output of `encode` belongs to a video with these settings.

    Args:
        model: The model.
        conditioning: The output of `encode`.
        settings: The settings of the video.
    """
    if (encoded_for := encoded_shape(conditioning)) is not None:
        encoded_for.check(settings)
    shapes = model.conditioning_shapes(conditioning, settings)
    check_conditioning(conditioning, shapes, settings.model, model.spec.task)
    if (reference_frames := model.leading_frames(conditioning, settings)) < 0:
        raise WanjaxError(f"the condition is {-reference_frames} latent frames shorter than the video: encode again")
    if encoded_for is not None and reference_frames != encoded_for.references:
        raise WanjaxError(
            f"the encoded pictures are for {encoded_for}, but hold {reference_frames} references: encode the pictures "
            "again"
        )


def conditioning_from(model: VideoModel[ConditioningT], tensors: Mapping[str, Array]) -> ConditioningT:
    """Restore the output of `encode` from its tensors by name; raise WanjaxError if one is missing.

    Warns about prompts that scripts before wanjax encoded, with a length that the model was not trained on.

    Args:
        model: The model.
        tensors: The tensors in the file of the encode stage, by name.
    """
    conditioning_type, text_length = model.conditioning_type, model.spec.text_length
    optional = conditioning_type._field_defaults.keys()
    if missing := [name for name in conditioning_type._fields if name not in tensors and name not in optional]:
        tensor_names = ", ".join(tensors) or "no tensors"
        raise WanjaxError(f"the encoded prompts have no tensor {missing[0]!r}, only {tensor_names}: encode again")
    conditioning = conditioning_type(**{name: x for name, x in tensors.items() if name in conditioning_type._fields})
    if text_length is not None and conditioning.prompt_embeds.shape[1] == OLD_TEXT_LENGTH != text_length:
        message = f"the prompt has {OLD_TEXT_LENGTH} tokens, and the model needs {text_length}: the video will differ"
        warnings.warn(message, WanjaxWarning, stacklevel=2)
    return conditioning


def latents_of(conditioning: Conditioning, spec: ModelSpec | None = None) -> dict[str, Any]:
    """Return the conditioning fields that hold latents: encoded images [B C T H W], and other modalities.

    Args:
        conditioning: The output of `encode`.
        spec: The spec of the model, which names its other modalities; None returns only the latents of images.
    """
    modalities = {f"{name}_latents" for name in (spec.extra_modalities if spec else ())}
    arrays = {name: x for name, x in conditioning._asdict().items() if x is not None}
    return {name: x for name, x in arrays.items() if len(x.shape) == 5 or name in modalities}


def with_attention(model: VideoModel[Any], attention: AttentionConfig, name: str) -> VideoModel[Any]:
    """Prepare a model for the requested attention. Sparse-linear attention may add a projection to its config.

    Raises UnsupportedError if the denoiser does not support the requested radial attention, sparse-linear attention or
    products in int8. Also raises it if the denoiser was trained with sparse-linear attention and another attention is
    requested.

    Args:
        model: The model.
        attention: The requested attention.
        name: The name of the model, for the message.
    """
    if attention.radial and not model.spec.supports_radial:
        raise UnsupportedError(f"{name} does not support radial attention: use --attention auto")
    if attention.qk and not model.spec.supports_int8_attention:
        raise UnsupportedError(f"{name} does not support attention with qk={attention.qk}: use --attention auto")
    trained = model.spec.trained_attention.sparse
    if attention.sparse and not trained:
        if not model.spec.supports_sparse_linear:
            raise UnsupportedError(f"{name} does not support sparse-linear attention: use --attention auto")
        config: Any = model.spec.networks[model.spec.denoisers[0]]
        return replace(model, **{model.spec.denoisers[0]: replace(config, sparse_linear=attention.sparse)})
    if trained and not model.spec.resolve_attention(attention).sparse:
        message = f"{name} was trained with sparse-linear attention and does not support {attention}"
        raise UnsupportedError(f"{message}: use --attention auto or sla:top=0.15")
    return model
