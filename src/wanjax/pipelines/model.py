# SPDX-License-Identifier: Apache-2.0
"""The seam between the library and a family of models: data in a `ModelSpec`, and the methods of a `VideoModel`.

A family writes a `VideoModel`, whose methods run on the host, and a `denoiser.Denoiser`, whose methods are traced. All
that follows from data alone is in `ModelSpec`, and no family overrides it.
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
from wanjax.errors import UnsupportedError, WanjaxError, WanjaxWarning
from wanjax.execution import Value
from wanjax.figures import quantity
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import InputSpec
from wanjax.media.pictures import Pictures, size_within
from wanjax.pipelines.caching.cache_tables import NO_TABLES, Tables
from wanjax.pipelines.caching.rules import NONE, CacheRule, chosen_rule
from wanjax.pipelines.denoiser import Denoiser, ModelInputs, Posterior, Preparation, pad_front, stream_of
from wanjax.pipelines.frames import AnyLatents, Decoded, decode_latents
from wanjax.pipelines.guidance import CLASSIFIER_FREE, check_rule, dynamic_scales
from wanjax.pipelines.noise_inputs import INITIAL, STEP_NOISE, VIDEO, noise_name
from wanjax.pipelines.phases import Phase
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.tokenizer import TokenBatch, Truncation
from wanjax.pipelines.validation import FieldShape, check_conditioning
from wanjax.pipelines.video_shape import encoded_shape
from wanjax.pipelines.windows import CONTROL, PICTURE, check_windows
from wanjax.schedulers import Scheduler, resolve
from wanjax.schedulers.base import TRAIN_STEPS, Schedule

Shape = tuple[int, ...]
Field = Value | np.ndarray  # of the output of `encode`
ConditioningSelf = TypeVar("ConditioningSelf")
OLD_TEXT_LENGTH = 226  # the length of prompts in files of the scripts before wanjax, a mistake


@runtime_checkable
class Conditioning(Protocol):
    """The output of `encode`: a family's own NamedTuple of arrays, each with a first axis of size 1, or None."""

    def __iter__(self) -> Iterator[Field | None]: ...

    def _asdict(self) -> dict[str, Field | None]: ...

    def _replace(self: ConditioningSelf, **fields: Any) -> ConditioningSelf: ...


ConditioningT = TypeVar("ConditioningT", bound=Conditioning)  # a family's own


@runtime_checkable
class VAEConfig(Protocol):
    """The part of an autoencoder's config that shared code uses.

    Args:
        latent_channels: The number of channels of its latents.
        spatial_factor: The number of pixels per latent position along height and width.
        temporal_factor: The number of frames per latent frame, after the first.
        patch: The number of pixels per patch along height and width, at the input of its convolutions.
        tiling: The default tiling for frames that are not decoded whole.
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


class Cost(NamedTuple):
    """The work of one forward of the denoiser for one prompt, for plans and profiles.

    Args:
        tokens: The length of self-attention's sequence.
        layers: The number of blocks of the network.
        heads: The number of attention heads.
        width: The number of channels of a token.
        scores: The operations of self-attention's two products; a multiply-add counts as two.
        flops: The operations by part of the network.
        ring: Whether self-attention is over a single sequence, so that TPUs can use ring attention if that is fastest.
    """

    tokens: int
    layers: int
    heads: int
    width: int
    scores: int
    flops: Mapping[str, int]
    ring: bool = False


class LatentStream(NamedTuple):
    """Latents [B C L] that are denoised together with a video's, such as those of its sound.

    Args:
        channels: The number of channels, C.
        per_second: The length L per second of the video.
    """

    channels: int
    per_second: float


class Pass(NamedTuple):
    """One denoising of a whole video. Later passes start from the latents of the pass before, with noise added.

    Args:
        divisor: The video's height and width are divided by it.
        steps: The number of steps of the schedule; None uses the settings.
        strength: The share of the steps that run, starting from the level of the added noise.
        guidance_scale: The guidance scale of all steps; None uses the settings.
        denoisers: The components among `ModelSpec.denoisers` that run its steps; empty for all.
    """

    divisor: int = 1
    steps: int | None = None
    strength: float | None = None
    guidance_scale: float | None = None
    denoisers: tuple[str, ...] = ()


class Chunk(NamedTuple):
    """A part of a video that is denoised at once.

    Args:
        number: The number of the chunk, from 0.
        count: The number of chunks of the video.
        frames: The latent frames of the chunk.
    """

    number: int
    count: int
    frames: range

    @property
    def last(self) -> bool:
        return self.number + 1 == self.count


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The description of a checkpoint for shared code, as data.

    Args:
        task: The task, in words.
        size_multiple: Height and width must be multiples of this number of pixels.
        vae: The autoencoder's config.
        scheduler: The solver.
        networks: The networks' configs that were read, by component.
        cache_tables: The tables for step caches.
        denoisers: The components that denoise, all of one shape; each step uses one of them.
        inputs: The inputs besides the prompt.
        reference_variants: True if the authors' code and diffusers differ; `follow` then selects one.
        radial_attention: True if the denoiser's self-attention can be radial.
        sparse_linear: True if the denoiser's config can have a projection for sparse-linear attention.
        trained_attention: The attention that the model was trained with.
        frame_multiple: Latent frames are padded at the front to a multiple of it; the padding is dropped at the end.
        chunk_frames: The number of latent frames in a chunk of a causal model; 0 if a video is denoised as a whole.
        max_frames: The maximal number of frames that the autoencoder can encode or decode.
        fixed_size: The only supported (height, width); None if any size is supported.
        posteriors: Encoded images or videos that are sampled from a distribution.
        latent_streams: The latents that are denoised with the video's, by name; none for a model with `chunk_frames`.
        passes: The passes in which a video is denoised; one for a model with `chunk_frames`.
        text_length: The number of tokens in `prompt_embeds`, if all prompts have the same.
        config_entries: Entries of the denoiser's config.json for what `with_attention` added.
    """

    task: str
    size_multiple: int
    vae: VAEConfig
    scheduler: Scheduler
    networks: Mapping[str, Config]
    cache_tables: Tables = NO_TABLES
    denoisers: tuple[str, ...] = ("transformer",)
    inputs: tuple[InputSpec, ...] = ()
    reference_variants: bool = False
    radial_attention: bool = False
    sparse_linear: bool = False
    trained_attention: AttentionConfig = AUTO
    frame_multiple: int = 1
    chunk_frames: int = 0
    max_frames: int | None = None
    fixed_size: tuple[int, int] | None = None
    posteriors: tuple[Posterior, ...] = ()
    latent_streams: Mapping[str, LatentStream] = field(default_factory=dict[str, LatentStream])
    passes: tuple[Pass, ...] = (Pass(),)
    text_length: int | None = None
    config_entries: Mapping[str, object] = field(default_factory=dict[str, object])

    # ---- what can be made

    @property
    def takes(self) -> tuple[str, ...]:
        """The names of all inputs."""
        return tuple(one.name for one in self.inputs)

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the required inputs."""
        return tuple(one.name for one in self.inputs if one.required)

    @property
    def begins_from_video(self) -> bool:
        """True if denoising starts from an input video; False if a video is only a control signal."""
        return any((one.name, one.page) == (VIDEO, "white") for one in self.inputs)

    @property
    def streams(self) -> bool:
        """True if the frames of a video are delivered chunk by chunk during denoising."""
        return self.chunk_frames > 0

    @property
    def experts(self) -> bool:
        """True if two networks share the steps of a pass."""
        return len(self.denoisers) > 1 and not any(one.denoisers for one in self.passes)

    @property
    def chunk_length(self) -> int:
        """The number of frames that a chunk adds to a video; 0 if a video is denoised as a whole."""
        return self.chunk_frames * self.vae.temporal_factor

    @property
    def picture_beside_clip(self) -> str | None:
        """How a first image and a clip are combined, in words; None for a model that does not accept both."""
        if not {"image", "video"} <= set(self.takes):
            return None
        return "the picture is the first frame and decides the size, and the frames after it begin from the clip"

    @property
    def continued_by(self) -> str | None:
        """The input that carries frames to the next window: `image`, a masked `video`, or None without windows."""
        if self.streams or set(self.needs) - {PICTURE}:
            return None
        return CONTROL if "mask" in self.takes else PICTURE if PICTURE in self.takes else None

    @property
    def tasks(self) -> list[str]:
        """The inputs and modes that the model supports, in words."""
        offers = {
            "text": not self.needs,
            "a first picture": "image" in self.takes and "last_image" not in self.needs,
            "a first and a last picture": "last_image" in self.takes,
            "a clip": self.begins_from_video,
            "a control clip": "video" in self.takes and not self.begins_from_video,
            "a mask": "mask" in self.takes,
            "reference pictures": "references" in self.takes,
            "a stream, chunk by chunk": self.streams,
            "long videos, in windows": self.continued_by is not None,
        }
        return [task for task, offered in offers.items() if offered]

    def implied(self, settings: Mapping[str, object]) -> Mapping[str, object]:
        """Fill in settings that follow from the given ones.

        `sigmas` defaults to `follow`; the second expert's guidance scale defaults to the first's.

        Args:
            settings: Values of settings by name.
        """
        complete = {**settings}
        if self.reference_variants and "sigmas" in self._schedule_parameters and settings.get("sigmas") is None:
            complete["sigmas"] = settings.get("follow")
        if self.experts and settings.get("guidance_scale_2") is None:
            complete["guidance_scale_2"] = settings.get("guidance_scale")
        return complete

    # ---- checks

    def check_settings(self, settings: Settings) -> None:
        """Raise WanjaxError if the model does not support these settings.

        Args:
            settings: Settings of the video.
        """
        settings.check(spatial=self.size_multiple, temporal=self.vae.temporal_factor)
        self.check_length(settings.frames, settings.model)
        check_windows(settings, self.continued_by)
        check_rule(settings.guidance_rule, settings.guided, settings.steps)
        if self.fixed_size and settings.size != self.fixed_size:
            raise WanjaxError(
                f"{settings.model} has learned positions for {self.fixed_size[1]}x{self.fixed_size[0]} alone: "
                f"{settings.width}x{settings.height} cannot be made with it"
            )
        if self.streams:
            self._check_chunks(settings)

    def _check_chunks(self, settings: Settings) -> None:
        """Raise WanjaxError unless a video consists of whole chunks and has no guidance."""
        chunk, factor = self.chunk_frames, self.vae.temporal_factor
        frames = self.latent_shape(settings)[2]
        if frames % chunk:
            legal = [(n * chunk - 1) * factor + 1 for n in (frames // chunk, frames // chunk + 1) if n]
            raise WanjaxError(
                f"{quantity(settings.frames, 'frame')} are {quantity(frames, 'latent frame')}, and "
                f"{settings.model} makes blocks of {chunk}: {' or '.join(map(str, legal))} frames can be made"
            )
        if settings.guided:
            raise WanjaxError(
                f"{settings.model} was distilled without guidance: leave the guidance scale at 1, its default"
            )

    def check_length(self, frames: int, model: str) -> None:
        """Raise WanjaxError for more frames than the autoencoder can encode or decode in one video.

        Args:
            frames: Frames of the video.
            model: Name of the model, for the message.
        """
        if self.max_frames is not None and frames > self.max_frames:
            raise WanjaxError(f"{frames} frames are too many for {model}: ask for at most {self.max_frames}")

    def check_pictures(self, pictures: Pictures, settings: Settings) -> None:
        """Raise WanjaxError where pictures that the model takes make no video of these settings.

        Args:
            pictures: The pictures and clips of the request.
            settings: Settings of the video.
        """
        if "last_image" in pictures and "image" not in pictures:
            raise WanjaxError(f"a last image is given without a first: {settings.model} takes both, or the first alone")
        if "last_image" in pictures and settings.frames == 1:
            raise WanjaxError("a video of 1 frame has no last image beside the first: ask for 5 frames or more")

    def check_whole(self, model: str, purpose: str) -> None:
        """Raise WanjaxError where a video is made chunk by chunk.

        Args:
            model: Name of the model, for the message.
            purpose: What needs a video that is made as a whole, for the message.
        """
        if self.streams:
            raise WanjaxError(f"{model} makes videos block by block, and {purpose} needs them made as a whole")

    def check_trainable(self, model: str) -> None:
        """Raise WanjaxError for a model that training has no loss for.

        Args:
            model: Name of the model, for the message.
        """
        self.check_whole(model, "training")
        if self.latent_streams:
            others = " and ".join(self.latent_streams)
            raise WanjaxError(f"{model} denoises {others} with the video: only models of a video alone can be trained")

    def check_streams(self, model: str) -> None:
        """Raise WanjaxError where a video is made as a whole.

        Args:
            model: Name of the model, for the message.
        """
        if not self.streams:
            raise WanjaxError(f"{model} makes a video as a whole and has no blocks to stream: pipe(prompt) makes it")

    # ---- shapes

    def latent_shape(self, settings: Settings) -> Shape:
        """Return the shape [1 C T H W] of a video's latents.

        Args:
            settings: Settings of the video.
        """
        frames = (settings.frames - 1) // self.vae.temporal_factor + 1
        height, width = (pixels // self.vae.spatial_factor for pixels in settings.size)
        return 1, self.vae.latent_channels, frames, height, width

    def stream_shapes(self, settings: Settings) -> dict[str, Shape]:
        """Return the shapes [1 C L] of the latents that are denoised with the video's, by name.

        Args:
            settings: Settings of the video.
        """
        seconds = settings.frames / settings.fps
        return {name: (1, one.channels, round(seconds * one.per_second)) for name, one in self.latent_streams.items()}

    def denoised_frames(self, frames: int) -> int:
        """Return the latent frames that are denoised for so many, some of which are dropped at the end.

        Args:
            frames: Latent frames of the video.
        """
        return frames + -frames % self.frame_multiple

    def noise_shape(self, settings: Settings, references: int = 0) -> Shape:
        """Return the shape [1 C T H W] of the initial noise, with all frames that are dropped before the video's.

        Args:
            settings: Settings of the video.
            references: Latent frames of reference pictures.
        """
        batch, channels, frames, height, width = self.latent_shape(settings)
        return batch, channels, references + self.denoised_frames(frames), height, width

    def noise_shapes(self, settings: Settings, references: int = 0, videos: int = 1) -> dict[str, Shape]:
        """Return the shapes of the initial noise of videos made together, in a pass of these settings, by stream.

        Args:
            settings: Settings of the pass.
            references: Latent frames of reference pictures.
            videos: Videos made together.
        """
        shapes = {VIDEO: self.noise_shape(settings, references), **self.stream_shapes(settings)}
        return {name: (videos, *shape[1:]) for name, shape in shapes.items()}

    def noise_inputs(self, settings: Settings, references: int = 0, videos: int = 1) -> Mapping[str, Shape]:
        """Return the shapes of the random arrays that can be given for videos made together, by name; of all passes.

        `step_noise` has a row for each step of the settings; those that a given video skips are not used.

        Args:
            settings: Settings of the video.
            references: Latent frames of reference pictures.
            videos: Videos made together.
        """
        _, channels, frames, *cells = self.latent_shape(settings)
        shapes = {}
        for number, one in enumerate(self.passes_of(settings)):
            for name, shape in self.noise_shapes(one, references, videos).items():
                shapes[noise_name(name, INITIAL, number)] = shape
                shapes |= (
                    {noise_name(name, STEP_NOISE, number): (one.steps, *shape)} if self.scheduler.stochastic else {}
                )
        for one in self.posteriors:
            kind = one.mean.partition("_")[0]
            if kind in self.takes:
                shapes[one.noise] = (videos, channels, 1 if kind == "image" else frames, *cells)
        return shapes

    def to_training_latents(self, latents: Float[Array, "B C T H W"]) -> Float[Array, "B _T H W C"]:
        """Return the latents of encoded videos [B C T H W] as the network is trained to make them.

        Args:
            latents: Latents of encoded videos, normalised.
        """
        return pad_front(jnp.moveaxis(latents, 1, -1), self.denoised_frames(latents.shape[2]))

    def decode_lengths(self, frames: int) -> tuple[int, int]:
        """Latent frames in the first chunk to decode, and in each later one, for a video of so many.

        Args:
            frames: Latent frames of the video.
        """
        return (self.chunk_frames, self.chunk_frames) if self.streams else self.vae.decode_lengths(frames)

    def chunks(self, frames: int) -> list[Chunk]:
        """Return the chunks of a video of so many latent frames; most models make a video as a whole.

        Args:
            frames: Latent frames of the video.
        """
        size = self.chunk_frames or frames
        count = frames // size
        return [Chunk(number, count, range(number * size, (number + 1) * size)) for number in range(count)]

    # ---- steps

    def passes_of(self, settings: Settings) -> list[Settings]:
        """Return the settings of each pass. A later one takes few steps, and has no step cache.

        Args:
            settings: Settings of the video.
        """
        return [self._pass_of(number, one, settings) for number, one in enumerate(self.passes)]

    def _pass_of(self, number: int, one: Pass, settings: Settings) -> Settings:
        changes: dict[str, object] = {"height": settings.height // one.divisor, "width": settings.width // one.divisor}
        changes |= {"steps": one.steps or settings.steps} | ({"cache": NONE} if number else {})
        if one.strength is not None:
            changes["strength"] = one.strength
        if one.guidance_scale is not None:
            changes |= {"guidance_scale": one.guidance_scale, "guidance_scale_2": None, "dynamic_guidance": False}
            if settings.guidance_rule.scaled and one.guidance_scale <= 1:
                changes["guidance_rule"] = CLASSIFIER_FREE
        return replace(settings, **changes)

    @property
    def _schedule_parameters(self) -> set[str]:
        return set(inspect.signature(self.scheduler.schedule).parameters)

    def schedule_options(self, settings: Settings) -> Mapping[str, float | str]:
        """Return the settings that decide the noise levels, as keywords of the scheduler's `schedule`.

        Args:
            settings: Settings of the video.
        """
        options = {"shift": settings.flow_shift, "sigmas": settings.sigmas, "follow": settings.follow}
        return {
            name: value for name, value in options.items() if value is not None and name in self._schedule_parameters
        }

    def schedule(self, settings: Settings, conditioning: Conditioning | None = None) -> Schedule:
        """Return the noise levels of the steps, arrays of the host; a given video, if encoded, skips the noisiest.

        Args:
            settings: Settings of the pass.
            conditioning: The output of `encode`, whose video, if there is one, decides where to start; None starts from
                noise.
        """
        starts_from_video = getattr(conditioning, "video_latents", None) is not None
        skip = settings.steps - settings.strong_steps if starts_from_video else 0
        return self.scheduler.schedule(settings.steps, skip=skip, **self.schedule_options(settings))

    def phases(self, schedule: Schedule, settings: Settings, number: int = 0) -> tuple[Phase, ...]:
        """Return the steps of each network, and their guidance scales.

        Args:
            schedule: Noise levels of the steps.
            settings: Settings of the video.
            number: The number of the pass, from 0.
        """
        return phases_of(self.passes[number].denoisers or self.denoisers, np.asarray(schedule.timesteps), settings)

    def noise_range(self, network: str, settings: Settings) -> tuple[float, float]:
        """Return the noise levels, from 0 to 1, between which a network denoises.

        Args:
            network: Name of the component.
            settings: Settings of the video.
        """
        if not self.experts or settings.boundary is None:
            return 0.0, 1.0
        return (settings.boundary, 1.0) if network == self.denoisers[0] else (0.0, settings.boundary)

    def tables_for(self, conditioning: Conditioning) -> Tables:
        """Return the tables of step caches for a video from this output of `encode`.

        Args:
            conditioning: The output of `encode`.
        """
        return (
            self.cache_tables if getattr(conditioning, "condition", None) is None else self.cache_tables.for_image_input
        )

    def cache_rule(self, settings: Settings) -> CacheRule:
        """Return the rule of the settings' step cache, complete; raise WanjaxError where the model cannot have it.

        Args:
            settings: Settings of the video.
        """
        if self.streams:
            if settings.cache != NONE:
                raise WanjaxError(f"{settings.model} takes too few steps for a step cache: leave {settings.cache} out")
            return NONE
        first = self.passes_of(settings)[0]
        return chosen_rule(settings.cache, self.phases(self.schedule(first), first), self.cache_tables, settings.model)

    def reused(self, settings: Settings) -> tuple[bool, ...]:
        """Tell of each step of the first pass whether it reuses what another kept, or may where that is not known.

        Args:
            settings: Settings of the video.
        """
        first = self.passes_of(settings)[0]
        rule, phases = self.cache_rule(settings), self.phases(self.schedule(first), first)
        return tuple(reuses for phase in phases for reuses in rule.reused(phase, self.cache_tables))

    def attention(self, requested: AttentionConfig) -> AttentionConfig:
        """Return the attention of the denoiser where this one is asked for; AUTO is that which it was trained with.

        Args:
            requested: The attention that is asked for.
        """
        return self.trained_attention if requested == AUTO else requested


@dataclass(frozen=True, kw_only=True)
class VideoModel(ABC, Generic[ConditioningT]):
    """A checkpoint as its family knows it, without weights: a method that computes is given a `Runtime`.

    A family writes the abstract methods, and the others where it differs.

    Args:
        vae: Config of the autoencoder.
        scheduler: The checkpoint's scheduler.
        tables: The checkpoint's tables for step caches.
    """

    conditioning_type: ClassVar[type[Any]]
    """The type that `encode` returns, a NamedTuple; its fields are the tensors of the first stage's file.

    One that holds pictures has a field `video_shape`, None by default, which a run fills (`pipelines/video_shape`).
    """

    vae: VAEConfig
    scheduler: Scheduler
    tables: Tables = NO_TABLES

    @cached_property
    def spec(self) -> ModelSpec:
        """What shared code knows of the model, as data. A family writes it."""
        raise NotImplementedError

    @property
    @abstractmethod
    def denoiser(self) -> Denoiser:
        """The traced part of the model."""

    @abstractmethod
    def encode_text(self, runtime: Runtime, settings: Settings) -> ConditioningT:
        """Encode the prompt and the negative prompt of a video's settings, with the text encoders alone.

        Args:
            runtime: Networks, devices and strategy.
            settings: Settings of the video.
        """

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Field | None]:
        """Encode the pictures of a video without the text encoders; return fields of `conditioning_type`.

        Args:
            runtime: Networks, devices and strategy.
            pictures: The pictures and clips of the request.
            settings: Settings of the video.
            tiling: Encode tile by tile, which saves memory.
        """
        return {}

    @abstractmethod
    def conditioning_shapes(self, conditioning: ConditioningT, settings: Settings) -> Mapping[str, FieldShape]:
        """Return the right shapes of the fields of `encode`'s output, for a video of these settings.

        Of fields without a default, which are the prompts', those that are left out are not checked; of the others,
        which hold pictures, those have to be None.

        Args:
            conditioning: That output, for the sizes that may be any and have to agree.
            settings: Those of the video.
        """

    @abstractmethod
    def prepare(
        self, runtime: Runtime, network: SplitNetwork, conditioning: ConditioningT, x: Any, purpose: Preparation
    ) -> tuple[tuple[object, ...], object]:
        """Compute what no step of a network changes; return the context of each forward, and what all share.

        Args:
            runtime: Calls programs.
            network: The network of the phase.
            conditioning: The output of `encode`, of videos that are made together.
            x: The latents, for their shape.
            purpose: What the steps are to do.
        """

    def update_memory(self, runtime: Runtime, network: SplitNetwork, inputs: ModelInputs, x: Any) -> object:
        """Return what the next chunk reads of this one, which is finished; buffers of `inputs` may be reused.

        Args:
            runtime: Networks, devices and strategy.
            network: Definition and weights of the denoiser.
            inputs: What the steps of the chunk were given.
            x: Latents of the finished chunk.
        """
        return None

    @abstractmethod
    def cost(self, settings: Settings, conditioning: ConditioningT | None = None) -> Cost:
        """Return the work of one forward of the denoiser, for this output of `encode` where there is one.

        Args:
            settings: Settings of the video.
            conditioning: The output of `encode`; None counts the prompt as plans do.
        """

    def refine(self, runtime: Runtime, conditioning: ConditioningT, latents: AnyLatents) -> ConditioningT:
        """Return the conditioning of the next pass, from that of this one and its latents, [B C T H W] or streams.

        The next pass begins from its fields `video_latents` and, of other streams, `NAME_latents`, in the shapes of
        that pass. By default these are the latents as they are, for passes of one size.

        Args:
            runtime: Networks, devices and strategy.
            conditioning: The conditioning of the finished pass.
            latents: Its latents, [B C T H W] or streams.
        """
        streams = latents if isinstance(latents, Mapping) else {VIDEO: latents}
        return conditioning._replace(**{f"{name}_latents": x for name, x in streams.items()})

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
        """Decode a video, each chunk as it is asked for; by default the video's latents alone, by the autoencoder.

        Args:
            runtime: Calls programs.
            latent_chunks: Latents of consecutive frames, [B C T H W] or streams: a list of one, or an iterator.
            seed: That of noise that a decoder takes.
            dtype: That of the frames.
            tiling: The tiles, with all of their sizes; None for whole frames.
            video: The place of the video in the batch of the pieces.

        Returns:
            Chunks of as many latent frames as `ModelSpec.decode_lengths` says.
        """
        first_chunks: Any = latent_chunks  # a list, but where a video comes in chunks
        at_once = self.spec.decode_lengths(self.spec.chunk_frames or stream_of(first_chunks[0]).shape[2])
        decoder = runtime.components.get(runtime.components.decoder)
        return map(
            Decoded, decode_latents(decoder, map(stream_of, latent_chunks), at_once, dtype, tiling, runtime.call, video)
        )

    def tokenize(self, runtime: Runtime, prompts: Sequence[str], follow: str) -> tuple[TokenBatch, ...]:
        """Return the tokens of prompts, for each text encoder.

        Args:
            runtime: Networks, devices and strategy.
            prompts: The texts to tokenize.
            follow: Which reference implementation to match, as in the settings.
        """
        return (runtime.components.get("tokenizer").tokenize(prompts),)

    def leading_frames(self, conditioning: ConditioningT, settings: Settings) -> int:
        """Return the number of reference latent frames, which are denoised before the video's and then dropped.

        Args:
            conditioning: The output of `encode`.
            settings: Settings of the video.
        """
        return 0

    def size_for(self, picture: tuple[int, int, int], settings: Settings) -> tuple[int, int]:
        """Return the size of a video of a picture [H W 3], where none is given.

        Args:
            picture: Its shape, [H W 3].
            settings: Settings of the video, but for its size.
        """
        return self.spec.fixed_size or size_within(picture, settings.height * settings.width, self.spec.size_multiple)


def phases_of(
    denoisers: Sequence[str], timesteps: Float[np.ndarray, " steps"], settings: Settings
) -> tuple[Phase, ...]:
    """Return the phases of a video: one, or that of each expert, the second below the noise level `boundary`.

    Args:
        denoisers: Names of the networks, the one of high noise first.
        timesteps: Timesteps of the schedule, falling.
        settings: Settings of the video.
    """
    total, skipped, first = len(timesteps), settings.steps - len(timesteps), settings.guidance_scale
    if settings.dynamic_guidance and settings.guided:
        return (Phase(denoisers[0], 0, tuple(dynamic_scales(first, timesteps, settings.steps)), total, 0, skipped),)
    if settings.boundary is None or len(denoisers) == 1:
        return (Phase(denoisers[0], 0, (first,) * total, total, 0, skipped),)
    high_noise_steps = int(np.sum(timesteps >= settings.boundary * TRAIN_STEPS))
    scale_2 = first if settings.guidance_scale_2 is None else settings.guidance_scale_2
    expert_steps = [
        (denoisers[0], 0, (first,) * high_noise_steps),
        (denoisers[1], high_noise_steps, (scale_2,) * (total - high_noise_steps)),
    ]
    return tuple(
        Phase(name, start, scales, total, number, skipped)
        for number, (name, start, scales) in enumerate(one for one in expert_steps if one[2])
    )


def with_scheduler(model: VideoModel[Any], scheduler: str | Scheduler) -> VideoModel[Any]:
    """Return the model with another scheduler; raise WanjaxError where it does not fit the model.

    Args:
        model: The model.
        scheduler: A scheduler, or its name with options.
    """
    return replace(model, scheduler=resolve(scheduler, model.scheduler))


def min_step_bytes(model: VideoModel[Any], settings: Settings) -> int:
    """Return bytes that a step holds at once, whatever its kernels are, beside the weights.

    They are those of the tokens of a layer, their queries, keys and values, which every attention is given whole. 0 for
    a video that is made by chunks.

    Args:
        model: The model.
        settings: Settings of the video.
    """
    if model.spec.streams:
        return 0
    work = model.cost(settings)
    return 4 * work.tokens * work.width * jnp.dtype(settings.dtype).itemsize


def truncations(model: VideoModel[Any], runtime: Runtime, prompt: str, follow: str) -> Sequence[Truncation]:
    """Return the parts of a prompt that the model does not read, if any.

    Args:
        model: The model.
        runtime: Networks, devices and strategy.
        prompt: The text.
        follow: Which reference implementation to match, as in the settings.
    """
    return tuple(cut for batch in model.tokenize(runtime, [prompt], follow) for cut in batch.truncated if cut)


def check_fits(model: VideoModel[ConditioningT], conditioning: ConditioningT, settings: Settings) -> None:
    """Raise WanjaxError unless this output of `encode` was made for a video of these settings.

    Args:
        model: The model.
        conditioning: The output of `encode`.
        settings: Settings of the video.
    """
    if (encoded_for := encoded_shape(conditioning)) is not None:
        encoded_for.check(settings)
    shapes = model.conditioning_shapes(conditioning, settings)
    check_conditioning(conditioning, shapes, settings.model, model.spec.task)
    if (reference_frames := model.leading_frames(conditioning, settings)) < 0:
        raise WanjaxError(f"the condition is {-reference_frames} latent frames shorter than the video: encode it again")
    if encoded_for is not None and reference_frames != encoded_for.references:
        raise WanjaxError(
            f"what was encoded for {encoded_for} holds {reference_frames} references: encode the pictures again"
        )


def conditioning_from(model: VideoModel[ConditioningT], tensors: Mapping[str, Array]) -> ConditioningT:
    """Restore the output of `encode` from its tensors by name; raise WanjaxError where one is missing.

    Warns of prompts from the scripts before wanjax, which had cut them to a length that the model was not trained on.

    Args:
        model: The model.
        tensors: The tensors of a stage's file, by name.
    """
    conditioning_type, text_length = model.conditioning_type, model.spec.text_length
    optional = conditioning_type._field_defaults.keys()
    if missing := [name for name in conditioning_type._fields if name not in tensors and name not in optional]:
        tensor_names = ", ".join(tensors) or "none at all"
        raise WanjaxError(
            f"there is no tensor {missing[0]!r} among the encoded prompts, only {tensor_names}: encode again"
        )
    conditioning = conditioning_type(**{name: x for name, x in tensors.items() if name in conditioning_type._fields})
    if text_length is not None and conditioning.prompt_embeds.shape[1] == OLD_TEXT_LENGTH != text_length:
        message = f"the prompt has {OLD_TEXT_LENGTH} tokens where the model reads {text_length}: the video will differ"
        warnings.warn(message, WanjaxWarning, stacklevel=2)
    return conditioning


def latents_of(conditioning: Conditioning, spec: ModelSpec | None = None) -> dict[str, Any]:
    """Return the encoded pictures that are latents [B C T H W], by name, and the clean latents of further streams.

    Args:
        conditioning: The output of `encode`.
        spec: The model's, whose further streams count too; None for the pictures alone.
    """
    streams = {f"{name}_latents" for name in (spec.latent_streams if spec else ())}
    reference_frames = {name: x for name, x in conditioning._asdict().items() if x is not None}
    return {name: x for name, x in reference_frames.items() if len(x.shape) == 5 or name in streams}


def with_attention(model: VideoModel[Any], attention: AttentionConfig, name: str) -> VideoModel[Any]:
    """Return the model whose denoiser can attend so: with a projection for sparse-linear attention.

    Raises UnsupportedError for radial or sparse-linear attention where the denoiser can have none, and for any other
    than sparse-linear attention where it was trained with that.

    Args:
        model: The model.
        attention: The attention that is asked for.
        name: Name of the model, for the message.
    """
    if attention.radial and not model.spec.radial_attention:
        raise UnsupportedError(f"{name} has no radial attention: use --attention auto")
    trained = model.spec.trained_attention.sparse
    if attention.sparse and not trained:
        if not model.spec.sparse_linear:
            raise UnsupportedError(f"{name} can have no sparse-linear attention: use --attention auto")
        config: Any = model.spec.networks[model.spec.denoisers[0]]
        return replace(model, **{model.spec.denoisers[0]: replace(config, sparse_linear=attention.sparse)})
    if trained and not model.spec.attention(attention).sparse:
        message = f"{name} was trained with sparse-linear attention, and {attention} is another"
        raise UnsupportedError(f"{message}: use --attention auto or sla:top=0.15")
    return model
