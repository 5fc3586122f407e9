# SPDX-License-Identifier: Apache-2.0
"""Sources: checkpoints of any layout, read as the components of a pipeline.

Loading and conversion use a `Source`: the config and the weights of each component, by the names of diffusers.
"""

import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

import jax
from flax import nnx

from wanjax.checkpoints import modules
from wanjax.checkpoints.arrays import Arrays, size_here
from wanjax.checkpoints.descaled import Descaled
from wanjax.checkpoints.files import (
    HEADER_LIMIT,
    SUFFIXES,
    Reader,
    SafetensorsFile,
    SafetensorsFolder,
    adding,
    check_names,
)
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
from wanjax.checkpoints.readers import Renamed, Together
from wanjax.converters.rules import Rule
from wanjax.errors import WanjaxError, reason, shown
from wanjax.figures import in_bytes
from wanjax.stores.places import Missing, Remote, no_file
from wanjax.stores.user import user_cache
from wanjax.stores.writing import check_folder, writing

MANIFEST = "wanjax.json"  # written by `wanjax convert`: a checkpoint's origin and contents
CONFIGS = ("config.json", "scheduler_config.json", "guider_config.json")
FORMAT = 1
WEIGHTS = "weights"  # in a component's folder of such a checkpoint
LARGE = {*SUFFIXES, ".msgpack", ".h5", ".onnx"}  # suffixes of weights, some of which others read
SHARE = 16  # digits of a SHA-256
KNOWN_AS = "known_as"  # in a request of a manifest: a name that tells more of the weights
UNUSED = "unused.safetensors"  # tensors of the original checkpoint that the network does not use
Module = TypeVar("Module", bound=nnx.Module)
Progress = Callable[[int, int], object]


class Weights(Reader, Protocol):
    """A component's tensors."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files of the tensors, from which a change is recognised."""
        ...


class Source(ABC):
    """A checkpoint: its configs, and access to its weights. Every method raises WanjaxError where files are damaged."""

    name: str
    """The hub id or the folder, as the user gave it."""
    root: Path
    """The folder of the files beside the components."""
    revision: str | None = None
    """The commit of the repository on the hub; None for a local folder."""
    index: dict[str, Any]
    """`model_index.json`: the pipeline's class, and each component's library and class."""
    loras: Sequence[tuple[str, Path]] = ()
    """What `tensors` has merged in: each LoRA's name, with its strength and expert, and its file."""

    extended: bool = False
    """True where networks have weights that the checkpoint does not hold."""

    @property
    def components(self) -> dict[str, str]:
        """The class of each component that `model_index.json` lists, without those that are null."""
        entries = {name: value for name, value in self.index.items() if isinstance(value, list) and len(value) == 2}
        return {
            name: str(kind) for name, (library, kind) in entries.items() if library is not None and kind is not None
        }

    @property
    def base(self) -> "Source":
        """The same checkpoint without LoRAs."""
        return self

    @property
    def origin(self) -> str:
        """The repository in which the weights were published; `name` where that is unknown."""
        return self.name

    @property
    def known_as(self) -> str:
        """The name that may tell which model it is: that of the repository, or the whole path of the folder or file."""
        return str(self.root.absolute()) if self.revision is None else self.name

    @property
    def notes(self) -> Sequence[str]:
        """What whoever loads the checkpoint is to know, in sentences, such as an input that is not offered."""
        return ()

    @abstractmethod
    def config(self, component: str) -> dict[str, Any]:
        """Reads the component's config, the first file of `CONFIGS`."""

    @abstractmethod
    def weights(self, component: str) -> Weights:
        """Returns the component's tensors by their names in diffusers or transformers."""

    def tensors(self, component: str, rules: Iterable[Rule]) -> Reader:
        """Returns the component's tensors with the names and shapes of diffusers, to which `rules` apply."""
        return self.weights(component)

    def original(self, component: str, tensors: Reader) -> Reader:
        """Returns all tensors that the component had where it was published, by their names there.

        `tensors` are those that `tensors` returned, of this source or of one with LoRAs.
        """
        return tensors

    @abstractmethod
    def files(self, component: str) -> Sequence[Path]:
        """Returns the component's files other than weights, which are in one folder."""

    @property
    def patterns(self) -> Sequence[str]:
        """Patterns of the components' files, by their names in a repository on the hub."""
        return ()

    @cached_property
    def listed(self) -> Sequence[Listed]:
        """The components' files on the hub; none of a local folder, or where the hub cannot be asked."""
        return [] if self.revision is None else listed(self.name, self.patterns, revision=self.revision)

    def check_room(self) -> int:
        """Returns the bytes that are still to be downloaded; raises WanjaxError where the disk has no room for them."""
        return check_room(self.name, self.listed) if self.listed else 0

    @abstractmethod
    def check_whole(self, networks: Iterable[str], others: Iterable[str]) -> None:
        """Raises WanjaxError where a file of these components is missing or cut off, from the files' headers alone.

        others: components without weights, such as tokenizers. Of what is still to be downloaded, the names are looked
        at that the hub lists.
        """

    def is_at_hand(self, component: str) -> bool:
        """Tells whether the component's config is there to be read at once, without a download."""
        return False

    def gather(self, progress: Callable[[str, int, int], object], *, anew: bool = False) -> None:
        """Downloads what is read from a store a part at a time: what is not here, or with `anew` all of it."""
        del progress, anew  # all files are here, or downloaded whole when they are needed

    @property
    def lent(self) -> Sequence[str]:
        """The components that the checkpoint lacks; they come from the lender."""
        return ()

    @property
    def lender(self) -> str:
        """The diffusers repository that has the components that the checkpoint lacks."""
        return self.origin

    def load(
        self,
        component: str,
        abstract: Module,
        rules: Iterable[Rule],
        *,
        ignore: Iterable[str] = (),
        progress: Progress | None = None,
    ) -> Module:
        """Returns the network with the component's weights, as `modules.load`; `rules` take the names of diffusers."""
        rules = list(rules)
        return modules.load(abstract, rules, self.tensors(component, rules), ignore=ignore, progress=progress)


class Wrapped(Source):
    """Another source of which some components are changed; the base of those that change them."""

    def __init__(self, source: Source):
        self._source = source
        self.name, self.root, self.revision, self.index = source.name, source.root, source.revision, source.index
        self.loras, self.extended = source.loras, source.extended

    @abstractmethod
    def changes(self, component: str) -> bool:
        """Tells whether the component is another than that of the source."""

    @property
    def base(self) -> Source:
        return self._source.base

    @property
    def origin(self) -> str:
        return self._source.origin

    @property
    def known_as(self) -> str:
        return self._source.known_as

    @property
    def notes(self) -> Sequence[str]:
        return self._source.notes

    @property
    def lent(self) -> Sequence[str]:
        return self._source.lent

    @property
    def lender(self) -> str:
        return self._source.lender

    def config(self, component: str) -> dict[str, Any]:
        return self._source.config(component)

    def weights(self, component: str) -> Weights:
        return self._source.weights(component)

    def tensors(self, component: str, rules: Iterable[Rule]) -> Reader:
        return self._source.tensors(component, rules)

    def original(self, component: str, tensors: Reader) -> Reader:
        return self._source.original(component, tensors)

    def files(self, component: str) -> Sequence[Path]:
        return self._source.files(component)

    def check_room(self) -> int:
        return self._source.check_room()

    def check_whole(self, networks: Iterable[str], others: Iterable[str]) -> None:
        self._source.check_whole(networks, others)

    def is_at_hand(self, component: str) -> bool:
        return self._source.is_at_hand(component)

    def gather(self, progress: Callable[[str, int, int], object], *, anew: bool = False) -> None:
        self._source.gather(progress, anew=anew)

    def load(self, component: str, abstract: Module, rules: Iterable[Rule], **how: Any) -> Module:
        given = super() if self.changes(component) else self._source  # the source's own way of loading may be faster
        return given.load(component, abstract, rules, **how)


class DiffusersSource(Source):
    """A folder or hub repository in the layout of diffusers. A component is downloaded when it is first needed."""

    def __init__(self, name: str | Path, folder: Path, revision: str | None = None):
        if not (folder / INDEX).is_file():
            kind = read_json(folder / "config.json", missing={}).get("_class_name")
            what = f"{name} holds no {INDEX}{f', and its config.json is of a {shown(kind)}' if kind else ''}"
            raise WanjaxError(f"{what}: a whole checkpoint, as diffusers or its authors lay it out, is needed")
        self.name, self.root, self.revision = str(name), folder, revision
        self.index = read_json(self.root / INDEX)

    def config(self, component: str) -> dict[str, Any]:
        there = any((self.root / component / name).is_file() for name in CONFIGS)  # they come with the index
        folder = self.folder(component, files=() if there else ("*.json",))
        names = [folder / name for name in CONFIGS]
        return read_json(next((path for path in names if path.is_file()), names[0]))

    def weights(self, component: str) -> Weights:
        return Descaled(SafetensorsFolder(self.folder(component)))

    def is_at_hand(self, component: str) -> bool:
        return self.revision is None and (self.root / component / "config.json").is_file()

    @property
    def patterns(self) -> Sequence[str]:
        return [f"{component}/{name}" for component in self.components for name in COMPONENT_FILES]

    def check_whole(self, networks: Iterable[str], others: Iterable[str]) -> None:
        awaited = {PurePosixPath(file.name).parts[0] for file in self.listed if file.awaited}
        for component in networks:
            if self.listed:
                check_names(f"{self.name}/{component}", names_in(component, self.listed))
            if component not in awaited:
                Descaled(SafetensorsFolder(self._there(component)))  # which refuses formats that are not read
        for component in others:
            if component not in awaited:
                check_small(self._there(component))

    def _there(self, component: str) -> Path:
        """Returns the folder of a component of which nothing is awaited; raises WanjaxError where there is none.

        Where the hub cannot be asked, what is in the client's cache has to be whole. A link whose file is gone is told
        by who reads it.
        """
        gone = any(not path.exists() for path in (self.root / component).glob("*"))
        if self.revision is None or self.listed or gone:
            return self._in_root(component)
        return self.folder(component)

    def files(self, component: str) -> Sequence[Path]:
        return _small_files(self.folder(component))

    def folder(self, component: str, files: Sequence[str] = COMPONENT_FILES) -> Path:
        """Returns the component's folder, with at least these files; downloads those that are missing."""
        if files and self.revision is not None and component.isidentifier():
            download(self.name, [INDEX, *(f"{component}/{name}" for name in files)], revision=self.revision)
        return self._in_root(component)

    def _in_root(self, component: str) -> Path:
        if not component.isidentifier():
            raise WanjaxError(f"{self.root} lists a component {component!r}, which is not the name of a folder in it")
        if not (folder := self.root / component).is_dir():
            raise WanjaxError(f"{self.name} has no folder {component}: a checkpoint in the diffusers layout is needed")
        return folder


class WanjaxSource(DiffusersSource):
    """A folder written by `wanjax convert`: the layout of diffusers, except that weights are Orbax checkpoints.

    `weights` has the names and shapes of this library.
    """

    def __init__(self, name: str | Path, folder: Path, revision: str | None = None):
        super().__init__(name, folder, revision)
        self.manifest = read_json(self.root / MANIFEST)
        if (found := self.manifest.get("format")) != FORMAT:
            raise WanjaxError(f"{self.root / MANIFEST} has the format {found!r} where this wanjax reads {FORMAT}")
        networks, names = self.manifest.get("networks"), self.manifest.get("names", {})
        tables = [self.manifest.get("files")]
        for parts in (networks, names):
            tables += parts.values() if isinstance(parts, dict) else [None]
        if not all(map(_is_of_texts, tables)) or not isinstance(self.manifest.get("request"), dict):
            raise WanjaxError(f"{self.root / MANIFEST} is not what `wanjax convert` wrote: convert it again")

    @property
    def origin(self) -> str:
        return str(self.manifest["request"].get("source", self.name))

    @property
    def known_as(self) -> str:
        return str(self.manifest["request"].get(KNOWN_AS) or super().known_as)

    @cached_property
    def listed(self) -> Sequence[Listed]:
        return []  # of the hub

    def weights(self, component: str) -> Arrays:
        return Arrays(self.folder(component) / WEIGHTS)

    def size_of(self, path: Path) -> int | None:
        """Returns the bytes of a file of the checkpoint, None where there is none."""
        return size_here(path)

    def check_whole(self, networks: Iterable[str], others: Iterable[str]) -> None:
        there = {path.parent.name for path in self.root.glob(f"*/{WEIGHTS}")}
        for component in sorted(there | self.manifest["networks"].keys()):
            self.weights(component).check_sizes(self.size_of)
        super().check_whole([], others)

    def original(self, component: str, tensors: Reader) -> Reader:
        names, unused = self.manifest.get("names", {}).get(component, {}), self.folder(component) / UNUSED
        used = Renamed(tensors, lambda key: names.get(key, key))
        return Together(used, SafetensorsFile(unused)) if unused.exists() else used

    def tensors(self, component: str, rules: Iterable[Rule]) -> Reader:
        arrays = self.weights(component)
        return modules.Exported({name: arrays[name] for name in arrays.specs}, rules)

    def load(
        self,
        component: str,
        abstract: Module,
        rules: Iterable[Rule],
        *,
        ignore: Iterable[str] = (),
        progress: Progress | None = None,
    ) -> Module:
        return modules.restore(abstract, self.weights(component), progress=progress)


class StoredSource(WanjaxSource):
    """A checkpoint that `wanjax convert` wrote to a store. A file is downloaded when it is first needed.

    What is downloaded stays in the user's cache, in a folder of its own for each manifest, so that another checkpoint
    of the same name is not mixed with it. A process downloads the chunks of arrays that its devices hold, no others.
    """

    def __init__(self, place: Remote, revision: str | None = None):
        try:
            manifest = (place / MANIFEST).read(HEADER_LIMIT)
        except Missing as error:
            told = f"{place} is no whole checkpoint that `wanjax convert` wrote, and no other is read from a store"
            raise WanjaxError(f"{told} ({error})") from error
        digest = hashlib.sha256(manifest).hexdigest()
        if revision not in (None, digest[:SHARE]):
            raise WanjaxError(f"{place} has the revision {digest[:SHARE]}, and is not the {revision} that it was")
        self.place, self.sizes = place, place.files()
        root = user_cache() / "checkpoints" / hashlib.sha256(f"{place} {digest}".encode()).hexdigest()[:SHARE]
        check_folder(root)
        with writing(root / MANIFEST) as beside:
            beside.write_bytes(manifest)
        self.root = root
        self._fetch(root / name for name in self.sizes if "/" not in name and name != MANIFEST)
        super().__init__(str(place), root, digest[:SHARE])
        self._check({name for name in self.sizes if "/" not in name})

    def weights(self, component: str) -> Arrays:
        return Arrays(self.folder(component) / WEIGHTS, self._fetch)

    def original(self, component: str, tensors: Reader) -> Reader:
        self._fetch([self.folder(component) / UNUSED])
        return super().original(component, tensors)

    def is_at_hand(self, component: str) -> bool:
        return f"{component}/config.json" in self.sizes

    def check_room(self) -> int:
        """Raises WanjaxError where the disk has no room for the rest; none of it is awaited before it can be checked.

        A process of several downloads a part that is not known yet.
        """
        missing = sum(size for name, size in self.sizes.items() if not (self.root / name).exists())
        if jax.process_count() == 1 and missing > (free := shutil.disk_usage(self.root).free):
            told = f"{self.name} needs {in_bytes(missing)} more where {self.root} has {in_bytes(free)} free"
            raise WanjaxError(f"{told}: make room, or set XDG_CACHE_HOME to a folder on a larger disk")
        return 0

    def size_of(self, path: Path) -> int | None:
        return self.sizes.get(path.relative_to(self.root).as_posix())

    def folder(self, component: str, files: Sequence[str] = ()) -> Path:
        return self._in_root(component)

    def gather(self, progress: Callable[[str, int, int], object], *, anew: bool = False) -> None:
        names = [name for name in self.sizes if anew or not (self.root / name).exists()]
        count = adding(partial(progress, "downloading"), sum(self.sizes[name] for name in names))
        self.place.download_all(names, self.root, lambda done: count(sum(self.sizes[name] for name in done)))

    def _in_root(self, component: str) -> Path:
        names = {name for name in self.sizes if name.startswith(f"{component}/")}
        small = {name for name in names if not name.startswith(f"{component}/{WEIGHTS}/")} - {f"{component}/{UNUSED}"}
        self._fetch(self.root / name for name in small)
        self._check(small)
        if names:
            (self.root / component).mkdir(exist_ok=True)
        return super()._in_root(component)

    def _fetch(self, files: Iterable[Path]) -> None:
        """Downloads files that are not here; one that the store does not have is missed by who reads it."""
        names = (file.relative_to(self.root).as_posix() for file in files)
        if missing := [name for name in names if name in self.sizes and not (self.root / name).exists()]:
            self.place.download_all(missing, self.root)

    def _check(self, names: Iterable[str]) -> None:
        """Raises WanjaxError unless files are those that the manifest tells."""
        told = self.manifest["files"]
        for name in sorted(told.keys() & names):
            if hashlib.sha256((self.root / name).read_bytes()).hexdigest()[:SHARE] != told[name]:
                (self.root / name).unlink()
                raise WanjaxError(f"{self.place / name} is not what was written: convert it again")


def folder_of(name: str | Path, revision: str | None = None, markers: Sequence[str] = ()) -> tuple[Path, str | None]:
    """Returns a checkpoint's folder, with its configs and the small files `markers`; its commit if it is of the hub.

    Raises WanjaxError where there is none.
    """
    folder = locate(name, revision=revision, markers=[*(f"*/{config}" for config in CONFIGS), *markers])
    return folder, None if os.path.exists(Path(name).expanduser()) else folder.name


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


def _is_of_texts(table: object) -> bool:
    return isinstance(table, dict) and all(isinstance(text, str) for text in table.values())


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
