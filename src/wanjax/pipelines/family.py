# SPDX-License-Identifier: Apache-2.0
"""A family of models as one value, and its published checkpoints."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wanjax.checkpoints.layout import Layout
from wanjax.checkpoints.network_kinds import Config, Network, NetworkKind, network_of
from wanjax.checkpoints.sources import Source, read_json
from wanjax.checkpoints.unsupported import UnsupportedModels
from wanjax.errors import WanjaxError
from wanjax.figures import quantity
from wanjax.media.metadata import CONFIG
from wanjax.pipelines.distillation import Distillation, find_distillation, model_name_in
from wanjax.pipelines.model import VideoModel
from wanjax.pipelines.settings import Settings, SomeSettings
from wanjax.schedulers import Scheduler, shift_of


def named_sizes(
    model: VideoModel[Any], defaults: Settings, published: Sequence[tuple[int, int]] = ()
) -> dict[str, tuple[int, int]]:
    """Return a model's sizes (height, width) by name, the default size first.

    The default size and the `published` ones are named by their short side, such as 480p. `portrait` is the default
    size rotated, and `square` has about the same area, if the model supports them.
    """
    height, width = defaults.size
    named = {lines(size): size for size in (defaults.size, *published)}
    portrait, square = (model.size_for((high, height, 3), defaults) for high in (width, height))
    if portrait[0] > portrait[1]:
        named["portrait"] = portrait
    return named | ({"square": square} if square[0] == square[1] else {})


def lines(size: tuple[int, int]) -> str:
    """Return the name of a size (height, width) by its short side, such as 480p."""
    return f"{min(size)}p"


@dataclass(frozen=True)
class TrainingDomain:
    """The limits of what a small model was trained on: the words of its prompts, one size and one length.

    `about` describes its clips, with an example prompt.
    """

    about: str
    words: frozenset[str]
    size: tuple[int, int]
    frames: int

    def unknown(self, prompt: str) -> list[str]:
        """Return the words of a prompt that the model does not know, without duplicates."""
        return [word for word in dict.fromkeys(re.findall(r"[^\W\d_]+", prompt.lower())) if word not in self.words]

    def unlike(self, settings: Settings) -> list[str]:
        """Describe how a video of these settings differs from the training's clips in size and length."""
        differences = [] if settings.size == self.size else [f"{settings.width}x{settings.height}"]
        return differences if settings.frames == self.frames else [*differences, quantity(settings.frames, "frame")]


@dataclass(frozen=True)
class Preset:
    """A published checkpoint: its source, description, licence and recommended settings.

    `model` is None for a checkpoint in the package, whose folder is `source`. `loras` are merged into it. `scheduler`
    replaces the checkpoint's scheduler. `domain` is None for a model with open prompts. `aliases` are other names of
    the source. `sizes` are the published sizes (height, width) besides the default one. `distillation` is that of the
    weights or the LoRAs. A checkpoint of the same shapes is recognised as this one if its lower-case name contains all
    `words`; `nearest` has the whole rule.
    """

    name: str
    source: str
    about: str
    transformer_parameters: int
    licence: str
    param_dtype: str
    defaults: Settings
    model: VideoModel[Any] | None = None
    loras: tuple[str, ...] = ()
    scheduler: Scheduler | None = None
    domain: TrainingDomain | None = None
    aliases: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    distillation: Distillation | None = None
    words: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The repositories of this preset; none for a preset with LoRAs."""
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
    presets: Sequence[Preset], path: str, distillations: Iterable[Distillation], shift: float | None = None
) -> Preset | None:
    """Select the preset that a checkpoint is, among those with its shapes; None if there are none.

    The name decides: first a distillation, then the presets' `words`, then a resolution. Ties go to a preset with the
    scheduler's flow `shift`, and then to the first preset.
    """
    name = model_name_in(path)
    distillation = find_distillation(name, distillations)
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


def no_prompts(model: Any) -> Mapping[str, tuple[int, int]]:
    """Return the prompt lengths of a family without tokenizers: none."""
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
        name: Its name.
        networks: The kinds of networks in its checkpoints.
        pipelines: Class names in model_index.json.
        read_model: Reads a checkpoint's configs, including those of its encoders if the second argument is True.
        settings: Returns the default settings of a checkpoint.
        presets: Its published models.
        loaders: Load tokenizers and image processors from their folders, by component.
        layouts: Layouts of its checkpoints other than that of diffusers.
        relatives: Similar models that are not supported, for error messages.
        tables: The file of published step cache tables, by preset.
        distillations: Distillations that are recognised by file names, the most specific first.
        prompt: Returns the padded length of a prompt and its number of real tokens by tokenizer, for plans.
    """

    name: str
    networks: tuple[NetworkKind, ...]
    pipelines: tuple[str, ...]
    read_model: Callable[[Source, bool], VideoModel[Any]]
    settings: Callable[[Source, Any, Preset | None], Settings]
    presets: tuple[Preset, ...] = ()
    loaders: Mapping[str, Callable[[Path], Any]] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = ()
    relatives: UnsupportedModels = field(default_factory=dict)
    tables: Path | None = None
    distillations: tuple[Distillation, ...] = ()
    prompt: Callable[[Any], Mapping[str, tuple[int, int]]] = no_prompts

    def network_of(self, config: Config) -> Network:
        """Return the network that a config describes.

        Args:
            config: The config.
        """
        return network_of(config, self.networks)


def family_of(source: Source, families: Sequence[Family]) -> Family:
    """Return the family of the pipeline in model_index.json; raise WanjaxError if no family has it."""
    kind = source.index.get("_class_name")
    for family in families:
        if kind in family.pipelines:
            return family
    names = " or ".join(name for family in families for name in family.pipelines)
    raise WanjaxError(f"{source.name} holds a {kind}: give a checkpoint of a {names}")


def updated_by(source: Source, settings: SomeSettings, more: Mapping[str, Any] | None = None) -> SomeSettings:
    """Override settings by a checkpoint's files: the flow shift of its scheduler, and its generation_config.json.

    `more` overrides the flow shift, but not generation_config.json.
    """
    shift = {"flow_shift": shift_of(source["scheduler"].config())}
    return settings.updated(shift | dict(more or {}) | read_json(source.root / CONFIG, missing={}))
