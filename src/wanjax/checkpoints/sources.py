# SPDX-License-Identifier: Apache-2.0
"""Sources: checkpoints of any layout, as values, and how one in the layout of diffusers is opened.

A `Source` is what is known of a checkpoint, with its components by the names of diffusers. A `Component` is functions
that read its config and its weights. Merged LoRAs, zeros and trained weights are other components in the same source.
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
from wanjax.checkpoints.descaled import Descaled
from wanjax.checkpoints.files import SUFFIXES, Reader, SafetensorsFolder, check_names
from wanjax.checkpoints.hub import (
    COMPONENT_FILES,
    INDEX,
    Listed,
    check_room,
    download,
    listed,
    locate,
    names_in,
)
from wanjax.checkpoints.lora_source import Lora
from wanjax.converters.rules import Rule
from wanjax.errors import WanjaxError, reason, shown
from wanjax.stores.places import no_file

CONFIGS = ("config.json", "scheduler_config.json", "guider_config.json")
LARGE = {*SUFFIXES, ".msgpack", ".h5", ".onnx"}  # suffixes of weights, some of which others read
Module = TypeVar("Module", bound=nnx.Module)
Change = Callable[[Reader], Reader]
"""A change of a network's tensors by their names in diffusers: LoRAs merged in, or zeros for weights that it lacks."""


class Weights(Reader, Protocol):
    """A component's tensors."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files of the tensors, from which a change is recognised."""
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
        """The name that may tell which model it is: that of the repository, or the whole path of the folder or file."""
        return str(self.root.absolute()) if self.revision is None else self.name

    @cached_property
    def listed(self) -> Sequence[Listed]:
        """The components' files on the hub; none of a local folder, or where the hub cannot be asked."""
        return [] if self.revision is None else listed(self.name, self.patterns, revision=self.revision)

    def fetched(self, patterns: Sequence[str]) -> Path:
        """Download those of the files that exist, and return the root."""
        if self.revision is not None and patterns:
            download(self.name, patterns, revision=self.revision)
        return self.root

    def folder(self, component: str, files: Sequence[str] = COMPONENT_FILES) -> Path:
        """Return a component's folder, with at least these files."""
        if not component.isidentifier():
            raise WanjaxError(f"{self.root} lists a component {component!r}, which is not the name of a folder in it")
        self.fetched([INDEX, *(f"{component}/{name}" for name in files)] if files else ())
        if not (folder := self.root / component).is_dir():
            raise WanjaxError(f"{self.name} has no folder {component}: a checkpoint in the diffusers layout is needed")
        return folder

    def bring(self, files: Iterable[Path]) -> None:
        """Download files that are not here; one that the store does not have is missed by who reads it."""

    def size_of(self, path: Path) -> int | None:
        """Return the bytes of a file of the checkpoint, None where there is none."""
        return size_here(path)

    def is_at_hand(self, file: str) -> bool:
        """Tell whether a file can be read without a large download."""
        return self.revision is None and (self.root / file).is_file()

    def check_room(self) -> int:
        """Return the bytes that are still to be downloaded; raise WanjaxError where the disk has no room for them."""
        return check_room(self.name, self.listed) if self.listed else 0

    def gather(self, progress: Callable[[str, int, int], object], *, anew: bool = False) -> None:
        """Download what is read from a store a part at a time: what is not here, or with `anew` all of it."""
        del progress, anew  # all files are here, or downloaded whole when they are needed


@dataclass(frozen=True, eq=False)
class Component:
    """A network, tokenizer or scheduler of a checkpoint. Its functions raise WanjaxError where files are damaged.

    Attributes:
        kind: Its class in model_index.json.
        config: Reads its config.json, or returns what stands for it.
        weights: Opens its tensors by their names in diffusers or transformers; in `Arrays` they have this library's.
        files: Returns its files other than weights, which are in one folder.
        held: Tells whether the checkpoint has it, and not the lender. Raises WanjaxError where it has a part of it.
        at_hand: Whether its config can be read without a download.
        original: Returns its tensors with the names that they were published by, and with those that are not used.
        changes: What is done to its tensors, in this order, before they fill a network.
    """

    kind: str
    config: Callable[[], dict[str, Any]]
    weights: Callable[[], Weights]
    files: Callable[[], Sequence[Path]]
    held: Callable[[], bool] = lambda: True
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
    """A checkpoint: its components, and what is known of it.

    Attributes:
        storage: Its files.
        index: `model_index.json`: the pipeline's class, and each component's library and class.
        components: Those that the index lists, without those that are null.
        check: Raises WanjaxError where a file is missing or cut off, from the files' headers alone. It is given the
            names of networks, and those of components without weights, such as tokenizers. Of what is still to be
            downloaded, it looks at the names that the hub lists.
        origin: The repository in which the weights were published; the checkpoint's name where that is unknown.
        known_as: The name that may tell which model it is.
        lender: The diffusers repository that has the components that the checkpoint lacks.
        notes: What whoever loads it is to know, in sentences, such as an input that is not offered.
        manifest: `wanjax.json`, of a checkpoint that is as `wanjax convert` wrote it.
        loras: Those that are merged in.
        base: The same checkpoint without LoRAs; None where none are merged in.
        extended: Whether networks have weights that the checkpoint does not hold.
    """

    storage: Storage
    index: Mapping[str, Any]
    components: Mapping[str, Component]
    check: Callable[[Iterable[str], Iterable[str]], None]
    origin: str
    known_as: str
    lender: str
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
    def lent(self) -> list[str]:
        """The components that the checkpoint lacks; they come from the lender."""
        return [name for name, component in self.components.items() if not component.held()]

    def __getitem__(self, component: str) -> Component:
        if component not in self.components:
            listed = ", ".join(self.components)
            raise WanjaxError(f"{self.name} lists no {component} in its model_index.json, which has {listed}")
        return self.components[component]

    def changed(self, components: Mapping[str, Component], **facts: Any) -> "Source":
        """Return the checkpoint with other components of these names, and other facts."""
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
        weights=lambda: Descaled(SafetensorsFolder(storage.folder(component))),
        files=lambda: _small_files(storage.folder(component)),
        at_hand=component.isidentifier() and storage.is_at_hand(f"{component}/config.json"),
    )


def _check_folders(storage: Storage, networks: Iterable[str], others: Iterable[str]) -> None:
    """Check the folders of components in the layout of diffusers, as `Source.check`."""
    awaited = {PurePosixPath(file.name).parts[0] for file in storage.listed if file.awaited}

    def folder(component: str) -> Path:
        """Return a folder of which nothing is awaited.

        Where the hub cannot be asked, what is in the client's cache has to be whole. A link whose file is gone is told
        by who reads it.
        """
        gone = any(not path.exists() for path in (storage.root / component).glob("*"))
        return storage.folder(component, () if storage.listed or gone else COMPONENT_FILES)

    for component in networks:
        if storage.listed:
            check_names(f"{storage.name}/{component}", names_in(component, storage.listed))
        if component not in awaited:
            Descaled(SafetensorsFolder(folder(component)))  # which refuses formats that are not read
    for component in others:
        if component not in awaited:
            check_small(folder(component))


def folder_of(name: str | Path, revision: str | None = None, markers: Sequence[str] = ()) -> tuple[Path, str | None]:
    """Returns a checkpoint's folder, with its configs and the small files `markers`; its commit if it is of the hub.

    Raises WanjaxError where there is none.
    """
    folder = locate(name, revision=revision, markers=[*(f"*/{config}" for config in CONFIGS), *markers])
    return folder, None if os.path.exists(Path(name).expanduser()) else folder.name


def read_index(name: object, folder: Path) -> dict[str, Any]:
    """Read the model_index.json of a checkpoint; raise WanjaxError, with the checkpoint's name, where there is none."""
    if not (folder / INDEX).is_file():
        kind = read_json(folder / "config.json", missing={}).get("_class_name")
        what = f"{name} holds no {INDEX}{f', and its config.json is of a {shown(kind)}' if kind else ''}"
        raise WanjaxError(f"{what}: a whole checkpoint, as diffusers or its authors lay it out, is needed")
    return read_json(folder / INDEX)


def classes_in(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the class of each component that a model_index.json lists, without those that are null."""
    entries = {name: value for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {name: str(kind) for name, (library, kind) in entries.items() if library is not None and kind is not None}


def read_json(path: Path, missing: dict | None = None) -> dict[str, Any]:
    """Reads a JSON object from a file; returns `missing`, unless it is None, where the file does not exist."""
    if missing is not None and not path.exists():
        return missing
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WanjaxError(
            f"{path} cannot be read ({reason(error)}): a complete checkpoint in the diffusers layout is needed"
        ) from error
    if not isinstance(value, dict):
        raise WanjaxError(f"{path} is not a JSON object: a complete checkpoint in the diffusers layout is needed")
    return value


def check_small(folder: Path) -> None:
    """Raises WanjaxError where a component's folder holds no files, or one that is empty or a link to nothing."""
    files = _small_files(folder)
    if lost := [path for path in files if not path.exists()]:
        raise WanjaxError(no_file(lost[0]))
    void = [path for path in files if path.suffix in (".json", ".model") and not path.stat().st_size]
    if void or not files:
        what = f"{void[0]} is empty" if void else f"{folder} holds no files"
        raise WanjaxError(f"{what}: a complete copy of the checkpoint is needed")


def _small_files(folder: Path) -> list[Path]:
    """Returns a component's files that are neither weights nor their index."""
    files = [path for path in sorted(folder.iterdir()) if not path.is_dir()]
    return [path for path in files if path.suffix not in LARGE and not path.name.endswith(".index.json")]
