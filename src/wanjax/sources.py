# SPDX-License-Identifier: Apache-2.0
"""A checkpoint, wherever it is and however it is laid out, as the components that a pipeline is made of.

Whoever loads or converts a checkpoint sees a `Source`: the configs and the weights of each component under the names
that diffusers gives them. A layout is a class with these methods and a place in `open_source`, which tells one layout
from another.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from wanjax.checkpoint import SafetensorsFolder
from wanjax.converters.engine import Reader
from wanjax.errors import WanjaxError
from wanjax.hub import INDEX, resolve


class Source(Protocol):
    """What is known of a checkpoint before its weights are read, and the way to them; raises WanjaxError throughout."""

    name: str
    """The hub id or the folder, as the user gave it."""
    root: Path
    """The folder of what lies beside the components."""
    revision: str | None
    """The commit of the hub's repository; None for a folder."""
    index: dict[str, Any]
    """`model_index.json`: the pipeline's class, and each component's library and class."""

    def config(self, component: str) -> dict[str, Any]:
        """The component's config.json, or its scheduler_config.json."""
        ...

    def weights(self, component: str) -> Reader:
        """The component's tensors by the names that diffusers, or transformers, gives them."""
        ...

    def files(self, component: str) -> Sequence[Path]:
        """The component's files that are not weights; all lie in one folder."""
        ...


class DiffusersSource:
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

    def weights(self, component: str) -> Reader:
        return SafetensorsFolder(self.folder(component))

    def files(self, component: str) -> Sequence[Path]:
        return [path for path in sorted(self.folder(component).iterdir()) if _is_small(path)]

    def folder(self, component: str) -> Path:
        """The component's folder, downloaded if it has to be."""
        if self.revision is None:
            folder = self.root / component
        else:
            folder = resolve(self.name, components=(component,), revision=self.revision) / component
        if not folder.is_dir():
            raise WanjaxError(f"{self.root} has no folder {component}: a checkpoint in the diffusers layout is needed")
        return folder


def open_source(name: str | Path, revision: str | None = None) -> Source:
    """The checkpoint of this name: a folder's, or a Hugging Face repository's at a revision.

    Raises WanjaxError where there is none, or it is in no layout that is known.
    """
    return DiffusersSource(name, revision)


def read_json(path: Path, missing: dict | None = None) -> dict[str, Any]:
    """The JSON object in a file; `missing` where there is no such file and that is allowed."""
    if missing is not None and not path.exists():
        return missing
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WanjaxError(
            f"{path} cannot be read ({error}): a complete checkpoint in the diffusers layout is needed"
        ) from error
    if not isinstance(value, dict):
        raise WanjaxError(f"{path} is not a JSON object: a complete checkpoint in the diffusers layout is needed")
    return value


def _is_small(path: Path) -> bool:
    """Whether a component's file is something other than weights, or their index."""
    weights = {".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".msgpack", ".h5", ".onnx"}
    return path.is_file() and path.suffix not in weights and not path.name.endswith(".index.json")
