# SPDX-License-Identifier: Apache-2.0
"""Converts a checkpoint once: to one that is restored straight onto any mesh, and back to the layout of diffusers.

A wanjax checkpoint is laid out as diffusers does it, but for the weights: those of each network are an Orbax checkpoint
in its folder `weights`. `wanjax.json` beside it says where they come from and keeps the checksum of everything.
It is written tensor by tensor in a hidden folder beside the place where it shall be, verified there, and given its name
at the end; what was stopped goes on from the last chunk.
"""

import hashlib
import json
import re
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from wanjax.checkpoint import Reader, SafetensorsFile, Spec, save_index, shards, write_safetensors, writing
from wanjax.converters import engine
from wanjax.converters.stream import stored, stream
from wanjax.errors import WanjaxError
from wanjax.hub import INDEX
from wanjax.manifest import REQUEST, SHARE, Progress, beside, counting, described, digest, files_in
from wanjax.networks import NETWORKS, Network, components, network
from wanjax.sources import FORMAT, MANIFEST, UNUSED, WEIGHTS, Source, WanjaxSource, Weights, read_json
from wanjax.store import Arrays, chunk_shape, synchronise

PARTIAL = ".{}.partial"  # the folder beside the target until it is complete
NOT_NETWORKS = re.compile(r"Tokenizer|Scheduler|Processor|Extractor|Guidance")
BESIDE = ("*.json", "README.md", "LICENSE*", "NOTICE*")
LICENCE = re.compile(r"^license:\s*(\S+)", re.MULTILINE)
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Part:
    """A network on its way: the tensors that are read for it, those that are written, and those kept as they are."""

    name: str
    network: Network
    read: Mapping[str, Spec]
    written: Mapping[str, Spec]
    kept: Mapping[str, Spec] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return sum(prod(spec.shape) for spec in self.written.values())

    @property
    def bytes_read(self) -> int:
        return sum(spec.nbytes for spec in (*self.read.values(), *self.kept.values()))

    @property
    def bytes_written(self) -> int:
        return sum(spec.nbytes for spec in (*self.written.values(), *self.kept.values()))

    @property
    def dtype(self) -> str:
        """The dtype of most of what is written."""
        counts: Counter[str] = Counter()
        for spec in self.written.values():
            counts[spec.dtype.name] += spec.nbytes
        return counts.most_common(1)[0][0]


class Conversion(ABC):
    """A checkpoint that shall become another; what is read and written is known from headers alone.

    Raises WanjaxError if the source is not whole, or its weights do not fit its configs.
    """

    def __init__(self, source: Source, target: Path):
        self.source = source
        self.target = target.expanduser().absolute()
        self.partial = self.target.with_name(PARTIAL.format(self.target.name))
        self._opened: dict[str, Weights] = {}
        self.parts = [self._part(name) for name, kind in components(source.index).items() if _is_network(kind)]

    @property
    def bytes_written(self) -> int:
        return sum(part.bytes_written for part in self.parts)

    @property
    def bytes_there(self) -> int:
        """What an earlier run has written of it."""
        return sum(path.stat().st_size for path in self.partial.rglob("*") if path.is_file()) if self._goes_on() else 0

    def run(self, progress: Progress = lambda at, done, total: None) -> bool:
        """Writes the target, or what is missing of it; False if it was already there, and is what was asked for.

        `progress(at, done, total)` is told the bytes. Raises WanjaxError if something else is there, or it cannot be
        written: then nothing has its name, and what was written waits for the next run.
        """
        if self.target.exists():
            if self._is_there():
                return False
            raise WanjaxError(f"{self.target} is there already and is not what was asked for: name a new folder")
        with _writing(self.target):
            self._begin()
            self._check_download(progress)
            for part in self.parts:
                (self.partial / part.name).mkdir(exist_ok=True)
            self._write(counting(progress, "converting", self.bytes_written))
            self._copy_files()
            self._finish(counting(progress, "verifying", self.bytes_written))
            (self.partial / REQUEST).unlink()
            self.partial.rename(self.target)
        return True

    @abstractmethod
    def _part(self, name: str) -> Part:
        """What is read and written of a component."""

    @abstractmethod
    def _request(self) -> dict[str, Any]:
        """All that what is written depends on."""

    @abstractmethod
    def _is_there(self) -> bool:
        """Whether the target is what was asked for."""

    @abstractmethod
    def _write(self, progress: Callable[[int], object]) -> None:
        """Writes the weights that are missing."""

    @abstractmethod
    def _finish(self, progress: Callable[[int], object]) -> None:
        """Makes sure that all is right, and on the disk."""

    def _written(
        self, name: str, file: str, specs: Mapping[str, Spec], reader: Reader, progress: Callable[[int], object]
    ) -> None:
        """Writes tensors to a file of a component, unless it is there: then it is complete."""
        path = self.partial / name / file
        if path.exists():
            progress(sum(spec.nbytes for spec in specs.values()))
        else:
            write_safetensors(path, _Told(reader, progress), specs, {"format": "pt"})

    def _compare(
        self, name: str, file: str, specs: Mapping[str, Spec], reader: Reader, progress: Callable[[int], object]
    ) -> None:
        """Raises WanjaxError unless the file of a component holds these tensors."""
        found = SafetensorsFile(self.partial / name / file)
        for key, spec in specs.items():
            if found.spec(key) != spec or found.read(key).tobytes() != reader.read(key).tobytes():
                found.path.unlink()
                raise WanjaxError(f"{key!r} in {found.path} is not what was written: run it again")
            progress(spec.nbytes)

    def _weights(self, name: str) -> Weights:
        """A component's tensors, whose headers are read once."""
        if name not in self._opened:
            self._opened[name] = self.source.weights(name)
        return self._opened[name]

    def _fingerprint(self) -> str:
        """Changes when the files of the source do."""
        digest = hashlib.sha256()
        for part in self.parts:
            for path in self._weights(part.name).paths:
                stat = path.stat()
                digest.update(f"{part.name} {path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:SHARE]

    def _check_download(self, progress: Progress) -> None:
        """Compares files with their checksums, where the hub's cache names them so."""
        files = [path.resolve() for part in self.parts for path in self._weights(part.name).paths]
        named = [path for path in files if SHA256.fullmatch(path.name)]
        told = counting(progress, "checking", sum(path.stat().st_size for path in named))
        for path in named:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != path.name:
                    raise WanjaxError(f"{path} is damaged: delete it, and it is downloaded again")
            told(path.stat().st_size)

    def _goes_on(self) -> bool:
        try:
            return json.loads((self.partial / REQUEST).read_bytes()) == self._request()
        except (OSError, ValueError):
            return False

    def _begin(self) -> None:
        """Makes the folder, empty unless the same was begun in it, and sees that there is room."""
        if not self._goes_on():
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
            _save_json(self.partial / REQUEST, self._request())
        missing = self.bytes_written - self.bytes_there
        if (free := shutil.disk_usage(self.partial).free) < missing:
            raise OSError(f"{free / 1e9:.2f} GB are free where {missing / 1e9:.2f} GB are needed")

    def _copy_files(self) -> None:
        """What lies beside the weights, as it is; what the source has in another form, as diffusers has it."""
        for pattern in BESIDE:
            for path in self.source.root.glob(pattern):
                if path.name not in (MANIFEST, INDEX) and path.is_file():
                    shutil.copyfile(path, self.partial / path.name)
        _save_json(self.partial / INDEX, self.source.index)
        for name, kind in components(self.source.index).items():
            (self.partial / name).mkdir(exist_ok=True)
            for path in self.source.files(name):
                shutil.copyfile(path, self.partial / name / path.name)
            config = "scheduler_config.json" if "Scheduler" in kind else "config.json" if _is_network(kind) else None
            if config and not (self.partial / name / config).exists():
                _save_json(self.partial / name / config, self.source.config(name))


class ToWanjax(Conversion):
    """Any layout to a wanjax checkpoint.

    dtypes: what components are stored in; others as they are. origin: the name under which they were published.
    """

    def __init__(
        self,
        source: Source,
        target: Path,
        *,
        dtypes: Mapping[str, str] | None = None,
        origin: str | None = None,
        licence: str | None = None,
    ):
        if isinstance(source, WanjaxSource):
            raise WanjaxError(f"{source.name} is a wanjax checkpoint already: `--to diffusers` writes it back")
        self.dtypes, self.origin, self.licence = dtypes or {}, origin or source.origin, licence
        if unknown := self.dtypes.keys() - components(source.index).keys():
            listed = ", ".join(components(source.index))
            raise WanjaxError(f"{source.name} has no {sorted(unknown)[0]} to store in another dtype, but {listed}")
        self._plans: dict[str, engine.Plan] = {}
        super().__init__(source, target)

    def _part(self, name: str) -> Part:
        found, weights, dtype = network(self.source, name), self._weights(name), self.dtypes.get(name)
        specs = {key: weights.spec(key) for key in weights.keys()}  # noqa: SIM118
        made_with = jnp.dtype(dtype or "float32")
        targets = engine.parameters(found.abstract(dtype=made_with, param_dtype=made_with))
        self._plans[name] = plan = engine.plan(found.rules, specs, targets, ignore=found.unused)
        read = {key: specs[key] for fill in plan for key in fill.sources}
        kept = {key: spec for key, spec in specs.items() if any(fnmatchcase(key, x) for x in found.unused)}
        return Part(name, found, read, stored(plan, specs, targets, dtype), kept)

    def _request(self) -> dict[str, Any]:
        return {
            "source": self.origin,
            "revision": self.source.revision,
            "dtypes": dict(self.dtypes),
            "fingerprint": self._fingerprint(),
        }

    def _is_there(self) -> bool:
        file = self.target / MANIFEST
        return file.is_file() and read_json(file).get("request") == self._request()

    def _write(self, progress: Callable[[int], object]) -> None:
        for part in self.parts:
            plan = self._plans[part.name]
            stacks = {fill.target for fill in plan if fill.stacked}
            chunks = {name: chunk_shape(spec, name in stacks) for name, spec in part.written.items()}
            arrays = Arrays.create(self.partial / part.name / WEIGHTS, part.written, chunks)
            stream(plan, self._weights(part.name), arrays, progress)
            if part.kept:
                self._written(part.name, UNUSED, part.kept, self._weights(part.name), progress)

    def _finish(self, progress: Callable[[int], object]) -> None:
        found = {}
        for part in self.parts:
            arrays = Arrays(self.partial / part.name / WEIGHTS)
            assert {name: arrays.spec(name) for name in arrays.keys()} == part.written  # noqa: SIM118
            for stray in set(files_in(arrays.path)) - arrays.files():  # of a chunk that was being written
                stray.unlink()
            synchronise(arrays.files())
            found[part.name] = self._verified(arrays, progress)
            if part.kept:
                self._compare(part.name, UNUSED, part.kept, self._weights(part.name), progress)
        manifest = {
            "format": FORMAT,
            "licence": self._licence(),
            "request": self._request(),
            "networks": found,
            "names": {name: aliases for name, plan in self._plans.items() if (aliases := _aliases(plan))},
            "files": {str(path.relative_to(self.partial)): digest(path) for path in beside(self.partial)},
        }
        _save_json(self.partial / MANIFEST, manifest)

    def _verified(self, arrays: Arrays, progress: Callable[[int], object]) -> dict[str, str]:
        """What is written in the manifest; what is damaged is removed, so that the next run writes it again."""
        try:
            return described(arrays, progress)
        except WanjaxError:
            shutil.rmtree(arrays.path)
            raise

    def _licence(self) -> str | None:
        """The licence of the weights, as far as it is known."""
        readme = self.source.root / "README.md"
        found = LICENCE.search(readme.read_text(encoding="utf-8", errors="replace")) if readme.is_file() else None
        return found[1] if found else self.licence


class ToDiffusers(Conversion):
    """A wanjax checkpoint back to the layout of diffusers, each tensor in the dtype in which it is stored."""

    def __init__(self, source: Source, target: Path):
        if not isinstance(source, WanjaxSource):
            raise WanjaxError(f"{source.name} is no wanjax checkpoint: only what `convert` wrote can be written back")
        self._stored = source
        self._readers: dict[str, Reader] = {}
        super().__init__(source, target)

    def _part(self, name: str) -> Part:
        found, arrays = network(self.source, name), self._weights(name)
        self._readers[name] = exported = self._stored.original(name, found.rules)
        read = {key: arrays.spec(key) for key in arrays.keys()}  # noqa: SIM118
        return Part(name, found, read, {key: exported.spec(key) for key in exported.keys()})  # noqa: SIM118

    def _request(self) -> dict[str, Any]:
        return {"to": "diffusers", "fingerprint": self._fingerprint()}

    def _is_there(self) -> bool:
        return False

    def _shards(self, part: Part) -> tuple[str, dict[str, dict[str, Spec]]]:
        """The name that the component's files begin with, and what each holds."""
        library = self.source.index[part.name][0]
        stem = "model" if library == "transformers" else "diffusion_pytorch_model"
        files = shards(self._readers[part.name], stem)
        return stem, {name: {key: part.written[key] for key in keys} for name, keys in files.items()}

    def _write(self, progress: Callable[[int], object]) -> None:
        for part in self.parts:
            reader, (stem, files) = self._readers[part.name], self._shards(part)
            for name, specs in files.items():
                self._written(part.name, name, specs, reader, progress)
            if len(files) > 1:
                save_index(self.partial / part.name, stem, files, part.bytes_written)

    def _finish(self, progress: Callable[[int], object]) -> None:
        """Compares what was written with what it was written from."""
        for part in self.parts:
            reader, (_, files) = self._readers[part.name], self._shards(part)
            for name, specs in files.items():
                self._compare(part.name, name, specs, reader, progress)


class _Told:
    """A reader that tells of what is read."""

    def __init__(self, reader: Reader, progress: Callable[[int], object]):
        self.keys, self.spec, self._read, self._progress = reader.keys, reader.spec, reader.read, progress

    def read(self, key: str):
        self._progress(self.spec(key).nbytes)
        return self._read(key)


def _aliases(plan: engine.Plan) -> dict[str, str]:
    """The names of tensors in the source, where a rule calls them by others."""
    pairs = ((ours, theirs) for fill in plan for ours, theirs in zip(fill.names, fill.sources, strict=True))
    return {ours: theirs for ours, theirs in pairs if ours != theirs}


def _is_network(kind: str) -> bool:
    return kind in NETWORKS or not NOT_NETWORKS.search(kind)


def _save_json(path: Path, value: Any) -> None:
    with writing(path) as beside:
        beside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        begun = target.with_name(PARTIAL.format(target.name)).exists()
        then = "what is complete is kept for the next run" if begun else "name a folder that can"
        raise WanjaxError(f"{target} cannot be written, {why}: {then}") from error
