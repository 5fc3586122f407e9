# SPDX-License-Identifier: Apache-2.0
"""The models of a server: presets that have the same weights but for LoRAs, and other strengths of its own LoRAs.

They share all networks but those that denoise, into which LoRAs are merged. Of these one variant's are in memory, and
another's are read when a video asks for it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from wanjax.checkpoints.hub import check_file
from wanjax.checkpoints.lora_source import Lora
from wanjax.errors import SettingError, WanjaxError, repr_short
from wanjax.pipelines.components import Components
from wanjax.pipelines.model import VideoModel
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings
from wanjax.registry import presets
from wanjax.sharding import abstract_partitioner
from wanjax.stores.paths import base_name

Load = Callable[[str, Sequence[Lora]], Pipeline]
Strengths = Mapping[str, float]


class ServedModels:
    """The models that requests may name, and the LoRAs. It goes to another process without its weights.

    Args:
        pipes: The pipelines by the models' names, the served one first.
        usual: The strengths of the LoRAs, by name.
        folders: The folders of the models and the LoRAs.
    """

    def __init__(self, pipes: Mapping[str, Pipeline], usual: Strengths, folders: Sequence[Path] = ()):
        self.pipes, self.usual, self.folders = dict(pipes), dict(usual), list(folders)
        self.first = next(iter(pipes))

    def __reduce__(self) -> Any:
        pipes = self.pipes.values()
        parts = [(pipe.model, pipe.defaults, pipe.sizes, dict(pipe.partitioner.mesh.shape)) for pipe in pipes]
        return _without_weights, (parts, self.usual, self.folders)

    def model(self, name: str | None) -> Pipeline:
        """Return a model's pipeline, for its settings; None is the first's. Raises SettingError."""
        if (pipe := self.pipes.get(self.first if name is None else name)) is None:
            problem = f"the model {repr_short(name)} is not served here: give {' or '.join(self.pipes)}"
            raise SettingError(problem, "model")
        return pipe

    def strengths(self, requested: Strengths) -> dict[str, float]:
        """Return the strength of each LoRA, as asked or else as the server was started; raise SettingError."""
        if unknown := [name for name in requested if name not in self.usual]:
            has = " and ".join(self.usual) or "none"
            raise SettingError(f"no LoRA of this server is named {repr_short(unknown[0])}: it has {has}", "lora")
        return {**self.usual, **requested}


def _without_weights(
    parts: Sequence[tuple[VideoModel, Settings, Mapping[str, tuple[int, int]], Mapping[str, int]]],
    usual: Strengths,
    folders: Sequence[Path],
) -> ServedModels:
    """Return models whose pipelines have no component, by which requests are checked; any devices do."""
    pipes: dict[str, Pipeline] = {}
    for model, defaults, sizes, mesh in parts:
        pipes[defaults.model] = pipe = Pipeline(Components({}), model, defaults, abstract_partitioner(**mesh))
        pipe.sizes = dict(sizes)
    return ServedModels(pipes, usual, folders)


class Variants(ServedModels):
    """The models of which one is in memory, and the LoRAs that are merged into it.

    `load` returns the pipeline of a model with LoRAs; None is for a server that has no other than the first. A model of
    a folder is known by the folder's name alone.
    """

    def __init__(self, pipe: Pipeline, loras: Sequence[Lora] = (), load: Load | None = None):
        self._place = pipe.defaults.model  # of the first, as `load` knows it
        pipe = _by_name(pipe)
        pipes = {pipe.defaults.model: pipe}
        self.loras = {lora.name: lora for lora in loras}
        self._load = load
        if load is not None:
            for name in _siblings(self._place):
                with suppress(WanjaxError):  # its LoRA cannot be read now
                    pipes[name] = load(name, loras)
        sources = [each.components.source for each in pipes.values()]
        folders = [Path(lora.file).expanduser().absolute().parent for lora in loras]
        folders += [source.root for source in sources if source is not None]
        super().__init__(pipes, {name: lora.strength for name, lora in self.loras.items()}, folders)
        self._held = pipe, self._weights(self.first, self.usual)

    def take(self, name: str, strengths: Strengths) -> Pipeline:
        """Return a model's pipeline with these strengths, whose networks take the place of those in memory.

        Raises SettingError where the server, started anew, does not have it.
        """
        held, weights = self._held
        pipe, wanted = self.model(name), self._weights(name, strengths)
        if pipe is held and weights == wanted:
            return held
        if wanted != self._weights(name, self.usual):
            assert self._load is not None
            loras = [replace(lora, strength=strengths[key]) for key, lora in self.loras.items()]
            pipe = _by_name(self._load(self._place if name == self.first else name, loras))
        pipe.progress = False
        pipe.components.move_from(held.components, () if weights == wanted else pipe.model.spec.denoisers)
        self._held = pipe, wanted
        return pipe

    def _weights(self, name: str, strengths: Strengths) -> tuple[object, ...]:
        """Return what decides the weights of the networks that denoise."""
        return getattr(presets().get(name), "loras", ()), tuple(strengths.items())


def _by_name(pipe: Pipeline) -> Pipeline:
    """Return a pipeline whose settings name its model without the folder that it is in."""
    named = copy(pipe)
    named.defaults = replace(pipe.defaults, model=base_name(pipe.defaults.model))
    return named


def _siblings(model: str) -> list[str]:
    """Return the presets whose weights are a preset's but for LoRAs, which are there already."""
    listed = presets()
    if model not in listed:
        return []
    others = [preset for preset in listed.values() if preset.source == listed[model].source and preset.name != model]
    files = {preset.name: [Lora.parse(text).file for text in preset.loras] for preset in others}
    return [name for name, lora_files in files.items() if not any(map(check_file, lora_files))]
