# SPDX-License-Identifier: Apache-2.0
"""Describe checkpoints of all layouts, and open checkpoints in the layout of diffusers.

A `Source` describes a checkpoint, and contains its components by diffusers' names. A `Component` has functions that
read the component's config and weights. To merge a LoRA, to add zeros or to use trained weights, make a copy of the
source in which some components are replaced.
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
from wanjax.checkpoints.arrays import RECONVERT_ADVICE, OrbaxCheckpoint, local_size
from wanjax.checkpoints.dequantized import DequantizedReader
from wanjax.checkpoints.files import SUFFIXES, SafetensorsFolder, TensorReader, check_names
from wanjax.checkpoints.hub import (
    COMPONENT_FILES,
    INDEX,
    HubFile,
    check_room,
    download,
    download_bytes,
    file_names_in_folder,
    hub_files,
    locate,
)
from wanjax.checkpoints.lora_source import Lora
from wanjax.checkpoints.quantize import float_kernels, quantized_kernels
from wanjax.converters.weight_rules import WeightRule
from wanjax.errors import WanjaxError, no_checkpoint, reason, repr_short
from wanjax.layers.precision import UNQUANTIZED, Precision
from wanjax.stores.paths import missing_file

MANIFEST = "wanjax.json"  # the manifest of a converted checkpoint
CONFIGS = ("config.json", "scheduler_config.json", "guider_config.json")
WEIGHT_SUFFIXES = {*SUFFIXES, ".msgpack", ".h5", ".onnx"}  # wanjax cannot read the added suffixes
Module = TypeVar("Module", bound=nnx.Module)
ReaderTransform = Callable[[TensorReader], TensorReader]
"""A function that changes a network's tensors, for example merges LoRAs. The tensors have diffusers' names."""


class Weights(TensorReader, Protocol):
    """A reader of a component's tensors."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files with the tensors."""
        ...


@dataclass(frozen=True)
class Storage:
    """The files of a checkpoint, which are local or in a repository on the hub.

    Attributes:
        name: The hub id, folder or file, as the user wrote it.
        root: The folder with the components' folders, or the single file.
        revision: The commit of the repository on the hub; None for local files.
        patterns: Patterns for the names of the components' files in the repository.
        companions: Further local files of the checkpoint, if `root` is a file.
    """

    name: str
    root: Path
    revision: str | None = None
    patterns: Sequence[str] = ()
    companions: Sequence[Path] = ()

    @property
    def name_hint(self) -> str:
        """The repository, or the absolute path of the folder or file. The name of the model is guessed from this."""
        return str(self.root.absolute()) if self.revision is None else self.name

    @cached_property
    def hub_files(self) -> Sequence[HubFile]:
        """The components' files on the hub; empty for a local folder, or if the hub is unreachable."""
        return [] if self.revision is None else hub_files(self.name, self.patterns, revision=self.revision)

    def download(self, patterns: Sequence[str]) -> Path:
        """Download the files that match the patterns, and return the root."""
        if self.revision is not None and patterns:
            download(self.name, patterns, revision=self.revision)
        return self.root

    def folder(self, component: str, files: Sequence[str] = COMPONENT_FILES) -> Path:
        """Return a component's folder, after downloading these files if they are missing."""
        if not component.isidentifier():
            raise WanjaxError(f"{self.root} lists a component {component!r}, which is not a valid folder name")
        self.download([INDEX, *(f"{component}/{name}" for name in files)] if files else ())
        if not (folder := self.root / component).is_dir():
            raise WanjaxError(f"{self.name} has no folder {component}: {_advice(self.root)}")
        return folder

    def fetch_files(self, files: Iterable[Path]) -> None:
        """Download missing files to this machine; ignore files that the store does not have."""

    def size_of(self, path: Path) -> int | None:
        """Return the size of a file of the checkpoint in bytes, or None if the file is missing."""
        return local_size(path)

    def is_available(self, file: str) -> bool:
        """Return whether a file can be read without a large download."""
        return self.revision is None and (self.root / file).is_file()

    @property
    def download_bytes(self) -> int:
        """The number of bytes to download."""
        return download_bytes(self.hub_files)

    def check_room(self) -> None:
        """Raise WanjaxError if the disk has no room for the files to download."""
        if self.hub_files:
            check_room(self.name, self.hub_files)

    def fetch_all(self, progress: Callable[[str, int, int], object], *, force: bool = False) -> None:
        """Download all missing files from a store. With `force`, download the existing files again too."""
        del progress, force  # nothing to do: files are local, or are downloaded when they are needed


@dataclass(frozen=True, eq=False)
class Component:
    """A network, tokenizer or scheduler of a checkpoint. The functions of a component raise WanjaxError for a damaged
    file.

    Attributes:
        kind: The component's class in model_index.json.
        config: Returns the component's config.json, or a config that is inferred from its tensors.
        weights: Opens the tensors, with diffusers' or transformers' names. In an `OrbaxCheckpoint`, the names are
            wanjax's.
        files: Returns the component's files other than weights; these files are in one folder.
        is_present: Returns whether the checkpoint has the component. A missing component is loaded from the fallback
            repository. Raises WanjaxError if the checkpoint has only a part of the component.
        is_config_available: Whether the config can be read without a download.
        original: Takes the tensors with diffusers' names, and returns all published tensors with their published names.
            The result includes tensors that the network does not use.
        changes: Functions that change the tensors, in this order, before the tensors fill a network.
        precision: The precision in which `wanjax convert` stored kernels.
    """

    kind: str
    config: Callable[[], dict[str, Any]]
    weights: Callable[[], Weights]
    files: Callable[[], Sequence[Path]]
    is_present: Callable[[], bool] = lambda: True
    is_config_available: bool = False
    original: ReaderTransform = lambda tensors: tensors
    changes: tuple[ReaderTransform, ...] = ()
    precision: Precision = UNQUANTIZED

    def tensors(self, rules: Iterable[WeightRule]) -> TensorReader:
        """Return the component's tensors after all changes, in floats. The tensors have the names and shapes that
        `rules` expect."""
        reader: TensorReader = self.weights()
        if isinstance(reader, OrbaxCheckpoint):
            arrays = float_kernels({name: reader[name] for name in reader.specs}, rotates=self.precision.rotates)
            reader = modules.ExportedTensors(arrays, rules)
        for change in self.changes:
            reader = change(reader)
        return reader

    def load(
        self,
        abstract: Module,
        rules: Iterable[WeightRule],
        *,
        ignore: Iterable[str] = (),
        progress: Callable[[int, int], object] | None = None,
    ) -> Module:
        """Fill a network with the component's weights, as `modules.load` does. `rules` apply to diffusers' names."""
        arrays = self.weights()
        has_stored_form = self.precision.quantizes or not quantized_kernels(abstract)
        if isinstance(arrays, OrbaxCheckpoint) and has_stored_form and not self.changes:
            return modules.restore(abstract, arrays, progress=progress)
        rules, options = list(rules), {"ignore": ignore, "progress": progress}
        quantized = self.precision.quantizes or getattr(arrays, "is_quantized", False)
        return modules.load(abstract, rules, self.tensors(rules), was_quantized=quantized, **options)


@dataclass(frozen=True, eq=False)
class Source:
    """A checkpoint: its files, its components, and their properties.

    Attributes:
        storage: The files of the checkpoint.
        index: `model_index.json`: the pipeline's class, and each component's library and class.
        components: Components by name. Components that are null in the index are left out.
        check: Raises WanjaxError if a file is missing or truncated. The function reads only headers. The arguments of
            the function are the names of networks, and the names of components without weights such as tokenizers. For
            a file that is not downloaded yet, the function checks only that the hub lists the file.
        published_name: The repository in which the weights were published, or the checkpoint's name if the repository
            is unknown.
        name_hint: A name or path from which the name of the model is guessed.
        fallback_repo: The diffusers repository from which missing components are loaded.
        notes: Sentences that the user sees when the checkpoint is loaded, for example about an unsupported input.
        manifest: The `wanjax.json` of a checkpoint from `wanjax convert` that was not changed; None for other
            checkpoints.
        loras: The LoRAs that are merged into the weights.
        base: The same checkpoint without LoRAs; None if no LoRAs are merged.
        is_extended: Whether zeros replace weights that the checkpoint lacks.
        precision: The precision in which the weights are stored.
    """

    storage: Storage
    index: Mapping[str, Any]
    components: Mapping[str, Component]
    check: Callable[[Iterable[str], Iterable[str]], None]
    published_name: str
    name_hint: str
    fallback_repo: str
    notes: Sequence[str] = ()
    manifest: Mapping[str, Any] | None = None
    loras: Sequence[Lora] = ()
    base: "Source | None" = None
    is_extended: bool = False
    precision: str = UNQUANTIZED.name

    @property
    def name(self) -> str:
        """The hub id, folder or file, as the user wrote it."""
        return self.storage.name

    @property
    def root(self) -> Path:
        """The folder with the components' folders, or the single file."""
        return self.storage.root

    @property
    def revision(self) -> str | None:
        """The commit of the repository on the hub; None for local files."""
        return self.storage.revision

    @property
    def missing_components(self) -> list[str]:
        """Names of the components that the checkpoint lacks; they are loaded from `fallback_repo`."""
        return [name for name, component in self.components.items() if not component.is_present()]

    def __getitem__(self, component: str) -> Component:
        if component not in self.components:
            names = ", ".join(self.components)
            raise WanjaxError(f"{self.name} lists no {component} in its model_index.json: it has {names}")
        return self.components[component]

    @property
    def has_quantized_weights(self) -> bool:
        """Whether the weights are stored with 8 bits."""
        return self.precision != UNQUANTIZED.name

    def check_floats(self, use: str) -> None:
        """Raise WanjaxError if the weights are stored with 8 bits.

        Args:
            use: The feature that needs float weights, for the message, such as "a LoRA".
        """
        if self.has_quantized_weights:
            raise WanjaxError(
                f"{self.name} has weights of 8 bits ({self.precision}), but {use} needs float weights: give the "
                "checkpoint from which it was converted"
            )

    def with_components(self, components: Mapping[str, Component], **fields: Any) -> "Source":
        """Return a copy with these components added or replaced, and with these other fields replaced."""
        return replace(self, components={**self.components, **components}, manifest=None, **fields)


def open_diffusers(name: str | Path, folder: Path, revision: str | None = None) -> Source:
    """Open a folder or hub repository in the layout of diffusers. A component is downloaded when it is first used."""
    index = read_index(name, folder)
    patterns = [f"{component}/{file}" for component in classes_in(index) for file in COMPONENT_FILES]
    storage = Storage(str(name), folder, revision, patterns)
    components = {component: in_folder(storage, component, kind) for component, kind in classes_in(index).items()}
    check = partial(_check_folders, storage)
    return Source(storage, index, components, check, str(name), storage.name_hint, str(name))


def in_folder(storage: Storage, component: str, kind: str) -> Component:
    """Describe a component in the layout of diffusers, where each component has its own folder."""

    def config() -> dict[str, Any]:
        has_config = any(
            (storage.root / component / name).is_file() for name in CONFIGS
        )  # the configs were downloaded together with the index
        folder = storage.folder(component, files=() if has_config else ("*.json",))
        names = [folder / name for name in CONFIGS]
        return read_json(next((path for path in names if path.is_file()), names[0]))

    return Component(
        kind,
        config,
        weights=lambda: DequantizedReader(SafetensorsFolder(storage.folder(component))),
        files=lambda: _small_files(storage.folder(component)),
        is_config_available=component.isidentifier() and storage.is_available(f"{component}/config.json"),
    )


def _check_folders(storage: Storage, networks: Iterable[str], other_components: Iterable[str]) -> None:
    """Check the folders of components in the layout of diffusers, as `Source.check` does."""
    incomplete = {PurePosixPath(file.name).parts[0] for file in storage.hub_files if file.needs_download}

    def complete_folder(component: str) -> Path:
        """Return a component's folder with all its files.

        If the hub is unreachable, all files must be in the local cache of the hub's client. This function ignores
        broken links, because the code that reads the files reports broken links.
        """
        has_broken_link = any(not path.exists() for path in (storage.root / component).glob("*"))
        return storage.folder(component, () if storage.hub_files or has_broken_link else COMPONENT_FILES)

    for component in networks:
        if storage.hub_files:
            check_names(f"{storage.name}/{component}", file_names_in_folder(component, storage.hub_files))
        if component not in incomplete:
            DequantizedReader(
                SafetensorsFolder(complete_folder(component))
            )  # raises WanjaxError for an unsupported format
    for component in other_components:
        if component not in incomplete:
            check_small_files(complete_folder(component))


def folder_of(name: str | Path, revision: str | None = None, markers: Sequence[str] = ()) -> tuple[Path, str | None]:
    """Return the folder of a checkpoint, and its commit on the hub. The commit of a local folder is None.

    The configs and the files that match `markers` are downloaded. Raises WanjaxError if the checkpoint is missing.
    """
    folder = locate(name, revision=revision, markers=[*(f"*/{config}" for config in CONFIGS), *markers])
    return folder, None if os.path.exists(Path(name).expanduser()) else folder.name


def read_index(name: object, folder: Path) -> dict[str, Any]:
    """Read the model_index.json of a checkpoint. Raises WanjaxError with the checkpoint's `name` if the file is
    missing."""
    if not (folder / INDEX).is_file():
        if (folder / MANIFEST).is_file():
            raise WanjaxError(f"{name} has no {INDEX}: {RECONVERT_ADVICE}")
        kind = read_json(folder / "config.json", missing={}).get("_class_name")
        raise WanjaxError(no_checkpoint(name, f", and its config.json describes a {repr_short(kind)}" if kind else ""))
    return read_json(folder / INDEX)


def classes_in(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the class of each component in a model_index.json. Components that are null are left out."""
    entries = {name: value for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {name: str(kind) for name, (library, kind) in entries.items() if library is not None and kind is not None}


def read_json(path: Path, missing: dict | None = None) -> dict[str, Any]:
    """Read a JSON object from a file. If the file does not exist, return `missing`; with None, raise WanjaxError."""
    if missing is not None and not path.exists():
        return missing
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WanjaxError(f"{path} cannot be read ({reason(error)}): {_advice(path.parent)}") from error
    if not isinstance(value, dict):
        raise WanjaxError(f"{path} is not a JSON object: {_advice(path.parent)}")
    return value


def _advice(folder: Path) -> str:
    """Return advice for a checkpoint of which a part is missing or damaged, from the folder of one of its files."""
    if any((parent / MANIFEST).is_file() for parent in (folder, folder.parent)):
        return RECONVERT_ADVICE
    return "give a complete checkpoint in the diffusers layout"


def check_small_files(folder: Path) -> None:
    """Raise WanjaxError if a component's folder is empty, or contains an empty file or a broken link."""
    files = _small_files(folder)
    if missing := [path for path in files if not path.exists()]:
        raise WanjaxError(missing_file(missing[0]))
    empty = [path for path in files if path.suffix in (".json", ".model") and not path.stat().st_size]
    if empty or not files:
        problem = f"{empty[0]} is empty" if empty else f"{folder} contains no files"
        raise WanjaxError(f"{problem}: give a complete copy of the checkpoint")


def _small_files(folder: Path) -> list[Path]:
    """List the files of a component's folder, without weights and the index of weights."""
    files = [path for path in sorted(folder.iterdir()) if not path.is_dir()]
    return [path for path in files if path.suffix not in WEIGHT_SUFFIXES and not path.name.endswith(".index.json")]
