# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from `wanjax convert`: the layout of diffusers, but with weights as Orbax checkpoints.

`wanjax.json` has a checkpoint's origin and contents. From a store, only the parts that are read are downloaded.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax

from wanjax.checkpoints.arrays import Arrays
from wanjax.checkpoints.files import HEADER_LIMIT, Reader, SafetensorsFile, adding
from wanjax.checkpoints.hub import COMPONENT_FILES, HubFile
from wanjax.checkpoints.readers import Combined, Renamed
from wanjax.checkpoints.sources import (
    Source,
    Storage,
    check_small,
    classes_in,
    in_folder,
    read_index,
    read_json,
)
from wanjax.errors import WanjaxError
from wanjax.figures import in_bytes
from wanjax.stores.paths import Missing, RemotePath
from wanjax.stores.user_folders import user_cache
from wanjax.stores.writing import check_folder, writing

MANIFEST = "wanjax.json"
FORMAT = 1
WEIGHTS = "weights"  # in a component's folder
SHARE = 16  # digits of a SHA-256
KNOWN_AS = "known_as"  # in a request of a manifest: a name that tells more of the weights
UNUSED = "unused.safetensors"  # tensors of the original checkpoint that the network does not use


def open_converted(name: str | Path, folder: Path) -> Source:
    """Open a folder that `wanjax convert` wrote."""
    return _opened(Storage(str(name), folder), _read_manifest(folder))


def open_stored(remote: RemotePath, revision: str | None = None) -> Source:
    """Open a checkpoint that `wanjax convert` wrote to a store. A file is downloaded when it is first needed.

    What is downloaded stays in the user's cache, in a folder of its own for each manifest, so that another checkpoint
    of the same name is not mixed with it. A process downloads the chunks of arrays that its devices hold, no others.
    """
    try:
        manifest = (remote / MANIFEST).read(HEADER_LIMIT)
    except Missing as error:
        message = f"{remote} is no whole checkpoint that `wanjax convert` wrote, and no other is read from a store"
        raise WanjaxError(f"{message} ({error})") from error
    digest = hashlib.sha256(manifest).hexdigest()
    if revision not in (None, digest[:SHARE]):
        raise WanjaxError(f"{remote} has the revision {digest[:SHARE]}, and is not the {revision} that it was")
    root = user_cache() / "checkpoints" / hashlib.sha256(f"{remote} {digest}".encode()).hexdigest()[:SHARE]
    check_folder(root)
    with writing(root / MANIFEST) as partial_path:
        partial_path.write_bytes(manifest)
    manifest = _read_manifest(root)
    storage = _Stored(str(remote), root, digest[:SHARE], remote=remote, sizes=remote.files(), digests=manifest["files"])
    above = {name for name in storage.sizes if "/" not in name}
    storage.bring(root / name for name in above - {MANIFEST})
    source = _opened(storage, manifest)
    storage.check(above)
    return source


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Read `wanjax.json`; raise WanjaxError unless `wanjax convert` wrote it."""
    manifest = read_json(folder / MANIFEST)
    if (version := manifest.get("format")) != FORMAT:
        raise WanjaxError(f"{folder / MANIFEST} has the format {version!r} where this wanjax reads {FORMAT}")
    networks, names = manifest.get("networks"), manifest.get("names", {})
    tables = [manifest.get("files")]
    for parts in (networks, names):
        tables += parts.values() if isinstance(parts, dict) else [None]
    if not all(map(_is_of_texts, tables)) or not isinstance(manifest.get("request"), dict):
        raise WanjaxError(f"{folder / MANIFEST} is not what `wanjax convert` wrote: convert it again")
    return manifest


def _is_of_texts(table: object) -> bool:
    return isinstance(table, dict) and all(isinstance(text, str) for text in table.values())


def _opened(storage: Storage, manifest: Mapping[str, Any]) -> Source:
    index, request = read_index(storage.name, storage.root), manifest["request"]
    origin = str(request.get("source", storage.name))

    def arrays(component: str) -> Arrays:
        return Arrays(storage.folder(component) / WEIGHTS, storage.bring)

    def original(component: str, tensors: Reader) -> Reader:
        names, unused = manifest.get("names", {}).get(component, {}), storage.folder(component) / UNUSED
        storage.bring([unused])
        used = Renamed(tensors, lambda key: names.get(key, key))
        return Combined(used, SafetensorsFile(unused)) if unused.exists() else used

    def check(networks: Iterable[str], others: Iterable[str]) -> None:
        there = {path.parent.name for path in storage.root.glob(f"*/{WEIGHTS}")}
        for component in sorted(there | manifest["networks"].keys()):
            arrays(component).check_sizes(storage.size_of)
        for component in others:
            check_small(storage.folder(component))

    components = {
        name: replace(in_folder(storage, name, kind), weights=partial(arrays, name), original=partial(original, name))
        for name, kind in classes_in(index).items()
    }
    known_as = str(request.get(KNOWN_AS) or storage.known_as)
    return Source(storage, index, components, check, origin, known_as, fallback_repo=origin, manifest=manifest)


@dataclass(frozen=True, kw_only=True)
class _Stored(Storage):
    """The files of a checkpoint in a store.

    Attributes:
        root: A folder with those that have been downloaded.
        remote: The checkpoint's folder in the store.
        sizes: The bytes of its files by their names in it.
        digests: Those of the files that are not weights, as `wanjax.json` tells them.
    """

    remote: RemotePath
    sizes: Mapping[str, int]
    digests: Mapping[str, str]

    @cached_property
    def hub_files(self) -> Sequence[HubFile]:
        return []  # of the hub

    def folder(self, component: str, files: Sequence[str] = COMPONENT_FILES) -> Path:
        names = {name for name in self.sizes if name.startswith(f"{component}/")}
        small = {name for name in names if not name.startswith(f"{component}/{WEIGHTS}/")} - {f"{component}/{UNUSED}"}
        self.bring(self.root / name for name in small)
        self.check(small)
        if names:
            (self.root / component).mkdir(exist_ok=True)
        return super().folder(component, ())

    def bring(self, files: Iterable[Path]) -> None:
        names = (file.relative_to(self.root).as_posix() for file in files)
        if missing := [name for name in names if name in self.sizes and not (self.root / name).exists()]:
            self.remote.download_all(missing, self.root)

    def check(self, names: Iterable[str]) -> None:
        """Raise WanjaxError unless the files have the digests of the manifest."""
        for name in sorted(self.digests.keys() & names):
            if hashlib.sha256((self.root / name).read_bytes()).hexdigest()[:SHARE] != self.digests[name]:
                (self.root / name).unlink()
                raise WanjaxError(f"{self.remote / name} is not what was written: convert it again")

    def is_at_hand(self, file: str) -> bool:
        return file in self.sizes

    def size_of(self, path: Path) -> int | None:
        return self.sizes.get(path.relative_to(self.root).as_posix())

    def check_room(self) -> int:
        """Raise WanjaxError where the disk has no room for the rest; none of it is awaited before it can be checked.

        A process of several downloads a part that is not known yet.
        """
        missing = sum(size for name, size in self.sizes.items() if not (self.root / name).exists())
        if jax.process_count() == 1 and missing > (free := shutil.disk_usage(self.root).free):
            message = f"{self.name} needs {in_bytes(missing)} more where {self.root} has {in_bytes(free)} free"
            raise WanjaxError(f"{message}: make room, or set XDG_CACHE_HOME to a folder on a larger disk")
        return 0

    def gather(self, progress: Callable[[str, int, int], object], *, anew: bool = False) -> None:
        names = [name for name in self.sizes if anew or not (self.root / name).exists()]
        count = adding(partial(progress, "downloading"), sum(self.sizes[name] for name in names))
        self.remote.download_all(names, self.root, lambda done: count(sum(self.sizes[name] for name in done)))
