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
    """Return a model's sizes (height, width) by name, the default one first.

    The `published` ones and the default one have the names of their lines, such as 480p. `portrait` is the default one
    on its side, and `square` has about its area, where the model makes these.
    """
    height, width = defaults.size
    named = {lines(size): size for size in (defaults.size, *published)}
    portrait, square = (model.size_for((high, height, 3), defaults) for high in (width, height))
    if portrait[0] > portrait[1]:
        named["portrait"] = portrait
    return named | ({"square": square} if square[0] == square[1] else {})


def lines(size: tuple[int, int]) -> str:
    """Return the name of a size (height, width) by its lines, such as 480p."""
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
        """Return the words of a prompt that the model does not know, each once."""
        return [word for word in dict.fromkeys(re.findall(r"[^\W\d_]+", prompt.lower())) if word not in self.words]

    def unlike(self, settings: Settings) -> list[str]:
        """Return what a video of these settings has that no clip of the training had."""
        differences = [] if settings.size == self.size else [f"{settings.width}x{settings.height}"]
        return differences if settings.frames == self.frames else [*differences, quantity(settings.frames, "frame")]


@dataclass(frozen=True)
class Preset:
    """A published checkpoint: its source, a description, its licence, and the settings that its authors publish.

    `model` is None for a checkpoint in the package, whose folder is `source`. `loras` are merged into it. A
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
    presets: Sequence[Preset], path: str, distillations: Iterable[Distillation], shift: float | None = None
) -> Preset | None:
    """Return the preset that a checkpoint is, of those whose networks have its shapes; None where there are none.

    Its name decides: by a distillation, then by the presets' own words, then by the lines of their sizes. Where it does
    not, the flow `shift` of its scheduler does, and then the first preset is taken.
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
    """Return the lengths of the prompts of a family without tokenizers: none."""
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
        name: Its name.
        networks: The kinds of networks in its checkpoints.
        pipelines: Class names in model_index.json.
        read_model: Reads a checkpoint's configs, and those of its text and image encoders if the second argument
            is True.
        settings: Returns the default settings of a checkpoint.
        presets: Its published models.
        loaders: Load tokenizers and image processors from their folders, by component.
        layouts: Layouts of its checkpoints other than that of diffusers.
        relatives: Models like its own that are not read, for the message.
        tables: File of published tables for step caches, by the presets' names.
        distillations: Distilled weights that names of files tell, the most special first.
        prompt: Returns, for plans, the length of a prompt and the number of its real tokens, by tokenizer.
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
    """Return the family of the pipeline that model_index.json names; raise WanjaxError where none has it."""
    kind = source.index.get("_class_name")
    for family in families:
        if kind in family.pipelines:
            return family
    names = " or ".join(name for family in families for name in family.pipelines)
    raise WanjaxError(f"{source.name} holds a {kind}: give a checkpoint of a {names}")


def updated_by(source: Source, settings: SomeSettings, more: Mapping[str, Any] | None = None) -> SomeSettings:
    """Return settings with those that a checkpoint's files give: its scheduler's flow shift, and its own settings.

    `more` are others, which take the place of the former and not of the latter.
    """
    shift = {"flow_shift": shift_of(source["scheduler"].config())}
    return settings.updated(shift | dict(more or {}) | read_json(source.root / CONFIG, missing={}))
