# SPDX-License-Identifier: Apache-2.0
"""Conversion of a checkpoint to one that loads directly onto any mesh, and back to the layout of diffusers.

A wanjax checkpoint has the layout of diffusers, except that the weights of each network are an Orbax checkpoint in its
folder `weights`. `wanjax.json` beside them records their origin and a digest of everything. The conversion writes
tensor by tensor to a hidden folder beside the target, verifies it there, and renames it at the end. A conversion that
was stopped resumes from the last chunk.
"""

import errno
import hashlib
import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from wanjax.checkpoints import modules
from wanjax.checkpoints.arrays import Arrays, chunk_shape, synchronise
from wanjax.checkpoints.converted import FORMAT, KNOWN_AS, MANIFEST, SHARE, UNUSED, WEIGHTS
from wanjax.checkpoints.files import (
    Reader,
    SafetensorsFile,
    Spec,
    content_digest,
    main_dtype,
    save_index,
    shards,
    write_safetensors,
)
from wanjax.checkpoints.hub import INDEX, cached_checksum, is_damaged
from wanjax.checkpoints.manifest import (
    OWN,
    REQUEST,
    Progress,
    array_digests,
    counting,
    digest,
    files_beside,
    files_in,
    own_digest,
)
from wanjax.checkpoints.network_kinds import Kinds, Network, network
from wanjax.checkpoints.readers import View
from wanjax.checkpoints.sources import Source, Weights, read_json
from wanjax.checkpoints.stream import stored, stream
from wanjax.converters import weight_rules
from wanjax.errors import WanjaxError
from wanjax.figures import in_bytes
from wanjax.stores.paths import AnyPath, RemotePath, local_copy, parse_path
from wanjax.stores.user_folders import user_cache
from wanjax.stores.writing import writing

NOT_NETWORKS = re.compile(r"Tokenizer|Scheduler|Processor|Extractor|Guidance")
CONFIG_FILES = {"Scheduler": "scheduler_config.json", "Guidance": "guider_config.json"}  # by words of class names
BESIDE = ("*.json", "README.md", "LICENSE*", "NOTICE*")
LICENCE = re.compile(r"^license:\s*(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class ConvertedNetwork:
    """A network to convert: the tensors to read, the tensors to write, and the unused tensors to keep unchanged."""

    name: str
    read: Mapping[str, Spec]
    written: Mapping[str, Spec]
    unused: Mapping[str, Spec] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return sum(prod(spec.shape) for spec in self.written.values())

    @property
    def bytes_read(self) -> int:
        return sum(spec.nbytes for spec in (*self.read.values(), *self.unused.values()))

    @property
    def bytes_written(self) -> int:
        return sum(spec.nbytes for spec in (*self.written.values(), *self.unused.values()))

    @property
    def dtype(self) -> str | None:
        """The dtype of most of the written bytes; None where nothing is written."""
        return main_dtype(self.written.values())


class Conversion(ABC):
    """A conversion of one checkpoint to another, planned from the files' headers alone.

    `kinds` are the kinds of networks that can be converted. Raises WanjaxError if the source is incomplete, or its
    weights do not fit its configs.
    """

    def __init__(self, source: Source, target: str | AnyPath, kinds: Kinds):
        self.source = source
        self.kinds = kinds
        self.target = parse_path(target).absolute()
        self.partial = _partial(self.target)
        self._opened: dict[str, Weights] = {}
        self._readers: dict[str, Reader] = {}
        self.networks = [
            self._plan_network(name) for name, each in source.components.items() if self._is_network(each.kind)
        ]

    @property
    def bytes_written(self) -> int:
        return sum(entry.bytes_written for entry in self.networks)

    @property
    def bytes_there(self) -> int:
        """The bytes that an earlier run of the same conversion has written."""
        return sum(path.stat().st_size for path in self.partial.rglob("*") if path.is_file()) if self._resumes() else 0

    def run(
        self, progress: Progress = lambda at, done, total: None, begun: Callable[[], object] = lambda: None
    ) -> bool:
        """Write the target, or the missing part of it; return False if the same target is already complete.

        `progress(at, done, total)` receives the bytes. `begun()` is called once there is a part from which another run
        goes on. Raises WanjaxError if the target is something else, or cannot be
        written. The target then does not exist, or is not whole in a store, and the next run resumes from the written
        part.
        """
        self.source.storage.gather(progress)
        if self.target.exists():
            if self._is_complete():
                return False
            if isinstance(self.target, Path) or not self._has_same_request(self.target / REQUEST):
                raise WanjaxError(f"{self.target} is there already and is not what was asked for: name a new folder")
        if isinstance(self.target, RemotePath):
            self.target.check_writable()
        with _writing(self.target, self.partial):
            self._begin()
            begun()
            self._check_download(progress)
            for entry in self.networks:
                (self.partial / entry.name).mkdir(exist_ok=True)
            self._write(counting(progress, "converting", self.bytes_written))
            self._copy_files()
            self._finish(counting(progress, "verifying", self.bytes_written))
            if isinstance(self.target, RemotePath):
                self._publish(self.target, progress)
            else:
                (self.partial / REQUEST).unlink()
                self.partial.rename(self.target)
        return True

    def _publish(self, target: RemotePath, progress: Progress) -> None:
        """Upload the complete folder to a store; the file that marks it as complete goes last.

        The store has the request meanwhile, so that another run of the same conversion skips uploaded weights.
        """
        files = {path.relative_to(self.partial).as_posix(): path for path in files_in(self.partial)}
        sizes, there = {name: path.stat().st_size for name, path in files.items()}, target.files()
        last = MANIFEST if MANIFEST in files else INDEX
        report = counting(progress, "uploading", sum(sizes.values()))
        target.upload_all({REQUEST: files.pop(REQUEST)})
        whole = {name: files.pop(name) for name in (last,)}
        uploaded_before = {name for name in files if WEIGHTS in Path(name).parts and there.get(name) == sizes[name]}
        report(sum(sizes[name] for name in (REQUEST, *uploaded_before)))
        target.upload_all(
            {name: path for name, path in files.items() if name not in uploaded_before},
            lambda names: report(sum(sizes[name] for name in names)),
        )
        uploaded = target.files()
        if unlike := [name for name in files if uploaded.get(name) != sizes[name]]:
            raise WanjaxError(f"{target / unlike[0]} is not what was written: run it again")
        target.upload_all(whole, lambda names: report(sizes[last]))
        (target / REQUEST).remove()
        shutil.rmtree(self.partial)

    def _is_network(self, name: str) -> bool:
        """Return whether a class in model_index.json is that of a network."""
        return any(name in kind.classes for kind in self.kinds) or not NOT_NETWORKS.search(name)

    @abstractmethod
    def _plan_network(self, name: str) -> ConvertedNetwork:
        """Return the tensors to read and to write for a component."""

    @abstractmethod
    def _request(self) -> dict[str, Any]:
        """Return everything on which the target's contents depend."""

    @abstractmethod
    def _is_complete(self) -> bool:
        """Return whether the target is the result of the same request."""

    @abstractmethod
    def _write(self, progress: Callable[[int], object]) -> None:
        """Write the missing weights."""

    @abstractmethod
    def _finish(self, progress: Callable[[int], object]) -> None:
        """Verify the written files, and flush them to the disk."""

    def _written(
        self, name: str, file: str, specs: Mapping[str, Spec], reader: Reader, progress: Callable[[int], object]
    ) -> None:
        """Write tensors to a file of a component; a file that exists is complete."""
        path = self.partial / name / file
        if path.exists():
            progress(sum(spec.nbytes for spec in specs.values()))
        else:
            write_safetensors(path, _Counting(reader, progress), specs, {"format": "pt"})

    def _compare(
        self, name: str, file: str, specs: Mapping[str, Spec], reader: Reader, progress: Callable[[int], object]
    ) -> None:
        """Raise WanjaxError unless the file of a component holds these tensors."""
        written = SafetensorsFile(self.partial / name / file)
        for key, spec in specs.items():
            if written.specs.get(key) != spec or written.read(key).tobytes() != reader.read(key).tobytes():
                written.path.unlink()
                raise WanjaxError(f"{key!r} in {written.path} is not what was written: run it again")
            progress(spec.nbytes)

    def _weights(self, name: str) -> Weights:
        """Return a component's tensors; read their headers once."""
        if name not in self._opened:
            self._opened[name] = self.source[name].weights()
        return self._opened[name]

    def _tensors(self, entry: Network, name: str) -> tuple[Reader, Reader]:
        """Return a component's tensors with their published names: as they are stored, and with LoRAs merged in."""
        component = self.source[name]
        stored = component.original((self.source.base or self.source)[name].tensors(entry.rules))
        return stored, component.original(component.tensors(entry.rules)) if self.source.loras else stored

    def _paths(self) -> Iterator[tuple[str, Path]]:
        """Yield the files of the weights with the names of their networks, then LoRA files with the LoRAs."""
        for entry in self.networks:
            yield from ((entry.name, path) for path in self._weights(entry.name).paths)
        yield from zip(self._loras, (lora.path for lora in self.source.loras), strict=True)

    @property
    def _loras(self) -> list[str]:
        """The LoRAs' names, each with its strength and expert."""
        return [str(replace(lora, file=lora.path.name)) for lora in self.source.loras]

    def _fingerprint(self) -> str:
        """Return a digest that changes when the files of the source do, or the LoRAs."""
        digest_ = hashlib.sha256()
        for name, path in self._paths():
            digest_.update(f"{name} {path.name} {content_digest(path)}\n".encode())
        return digest_.hexdigest()[:SHARE]

    def _merged(self) -> dict[str, Any]:
        """Return the entry of a request on LoRAs; none if there are none."""
        return {"loras": self._loras} if self.source.loras else {}

    def _check_download(self, progress: Progress) -> None:
        """Compare the weights' files with their checksums, where the hub's cache knows them."""
        named = [path for _, path in self._paths() if cached_checksum(path)]
        report = counting(progress, "checking", sum(path.stat().st_size for path in named))
        for path in named:
            if is_damaged(path):
                raise WanjaxError(f"{path.resolve()} is damaged: delete it, and it is downloaded again")
            report(path.stat().st_size)

    def _resumes(self) -> bool:
        return self._has_same_request(self.partial / REQUEST)

    def _has_same_request(self, file: AnyPath) -> bool:
        """Return whether a file holds the same request."""
        try:
            with local_copy(file) as copy:
                return json.loads(copy.read_bytes()) == self._request()
        except (OSError, ValueError):
            return False

    def _begin(self) -> None:
        """Make the folder, emptied unless the same conversion began in it; raise OSError if the disk is too full."""
        missing, resumes = self.bytes_written - self.bytes_there, self._resumes()
        if not resumes:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
        try:
            if (free := shutil.disk_usage(self.partial).free) < missing:
                raise OSError(errno.ENOSPC, f"{in_bytes(free)} are free where {in_bytes(missing)} are needed")
            if not resumes:
                _save_json(self.partial / REQUEST, self._request())
        except (OSError, WanjaxError):
            if not resumes:  # nothing is there from which another run goes on
                shutil.rmtree(self.partial, ignore_errors=True)
            raise

    def _copy_files(self) -> None:
        """Copy the files beside the weights; write configs that the source lacks in the form of diffusers."""
        for pattern in BESIDE:
            for path in self.source.root.glob(pattern):
                if path.name not in (MANIFEST, INDEX) and path.is_file():
                    shutil.copyfile(path, self.partial / path.name)
        _save_json(self.partial / INDEX, self.source.index)
        for name, component in self.source.components.items():
            (self.partial / name).mkdir(exist_ok=True)
            for path in component.files():
                shutil.copyfile(path, self.partial / name / path.name)
            named = (file for word, file in CONFIG_FILES.items() if word in component.kind)
            config = next(named, "config.json" if self._is_network(component.kind) else None)
            if config and not (self.partial / name / config).exists():
                _save_json(self.partial / name / config, component.config())


class ToWanjax(Conversion):
    """A conversion from any layout to a wanjax checkpoint.

    `dtypes` are new dtypes by component; the other components keep theirs. `origin` is the name under which the weights
    were published. `known_as` is a name that tells more of them, such as that of a file that is distilled.
    """

    def __init__(
        self,
        source: Source,
        target: str | AnyPath,
        kinds: Kinds,
        *,
        dtypes: Mapping[str, str] | None = None,
        origin: str | None = None,
        licence: str | None = None,
        known_as: str = "",
    ):
        if source.manifest is not None:
            raise WanjaxError(f"{source.name} is a wanjax checkpoint already: `--to diffusers` writes it back")
        self.dtypes, self.origin, self.licence = dtypes or {}, origin or source.origin, licence
        self.known_as = known_as
        if unknown := self.dtypes.keys() - source.components.keys():
            listed = ", ".join(source.components)
            raise WanjaxError(f"{source.name} has no {sorted(unknown)[0]} to store in another dtype, but {listed}")
        self._assignments: dict[str, list[weight_rules.Assignment]] = {}
        super().__init__(source, target, kinds)

    def _plan_network(self, name: str) -> ConvertedNetwork:
        entry, dtype = network(self.source, name, self.kinds), self.dtypes.get(name)
        stored_tensors, self._readers[name] = self._tensors(entry, name)
        specs = stored_tensors.specs
        abstract_dtype = jnp.dtype(dtype or "float32")
        targets = modules.parameters(entry.abstract(dtype=abstract_dtype, param_dtype=abstract_dtype))
        self._assignments[name] = assignments = weight_rules.assign(entry.rules, specs, targets, ignore=entry.unused)
        read = {key: specs[key] for each in assignments for key in each.sources}
        unused = {key: spec for key, spec in specs.items() if any(fnmatchcase(key, x) for x in entry.unused)}
        return ConvertedNetwork(name, read, stored(assignments, specs, targets, dtype), unused)

    def _request(self) -> dict[str, Any]:
        return {
            "source": self.origin,
            "revision": self.source.revision,
            "dtypes": dict(self.dtypes),
            "fingerprint": self._fingerprint(),
            **({KNOWN_AS: self.known_as} if self.known_as else {}),
            **self._merged(),
        }

    def _is_complete(self) -> bool:
        if not (file := self.target / MANIFEST).is_file():
            return False
        with local_copy(file) as copy:
            return read_json(copy).get("request") == self._request()

    def _write(self, progress: Callable[[int], object]) -> None:
        for entry in self.networks:
            assignments = self._assignments[entry.name]
            stacks = {each.target for each in assignments if each.stacked}
            chunks = {name: chunk_shape(spec, name in stacks) for name, spec in entry.written.items()}
            arrays = Arrays.create(self.partial / entry.name / WEIGHTS, entry.written, chunks)
            stream(assignments, self._readers[entry.name], arrays, progress)
            if entry.unused:
                self._written(entry.name, UNUSED, entry.unused, self._readers[entry.name], progress)

    def _finish(self, progress: Callable[[int], object]) -> None:
        checksums = {}
        for entry in self.networks:
            arrays = Arrays(self.partial / entry.name / WEIGHTS)
            assert arrays.specs == entry.written
            for stray in set(files_in(arrays.path)) - arrays.files():  # left by a chunk that was not completed
                stray.unlink()
            synchronise(arrays.files())
            checksums[entry.name] = self._verified(arrays, progress)
            if entry.unused:
                self._compare(entry.name, UNUSED, entry.unused, self._readers[entry.name], progress)
        manifest = {
            "format": FORMAT,
            "licence": self._licence(),
            "request": self._request(),
            "networks": checksums,
            "names": {
                name: aliases for name, assignments in self._assignments.items() if (aliases := _aliases(assignments))
            },
            "files": {str(path.relative_to(self.partial)): digest(path) for path in files_beside(self.partial)},
        }
        _save_json(self.partial / MANIFEST, manifest | {OWN: own_digest(manifest)})

    def _verified(self, arrays: Arrays, progress: Callable[[int], object]) -> dict[str, str]:
        """Return a network's entry of the manifest; remove damaged weights, which the next run writes again."""
        try:
            return array_digests(arrays, progress)
        except WanjaxError:
            shutil.rmtree(arrays.path)
            raise

    def _licence(self) -> str | None:
        """Return the licence of the weights; None where it is unknown."""
        readme = self.source.root / "README.md"
        match = LICENCE.search(readme.read_text(encoding="utf-8", errors="replace")) if readme.is_file() else None
        return match[1] if match else self.licence


class ToDiffusers(Conversion):
    """A conversion from a wanjax checkpoint to the layout of diffusers. Each tensor keeps its stored dtype."""

    def __init__(self, source: Source, target: str | AnyPath, kinds: Kinds):
        if (source.base or source).manifest is None:
            why = "has that of diffusers already" if (source.root / INDEX).is_file() else "is no such checkpoint"
            way = "`convert` without it makes one of wanjax"
            raise WanjaxError(f"--to diffusers writes a checkpoint of wanjax back, and {source.name} {why}: {way}")
        super().__init__(source, target, kinds)

    def _plan_network(self, name: str) -> ConvertedNetwork:
        stored_tensors, merged = self._tensors(network(self.source, name, self.kinds), name)
        self._readers[name] = _AsStored(merged, stored_tensors)
        return ConvertedNetwork(name, self._weights(name).specs, stored_tensors.specs)

    def _request(self) -> dict[str, Any]:
        return {"to": "diffusers", "fingerprint": self._fingerprint(), **self._merged()}

    def _is_complete(self) -> bool:
        return False

    def _shards(self, entry: ConvertedNetwork) -> tuple[str, dict[str, dict[str, Spec]]]:
        """Return the stem of the component's file names, and the tensors of each file."""
        library = self.source.index[entry.name][0]
        stem = "model" if library == "transformers" else "diffusion_pytorch_model"
        files = shards(self._readers[entry.name], stem)
        return stem, {name: {key: entry.written[key] for key in keys} for name, keys in files.items()}

    def _write(self, progress: Callable[[int], object]) -> None:
        for entry in self.networks:
            reader, (stem, files) = self._readers[entry.name], self._shards(entry)
            for name, specs in files.items():
                self._written(entry.name, name, specs, reader, progress)
            if len(files) > 1:
                save_index(self.partial / entry.name, stem, files, entry.bytes_written)

    def _finish(self, progress: Callable[[int], object]) -> None:
        """Compare the written tensors with those of the source."""
        for entry in self.networks:
            reader, (_, files) = self._readers[entry.name], self._shards(entry)
            for name, specs in files.items():
                self._compare(entry.name, name, specs, reader, progress)


class _AsStored(View):
    """A reader's tensors in the dtypes of another's."""

    def __init__(self, reader: Reader, stored: Reader):
        super().__init__(reader)
        self.specs = stored.specs

    def read(self, key: str) -> np.ndarray:
        return self._reader.read(key).astype(self.specs[key].dtype, copy=False)


class _Counting(View):
    """A reader that reports the bytes that it reads."""

    def __init__(self, reader: Reader, progress: Callable[[int], object]):
        super().__init__(reader)
        self._progress = progress

    def read(self, key: str) -> np.ndarray:
        self._progress(self.specs[key].nbytes)
        return super().read(key)


def _aliases(assignments: Iterable[weight_rules.Assignment]) -> dict[str, str]:
    """Return the source's names of tensors that a rule calls by another name."""
    pairs = ((ours, theirs) for each in assignments for ours, theirs in zip(each.names, each.sources, strict=True))
    return {ours: theirs for ours, theirs in pairs if ours != theirs}


def _save_json(path: Path, value: Any) -> None:
    with writing(path) as partial_path:
        partial_path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _partial(target: AnyPath) -> Path:
    """Return the folder in which a target is made until it is complete: beside it, or in the user's cache."""
    if isinstance(target, RemotePath):
        return user_cache() / "conversions" / hashlib.sha256(str(target).encode()).hexdigest()[:SHARE]
    return target.with_name(f".{target.name}.partial")


@contextmanager
def _writing(target: AnyPath, partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        then = "what is complete is kept for the next run" if partial.exists() else "name a folder that can"
        raise WanjaxError(f"{target} cannot be written, {why}: {then}") from error
