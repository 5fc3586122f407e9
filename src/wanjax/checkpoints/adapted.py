# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose transformers have LoRAs merged in while they are read."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx

from wanjax.checkpoints import modules
from wanjax.checkpoints.files import Reader
from wanjax.checkpoints.hub import locate_file
from wanjax.checkpoints.lora import Lora, LoraFile, Merged
from wanjax.checkpoints.lora_scales import PEFT_CONFIG
from wanjax.checkpoints.networks import Kinds, components, network
from wanjax.checkpoints.sources import Progress, Source, Weights
from wanjax.converters.names import Names
from wanjax.converters.rules import Rule
from wanjax.errors import WanjaxError

PREFIXES = {"transformer": "high", "transformer_2": "low"}  # prefixes of a LoRA for one of two transformers
Module = TypeVar("Module", bound=nnx.Module)
Note = Callable[[str], Any]


class AdaptedSource(Source):
    """A source whose transformers have LoRAs merged in; everything else is unchanged.

    `note` receives a sentence on what was merged from each file; where it is None, a warning lists what was not.
    Raises WanjaxError where a file cannot be found or read, too little of it fits the transformer, or the source lacks
    the expert that it is for.
    """

    def __init__(self, source: Source, loras: Sequence[Lora], kinds: Kinds, note: Note | None = None):
        self._base = source
        self.name, self.root, self.revision, self.index = source.name, source.root, source.revision, source.index
        self.loras: list[tuple[str, Path]] = []
        self.read: dict[str, Path] = {}  # the files, as they were named
        present = [name for name in PREFIXES if name in components(source.index)]
        self._files: dict[str, list[tuple[LoraFile, float]]] = {name: [] for name in present}
        for lora in loras:
            chosen = [name for name in present if len(present) == 1 or lora.expert in (None, PREFIXES[name])]
            if lora.expert and len(present) == 1:
                expert = f"{lora.expert}="
                raise WanjaxError(f"{lora} is for one of two experts, which {source.name} has not: leave {expert} out")
            path = locate_file(lora.file, beside=(PEFT_CONFIG,))
            self.read[lora.file] = path
            self.loras.append((str(replace(lora, file=path.name)), path))
            for name in chosen:
                file = _opened(source, name, path, kinds)
                self._files[name].append((file, lora.strength))
                told = str(file.matches)
                if note:
                    note(told)
                elif file.matches.doubtful:
                    warnings.warn(told, stacklevel=2)

    @property
    def base(self) -> Source:
        return self._base

    @property
    def origin(self) -> str:
        return self._base.origin

    def check_room(self) -> int:
        return self._base.check_room()

    def check_whole(self, networks: Iterable[str], others: Iterable[str]) -> None:
        self._base.check_whole(networks, others)

    def is_at_hand(self, component: str) -> bool:
        return self._base.is_at_hand(component)

    def tensors(self, component: str, rules: Iterable[Rule]) -> Reader:
        tensors = self._base.tensors(component, rules)
        return Merged(tensors, self._files[component]) if self._files.get(component) else tensors

    def original(self, component: str, tensors: Reader) -> Reader:
        return self._base.original(component, tensors)

    def config(self, component: str) -> dict[str, Any]:
        return self._base.config(component)

    def weights(self, component: str) -> Weights:
        return self._base.weights(component)

    def files(self, component: str) -> Sequence[Path]:
        return self._base.files(component)

    def load(
        self,
        component: str,
        abstract: Module,
        rules: Iterable[Rule],
        *,
        ignore: Iterable[str] = (),
        progress: Progress | None = None,
    ) -> Module:
        if not self._files.get(component):  # the source's own way of loading is faster
            return self._base.load(component, abstract, rules, ignore=ignore, progress=progress)
        return super().load(component, abstract, rules, ignore=ignore, progress=progress)


def _opened(source: Source, component: str, path: Path, kinds: Kinds) -> LoraFile:
    """Opens a LoRA file for a transformer, whose tensor shapes come from its config."""
    found = network(source, component, kinds)
    abstract = found.abstract(dtype=jnp.float32, param_dtype=jnp.float32)
    shapes: Reader = modules.Exported(modules.parameters(abstract), found.rules)
    specs = {key: shapes.spec(key) for key in shapes.keys()}  # noqa: SIM118
    return LoraFile(path, specs, found.kind.lora_names or Names([]))
