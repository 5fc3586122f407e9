# SPDX-License-Identifier: Apache-2.0
"""A checkpoint, wherever it is and however it is laid out, as the components that a pipeline is made of.

Whoever loads or converts a checkpoint sees a `Source`: the configs and the weights of each component under the names
that diffusers gives them. A layout is a class with these methods and a place in `open_source`, which tells one layout
from another.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from flax import nnx

from wanjax.checkpoint import Reader, SafetensorsFile, SafetensorsFolder
from wanjax.converters import engine
from wanjax.converters.engine import Rule
from wanjax.converters.readers import SUFFIXES, Renamed, Together
from wanjax.errors import WanjaxError
from wanjax.hub import HUB_FILE, INDEX, locate, locate_file, resolve
from wanjax.store import Arrays

MANIFEST = "wanjax.json"  # of a checkpoint that `wanjax convert` wrote: where it comes from, and what it holds
FORMAT = 1
WEIGHTS = "weights"  # a component's folder in it
UNUSED = "unused.safetensors"  # the tensors of its source that the network has no use for
Module = TypeVar("Module", bound=nnx.Module)
Progress = Callable[[int, int], object]


class Weights(Reader, Protocol):
    """A component's tensors."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files that hold them, by which it is known whether they have changed."""
        ...


class Source(ABC):
    """What is known of a checkpoint before its weights are read, and the way to them; raises WanjaxError throughout."""

    name: str
    """The hub id or the folder, as the user gave it."""
    root: Path
    """The folder of what lies beside the components."""
    revision: str | None = None
    """The commit of the hub's repository; None for a folder."""
    index: dict[str, Any]
    """`model_index.json`: the pipeline's class, and each component's library and class."""

    @property
    def origin(self) -> str:
        """Where the weights were published, as far as is known."""
        return self.name

    @abstractmethod
    def config(self, component: str) -> dict[str, Any]:
        """The component's config.json, or its scheduler_config.json."""

    @abstractmethod
    def weights(self, component: str) -> Weights:
        """The component's tensors by the names that diffusers, or transformers, gives them."""

    def tensors(self, component: str, rules: Iterable[Rule]) -> Reader:
        """The component's tensors by the names and in the layouts of diffusers, from which `rules` are."""
        return self.weights(component)

    @abstractmethod
    def files(self, component: str) -> Sequence[Path]:
        """The component's files that are not weights, all in one folder."""

    def load(
        self,
        component: str,
        abstract: Module,
        rules: Iterable[Rule],
        *,
        ignore: Iterable[str] = (),
        progress: Progress | None = None,
    ) -> Module:
        """The network with the component's weights; `rules` are from the names of diffusers, all as in `engine`."""
        rules = list(rules)
        return engine.load(abstract, rules, self.tensors(component, rules), ignore=ignore, progress=progress)


class DiffusersSource(Source):
    """A folder, or a repository on the hub, in the layout of diffusers; a component is downloaded when it is needed."""

    def __init__(self, name: str | Path, revision: str | None = None):
        self.name = str(name)
        self.root = resolve(name, components=(), revision=revision)
        self.revision = None if Path(name).expanduser().exists() else self.root.name  # as the hub's cache names it
        self.index = read_json(self.root / INDEX)

    def config(self, component: str) -> dict[str, Any]:
        folder = self.folder(component)
        names = [folder / name for name in ("config.json", "scheduler_config.json")]
        return read_json(next((path for path in names if path.is_file()), names[0]))

    def weights(self, component: str) -> Weights:
        return SafetensorsFolder(self.folder(component))

    def files(self, component: str) -> Sequence[Path]:
        return [path for path in sorted(self.folder(component).iterdir()) if _is_small(path)]

    def folder(self, component: str) -> Path:
        """The component's folder, downloaded if it has to be."""
        if not component.isidentifier():
            raise WanjaxError(f"{self.root} lists a component {component!r}, which is not the name of a folder in it")
        if self.revision is None:
            folder = self.root / component
        else:
            folder = resolve(self.name, components=(component,), revision=self.revision) / component
        if not folder.is_dir():
            raise WanjaxError(f"{self.root} has no folder {component}: a checkpoint in the diffusers layout is needed")
        return folder


class WanjaxSource(DiffusersSource):
    """A folder that `wanjax convert` wrote: as diffusers lays it out, but for the weights, an Orbax checkpoint each.

    `weights` has our own names and layouts.
    """

    def __init__(self, folder: str | Path):
        super().__init__(folder)
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

    def weights(self, component: str) -> Arrays:
        return Arrays(self.folder(component) / WEIGHTS)

    def original(self, component: str, rules: Iterable[Rule]) -> Reader:
        """All that the source had, by the names that it had there."""
        names, unused = self.manifest.get("names", {}).get(component, {}), self.folder(component) / UNUSED
        used = Renamed(self.tensors(component, rules), lambda key: names.get(key, key))
        return Together(used, SafetensorsFile(unused)) if unused.exists() else used

    def tensors(self, component: str, rules: Iterable[Rule]) -> Reader:
        arrays = self.weights(component)
        return engine.Exported({name: arrays[name] for name in arrays.keys()}, rules)  # noqa: SIM118

    def load(
        self,
        component: str,
        abstract: Module,
        rules: Iterable[Rule],
        *,
        ignore: Iterable[str] = (),
        progress: Progress | None = None,
    ) -> Module:
        return engine.restore(abstract, self.weights(component), progress=progress)


def open_source(name: str | Path, revision: str | None = None) -> Source:
    """The checkpoint of this name: a folder, a file, or a Hugging Face repository or OWNER/NAME/FILE, at a revision.

    Raises WanjaxError where there is none, or it is in no layout that is known.
    """
    from wanjax.layouts import FileSource, OriginalSource  # here: they are sources too, made of what stands above

    path = Path(name).expanduser()
    if revision is not None and path.exists():
        raise WanjaxError(f"{path} is not on the hub: it has no revision {revision}")
    if path.is_file():
        return FileSource(path)
    if path.suffix in SUFFIXES and HUB_FILE.fullmatch(str(name)):
        return FileSource(locate_file(name, revision=revision))
    if (path / MANIFEST).is_file():
        return WanjaxSource(name)
    if OriginalSource.is_at(locate(name, revision=revision)):
        return OriginalSource(name, revision)
    return DiffusersSource(name, revision)


def read_json(path: Path, missing: dict | None = None) -> dict[str, Any]:
    """The JSON object in a file; `missing` where there is no such file and that is allowed."""
    if missing is not None and not path.exists():
        return missing
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WanjaxError(
            f"{path} cannot be read ({error}): a complete checkpoint in the diffusers layout is needed"
        ) from error
    if not isinstance(value, dict):
        raise WanjaxError(f"{path} is not a JSON object: a complete checkpoint in the diffusers layout is needed")
    return value


def _is_of_texts(table: object) -> bool:
    return isinstance(table, dict) and all(isinstance(text, str) for text in table.values())


def _is_small(path: Path) -> bool:
    """Whether a component's file is something other than weights, or their index."""
    weights = {".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".msgpack", ".h5", ".onnx"}
    return path.is_file() and path.suffix not in weights and not path.name.endswith(".index.json")
