# SPDX-License-Identifier: Apache-2.0
"""Convert a checkpoint to wanjax's format, which loads directly onto any mesh, and back to the layout of diffusers.

A wanjax checkpoint has the layout of diffusers, but the weights of each network are an Orbax checkpoint in its folder
`weights`. `wanjax.json` names the origin of the weights and has the digests of all files. A conversion writes one
tensor after another to a hidden folder beside the target, verifies this folder, and renames it at the end. A conversion
that was stopped resumes from the last chunk.
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
from wanjax.checkpoints.arrays import RECONVERT_ADVICE, OrbaxCheckpoint, chunk_shape, fsync_files
from wanjax.checkpoints.converted import (
    DIGEST_LENGTH,
    FORMAT_VERSION,
    MANIFEST,
    NAME_HINT_ENTRY,
    PRECISION_ENTRY,
    UNUSED_FILE,
    WEIGHTS_FOLDER,
    open_converted,
    open_stored,
)
from wanjax.checkpoints.files import (
    SafetensorsFile,
    Spec,
    TensorReader,
    content_digest,
    main_dtype,
    save_index,
    split_into_shards,
    write_safetensors,
)
from wanjax.checkpoints.hub import INDEX, cached_checksum, is_damaged
from wanjax.checkpoints.manifest import (
    DIGEST_ENTRY,
    REQUEST_FILE,
    Progress,
    array_digests,
    digest,
    files_beside,
    files_in,
    own_digest,
    report_stage,
)
from wanjax.checkpoints.network_kinds import Kinds, Network, network
from wanjax.checkpoints.quantize import QuantizedKernel, as_floats, quantized_kernels
from wanjax.checkpoints.readers import TensorReaderView
from wanjax.checkpoints.sources import Source, Weights
from wanjax.checkpoints.stream import stored_specs, stream
from wanjax.converters import weight_rules
from wanjax.errors import WanjaxError, is_full
from wanjax.figures import format_bytes
from wanjax.layers.precision import UNQUANTIZED, Precision
from wanjax.stores.paths import AnyPath, RemotePath, local_copy, parse_path
from wanjax.stores.user_folders import user_cache
from wanjax.stores.writing import atomic_write

NOT_NETWORKS = re.compile(r"Tokenizer|Scheduler|Processor|Extractor|Guidance")
# the file of a component's config, by a part of the class name
CONFIG_FILES = {"Scheduler": "scheduler_config.json", "Guidance": "guider_config.json"}
COPIED_FILES = ("*.json", "README.md", "LICENSE*", "NOTICE*")
LICENCE = re.compile(r"^license:\s*(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class ConvertedNetwork:
    """A network to convert.

    Args:
        name: The component.
        read: The tensors to read.
        written: The tensors to write.
        unused: The tensors that the network does not use, which are copied unchanged.
    """

    name: str
    read: Mapping[str, Spec]
    written: Mapping[str, Spec]
    unused: Mapping[str, Spec] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return sum(prod(spec.shape) for spec in self.read.values())

    @property
    def bytes_read(self) -> int:
        return sum(spec.nbytes for spec in (*self.read.values(), *self.unused.values()))

    @property
    def bytes_written(self) -> int:
        return sum(spec.nbytes for spec in (*self.written.values(), *self.unused.values()))

    @property
    def dtype(self) -> str | None:
        """The dtype of most of the written bytes; None if nothing is written."""
        return main_dtype(self.written.values())


class Conversion(ABC):
    """A conversion of a checkpoint, planned from the headers of its files.

    Args:
        source: The checkpoint.
        target: The folder to write, also in a store.
        kinds: The kinds of networks that can be converted.

    Raises:
        WanjaxError: The source is incomplete, or its weights do not fit its configs.
    """

    def __init__(self, source: Source, target: str | AnyPath, kinds: Kinds):
        self.source = source
        self.kinds = kinds
        self.target = parse_path(target).absolute()
        self.partial = _partial_folder(self.target)
        self._weights_by_name: dict[str, Weights] = {}
        self._readers: dict[str, TensorReader] = {}
        self.networks = [
            self._plan_network(name)
            for name, component in source.components.items()
            if self._is_network(component.kind)
        ]

    @property
    def bytes_written(self) -> int:
        return sum(entry.bytes_written for entry in self.networks)

    @property
    def bytes_done(self) -> int:
        """The bytes of weights that earlier runs of the same conversion wrote."""
        return sum(path.stat().st_size for path in self._written_files()) if self._resumes() else 0

    def has_saved_work(self) -> bool:
        """Whether another run would resume from weights that this run or an earlier one wrote."""
        return any(self._written_files())

    def _written_files(self) -> Iterator[Path]:
        return (path for entry in self.networks for path in (self.partial / entry.name).rglob("*") if path.is_file())

    def run(
        self, progress: Progress = lambda at, done, total: None, on_begin: Callable[[], object] = lambda: None
    ) -> bool:
        """Write the target, or the part of it that is missing. After an error, the next run resumes from the written
        part.

        Args:
            progress: Called with a stage, the bytes done and the total bytes.
            on_begin: Called when another run of the same request can resume.

        Returns:
            False if the target is already complete: all its files exist, and those of weights have the right sizes.

        Raises:
            WanjaxError: The target exists with other contents or is damaged, or cannot be written.
        """
        if self.target.exists():
            if self._is_complete():
                return False
            if isinstance(self.target, Path) or not self._has_same_request(self.target / REQUEST_FILE):
                contents = f"other contents{self._describe_difference()}"
                raise WanjaxError(f"{self.target} already exists with {contents}: name a new folder")
        if isinstance(self.target, RemotePath):
            self.target.check_writable()
        self.source.storage.fetch_all(progress)
        with _write_errors(self.target, self.partial):
            self._begin()
            on_begin()
            self._check_download(progress)
            for entry in self.networks:
                (self.partial / entry.name).mkdir(exist_ok=True)
            self._write(report_stage(progress, "converting", self.bytes_written))
            self._copy_files()
            self._finish(report_stage(progress, "verifying", self.bytes_written))
            if isinstance(self.target, RemotePath):
                self._publish(self.target, progress)
            else:
                (self.partial / REQUEST_FILE).unlink()
                self.partial.rename(self.target)
        return True

    def _publish(self, target: RemotePath, progress: Progress) -> None:
        """Upload the complete folder to a store; the file that marks it as complete is uploaded last.

        During the upload, the store has a file with the request. Another run of the same conversion then skips uploaded
        weights.
        """
        files = {path.relative_to(self.partial).as_posix(): path for path in files_in(self.partial)}
        sizes, remote_sizes = {name: path.stat().st_size for name, path in files.items()}, target.files()
        last = MANIFEST if MANIFEST in files else INDEX
        report = report_stage(progress, "uploading", sum(sizes.values()))
        target.upload_all({REQUEST_FILE: files.pop(REQUEST_FILE)})
        final_files = {name: files.pop(name) for name in (last,)}
        uploaded_before = {
            name for name in files if WEIGHTS_FOLDER in Path(name).parts and remote_sizes.get(name) == sizes[name]
        }
        report(sum(sizes[name] for name in (REQUEST_FILE, *uploaded_before)))
        target.upload_all(
            {name: path for name, path in files.items() if name not in uploaded_before},
            lambda names: report(sum(sizes[name] for name in names)),
        )
        uploaded = target.files()
        if mismatched := [name for name in files if uploaded.get(name) != sizes[name]]:
            raise WanjaxError(f"{target / mismatched[0]} was changed after it was written: run the conversion again")
        target.upload_all(final_files, lambda names: report(sizes[last]))
        (target / REQUEST_FILE).remove()
        shutil.rmtree(self.partial)

    def _is_network(self, name: str) -> bool:
        """Return whether a class name in model_index.json is the class of a network."""
        return any(name in kind.classes for kind in self.kinds) or not NOT_NETWORKS.search(name)

    @abstractmethod
    def _plan_network(self, name: str) -> ConvertedNetwork:
        """Plan which tensors of a component to read and to write."""

    @abstractmethod
    def _request(self) -> dict[str, Any]:
        """Return all options and digests that determine the target's contents."""

    @abstractmethod
    def _is_complete(self) -> bool:
        """Return whether the target is the result of the same request. Raise WanjaxError if a file of it is lost."""

    @abstractmethod
    def _write(self, progress: Callable[[int], object]) -> None:
        """Write the missing weights."""

    @abstractmethod
    def _finish(self, progress: Callable[[int], object]) -> None:
        """Verify the written files, and flush them to the disk."""

    def _write_file(
        self, name: str, file: str, specs: Mapping[str, Spec], reader: TensorReader, progress: Callable[[int], object]
    ) -> None:
        """Write tensors to a component's file, unless the file exists: an existing file is complete."""
        path = self.partial / name / file
        if path.exists():
            progress(sum(spec.nbytes for spec in specs.values()))
        else:
            write_safetensors(path, _ProgressReader(reader, progress), specs, {"format": "pt"})

    def _compare(
        self, name: str, file: str, specs: Mapping[str, Spec], reader: TensorReader, progress: Callable[[int], object]
    ) -> None:
        """Raise WanjaxError unless a component's file contains these tensors."""
        written = SafetensorsFile(self.partial / name / file)
        for key, spec in specs.items():
            if written.specs.get(key) != spec or written.read(key).tobytes() != reader.read(key).tobytes():
                written.path.unlink()
                raise WanjaxError(
                    f"{key!r} in {written.path} was changed after it was written: run the conversion again"
                )
            progress(spec.nbytes)

    def _weights(self, name: str) -> Weights:
        """Return a component's tensors; the headers of their files are read only once."""
        if name not in self._weights_by_name:
            self._weights_by_name[name] = self.source[name].weights()
        return self._weights_by_name[name]

    def _tensors(self, entry: Network, name: str) -> tuple[TensorReader, TensorReader]:
        """Return a component's tensors by published names, without and with the LoRAs merged."""
        component = self.source[name]
        stored_specs = component.original((self.source.base or self.source)[name].tensors(entry.rules))
        return stored_specs, component.original(component.tensors(entry.rules)) if self.source.loras else stored_specs

    def _paths(self) -> Iterator[tuple[str, Path]]:
        """Yield (name of the network, file) for each file of weights, then (name of the LoRA, file) for each LoRA."""
        for entry in self.networks:
            yield from ((entry.name, path) for path in self._weights(entry.name).paths)
        yield from zip(self._lora_names, (lora.path for lora in self.source.loras), strict=True)

    @property
    def _lora_names(self) -> list[str]:
        """The names of the LoRAs, with strengths and experts."""
        return [str(replace(lora, file=lora.path.name)) for lora in self.source.loras]

    def _fingerprint(self) -> str:
        """Return a digest of the files of the source and of the LoRAs."""
        fingerprint = hashlib.sha256()
        for name, path in self._paths():
            fingerprint.update(f"{name} {path.name} {content_digest(path)}\n".encode())
        return fingerprint.hexdigest()[:DIGEST_LENGTH]

    def _lora_entry(self) -> dict[str, Any]:
        """Return the request's entry for LoRAs; empty without LoRAs."""
        return {"loras": self._lora_names} if self.source.loras else {}

    def _check_download(self, progress: Progress) -> None:
        """Compare the files of weights with their checksums, if the hub's cache has checksums."""
        checksummed = [path for _, path in self._paths() if cached_checksum(path)]
        report = report_stage(progress, "checking", sum(path.stat().st_size for path in checksummed))
        for path in checksummed:
            if is_damaged(path):
                raise WanjaxError(f"{path.resolve()} is damaged: delete it, and run the command again to download it")
            report(path.stat().st_size)

    def _resumes(self) -> bool:
        return self._has_same_request(self.partial / REQUEST_FILE)

    def _has_same_request(self, file: AnyPath) -> bool:
        """Return whether a file contains the same request."""
        try:
            with local_copy(file) as copy:
                return json.loads(copy.read_bytes()) == self._request()
        except (OSError, ValueError):
            return False

    def _describe_difference(self) -> str:
        """Say in which options the request of an existing target differs; return "" if none is known."""
        return ""

    def _begin(self) -> None:
        """Create the folder, empty unless the same conversion started in it; raise OSError if the disk is full."""
        missing, resumes = self.bytes_written - self.bytes_done, self._resumes()
        if not resumes:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
        try:
            if (free_bytes := shutil.disk_usage(self.partial).free) < missing:
                raise OSError(
                    errno.ENOSPC, f"{format_bytes(missing)} are needed, and {format_bytes(free_bytes)} are free"
                )
            if not resumes:
                _save_json(self.partial / REQUEST_FILE, self._request())
        except (OSError, WanjaxError):
            if not resumes:  # this run created the folder, so the folder has no earlier work to keep
                shutil.rmtree(self.partial, ignore_errors=True)
            raise

    def _copy_files(self) -> None:
        """Copy the files other than weights, and write diffusers' configs that the source lacks."""
        for pattern in COPIED_FILES:
            for path in self.source.root.glob(pattern):
                if path.name not in (MANIFEST, INDEX) and path.is_file():
                    shutil.copyfile(path, self.partial / path.name)
        _save_json(self.partial / INDEX, self.source.index)
        for name, component in self.source.components.items():
            (self.partial / name).mkdir(exist_ok=True)
            for path in component.files():
                shutil.copyfile(path, self.partial / name / path.name)
            config_files = (file for word, file in CONFIG_FILES.items() if word in component.kind)
            config = next(config_files, "config.json" if self._is_network(component.kind) else None)
            if config and not (self.partial / name / config).exists():
                _save_json(self.partial / name / config, component.config())


REQUEST_OPTIONS = {"revision": "--revision", "dtypes": "--dtype", PRECISION_ENTRY: "--precision", "loras": "--lora"}
"""The options of `wanjax convert` by their entries in a request."""


class ConversionToWanjax(Conversion):
    """A conversion from any layout to a wanjax checkpoint.

    Args:
        source: The checkpoint.
        target: The folder to write, also in a store.
        kinds: The kinds of networks that can be converted.
        dtypes: New dtypes by component. Other components keep their dtypes.
        published_name: The name under which the weights were published. None means the source's name.
        licence: The licence of the weights, if the source names none.
        name_hint: A name that identifies the weights better than `published_name`, such as a distilled model's file
            name.
        precision: The precision in which transformers are stored.
    """

    def __init__(
        self,
        source: Source,
        target: str | AnyPath,
        kinds: Kinds,
        *,
        dtypes: Mapping[str, str] | None = None,
        published_name: str | None = None,
        licence: str | None = None,
        name_hint: str = "",
        precision: Precision = UNQUANTIZED,
    ):
        if source.manifest is not None:
            raise WanjaxError(f"{source.name} is already a wanjax checkpoint: give --to diffusers to convert it back")
        (source.base or source).check_floats("another conversion")
        self.dtypes, self.published_name, self.licence = dtypes or {}, published_name or source.published_name, licence
        self.name_hint, self.precision = name_hint, precision
        if unknown := self.dtypes.keys() - source.components.keys():
            names = ", ".join(source.components)
            raise WanjaxError(f"{source.name} has no component {sorted(unknown)[0]}: give a dtype for one of {names}")
        self._assignments: dict[str, list[weight_rules.Assignment]] = {}
        self._kernels: dict[str, dict[str, QuantizedKernel]] = {}
        super().__init__(source, target, kinds)

    def _plan_network(self, name: str) -> ConvertedNetwork:
        entry, dtype = network(self.source, name, self.kinds), self.dtypes.get(name)
        stored_tensors, self._readers[name] = self._tensors(entry, name)
        specs = stored_tensors.specs
        abstract_dtype = jnp.dtype(dtype or "float32")
        abstract = entry.abstract(dtype=abstract_dtype, param_dtype=abstract_dtype, precision=self.precision)
        self._kernels[name] = kernels = quantized_kernels(abstract)
        targets = as_floats(modules.parameters(abstract), kernels)
        self._assignments[name] = assignments = weight_rules.assign(entry.rules, specs, targets, ignore=entry.unused)
        read = {key: specs[key] for assignment in assignments for key in assignment.sources}
        unused = {
            key: spec for key, spec in specs.items() if any(fnmatchcase(key, pattern) for pattern in entry.unused)
        }
        return ConvertedNetwork(name, read, stored_specs(assignments, specs, targets, dtype, kernels), unused)

    def _request(self) -> dict[str, Any]:
        return {
            "source": self.published_name,
            "revision": self.source.revision,
            "dtypes": dict(self.dtypes),
            "fingerprint": self._fingerprint(),
            **({NAME_HINT_ENTRY: self.name_hint} if self.name_hint else {}),
            **({PRECISION_ENTRY: self.precision.name} if self.precision.quantizes else {}),
            **self._lora_entry(),
        }

    def _is_complete(self) -> bool:
        target = self.target
        if not (target / MANIFEST).is_file():
            return False
        source = open_stored(target) if isinstance(target, RemotePath) else open_converted(target, target)
        manifest = source.manifest or {}
        if manifest["request"] != self._request():
            return False
        source.check((), ())
        if lost_files := [name for name in manifest["files"] if not source.storage.is_available(name)]:
            raise WanjaxError(f"{target / lost_files[0]} is missing: {RECONVERT_ADVICE}")
        return True

    def _describe_difference(self) -> str:
        if not isinstance(self.target, Path) or not (self.target / MANIFEST).is_file():
            return ""
        previous, requested = (open_converted(self.target, self.target).manifest or {})["request"], self._request()
        options = [option for name, option in REQUEST_OPTIONS.items() if previous.get(name) != requested.get(name)]
        return f", made with another {' and another '.join(options)}" if options else ""

    def _write(self, progress: Callable[[int], object]) -> None:
        for entry in self.networks:
            assignments = self._assignments[entry.name]
            stacks = {assignment.target for assignment in assignments if assignment.stacked}
            kernels = self._kernels[entry.name]
            stacks |= {kernels[name].values_name for name in stacks & kernels.keys()}
            chunks = {name: chunk_shape(spec, name in stacks) for name, spec in entry.written.items()}
            for kernel in kernels.values():  # a chunk of scales has the same blocks as a chunk of values
                chunks[kernel.scale_name] = (
                    *chunks[kernel.values_name][:-2],
                    entry.written[kernel.scale_name].shape[-1],
                )
            arrays = OrbaxCheckpoint.create(self.partial / entry.name / WEIGHTS_FOLDER, entry.written, chunks)
            stream(assignments, self._readers[entry.name], arrays, kernels, progress)
            if entry.unused:
                self._write_file(entry.name, UNUSED_FILE, entry.unused, self._readers[entry.name], progress)

    def _finish(self, progress: Callable[[int], object]) -> None:
        checksums = {}
        for entry in self.networks:
            arrays = OrbaxCheckpoint(self.partial / entry.name / WEIGHTS_FOLDER)
            assert arrays.specs == entry.written
            for leftover in set(files_in(arrays.path)) - arrays.files():  # an interrupted write left these files
                leftover.unlink()
            fsync_files(arrays.files())
            checksums[entry.name] = self._verified_digests(arrays, progress)
            if entry.unused:
                self._compare(entry.name, UNUSED_FILE, entry.unused, self._readers[entry.name], progress)
        manifest = {
            "format": FORMAT_VERSION,
            "licence": self._licence(),
            "request": self._request(),
            "networks": checksums,
            "names": {
                name: aliases for name, assignments in self._assignments.items() if (aliases := _aliases(assignments))
            },
            "files": {str(path.relative_to(self.partial)): digest(path) for path in files_beside(self.partial)},
        }
        _save_json(self.partial / MANIFEST, manifest | {DIGEST_ENTRY: own_digest(manifest)})

    def _verified_digests(self, arrays: OrbaxCheckpoint, progress: Callable[[int], object]) -> dict[str, str]:
        """Verify a network's arrays and return their digests.

        Delete damaged weights, so that a later run writes them again.
        """
        try:
            return array_digests(arrays, progress)
        except WanjaxError:
            shutil.rmtree(arrays.path)
            raise

    def _licence(self) -> str | None:
        """Return the licence of the weights, or None if it is unknown."""
        readme = self.source.root / "README.md"
        match = LICENCE.search(readme.read_text(encoding="utf-8", errors="replace")) if readme.is_file() else None
        return match[1] if match else self.licence


class ConversionToDiffusers(Conversion):
    """A conversion from a wanjax checkpoint to the layout of diffusers. Tensors keep their stored dtypes."""

    def __init__(self, source: Source, target: str | AnyPath, kinds: Kinds):
        if (source.base or source).manifest is None:
            problem = "already has the layout of diffusers" if (source.root / INDEX).is_file() else "is none"
            advice = "leave the option out to write a wanjax checkpoint"
            raise WanjaxError(f"--to diffusers converts a wanjax checkpoint, but {source.name} {problem}: {advice}")
        (source.base or source).check_floats("a checkpoint in the layout of diffusers")
        super().__init__(source, target, kinds)

    def _plan_network(self, name: str) -> ConvertedNetwork:
        stored_tensors, merged = self._tensors(network(self.source, name, self.kinds), name)
        self._readers[name] = _CastToStored(merged, stored_tensors)
        return ConvertedNetwork(name, self._weights(name).specs, stored_tensors.specs)

    def _request(self) -> dict[str, Any]:
        return {"to": "diffusers", "fingerprint": self._fingerprint(), **self._lora_entry()}

    def _is_complete(self) -> bool:
        return False

    def _shards(self, entry: ConvertedNetwork) -> tuple[str, dict[str, dict[str, Spec]]]:
        """Return the stem of a component's file names, and the tensors of each file."""
        library = self.source.index[entry.name][0]
        stem = "model" if library == "transformers" else "diffusion_pytorch_model"
        files = split_into_shards(self._readers[entry.name], stem)
        return stem, {name: {key: entry.written[key] for key in keys} for name, keys in files.items()}

    def _write(self, progress: Callable[[int], object]) -> None:
        for entry in self.networks:
            reader, (stem, files) = self._readers[entry.name], self._shards(entry)
            for name, specs in files.items():
                self._write_file(entry.name, name, specs, reader, progress)
            if len(files) > 1:
                save_index(self.partial / entry.name, stem, files, entry.bytes_written)

    def _finish(self, progress: Callable[[int], object]) -> None:
        """Compare the written tensors with the source's tensors."""
        for entry in self.networks:
            reader, (_, files) = self._readers[entry.name], self._shards(entry)
            for name, specs in files.items():
                self._compare(entry.name, name, specs, reader, progress)


class _CastToStored(TensorReaderView):
    """A reader's tensors, cast to the dtypes of another reader."""

    def __init__(self, reader: TensorReader, stored_specs: TensorReader):
        super().__init__(reader)
        self.specs = stored_specs.specs

    def read(self, key: str) -> np.ndarray:
        return self._reader.read(key).astype(self.specs[key].dtype, copy=False)


class _ProgressReader(TensorReaderView):
    """A reader that reports the bytes that it reads."""

    def __init__(self, reader: TensorReader, progress: Callable[[int], object]):
        super().__init__(reader)
        self._progress = progress

    def read(self, key: str) -> np.ndarray:
        self._progress(self.specs[key].nbytes)
        return super().read(key)


def _aliases(assignments: Iterable[weight_rules.Assignment]) -> dict[str, str]:
    """Return the source's names of tensors that differ from the rules' names."""
    pairs = (
        (rule_name, source_name)
        for assignment in assignments
        for rule_name, source_name in zip(assignment.names, assignment.sources, strict=True)
    )
    return {rule_name: source_name for rule_name, source_name in pairs if rule_name != source_name}


def _save_json(path: Path, value: Any) -> None:
    with atomic_write(path) as partial_path:
        partial_path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _partial_folder(target: AnyPath) -> Path:
    """Return the folder for an incomplete target. It is beside the target or, if the target is in a store, in the
    user's cache."""
    if isinstance(target, RemotePath):
        return user_cache() / "conversions" / hashlib.sha256(str(target).encode()).hexdigest()[:DIGEST_LENGTH]
    return target.with_name(f".{target.name}.partial")


@contextmanager
def _write_errors(target: AnyPath, partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        cause = error.strerror or error
        if partial.exists():
            advice = "the next run resumes from what is written"
            advice = f"free some space, and {advice}" if is_full(error) else advice
        else:
            advice = "free some space, or name a folder on another disk" if is_full(error) else "name a writable folder"
        raise WanjaxError(f"{target} cannot be written ({cause}): {advice}") from error
