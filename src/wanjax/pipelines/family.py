# SPDX-License-Identifier: Apache-2.0
"""Describe a family of models by one value, and its published checkpoints by presets."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wanjax.checkpoints.files import TensorReader
from wanjax.checkpoints.layout import Layout, RecognisedComponent
from wanjax.checkpoints.network_kinds import Config, Network, NetworkKind, network_of
from wanjax.checkpoints.sources import Source, read_json
from wanjax.checkpoints.unsupported import UnsupportedModels
from wanjax.errors import SettingError, WanjaxError
from wanjax.figures import pluralize
from wanjax.layers.precision import UNQUANTIZED
from wanjax.media.metadata import CONFIG
from wanjax.pipelines.distillation import Distillation, find_distillation, model_name_in
from wanjax.pipelines.model import VideoModel
from wanjax.pipelines.settings import Settings, SomeSettings
from wanjax.schedulers import Scheduler, shift_of


def named_sizes(
    model: VideoModel[Any], defaults: Settings, published: Sequence[tuple[int, int]] = ()
) -> dict[str, tuple[int, int]]:
    """Give names to a model's sizes (height, width). The default size comes first.

    The default size and the `published` sizes are named after their short sides, such as 480p. `portrait` is the
    rotated default size, and `square` has about the same area. Sizes that the model does not support are left out.
    """
    height, width = defaults.size
    sizes_by_name = {resolution_name(size): size for size in (defaults.size, *published)}
    portrait, square = (model.size_for((picture_height, height, 3), defaults) for picture_height in (width, height))
    if portrait[0] > portrait[1]:
        sizes_by_name["portrait"] = portrait
    return sizes_by_name | ({"square": square} if square[0] == square[1] else {})


def resolution_name(size: tuple[int, int]) -> str:
    """Return the name of a size (height, width) by its short side, such as 480p."""
    return f"{min(size)}p"


@dataclass(frozen=True)
class TrainingDomain:
    """The training data of a small model: the words of its prompts, and the size and the length of all its clips.

    `about` describes the clips, with an example prompt.
    """

    about: str
    words: frozenset[str]
    size: tuple[int, int]
    frames: int

    def unknown_words(self, prompt: str) -> list[str]:
        """List the words of a prompt that are not in the training data, without duplicates."""
        return [word for word in dict.fromkeys(re.findall(r"[^\W\d_]+", prompt.lower())) if word not in self.words]

    def differences(self, settings: Settings) -> list[str]:
        """List the size and the number of frames of a video, if they differ from those of the training clips."""
        size = [] if settings.size == self.size else [f"{settings.width}x{settings.height}"]
        return size if settings.frames == self.frames else [*size, pluralize(settings.frames, "frame")]


UNSTATED_LICENCE = "not stated"  # for a preset with a LoRA that its publisher gives no licence


@dataclass(frozen=True)
class Preset:
    """A published checkpoint: its source, description, licence and recommended settings.

    `model` is None for a checkpoint in the package; its folder is `source`. `loras` are merged into the weights.
    `scheduler` replaces the checkpoint's scheduler. `domain` is None for a model that accepts any prompt. `aliases` are
    other names of the source. `sizes` are the published sizes (height, width) besides the default one. `distillation`
    describes distilled weights or LoRAs. Another checkpoint of the same shapes gets this preset if its lower-case name
    contains all `words` (see `best_match`).
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
        """The repositories whose checkpoints are this preset. A preset with LoRAs has no such repository."""
        return () if self.loras else (self.source, *self.aliases)

    @property
    def repository_names(self) -> list[str]:
        """The names of the repositories without their owners."""
        return [source.rpartition("/")[2] for source in self.sources if source.count("/") == 1]

    @property
    def bundled(self) -> bool:
        """True if the checkpoint is part of the package."""
        return Path(self.source).is_dir()


def best_match(
    presets: Sequence[Preset], path: str, distillations: Iterable[Distillation], shift: float | None = None
) -> Preset | None:
    """Select the preset that fits a checkpoint best, among presets with the same shapes. Return None if there are none.

    The parts of the name decide in this order: the distillation, the presets' `words`, the resolution. If several
    presets fit equally well, prefer a preset with the scheduler's flow `shift`, and then the first preset.
    """
    name = model_name_in(path)
    distillation = find_distillation(name, distillations)
    line_counts = set(re.findall(r"\b(\d{3,4})p\b", name))

    def match_score(preset: Preset) -> tuple[int, ...]:
        publisher = preset.distillation and preset.distillation.name
        words = [bool(re.search(rf"\b{word}\b", name)) for word in preset.words]
        return (
            2 if publisher == (distillation and distillation.name) else 1 if publisher is None else 0,
            len(words) if all(words) else -1,
            str(min(preset.defaults.size)) in line_counts,
            preset.defaults.flow_shift == shift,
        )

    return max(presets, key=match_score, default=None)


def no_prompt_lengths(model: Any) -> Mapping[str, tuple[int, int]]:
    """Return the prompt lengths of a family without tokenizers: none."""
    return {}


def no_autoencoder(reader: TensorReader, vae: Any) -> None:
    """Return None, for a family without files of single autoencoders."""


@dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
        name: The name of the family.
        networks: The kinds of networks in the family's checkpoints.
        pipelines: Class names in model_index.json.
        read_model: Reads a checkpoint's configs, including those of its encoders if the second argument is True.
        default_settings: Returns the default settings of a checkpoint.
        presets: The published models of the family.
        loaders: Load tokenizers and image processors from their folders, by component.
        layouts: Layouts of the family's checkpoints, without the layout of diffusers.
        unsupported_models: Similar models that are not supported, for error messages.
        tables: The file of published step cache tables, by preset.
        distillations: Distillations that are recognised by file names, the most specific first.
        prompt_lengths: Returns the padded length of a prompt and its number of real tokens by tokenizer, for plans.
        find_autoencoder: Returns the autoencoder in a file, for the latents of a model's autoencoder, whose config is
            the second argument; None if the file has no autoencoder.
    """

    name: str
    networks: tuple[NetworkKind, ...]
    pipelines: tuple[str, ...]
    read_model: Callable[[Source, bool], VideoModel[Any]]
    default_settings: Callable[[Source, Any, Preset | None], Settings]
    presets: tuple[Preset, ...] = ()
    loaders: Mapping[str, Callable[[Path], Any]] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = ()
    unsupported_models: UnsupportedModels = field(default_factory=dict)
    tables: Path | None = None
    distillations: tuple[Distillation, ...] = ()
    prompt_lengths: Callable[[Any], Mapping[str, tuple[int, int]]] = no_prompt_lengths
    find_autoencoder: Callable[[TensorReader, Any], RecognisedComponent | None] = no_autoencoder

    def network_of(self, config: Config) -> Network:
        """Return the network that a config describes.

        Args:
            config: The config.
        """
        return network_of(config, self.networks)

    def unquantized_projections(self, model: VideoModel[Any]) -> list[str] | None:
        """Describe the projections of a model that are never quantized. Return None if the whole model is never
        quantized.

        Args:
            model: A model of the family.
        """
        return self.network_of(model.spec.networks[model.spec.denoisers[0]]).unquantized_projections

    def check_precision(self, model: VideoModel[Any], settings: Settings) -> None:
        """Raise SettingError if the model does not offer the precision of its settings.

        Args:
            model: A model of the family.
            settings: Its settings.
        """
        if settings.precision != UNQUANTIZED.name and self.unquantized_projections(model) is None:
            raise SettingError(
                f"precision is given as {settings.precision}, which {settings.model} does not offer: leave it out",
                "precision",
            )


def family_of(source: Source, families: Sequence[Family]) -> Family:
    """Find the family of the pipeline in model_index.json; raise WanjaxError if no family supports it."""
    kind = source.index.get("_class_name")
    for family in families:
        if kind in family.pipelines:
            return family
    names = " or ".join(name for family in families for name in family.pipelines)
    raise WanjaxError(f"{source.name} is a checkpoint of a {kind}, which is not supported: use one of a {names}")


def with_checkpoint_settings(
    source: Source, settings: SomeSettings, overrides: Mapping[str, Any] | None = None
) -> SomeSettings:
    """Override settings with those in a checkpoint: its scheduler's flow shift, and its generation_config.json.

    `more` overrides the flow shift, but not generation_config.json.
    """
    shift = {"flow_shift": shift_of(source["scheduler"].config())}
    return settings.updated(shift | dict(overrides or {}) | read_json(source.root / CONFIG, missing={}))
