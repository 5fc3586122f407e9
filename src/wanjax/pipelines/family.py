# SPDX-License-Identifier: Apache-2.0
"""A family of models as one value, which holds everything that the rest of the library needs to know of it.

Loading, stages, files, sampling, LoRA, conversion, plans and the command line use a family through this value alone.
The seam is two classes: a family writes an `Architecture`, a checkpoint as the family knows it, and the methods of it
that compute are given a `Pipe`, a pipeline as they see it.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from wanjax.checkpoints.layouts import Layout
from wanjax.checkpoints.networks import Config, Network, NetworkKind, network_of
from wanjax.checkpoints.relatives import Relatives
from wanjax.checkpoints.sources import Source, read_json
from wanjax.errors import UnsupportedError, WanjaxError
from wanjax.figures import quantity
from wanjax.kernels.attention import AUTO, Attention, SparseLinear
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Pictures, size_within
from wanjax.media.records import CONFIG
from wanjax.pipelines.caching.rules import CacheRule, Turn, chosen_rule, turns_of
from wanjax.pipelines.caching.tables import NO_TABLES, Tables
from wanjax.pipelines.checks import check_taken
from wanjax.pipelines.components import Components
from wanjax.pipelines.distillation import Distillation, distilled_by, telling
from wanjax.pipelines.draws import INITIAL, OF_STEPS
from wanjax.pipelines.frames import GivenFrames, encoded
from wanjax.pipelines.guidance import check_rule
from wanjax.pipelines.previews.latent_preview import LatentPreview
from wanjax.pipelines.sampler import Denoiser, Ends, Held, Inputs
from wanjax.pipelines.settings import Settings, SomeSettings
from wanjax.pipelines.steps import Segment
from wanjax.pipelines.text.tokenizer import TokenBatch, Truncation
from wanjax.pipelines.video_shape import encoded_shape
from wanjax.pipelines.windows import CONTROL, PICTURE, check_windows
from wanjax.programs import Program, Strategy, Value
from wanjax.schedulers import Scheduler, shift_of, successor
from wanjax.sharding import Partitioner, choose_axes, platform

Encoded = Any  # the family's own NamedTuple of arrays, each with a first axis of size 1


@runtime_checkable
class Pipe(Protocol):
    """A pipeline as its family and its runs see it: components, devices, and what is done with programs."""

    components: Components
    architecture: "Architecture"
    defaults: Settings
    partitioner: Partitioner
    compiler: str
    strategy: Strategy

    def call(self, program: Program, static: Any, *arguments: Any) -> Any:
        """Calls a program on the pipeline's devices, and returns its results; `static` is hashable."""
        ...

    def encode_video(self, frames: GivenFrames, *, tiling: Tiling | None = None) -> Float[Value, "1 C _T _H _W"]:
        """Encodes frames [T H W 3] to latents [1 C T H W]."""
        ...

    def under(self, strategy: Strategy, components: Components | None = None) -> "Pipe":
        """Return the pipeline with another strategy, and with other components if given; the rest is shared."""
        ...

    def colours(self) -> LatentPreview:
        """Returns what makes previews of latents."""
        ...


class Forward(NamedTuple):
    """The work of one forward of the denoiser for one prompt, for plans and profiles.

    `tokens` is the length of self-attention's sequence, `scores` the operations of its two products, and `flops` all
    operations by part of the network. A multiplication and an addition are two operations. `ring` tells whether
    self-attention is that of one sequence to itself, whose keys TPUs pass round where that is fastest.
    """

    tokens: int
    layers: int
    heads: int
    width: int
    scores: int
    flops: Mapping[str, int]
    ring: bool = False


def auto_axes(
    work: Forward, devices: int, *, guided: bool, sp: int | None = None, attention: Attention = AUTO
) -> tuple[int, int, int]:
    """Returns dp, sp and tp of the mesh that "auto" is, on so many devices of this platform.

    `sp` and the errors are those of `choose_axes`.
    """
    ring = work.ring and platform() == "tpu" and attention.passes_keys
    return choose_axes(devices, heads=work.heads, tokens=work.tokens, guided=guided, sp=sp, ring=ring)


@dataclass(frozen=True, kw_only=True)
class Architecture(ABC):
    """A checkpoint as its family knows it: the shapes of its networks, its scheduler, and how its videos are made.

    It has no weights: a method that computes is given the pipeline, which has them. A family writes the abstract
    methods, and the others where it differs. Text and image encoders are in it for plans alone; a pipeline that runs
    reads their configs when it loads them. `vae` is the autoencoder's config, which has `spatial_factor`,
    `temporal_factor`, `latent_channels` and `patch`. `tables` are those that step caches need.
    """

    encoded_type: ClassVar[type[Any]]
    """The type that `encode` returns; its fields are the tensors of the first stage's file.

    One that holds pictures has a field `video_shape`, None by default, which a run fills (`pipelines/video_shape`).
    """

    vae: Any
    scheduler: Scheduler
    tables: Tables = NO_TABLES

    @property
    @abstractmethod
    def grid(self) -> int:
        """The number of pixels of which a video's height and width are multiples."""

    @abstractmethod
    def forward(self, settings: Settings, encoded: Encoded | None = None) -> Forward:
        """Returns the work of one forward of the denoiser, for this output of `encode` where there is one."""

    @abstractmethod
    def encode_prompts(self, pipe: Pipe, settings: Settings) -> Encoded:
        """Encodes the prompt and the negative prompt of a video's settings, with the text encoders alone."""

    @abstractmethod
    def check_encoded(self, encoded: Encoded, settings: Settings) -> None:
        """Raises WanjaxError unless this output of `encode` fits a video of these settings."""

    @abstractmethod
    def inputs(
        self, pipe: Pipe, network: nnx.Module, segment: Segment, encoded: Encoded, x: Held, batched: bool
    ) -> tuple[Denoiser, Inputs]:
        """Returns the denoiser of a segment's network, and the inputs that its steps share."""

    @property
    def networks(self) -> Mapping[str, Config]:
        """The config of each network whose config was read, by component."""
        shared = {field.name for field in fields(Architecture)}
        names = (*(field.name for field in fields(self) if field.name not in shared), "vae")
        return {name: config for name in names if is_dataclass(config := getattr(self, name))}

    @property
    def denoisers(self) -> tuple[str, ...]:
        """The components that denoise. They have one shape, and each step uses one of them."""
        return ("transformer",)

    @property
    def radial(self) -> bool:
        """True where the denoiser's self-attention can be radial."""
        return False

    @property
    def purpose(self) -> str:
        """The kind of videos that the model makes, in words."""
        return "text to video"

    @property
    def needs(self) -> tuple[str, ...]:
        """The pictures without which the model makes no video, by name."""
        return ()

    @property
    def takes(self) -> tuple[str, ...]:
        """The pictures that the model can use, by name."""
        return self.needs

    @property
    def tasks(self) -> list[str]:
        """What a video can be made from, and how, in words; from what the checks of pictures take."""
        told = {
            "text": not self.needs,
            "a first picture": "image" in self.takes and "last_image" not in self.needs,
            "a first and a last picture": "last_image" in self.takes,
            "a clip": "video" in self.takes and self.begins_from_video,
            "a control clip": "video" in self.takes and not self.begins_from_video,
            "a mask": "mask" in self.takes,
            "reference pictures": "references" in self.takes,
            "streamed block by block": self.streams,
            "in windows that go on": self.continued_by is not None,
        }
        return [task for task, offered in told.items() if offered]

    @property
    def picture_beside_clip(self) -> str | None:
        """How a first picture counts beside a clip, in words; None for a model that does not take both."""
        if not {"image", "video"} <= set(self.takes):
            return None
        return "the picture is the first frame and decides the size, and the frames after it begin from the clip"

    @property
    def continued_by(self) -> str | None:
        """What a window takes of the one before: a frame as `image`, frames in a masked `video`, or nothing."""
        if self.streams or set(self.needs) - {PICTURE}:
            return None
        return CONTROL if "mask" in self.takes else PICTURE if PICTURE in self.takes else None

    def least_bytes(self, settings: Settings) -> int:
        """Returns bytes that a step holds at once, whatever its kernels are, beside the weights.

        They are those of the tokens of a layer, their queries, keys and values, which every attention is given whole.
        0 for a video that is made by blocks.
        """
        if self.block_frames:
            return 0
        work = self.forward(settings)
        return 4 * work.tokens * work.width * jnp.dtype(settings.dtype).itemsize

    @property
    def begins_from_video(self) -> bool:
        """True where denoising begins from a given video, up to the strength; False where the video only guides it."""
        return True

    @property
    def ways(self) -> bool:
        """True where `follow` makes a difference: the ways of the model's authors and of diffusers are not the same."""
        return False

    @property
    def block_frames(self) -> int:
        """The latent frames of each block of a video that is made block by block; 0 for one that is made as a whole."""
        return 0

    @property
    def longest(self) -> int | None:
        """The largest number of frames that the autoencoder can encode or decode; None where there is no such limit."""
        return None

    @property
    def ends(self) -> Ends:
        """The two ends of denoising."""
        return Ends()

    def implied(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns given settings, and those that follow from them."""
        return given

    def check_settings(self, settings: Settings) -> None:
        """Raises WanjaxError where the model makes no video of these settings."""
        settings.check(spatial=self.grid, temporal=self.vae.temporal_factor)
        self.check_length(settings.frames, settings.model)
        check_windows(settings, self.continued_by)
        check_rule(settings.guidance_rule, settings.guided, settings.steps)

    def check_length(self, frames: int, model: str) -> None:
        """Raises WanjaxError for more frames than the autoencoder can encode or decode in one video."""
        if self.longest is not None and frames > self.longest:
            raise WanjaxError(f"{frames} frames are too many for {model}: at most {self.longest} would do")

    def check_pictures(self, pictures: Pictures, settings: Settings) -> None:
        """Raises WanjaxError unless the model takes these pictures and needs no others."""
        check_taken(pictures.given(), settings.model, self.purpose, takes=self.takes, needs=self.needs)
        if pictures.last_image is not None and pictures.image is None:
            raise WanjaxError(f"a last image is given without a first: {settings.model} takes both, or the first alone")
        if pictures.last_image is not None and settings.frames == 1:
            raise WanjaxError("a video of 1 frame has no last image beside the first: 5 frames or more would do")

    def size_for(self, picture: tuple[int, int, int], asked: Settings) -> tuple[int, int]:
        """Returns the size of a video of a picture [H W 3], where none is given."""
        return size_within(picture, asked.height * asked.width, self.grid)

    def tokens(self, pipe: Pipe, prompts: Sequence[str], follow: str) -> tuple[TokenBatch, ...]:
        """Returns the tokens of prompts, for each text encoder; `follow` is that of the settings."""
        return (pipe.components.get("tokenizer").tokenize(prompts),)

    def truncations(self, pipe: Pipe, prompt: str, follow: str) -> Sequence[Truncation]:
        """Returns the parts of a prompt that the model does not read, if any."""
        return tuple(cut for batch in self.tokens(pipe, [prompt], follow) for cut in batch.truncated if cut)

    def encode_pictures(
        self, pipe: Pipe, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        """Encodes the pictures of `prepare` without the text encoders; returns fields of `encoded_type`."""
        return {}

    def check_fits(self, encoded: Encoded, settings: Settings) -> None:
        """Raise WanjaxError unless this output of `encode` was made for a video of these settings."""
        if (made := encoded_shape(encoded)) is not None:
            made.check(settings)
        self.check_encoded(encoded, settings)
        if made is not None and (held := self.references(encoded, settings)) != made.references:
            raise WanjaxError(f"what was encoded for {made} holds {held} references: encode the pictures again")

    def encode_frames(self, pipe: Pipe, frames: GivenFrames, tiling: Tiling | None) -> Float[Value, "1 C _T _H _W"]:
        """Encodes frames to the latents that the network is trained on, as `decode` takes them."""
        return encoded(pipe.components.get("vae"), frames, tiling, pipe.call)

    def encoded_from(self, tensors: Mapping[str, Array]) -> Encoded:
        """Restores the output of `encode` from its tensors by name; raises WanjaxError where one is missing."""
        optional = self.encoded_type._field_defaults.keys()
        if missing := [name for name in self.encoded_type._fields if name not in tensors and name not in optional]:
            has = ", ".join(tensors) or "none at all"
            raise WanjaxError(f"there is no tensor {missing[0]!r} among the encoded prompts, only {has}: encode again")
        return self.encoded_type(**{name: x for name, x in tensors.items() if name in self.encoded_type._fields})

    def latent_shape(self, settings: Settings) -> tuple[int, ...]:
        """Returns the shape [1 C T H W] of a video's latents."""
        frames = (settings.frames - 1) // self.vae.temporal_factor + 1
        height, width = (pixels // self.vae.spatial_factor for pixels in settings.size)
        return 1, self.vae.latent_channels, frames, height, width

    def denoised_shape(self, settings: Settings) -> tuple[int, ...]:
        """Returns the shape [1 C T H W] of the latents that are denoised, with frames that are dropped at the end."""
        return self.latent_shape(settings)

    def references(self, encoded: Encoded, settings: Settings) -> int:
        """Returns the number of reference latent frames, which are denoised before the video's and then dropped."""
        return 0

    def noise_shape(self, settings: Settings, references: int = 0) -> tuple[int, ...]:
        """Returns the shape [1 C T H W] of the initial noise, with all frames that are dropped before the video's."""
        batch, channels, frames, height, width = self.denoised_shape(settings)
        return batch, channels, references + frames, height, width

    def draws(self, settings: Settings, references: int = 0, videos: int = 1) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes of the random arrays that can be given for videos made together, by name.

        `step_noise` has a row for each step of the settings; those that a given video skips are not used.
        """
        initial = (videos, *self.noise_shape(settings, references)[1:])
        of_steps = {OF_STEPS: (settings.steps, *initial)} if self.scheduler.stochastic else {}
        return {INITIAL: initial} | of_steps

    def with_scheduler(self, scheduler: str | Scheduler) -> "Architecture":
        """Returns the architecture with another scheduler; raises WanjaxError where it does not fit the model."""
        return replace(self, scheduler=successor(scheduler, self.scheduler))

    def schedule(self, settings: Settings, encoded: Encoded | None = None) -> Any:
        """Returns the noise levels of the steps, arrays of the host; a given video, if encoded, skips the noisiest."""
        begun = getattr(encoded, "video_latents", None) is not None
        skip = settings.steps - settings.strong_steps if begun else 0
        return self.scheduler.schedule(settings.steps, skip=skip, **self.levels(settings))

    def levels(self, settings: Settings) -> Mapping[str, Any]:
        """Returns the settings that decide the noise levels, as keywords of the scheduler's `schedule`.

        These are those of a flow, of which a model may have none.
        """
        known = {"shift": settings.flow_shift, "sigmas": settings.sigmas}
        return {name: value for name, value in known.items() if value is not None}

    def segments(self, schedule: Any, settings: Settings) -> Sequence[Segment]:
        """Returns the steps of each network, and their guidance scales."""
        return [Segment(self.denoisers[0], 0, (settings.guidance_scale,) * len(schedule.timesteps))]

    def block_inputs(
        self,
        pipe: Pipe,
        network: nnx.Module,
        segment: Segment,
        encoded: Encoded,
        x: Held,
        batched: bool,
        block: int,
        past: Any,
    ) -> tuple[Denoiser, Inputs, Any]:
        """Returns the denoiser and the inputs of a block, counted from 0, and what is kept of the blocks before it.

        `past` is None for the first block.
        """
        return *self.inputs(pipe, network, segment, encoded, x, batched), past

    def renewed(self, pipe: Pipe, network: nnx.Module, past: Any, inputs: Inputs, x: Held) -> Any:
        """Returns what the next block is given, once a block is finished; the buffers of `past` may be reused."""
        return past

    def decoded_at_once(self, frames: int) -> tuple[int, int]:
        """Latent frames in the first chunk to decode, and in each later one, for a video of so many."""
        return (self.block_frames, self.block_frames) if self.streams else self.vae.decoded_at_once(frames)

    def noise_range(self, network: str, settings: Settings) -> tuple[float, float]:
        """Returns the noise levels, from 0 to 1, between which a network denoises."""
        return 0.0, 1.0

    def clean(self, latents: Float[Array, "B C T H W"]) -> Float[Array, "B _T H W C"]:
        """Returns the latents of encoded videos [B C T H W] as the network is trained to make them."""
        return jnp.moveaxis(latents, 1, -1)

    @property
    def streams(self) -> bool:
        """True where a video's frames are delivered while it is made, block by block."""
        return self.block_frames > 0

    @property
    def block_length(self) -> int:
        """The frames that each block adds to a video that is made block by block; 0 for one that is made as a whole."""
        return self.block_frames * self.vae.temporal_factor

    def check_whole(self, model: str, purpose: str) -> None:
        """Raises WanjaxError where a video is made block by block; `purpose` is what needs one made as a whole."""
        if self.streams:
            raise WanjaxError(f"{model} makes videos block by block, and {purpose} needs them made as a whole")

    def check_streams(self, model: str) -> None:
        """Raises WanjaxError where a video is made as a whole."""
        if not self.streams:
            raise WanjaxError(f"{model} makes a video as a whole and has no blocks to stream: pipe(prompt) makes it")

    def tables_for(self, encoded: Encoded) -> Tables:
        """Returns the tables of step caches for a video from this output of `encode`."""
        return self.tables if getattr(encoded, "condition", None) is None else self.tables.of_pictured

    def turns(self, settings: Settings) -> tuple[Turn, ...]:
        """Returns the steps of each network for a step cache."""
        return turns_of(self.segments(self.schedule(settings), settings), settings.steps)

    def cache_rule(self, settings: Settings) -> CacheRule:
        """Returns the rule of the settings' step cache, complete; raises WanjaxError where the model cannot have it."""
        return chosen_rule(settings.cache, self.turns(settings), self.tables, settings.model)

    def reused(self, settings: Settings) -> tuple[bool, ...]:
        """Tells of each step whether it reuses what another kept, or may where the rule is not `counted`."""
        rule = self.cache_rule(settings)
        return tuple(reuses for turn in self.turns(settings) for reuses in rule.reused(turn, self.tables))

    def attention(self, asked: Attention) -> Attention:
        """Returns the attention of the denoiser where this one is asked for; AUTO is that which it was trained with."""
        return asked

    def attending(self, asked: Attention, model: str) -> "Architecture":
        """Returns the architecture whose denoiser can attend so: with a projection for sparse-linear attention.

        Raises UnsupportedError for radial or sparse-linear attention where the denoiser can have none, and for any
        other than sparse-linear attention where it was trained with that.
        """
        if asked.radial and not self.radial:
            raise UnsupportedError(f"{model} has no radial attention: --attention auto would do")
        trained = self.attention(AUTO).sparse
        if asked.sparse and not trained:
            return self.linearised(asked.sparse, model)
        if trained and not self.attention(asked).sparse:
            told = f"{model} was trained with sparse-linear attention, and {asked} is another"
            raise UnsupportedError(f"{told}: --attention auto or sla:top=0.15 would do")
        return self

    def linearised(self, sparse: SparseLinear, model: str) -> "Architecture":
        """Returns the architecture whose denoiser has a projection for this sparse-linear attention.

        Raises UnsupportedError where it can have none.
        """
        raise UnsupportedError(f"{model} can have no sparse-linear attention: --attention auto would do")

    @property
    def entries(self) -> Mapping[str, Any]:
        """The entries of a denoiser's config.json on what `attending` added."""
        return {}


def named_sizes(
    architecture: Architecture, defaults: Settings, published: Sequence[tuple[int, int]] = ()
) -> dict[str, tuple[int, int]]:
    """Returns a model's sizes (height, width) by name, the default one first.

    The `published` ones and the default one have the names of their lines, such as 480p. `portrait` is the default one
    on its side, and `square` has about its area, where the model makes these.
    """
    height, width = defaults.size
    named = {lines(size): size for size in (defaults.size, *published)}
    portrait, square = (architecture.size_for((high, height, 3), defaults) for high in (width, height))
    if portrait[0] > portrait[1]:
        named["portrait"] = portrait
    return named | ({"square": square} if square[0] == square[1] else {})


def lines(size: tuple[int, int]) -> str:
    """Returns the name of a size (height, width) by its lines, such as 480p."""
    return f"{min(size)}p"


@dataclass(frozen=True)
class TrainingDomain:
    """All that a small model was trained on, and can show: the words of its prompts, and one size and length.

    `about` describes its clips, and gives a prompt as an example.
    """

    about: str
    words: frozenset[str]
    size: tuple[int, int]
    frames: int

    def unknown(self, prompt: str) -> list[str]:
        """Returns the words of a prompt that the model does not know, each once."""
        return [word for word in dict.fromkeys(re.findall(r"[^\W\d_]+", prompt.lower())) if word not in self.words]

    def unlike(self, settings: Settings) -> list[str]:
        """Returns what a video of these settings has that no clip of the training had."""
        found = [] if settings.size == self.size else [f"{settings.width}x{settings.height}"]
        return found if settings.frames == self.frames else [*found, quantity(settings.frames, "frame")]


@dataclass(frozen=True)
class Preset:
    """A published checkpoint: its source, a description, its licence, and the settings that its authors publish.

    `architecture` is None for a checkpoint in the package, whose folder is `source`. `loras` are merged into it. A
    `scheduler` replaces the checkpoint's own. `domain` is None for a model that knows more than can be listed.
    `aliases` are other names for the source. `sizes` are those, as (height, width), that the authors publish beside the
    default one. `distillation` is that of its weights, or of its LoRAs. A checkpoint of the same shapes is this one
    where its name holds all `words`, in lower case; `nearest` has the whole rule.
    """

    name: str
    source: str
    about: str
    transformer_parameters: int
    licence: str
    param_dtype: str
    defaults: Settings
    architecture: Architecture | None = None
    loras: tuple[str, ...] = ()
    scheduler: Scheduler | None = None
    domain: TrainingDomain | None = None
    aliases: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    distillation: Distillation | None = None
    words: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The repositories that this preset is, without its LoRAs."""
        return () if self.loras else (self.source, *self.aliases)

    @property
    def bare_names(self) -> list[str]:
        """The names of these repositories without their owners; none for a file."""
        return [source.rpartition("/")[2] for source in self.sources if source.count("/") == 1]

    @property
    def shipped(self) -> bool:
        """True for a checkpoint in the package."""
        return Path(self.source).is_dir()


def nearest(
    presets: Sequence[Preset], path: str, known: Iterable[Distillation], shift: float | None = None
) -> Preset | None:
    """Returns the preset that a checkpoint is, of those whose networks have its shapes; None where there are none.

    Its name decides: by a distillation, then by the presets' own words, then by the lines of their sizes. Where it does
    not, the flow `shift` of its scheduler does, and then the first preset is taken.
    """
    name = telling(path)
    distillation = distilled_by(name, known)
    lines = set(re.findall(r"\b(\d{3,4})p\b", name))

    def nearness(preset: Preset) -> tuple[int, ...]:
        publisher = preset.distillation and preset.distillation.name
        words = [bool(re.search(rf"\b{word}\b", name)) for word in preset.words]
        return (
            2 if publisher == (distillation and distillation.name) else 1 if publisher is None else 0,
            len(words) if all(words) else -1,
            str(min(preset.defaults.size)) in lines,
            preset.defaults.flow_shift == shift,
        )

    return max(presets, key=nearness, default=None)


def no_prompts(architecture: Any) -> Mapping[str, tuple[int, int]]:
    """Returns the lengths of the prompts of a family without tokenizers: none."""
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models.

    `networks` are the kinds of networks in its checkpoints; `pipelines` the class names in model_index.json.
    `architecture` reads a checkpoint's configs, and those of its text and image encoders if the second argument is
    True. `settings` returns the default settings of a checkpoint. `loaders` load tokenizers and image processors from
    their folders. `layouts` are the layouts of its checkpoints other than that of diffusers, and `relatives` models
    like its own that are not read. `tables` is a file of published tables for step caches, by the presets' names.
    `distillations` are those that names of files tell, the most special first. `prompt` returns, for plans, the length
    of a prompt and the number of its real tokens, by tokenizer.
    """

    name: str
    networks: tuple[NetworkKind, ...]
    pipelines: tuple[str, ...]
    architecture: Callable[[Source, bool], Architecture]
    settings: Callable[[Source, Any, Preset | None], Settings]
    presets: tuple[Preset, ...] = ()
    loaders: Mapping[str, Callable[[Path], Any]] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = ()
    relatives: Relatives = field(default_factory=dict)
    tables: Path | None = None
    distillations: tuple[Distillation, ...] = ()
    prompt: Callable[[Any], Mapping[str, tuple[int, int]]] = no_prompts

    def network_of(self, config: Config) -> Network:
        """Returns the network that a config describes."""
        return network_of(config, self.networks)


def family_of(source: Source, families: Sequence[Family]) -> Family:
    """Returns the family of the pipeline that model_index.json names; raises WanjaxError where none has it."""
    kind = source.index.get("_class_name")
    for family in families:
        if kind in family.pipelines:
            return family
    known = " or ".join(name for family in families for name in family.pipelines)
    raise WanjaxError(f"{source.name} holds a {kind}: {known} would do")


def updated_by(source: Source, settings: SomeSettings, more: Mapping[str, Any] | None = None) -> SomeSettings:
    """Returns settings with those that a checkpoint's files give: its scheduler's flow shift, and its own settings.

    `more` are others, which take the place of the former and not of the latter.
    """
    shift = {"flow_shift": shift_of(source.config("scheduler"))}
    return settings.updated(shift | dict(more or {}) | read_json(source.root / CONFIG, missing={}))
