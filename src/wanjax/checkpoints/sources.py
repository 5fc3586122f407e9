# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of any layout as values, and the layout of diffusers.

A `Source` describes a checkpoint and has its components by the names of diffusers. A `Component` has functions that
read its config and its weights. To merge a LoRA, add zeros or use trained weights, replace components of the source.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from flax import nnx

from wanjax.checkpoints import modules
from wanjax.checkpoints.arrays import Arrays, size_here
from wanjax.checkpoints.dequantized import Dequantized
from wanjax.checkpoints.files import SUFFIXES, Reader, SafetensorsFolder, check_names
from wanjax.checkpoints.hub import (
    COMPONENT_FILES,
    INDEX,
    HubFile,
    check_room,
    download,
    hub_files,
    locate,
    names_in,
)
from wanjax.checkpoints.lora_source import Lora
from wanjax.converters.weight_rules import Rule
from wanjax.errors import WanjaxError, no_checkpoint, reason, repr_short
from wanjax.stores.paths import missing_file

CONFIGS = ("config.json", "scheduler_config.json", "guider_config.json")
LARGE = {*SUFFIXES, ".msgpack", ".h5", ".onnx"}  # suffixes of weights, some of which others read
Module = TypeVar("Module", bound=nnx.Module)
Change = Callable[[Reader], Reader]
"""A change of a network's tensors by their names in diffusers: merges LoRAs, or adds zeros for missing weights."""


class Weights(Reader, Protocol):
    """A component's tensors."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files of the tensors, whose digests show changes."""
        ...


@dataclass(frozen=True)
class Storage:
    """The files of a checkpoint: on this machine, or in a repository on the hub, from where they are downloaded.

    Attributes:
        name: The hub id, or the folder or file, as the user gave it.
        root: The folder of the files beside the components, or the one file.
        revision: The commit of the repository on the hub; None for what is on this machine.
        patterns: Patterns of the components' files, by their names in the repository.
    """

    name: str
    root: Path
    revision: str | None = None
    patterns: Sequence[str] = ()

    @property
    def known_as(self) -> str:
        """The name from which the model may be guessed: the repository, or the whole path of the folder or file."""
        return str(self.root.absolute()) if self.revision is None else self.name

    @cached_property
    def hub_files(self) -> Sequence[HubFile]:
        """The components' files on the hub; none of a local folder, or where the hub cannot be asked."""
        return [] if self.revision is None else hub_files(self.name, self.patterns, revision=self.revision)

    def fetched(self, patterns: Sequence[str]) -> Path:
        """Download the files that match, and return the root."""
        if self.revision is not None and patterns:
            download(self.name, patterns, revision=self.revision)
        return self.root

    def folder(self, component: str, files: Sequence[str] = COMPONENT_FILES) -> Path:
        """Return a component's folder, with at least these files."""
        if not component.isidentifier():
            raise WanjaxError(f"{self.root} lists a component {component!r}, which is not the name of a folder in it")
        self.fetched([INDEX, *(f"{component}/{name}" for name in files)] if files else ())
        if not (folder := self.root / component).is_dir():
            raise WanjaxError(f"{self.name} has no folder {component}: give a checkpoint in the diffusers layout")
        return folder

    def bring(self, files: Iterable[Path]) -> None:
        """Download files that are not here; skip those that the store lacks."""

    def size_of(self, path: Path) -> int | None:
        """Return the bytes of a file of the checkpoint, None where there is none."""
        return size_here(path)

    def is_at_hand(self, file: str) -> bool:
        """Tell whether a file can be read without a large download."""
        return self.revision is None and (self.root / file).is_file()

    def check_room(self) -> int:
        """Return the bytes that are still to be downloaded; raise WanjaxError where the disk has no room for them."""
        return check_room(self.name, self.hub_files) if self.hub_files else 0

    def gather(self, progress: Callable[[str, int, int], object], *, anew: bool = False) -> None:
        """Download all files of a store that are not here, or with `anew` all of them."""
        del progress, anew  # all files are here, or come whole when they are needed


@dataclass(frozen=True, eq=False)
class Component:
    """A network, tokenizer or scheduler of a checkpoint. Its functions raise WanjaxError where files are damaged.

    Attributes:
        kind: Its class in model_index.json.
        config: Returns its config.json, or a config made from its tensors.
        weights: Opens its tensors by their names in diffusers or transformers; in `Arrays` they have this library's.
        files: Returns its files other than weights, which are in one folder.
        is_present: Whether the checkpoint has it; else it comes from the fallback repository. Raises WanjaxError where
            the checkpoint has only a part of it.
        at_hand: Whether its config can be read without a download.
        original: Returns its tensors with their published names, unused ones included.
        changes: Applied to its tensors, in this order, before they fill a network.
    """

    kind: str
    config: Callable[[], dict[str, Any]]
    weights: Callable[[], Weights]
    files: Callable[[], Sequence[Path]]
    is_present: Callable[[], bool] = lambda: True
    at_hand: bool = False
    original: Change = lambda tensors: tensors
    changes: tuple[Change, ...] = ()

    def tensors(self, rules: Iterable[Rule]) -> Reader:
        """Return its changed tensors with the names and shapes of diffusers, to which `rules` apply."""
        reader: Reader = self.weights()
        if isinstance(reader, Arrays):
            reader = modules.Exported({name: reader[name] for name in reader.specs}, rules)
        for change in self.changes:
            reader = change(reader)
        return reader

    def load(
        self,
        abstract: Module,
        rules: Iterable[Rule],
        *,
        ignore: Iterable[str] = (),
        progress: Callable[[int, int], object] | None = None,
    ) -> Module:
        """Fill a network with its weights, as `modules.load`; `rules` take the names of diffusers."""
        if not self.changes and isinstance(arrays := self.weights(), Arrays):
            return modules.restore(abstract, arrays, progress=progress)
        rules = list(rules)
        return modules.load(abstract, rules, self.tensors(rules), ignore=ignore, progress=progress)


@dataclass(frozen=True, eq=False)
class Source:
    """A checkpoint: its components and facts about it.

    Attributes:
        storage: Its files.
        index: `model_index.json`: the pipeline's class, and each component's library and class.
        components: By name, those that the index lists and that are not null.
        check: Raises WanjaxError where a file is missing or cut off; reads headers only. Its arguments are names of
            networks and of components without weights, such as tokenizers. For files not yet downloaded, it checks
            only that the hub lists them.
        origin: The repository in which the weights were published; the checkpoint's name where that is unknown.
        known_as: The name from which the model may be guessed.
        fallback_repo: The diffusers repository of the components that the checkpoint lacks.
        notes: Sentences for the user who loads it, such as on an input that is not offered.
        manifest: `wanjax.json` of an unchanged checkpoint from `wanjax convert`; else None.
        loras: The LoRAs that are merged in.
        base: The same checkpoint without LoRAs; None where none are merged in.
        extended: Whether networks have weights that the checkpoint does not hold.
    """

    storage: Storage
    index: Mapping[str, Any]
    components: Mapping[str, Component]
    check: Callable[[Iterable[str], Iterable[str]], None]
    origin: str
    known_as: str
    fallback_repo: str
    notes: Sequence[str] = ()
    manifest: Mapping[str, Any] | None = None
    loras: Sequence[Lora] = ()
    base: "Source | None" = None
    extended: bool = False

    @property
    def name(self) -> str:
        """The hub id, or the folder or file, as the user gave it."""
        return self.storage.name

    @property
    def root(self) -> Path:
        """The folder of the files beside the components, or the one file."""
        return self.storage.root

    @property
    def revision(self) -> str | None:
        """The commit of the repository on the hub; None for what is on this machine."""
        return self.storage.revision

    @property
    def missing_components(self) -> list[str]:
        """Components that the checkpoint lacks, which are loaded from `fallback_repo`."""
        return [name for name, component in self.components.items() if not component.is_present()]

    def __getitem__(self, component: str) -> Component:
        if component not in self.components:
            listed = ", ".join(self.components)
            raise WanjaxError(f"{self.name} lists no {component} in its model_index.json, which has {listed}")
        return self.components[component]

    def changed(self, components: Mapping[str, Component], **facts: Any) -> "Source":
        """Return the checkpoint with these components and other fields replaced."""
        return replace(self, components={**self.components, **components}, manifest=None, **facts)


def open_diffusers(name: str | Path, folder: Path, revision: str | None = None) -> Source:
    """Open a folder or hub repository in the layout of diffusers. A component is downloaded when it is first needed."""
    index = read_index(name, folder)
    patterns = [f"{component}/{file}" for component in classes_in(index) for file in COMPONENT_FILES]
    storage = Storage(str(name), folder, revision, patterns)
    components = {component: in_folder(storage, component, kind) for component, kind in classes_in(index).items()}
    check = partial(_check_folders, storage)
    return Source(storage, index, components, check, str(name), storage.known_as, str(name))


def in_folder(storage: Storage, component: str, kind: str) -> Component:
    """Return a component that has a folder of its own, as in the layout of diffusers."""

    def config() -> dict[str, Any]:
        there = any((storage.root / component / name).is_file() for name in CONFIGS)  # they come with the index
        folder = storage.folder(component, files=() if there else ("*.json",))
        names = [folder / name for name in CONFIGS]
        return read_json(next((path for path in names if path.is_file()), names[0]))

    return Component(
        kind,
        config,
        weights=lambda: Dequantized(SafetensorsFolder(storage.folder(component))),
        files=lambda: _small_files(storage.folder(component)),
        at_hand=component.isidentifier() and storage.is_at_hand(f"{component}/config.json"),
    )


def _check_folders(storage: Storage, networks: Iterable[str], others: Iterable[str]) -> None:
    """Check the folders of components in the layout of diffusers, as `Source.check`."""
    awaited = {PurePosixPath(file.name).parts[0] for file in storage.hub_files if file.to_download}

    def folder(component: str) -> Path:
        """Return a folder of which all files are here.

        Where the hub cannot be reached, the client's cache has to have the whole folder. A link to a missing file is
        reported by its reader.
        """
        gone = any(not path.exists() for path in (storage.root / component).glob("*"))
        return storage.folder(component, () if storage.hub_files or gone else COMPONENT_FILES)

    for component in networks:
        if storage.hub_files:
            check_names(f"{storage.name}/{component}", names_in(component, storage.hub_files))
        if component not in awaited:
            Dequantized(SafetensorsFolder(folder(component)))  # which refuses formats that are not read
    for component in others:
        if component not in awaited:
            check_small(folder(component))


def folder_of(name: str | Path, revision: str | None = None, markers: Sequence[str] = ()) -> tuple[Path, str | None]:
    """Return a checkpoint's folder, with its configs and the small files `markers`, and its commit if it is on the hub.

    Raises WanjaxError where there is no such checkpoint.
    """
    folder = locate(name, revision=revision, markers=[*(f"*/{config}" for config in CONFIGS), *markers])
    return folder, None if os.path.exists(Path(name).expanduser()) else folder.name


def read_index(name: object, folder: Path) -> dict[str, Any]:
    """Read the model_index.json of a checkpoint; raise WanjaxError, with the checkpoint's name, where there is none."""
    if not (folder / INDEX).is_file():
        kind = read_json(folder / "config.json", missing={}).get("_class_name")
        raise WanjaxError(no_checkpoint(name, f", and its config.json is of a {repr_short(kind)}" if kind else ""))
    return read_json(folder / INDEX)


def classes_in(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the class of each component that a model_index.json lists, without those that are null."""
    entries = {name: value for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {name: str(kind) for name, (library, kind) in entries.items() if library is not None and kind is not None}


def read_json(path: Path, missing: dict | None = None) -> dict[str, Any]:
    """Read a JSON object from a file; return `missing`, unless it is None, where the file does not exist."""
    if missing is not None and not path.exists():
        return missing
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WanjaxError(
            f"{path} cannot be read ({reason(error)}): give a complete checkpoint in the diffusers layout"
        ) from error
    if not isinstance(value, dict):
        raise WanjaxError(f"{path} is not a JSON object: give a complete checkpoint in the diffusers layout")
    return value


def check_small(folder: Path) -> None:
    """Raise WanjaxError where a component's folder holds no files, or one that is empty or a link to nothing."""
    files = _small_files(folder)
    if lost := [path for path in files if not path.exists()]:
        raise WanjaxError(missing_file(lost[0]))
    void = [path for path in files if path.suffix in (".json", ".model") and not path.stat().st_size]
    if void or not files:
        problem = f"{void[0]} is empty" if void else f"{folder} holds no files"
        raise WanjaxError(f"{problem}: give a complete copy of the checkpoint")


def _small_files(folder: Path) -> list[Path]:
    """Return a component's files other than weights and their index."""
    files = [path for path in sorted(folder.iterdir()) if not path.is_dir()]
    return [path for path in files if path.suffix not in LARGE and not path.name.endswith(".index.json")]
