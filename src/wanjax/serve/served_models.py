# SPDX-License-Identifier: Apache-2.0
"""The variants of a server's model: presets that differ only in their LoRAs, and LoRAs with other strengths.

LoRAs are merged into the denoising networks. All variants share the other networks. One variant is in memory at a time.
If a video needs another variant, the worker loads that variant.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from wanjax.checkpoints.hub import checked_file_bytes
from wanjax.checkpoints.lora_source import Lora
from wanjax.errors import SettingError, WanjaxError, repr_short
from wanjax.pipelines.components import Components
from wanjax.pipelines.model import VideoModel
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings
from wanjax.registry import presets
from wanjax.sharding import abstract_partitioner
from wanjax.stores.paths import base_name

LoadModel = Callable[[str, Sequence[Lora]], Pipeline]
Strengths = Mapping[str, float]


class ServedModels:
    """The models and LoRAs that requests may name. A pickled object has no weights.

    Args:
        pipes: The pipelines by model name, the served model first.
        default_strengths: The default strengths of the LoRAs, by name.
        folders: The folders of the models and the LoRAs.
    """

    def __init__(self, pipes: Mapping[str, Pipeline], default_strengths: Strengths, folders: Sequence[Path] = ()):
        self.pipes, self.default_strengths, self.folders = dict(pipes), dict(default_strengths), list(folders)
        self.default_name = next(iter(pipes))

    def __reduce__(self) -> Any:
        pipes = self.pipes.values()
        pipe_args = [(pipe.model, pipe.defaults, pipe.sizes, dict(pipe.partitioner.mesh.shape)) for pipe in pipes]
        return _build_without_weights, (pipe_args, self.default_strengths, self.folders)

    def model(self, name: str | None) -> Pipeline:
        """Return the pipeline of a model. Callers read only its settings. None means the served model.

        Raises:
            SettingError: The server does not have this model.
        """
        if (pipe := self.pipes.get(self.default_name if name is None else name)) is None:
            message = f"this server has no model {repr_short(name)}: use {' or '.join(self.pipes)}"
            raise SettingError(message, "model")
        return pipe

    def check_loras(self, requested: object) -> None:
        """If a request names LoRAs, check that the server has LoRAs. In a text, check that each LoRA has a strength.

        Args:
            requested: The field `lora` of a request, before it is parsed.

        Raises:
            SettingError: The server has no LoRA, or a LoRA has no strength.
        """
        if not requested:
            return
        if not self.default_strengths:
            problem = f"lora is {repr_short(requested)}, and this server was started with no LoRA"
            message = f"{problem}: leave lora out, or start the server with wanjax serve --lora FILE"
            raise SettingError(message, "lora")
        if isinstance(requested, str) and (bare_names := [x for x in requested.split(",") if x and ":" not in x]):
            names = " and ".join(self.default_strengths)
            example = f"{next(iter(self.default_strengths))}:0.5"
            message = (
                f"lora gives {repr_short(bare_names[0])} without a strength: write {example}; this server has {names}"
            )
            raise SettingError(message, "lora")

    def strengths(self, requested: Strengths) -> dict[str, float]:
        """Return the strength of each LoRA: the requested strength or, if none is requested, the server's default.

        Raises:
            SettingError: The server does not have a LoRA of this name.
        """
        if unknown := [name for name in requested if name not in self.default_strengths]:
            names = " and ".join(self.default_strengths) or "none"  # "none" if the server was restarted without any
            raise SettingError(f"this server has no LoRA {repr_short(unknown[0])}: it has {names}", "lora")
        return {**self.default_strengths, **requested}


def _build_without_weights(
    pipe_args: Sequence[tuple[VideoModel, Settings, Mapping[str, tuple[int, int]], Mapping[str, int]]],
    default_strengths: Strengths,
    folders: Sequence[Path],
) -> ServedModels:
    """Rebuild models without components, on abstract devices. Such models can only check requests."""
    pipes: dict[str, Pipeline] = {}
    for model, defaults, sizes, mesh in pipe_args:
        pipes[defaults.model] = pipe = Pipeline(Components({}), model, defaults, abstract_partitioner(**mesh))
        pipe.sizes = dict(sizes)
    return ServedModels(pipes, default_strengths, folders)


class LoadedModels(ServedModels):
    """The models and LoRAs of a worker, which keeps one variant in memory.

    Args:
        pipe: The pipeline of the served model.
        loras: The LoRAs of the server.
        load: Loads a model with LoRAs; None if the server has only the served model.
    """

    def __init__(self, pipe: Pipeline, loras: Sequence[Lora] = (), load: LoadModel | None = None):
        self._served_source = pipe.model_name  # the argument of `load` for the served model
        pipe = _with_base_name(pipe)
        pipes = {pipe.model_name: pipe}
        self.loras = {lora.name: lora for lora in loras}
        self._load = load
        if load is not None:
            for name in _sibling_presets(self._served_source):
                with suppress(WanjaxError):  # leaves out a model whose LoRA cannot be read
                    pipes[name] = load(name, loras)
        sources = [pipe.components.source for pipe in pipes.values()]
        folders = [Path(lora.file).expanduser().absolute().parent for lora in loras]
        folders += [source.root for source in sources if source is not None]
        super().__init__(pipes, {name: lora.strength for name, lora in self.loras.items()}, folders)
        self._current = pipe, self._weights_key(self.default_name, self.default_strengths)

    def load_variant(self, name: str, strengths: Strengths) -> Pipeline:
        """Replace the variant in memory by a model with these LoRA strengths, and return its pipeline.

        Raises:
            SettingError: The server no longer has this model, because it was restarted with other options.
        """
        current, current_key = self._current
        pipe, weights_key = self.model(name), self._weights_key(name, strengths)
        if pipe is current and current_key == weights_key:
            return current
        if weights_key != self._weights_key(name, self.default_strengths):
            assert self._load is not None
            loras = [replace(lora, strength=strengths[key]) for key, lora in self.loras.items()]
            pipe = _with_base_name(self._load(self._served_source if name == self.default_name else name, loras))
        pipe.progress = False
        pipe.components.move_from(current.components, () if current_key == weights_key else pipe.model.spec.denoisers)
        self._current = pipe, weights_key
        return pipe

    def _weights_key(self, name: str, strengths: Strengths) -> tuple[object, ...]:
        """Return a key that identifies the weights of the denoising networks."""
        return getattr(presets().get(name), "loras", ()), tuple(strengths.items())


def _with_base_name(pipe: Pipeline) -> Pipeline:
    """Return the pipeline with the model's folder removed from its name."""
    renamed = copy(pipe)
    renamed.defaults = replace(pipe.defaults, model=base_name(pipe.model_name))
    return renamed


def _sibling_presets(model: str) -> list[str]:
    """Return the presets that differ from a preset only in LoRAs, if their LoRA files are available locally."""
    all_presets = presets()
    if model not in all_presets:
        return []
    other_names = [
        preset for preset in all_presets.values() if preset.source == all_presets[model].source and preset.name != model
    ]
    files = {preset.name: [Lora.parse(text).file for text in preset.loras] for preset in other_names}
    return [name for name, lora_files in files.items() if not any(map(checked_file_bytes, lora_files))]
