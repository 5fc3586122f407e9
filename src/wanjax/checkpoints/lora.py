# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with LoRA merged into its transformers while they are read."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx

from wanjax.checkpoint import Reader
from wanjax.converters import engine
from wanjax.converters.engine import Rule
from wanjax.converters.lora import Lora, LoraFile, Merged
from wanjax.converters.original import TRANSFORMER
from wanjax.converters.readers import Names
from wanjax.errors import WanjaxError
from wanjax.hub import locate_file
from wanjax.networks import components, network
from wanjax.sources import Progress, Source, Weights

EXPERTS = {"transformer": "high", "transformer_2": "low"}
Module = TypeVar("Module", bound=nnx.Module)
Note = Callable[[str], Any]


class AdaptedSource(Source):
    """A source whose transformers have LoRA merged in; all else is the source's own.

    `note` is told what of each file was merged; where it is None, a warning tells what was not. Raises WanjaxError
    where a file cannot be found or read, hardly fits the transformer, or is for an expert that there is not.
    """

    def __init__(self, source: Source, loras: Sequence[Lora], note: Note | None = None):
        self._source = source
        self.name, self.root, self.revision, self.index = source.name, source.root, source.revision, source.index
        present = [name for name in EXPERTS if name in components(source.index)]
        self._files: dict[str, list[tuple[LoraFile, float]]] = {name: [] for name in present}
        for lora in loras:
            chosen = [name for name in present if len(present) == 1 or lora.expert in (None, EXPERTS[name])]
            if lora.expert and len(present) == 1:
                expert = f"{lora.expert}="
                raise WanjaxError(f"{lora} is for one of two experts, which {source.name} has not: leave {expert} out")
            path = locate_file(lora.file)
            for name in chosen:
                file = _opened(source, name, path)
                self._files[name].append((file, lora.strength))
                told = str(file.matches)
                if note:
                    note(told)
                elif file.matches.unmatched:
                    warnings.warn(told, stacklevel=2)

    @property
    def origin(self) -> str:
        return self._source.origin

    def tensors(self, component: str, rules: Iterable[Rule]) -> Reader:
        tensors = self._source.tensors(component, rules)
        return Merged(tensors, self._files[component]) if self._files.get(component) else tensors

    def config(self, component: str) -> dict[str, Any]:
        return self._source.config(component)

    def weights(self, component: str) -> Weights:
        return self._source.weights(component)

    def files(self, component: str) -> Sequence[Path]:
        return self._source.files(component)

    def load(
        self,
        component: str,
        abstract: Module,
        rules: Iterable[Rule],
        *,
        ignore: Iterable[str] = (),
        progress: Progress | None = None,
    ) -> Module:
        if not self._files.get(component):  # as it loads best by itself
            return self._source.load(component, abstract, rules, ignore=ignore, progress=progress)
        return super().load(component, abstract, rules, ignore=ignore, progress=progress)


def _opened(source: Source, component: str, path: Path) -> LoraFile:
    """A file's changes of a transformer, whose tensors are known from its config before they are there."""
    found = network(source, component)
    abstract = found.abstract(dtype=jnp.float32, param_dtype=jnp.float32)
    shapes: Reader = engine.Exported(engine.parameters(abstract), found.rules)
    wan = components(source.index)[component].startswith("Wan")
    return LoraFile(path, {key: shapes.spec(key) for key in shapes.keys()}, TRANSFORMER if wan else Names([]))  # noqa: SIM118
