# SPDX-License-Identifier: Apache-2.0
"""Open checkpoints that `wanjax convert` wrote: diffusers' layout, but with weights as Orbax checkpoints.

`wanjax.json` has a checkpoint's origin and contents. If the checkpoint is in a store, only the needed parts are
downloaded.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax

from wanjax.checkpoints.arrays import RECONVERT_ADVICE, OrbaxCheckpoint
from wanjax.checkpoints.files import HEADER_LIMIT, SafetensorsFile, TensorReader, progress_counter
from wanjax.checkpoints.hub import COMPONENT_FILES, HubFile
from wanjax.checkpoints.readers import CombinedReader, RenamedReader
from wanjax.checkpoints.sources import (
    MANIFEST,
    Source,
    Storage,
    check_small_files,
    classes_in,
    in_folder,
    read_index,
    read_json,
)
from wanjax.errors import WanjaxError
from wanjax.figures import format_bytes
from wanjax.layers.precision import UNQUANTIZED, Precision
from wanjax.stores.paths import MissingObjectError, RemotePath
from wanjax.stores.user_folders import user_cache
from wanjax.stores.writing import atomic_write, check_folder

FORMAT_VERSION = 1
WEIGHTS_FOLDER = "weights"  # the folder of the Orbax checkpoint, in a component's folder
DIGEST_LENGTH = 16  # the number of hexadecimal digits of a shortened SHA-256
# the entry of the manifest's request with a name that identifies the weights better than their origin
NAME_HINT_ENTRY = "known_as"
PRECISION_ENTRY = "precision"  # the entry of the manifest's request with the precision; missing for weights in floats
UNUSED_FILE = "unused.safetensors"  # tensors of the original checkpoint that the network does not use


def open_converted(name: str | Path, folder: Path) -> Source:
    """Open a folder that `wanjax convert` wrote."""
    return _make_source(Storage(str(name), folder), _read_manifest(folder))


def open_stored(remote: RemotePath, revision: str | None = None) -> Source:
    """Open a checkpoint that `wanjax convert` wrote to a store; download each file when it is first needed.

    Downloaded files stay in the user's cache, in a folder for each manifest, so that checkpoints of the same name are
    not mixed. A process downloads only the chunks of arrays that its devices hold.
    """
    try:
        manifest = (remote / MANIFEST).read_object(HEADER_LIMIT)
    except MissingObjectError as error:
        message = f"{remote} is not a complete checkpoint of `wanjax convert` ({error})"
        raise WanjaxError(f"{message}: convert the checkpoint to this store first") from error
    digest = hashlib.sha256(manifest).hexdigest()
    if revision not in (None, digest[:DIGEST_LENGTH]):
        raise WanjaxError(
            f"{remote} has the revision {digest[:DIGEST_LENGTH]}, not {revision}: give that revision, or leave it out"
        )
    root = user_cache() / "checkpoints" / hashlib.sha256(f"{remote} {digest}".encode()).hexdigest()[:DIGEST_LENGTH]
    check_folder(root)
    with atomic_write(root / MANIFEST) as partial_path:
        partial_path.write_bytes(manifest)
    manifest = _read_manifest(root)
    storage = _RemoteStorage(
        str(remote), root, digest[:DIGEST_LENGTH], remote=remote, sizes=remote.files(), digests=manifest["files"]
    )
    top_level = {name for name in storage.sizes if "/" not in name}
    storage.fetch_files(root / name for name in top_level - {MANIFEST})
    source = _make_source(storage, manifest)
    storage.check(top_level)
    return source


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Read `wanjax.json`; raise WanjaxError unless `wanjax convert` wrote it."""
    manifest = read_json(folder / MANIFEST)
    if (version := manifest.get("format")) != FORMAT_VERSION:
        raise WanjaxError(
            f"{folder / MANIFEST} has the format {version!r}, but this wanjax reads {FORMAT_VERSION}: "
            f"{RECONVERT_ADVICE}"
        )
    networks, names = manifest.get("networks"), manifest.get("names", {})
    tables = [manifest.get("files")]
    for parts in (networks, names):
        tables += parts.values() if isinstance(parts, dict) else [None]
    if not all(map(_is_string_table, tables)) or not isinstance(manifest.get("request"), dict):
        raise WanjaxError(f"{folder / MANIFEST} was changed after `wanjax convert` wrote it: {RECONVERT_ADVICE}")
    return manifest


def _is_string_table(table: object) -> bool:
    return isinstance(table, dict) and all(isinstance(text, str) for text in table.values())


def _make_source(storage: Storage, manifest: Mapping[str, Any]) -> Source:
    index, request = read_index(storage.name, storage.root), manifest["request"]
    published_name = str(request.get("source", storage.name))

    def arrays(component: str) -> OrbaxCheckpoint:
        return OrbaxCheckpoint(storage.folder(component) / WEIGHTS_FOLDER, storage.fetch_files)

    def original(component: str, tensors: TensorReader) -> TensorReader:
        names, unused = manifest.get("names", {}).get(component, {}), storage.folder(component) / UNUSED_FILE
        storage.fetch_files([unused])
        renamed_tensors = RenamedReader(tensors, lambda key: names.get(key, key))
        return CombinedReader(renamed_tensors, SafetensorsFile(unused)) if unused.exists() else renamed_tensors

    def check(networks: Iterable[str], other_components: Iterable[str]) -> None:
        present = {path.parent.name for path in storage.root.glob(f"*/{WEIGHTS_FOLDER}")}
        for component in sorted(present | manifest["networks"].keys()):
            arrays(component).check_sizes(storage.size_of)
        for component in other_components:
            check_small_files(storage.folder(component))

    precision = Precision.of(request.get(PRECISION_ENTRY, UNQUANTIZED.name))
    components = {
        name: replace(
            in_folder(storage, name, kind),
            weights=partial(arrays, name),
            original=partial(original, name),
            precision=precision,
        )
        for name, kind in classes_in(index).items()
    }
    name_hint = str(request.get(NAME_HINT_ENTRY) or storage.name_hint)
    return Source(
        storage,
        index,
        components,
        check,
        published_name,
        name_hint,
        fallback_repo=published_name,
        manifest=manifest,
        precision=precision.name,
    )


@dataclass(frozen=True, kw_only=True)
class _RemoteStorage(Storage):
    """The files of a checkpoint in a store.

    Attributes:
        root: The folder of downloaded files.
        remote: The checkpoint's folder in the store.
        sizes: The sizes of the checkpoint's files in bytes, by their paths in this folder.
        digests: The digests of all files except weights, from `wanjax.json`.
    """

    remote: RemotePath
    sizes: Mapping[str, int]
    digests: Mapping[str, str]

    @cached_property
    def hub_files(self) -> Sequence[HubFile]:
        return []  # a converted checkpoint does not come from the hub

    def folder(self, component: str, files: Sequence[str] = COMPONENT_FILES) -> Path:
        names = {name for name in self.sizes if name.startswith(f"{component}/")}
        small_files = {name for name in names if not name.startswith(f"{component}/{WEIGHTS_FOLDER}/")} - {
            f"{component}/{UNUSED_FILE}"
        }
        self.fetch_files(self.root / name for name in small_files)
        self.check(small_files)
        if names:
            (self.root / component).mkdir(exist_ok=True)
        return super().folder(component, ())

    def fetch_files(self, files: Iterable[Path]) -> None:
        names = (file.relative_to(self.root).as_posix() for file in files)
        if missing := [name for name in names if name in self.sizes and not (self.root / name).exists()]:
            self.remote.download_all(missing, self.root)

    def check(self, names: Iterable[str]) -> None:
        """Raise WanjaxError unless the files have the digests of the manifest."""
        for name in sorted(self.digests.keys() & names):
            if hashlib.sha256((self.root / name).read_bytes()).hexdigest()[:DIGEST_LENGTH] != self.digests[name]:
                (self.root / name).unlink()
                raise WanjaxError(f"{self.remote / name} was changed after it was written: {RECONVERT_ADVICE}")

    def is_available(self, file: str) -> bool:
        return file in self.sizes

    def size_of(self, path: Path) -> int | None:
        return self.sizes.get(path.relative_to(self.root).as_posix())

    def check_room(self) -> None:
        """Raise WanjaxError if the disk has no room for the missing files.

        With several processes, check nothing: each process downloads only a part of the files.
        """
        missing = sum(size for name, size in self.sizes.items() if not (self.root / name).exists())
        if jax.process_count() == 1 and missing > (free_bytes := shutil.disk_usage(self.root).free):
            message = (
                f"{self.name} needs {format_bytes(missing)} more, and {self.root} has {format_bytes(free_bytes)} free"
            )
            raise WanjaxError(f"{message}: make room, or set XDG_CACHE_HOME to a folder on a larger disk")

    def fetch_all(self, progress: Callable[[str, int, int], object], *, force: bool = False) -> None:
        names = [name for name in self.sizes if force or not (self.root / name).exists()]
        count = progress_counter(partial(progress, "downloading"), sum(self.sizes[name] for name in names))
        self.remote.download_all(names, self.root, lambda done: count(sum(self.sizes[name] for name in done)))
