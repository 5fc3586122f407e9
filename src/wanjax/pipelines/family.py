# SPDX-License-Identifier: Apache-2.0
"""A family of models as one value, which holds everything that the rest of the library needs to know of it.

Loading, stages, files, sampling, LoRA, conversion, plans and the command line use a family through this value alone.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from wanjax.checkpoints.networks import Config, Network, NetworkKind, components, network_of
from wanjax.checkpoints.sources import Layout, Source
from wanjax.errors import UnsupportedError, WanjaxError
from wanjax.kernels.attention import AUTO, Attention
from wanjax.pipelines.cache_rules import CacheRule, Turn, chosen_rule, turns_of
from wanjax.pipelines.cache_tables import NO_TABLES, Tables
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Segment
from wanjax.schedulers import Scheduler
from wanjax.sharding import choose_axes, platform


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
    """The shapes of a pipeline's networks, and its scheduler: the knowledge that needs no weights.

    Text and image encoders are in it for plans alone; a pipeline that runs reads their configs when it loads them.
    `vae` is the autoencoder's config, which has `spatial_factor`, `temporal_factor`, `latent_channels` and `patch`.
    `tables` are those that step caches need.
    """

    vae: Any
    scheduler: Scheduler
    tables: Tables = NO_TABLES

    @property
    @abstractmethod
    def networks(self) -> Mapping[str, Config]:
        """The config of each network whose config was read, by component."""

    @property
    @abstractmethod
    def grid(self) -> int:
        """The number of pixels of which a video's height and width are multiples."""

    @property
    def purpose(self) -> str:
        """The kind of videos that the model makes, in words."""
        return "text to video"

    @property
    def needs(self) -> tuple[str, ...]:
        """The pictures without which the model makes no video, by name."""
        return ()

    @property
    def denoisers(self) -> tuple[str, ...]:
        """The components that denoise. They have one shape, and each step uses one of them."""
        return ("transformer",)

    @property
    def block_length(self) -> int:
        """The frames that each block adds to a video that is made block by block; 0 for one that is made as a whole."""
        return 0

    @property
    def streams(self) -> bool:
        """True where a video's frames are delivered while it is made, block by block."""
        return self.block_length > 0

    def check_whole(self, model: str, purpose: str) -> None:
        """Raises WanjaxError where a video is made block by block; `purpose` is what needs one made as a whole."""
        if self.streams:
            raise WanjaxError(f"{model} makes videos block by block, and {purpose} needs them made as a whole")

    def latent_shape(self, settings: Settings) -> tuple[int, ...]:
        """Returns the shape [1 C T H W] of a video's latents."""
        frames = (settings.frames - 1) // self.vae.temporal_factor + 1
        height, width = (pixels // self.vae.spatial_factor for pixels in settings.size)
        return 1, self.vae.latent_channels, frames, height, width

    def denoised_shape(self, settings: Settings) -> tuple[int, ...]:
        """Returns the shape [1 C T H W] of the latents that are denoised, with frames that are dropped at the end."""
        return self.latent_shape(settings)

    def segments(self, settings: Settings) -> Sequence[Segment]:
        """Returns the steps of each network of a video that begins from noise."""
        return [Segment(self.denoisers[0], 0, (settings.guidance_scale,) * settings.steps)]

    def turns(self, settings: Settings) -> tuple[Turn, ...]:
        """Returns the steps of each network for a step cache."""
        return turns_of(self.segments(settings), settings.steps)

    def cache_rule(self, settings: Settings) -> CacheRule:
        """Returns the rule of the settings' step cache, complete; raises WanjaxError where the model cannot have it."""
        return chosen_rule(settings.cache, self.turns(settings), self.tables, settings.model)

    def reused(self, settings: Settings) -> tuple[bool, ...]:
        """Tells of each step whether it reuses what another kept, or may where the rule is not `counted`."""
        rule = self.cache_rule(settings)
        return tuple(reuses for turn in self.turns(settings) for reuses in rule.reused(turn, self.tables))

    @property
    def radial(self) -> bool:
        """True where the denoiser's self-attention can be radial."""
        return False

    def check_attention(self, attention: Attention, model: str) -> None:
        """Raises UnsupportedError for radial attention where the denoiser has none."""
        if attention.radial and not self.radial:
            raise UnsupportedError(f"{model} has no radial attention: --attention auto would do")

    @abstractmethod
    def forward(self, settings: Settings, encoded: Any = None) -> Forward:
        """Returns the work of one forward of the denoiser, for this output of `encode` where there is one."""

    def decoded_at_once(self, frames: int) -> tuple[int, int]:
        """Latent frames in the first chunk to decode, and in each later one, for a video of so many."""
        return self.vae.decoded_at_once(frames)


@dataclass(frozen=True)
class Lesson:
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
        return found if settings.frames == self.frames else [*found, f"{settings.frames} frames"]


@dataclass(frozen=True)
class Preset:
    """A published checkpoint: its source, a description, its licence, and the settings that its authors publish.

    `architecture` is None for a checkpoint in the package, whose folder is `source`. `loras` are merged into it. A
    `scheduler` replaces the checkpoint's own. `lesson` is None for a model that knows more than can be listed.
    `aliases` are other names for the source.
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
    lesson: Lesson | None = None
    aliases: tuple[str, ...] = ()

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


@dataclass(frozen=True)
class Family:
    """A family of models.

    `networks` are the kinds of networks in its checkpoints; `pipelines` the class names in model_index.json. `pipeline`
    makes a pipeline from components, an architecture, default settings, a partitioner and the name of a set of
    compiler options. `architecture` reads a checkpoint's configs, and those of its text and image encoders if the
    second argument is True. `settings` returns the default settings of a checkpoint. `loaders` load tokenizers and
    image processors from their folders. `layouts` are the layouts of its checkpoints other than that of diffusers.
    `tables` is a file of published tables for step caches, by the presets' names. `prompt` returns, for plans, the
    length of a prompt and the number of its real tokens, by tokenizer.
    """

    name: str
    networks: tuple[NetworkKind, ...]
    pipelines: tuple[str, ...]
    pipeline: Callable[..., Pipeline]
    architecture: Callable[[Source, bool], Architecture]
    settings: Callable[[Source, Any, Preset | None], Settings]
    presets: tuple[Preset, ...] = ()
    loaders: Mapping[str, Callable[[Path], Any]] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = ()
    tables: Path | None = None
    prompt: Callable[[Any], Mapping[str, tuple[int, int]]] = lambda architecture: {}

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


def optional(source: Source, component: str) -> bool:
    """Tells whether a checkpoint has a component."""
    return component in components(source.index)
