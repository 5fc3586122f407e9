# SPDX-License-Identifier: Apache-2.0
"""Layouts other than that of diffusers, and sources whose components are recognised by their tensors.

A component that such a checkpoint lacks comes from the diffusers repository of the same model.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from wanjax.checkpoints.descaled import Descaled
from wanjax.checkpoints.files import Reader
from wanjax.checkpoints.hub import download
from wanjax.checkpoints.readers import Renamed
from wanjax.checkpoints.sources import DiffusersSource, Source, Weights, folder_of
from wanjax.errors import WanjaxError

TRANSFORMER_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "model.", "transformer.", "net.")
VAE_PREFIXES = ("", "vae.", "first_stage_model.")
"""Prefixes of names in single files, such as those for ComfyUI or of training runs."""


@dataclass(frozen=True)
class Layout:
    """A layout of checkpoints other than that of diffusers.

    `markers` are small files that identify the layout and are downloaded first; `is_folder` tells whether a folder has
    it, and `open` returns that folder's source, given the checkpoint's name, the folder, and its commit if it is of the
    hub. `open_file` returns a file's source, or None for a file of another layout. `beside` returns the names of files
    that belong to a file of this name, as far as its folder has them.
    """

    markers: tuple[str, ...]
    is_folder: Callable[[Path], bool]
    open: Callable[[str | Path, Path, str | None], Source]
    open_file: Callable[[Path], Source | None]
    beside: Callable[[str], Sequence[str]] = lambda name: ()


class Component(NamedTuple):
    """A recognised component: its config.json, and its tensors by their names in diffusers or transformers."""

    json: dict[str, Any]
    weights: Any  # Weights


class RecognisedSource(Source):
    """A source whose components are recognised by their tensors.

    Those of a file are `known` from the beginning; those of a folder are looked for when they are needed.
    """

    def __init__(
        self,
        name: str | Path,
        root: Path,
        revision: str | None = None,
        known: Mapping[str, Component] | None = None,
    ):
        self.name, self.root, self.revision = str(name), root, revision
        self._known: dict[str, Component | None] = {**(known or {})}

    def component(self, name: str) -> Component | None:
        """Returns the component, or None where the checkpoint does not hold it."""
        if name not in self._known:
            self._known[name] = self.find(name)
        return self._known[name]

    def find(self, name: str) -> Component | None:
        """Looks for a component in the folder; returns None where it is not there."""
        return None

    def fetched(self, patterns: Sequence[str]) -> Path:
        """Returns the folder with those of the files that exist; downloads them from the hub."""
        if self.revision is not None and patterns:
            download(self.name, patterns, revision=self.revision)
        return self.root

    @property
    @abstractmethod
    def repository(self) -> str | None:
        """The diffusers repository of the same model; None where none is known."""

    @property
    @abstractmethod
    def configs(self) -> Mapping[str, dict[str, Any]]:
        """The configs of components that are no more than a config, such as the scheduler's."""

    @property
    def origin(self) -> str:
        return self.repository or self.name

    @property
    def lent(self) -> list[str]:
        """The components that the checkpoint lacks, which come from the same model's repository."""
        return [name for name in self.components if not self.holds(name)]

    @cached_property
    def _published(self) -> Source:
        return DiffusersSource(self.lender, *folder_of(self.lender))

    def _lender(self, component: str) -> Source:
        """Returns the repository of the same model, for a component that the checkpoint lacks."""
        if self.lender == self.name:
            raise WanjaxError(
                f"{self.name} holds no {component}, and no published model has one that fits its transformer: a whole "
                "checkpoint is needed"
            )
        return self._published

    def config(self, component: str) -> dict[str, Any]:
        if component in self.configs:
            return self.configs[component]
        found = self.component(component)
        return self._lender(component).config(component) if found is None else found.json

    def weights(self, component: str) -> Weights:
        found = self.component(component)
        return self._lender(component).weights(component) if found is None else found.weights

    def holds(self, component: str) -> bool:
        """Tells whether the checkpoint has a component; raises WanjaxError where it has a part of one."""
        return component in self.configs or self.component(component) is not None

    def check_whole(self, networks: Iterable[str], others: Iterable[str]) -> None:
        lacking = [[name for name in names if not self.holds(name)] for names in (networks, others)]
        if any(lacking) and self.lender != self.name:
            self._published.check_whole(*lacking)

    def files(self, component: str) -> Sequence[Path]:
        return [] if self.holds(component) else self._lender(component).files(component)


def model_index(pipeline: str, classes: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Returns the model_index.json that diffusers would write of a pipeline with components of these classes."""
    return {"_class_name": pipeline} | {name: list(kind) for name, kind in sorted(classes.items())}


def needs_transformer(name: object, components: Iterable[str], model: str) -> WanjaxError:
    """Returns the error for a checkpoint that holds these components, or none, and no transformer."""
    listed = " and the ".join(components)
    what = f"{name} holds {f'the {listed} of {model} alone' if listed else 'no transformer'}"
    return WanjaxError(f"{what}: give a file or folder of {model}'s transformer, to which the rest is lent")


def has_authors_names(component: str, reader: Reader, telling: Sequence[str], model: str) -> bool:
    """Tells whether a component has the names of its authors, not those of diffusers.

    telling: the names of tensors that only this component has, the authors' first. Raises WanjaxError where the reader
    has none of them, so that it holds no weights of the `model`.
    """
    if not any(name in reader.specs for name in telling):
        raise WanjaxError(f"the {component} lacks {' or '.join(telling)}: weights of {model} are needed")
    return telling[0] in reader.specs


def held(
    reader: Reader, telling: Mapping[str, Sequence[str]], prefixes: Mapping[str, Sequence[str]]
) -> dict[str, Reader]:
    """Returns the components that a file holds, each without the prefix of its names.

    telling: the names of tensors that only this component has; prefixes: those that its names may have in a file.
    """
    reader = Descaled(reader)  # by whose names a component is known
    found, present = {}, set(reader.specs)
    for component, names in telling.items():
        for prefix in prefixes[component]:
            if any(prefix + name in present for name in names):
                found[component] = prefix
                break
    return {name: _without(reader, prefix, found) for name, prefix in found.items()}


def _without(reader: Reader, prefix: str, found: Mapping[str, str]) -> Reader:
    """Returns the tensors with a prefix; if it is empty, those that belong to no other component."""
    others = tuple(other for other in found.values() if other and other != prefix)

    def rename(key: str) -> str | None:
        mine = key.startswith(prefix) and not (prefix == "" and key.startswith(others))
        return key.removeprefix(prefix) if mine else None

    return Renamed(reader, rename)
