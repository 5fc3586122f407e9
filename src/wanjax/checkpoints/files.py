# SPDX-License-Identifier: Apache-2.0
"""Read and write safetensors: one file, or a component's folder with shards and their index.

A file has eight bytes with the length of a JSON header, the header, and the tensors' bytes without gaps
(https://huggingface.co/docs/safetensors, format section). The safetensors library reads the header and checks its
offsets. This module maps tensors into memory one at a time, because the library copies tensors and does not support
NumPy's 8-bit floats. This module also writes tensors, because the library needs all of them in memory.
"""

import hashlib
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from wanjax.errors import WanjaxError, reason
from wanjax.stores.paths import missing_file
from wanjax.stores.writing import atomic_write

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHT_NAMES = ("diffusion_pytorch_model", "model")
TORCH_SUFFIXES = (".pth", ".pt", ".ckpt", ".bin")
GGUF_SUFFIX = ".gguf"
SUFFIXES = (".safetensors", *TORCH_SUFFIXES, GGUF_SUFFIX)  # the suffixes of files of weights
SHARD_NAME = re.compile(r"(?P<stem>\w+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.safetensors", re.ASCII)
HEADER_LIMIT = 100_000_000  # bytes; the safetensors library has the same limit
MAX_RANK = 32
COMPLETE_ADVICE = "give a complete copy of the checkpoint"
CACHE_LINE = 64  # bytes
FINITE_CHECK_VALUES = 1 << 18  # the number of values that are checked together
SHARD_BYTES = 5e9  # the size of a shard in published checkpoints
MAX_DIGEST_FILES = 10_000  # a folder with more files gets no digest
MAX_FULL_DIGEST = 64 * 2**20  # bytes; the digest of a larger file covers only its header and some blocks
HEADER_BYTES, NUM_BLOCKS, BLOCK_BYTES = 2**20, 64, 2**16


class Spec(NamedTuple):
    """A tensor's shape and dtype, known without reading it."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class TensorReader(Protocol):
    """Named tensors whose shapes and dtypes are known before they are read."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Each tensor's shape and dtype by its name."""
        ...

    def read(self, key: str) -> np.ndarray: ...


def main_dtype(specs: Iterable[Spec]) -> str | None:
    """Return the dtype of most of the tensors' bytes; None without tensors."""
    counts: Counter[str] = Counter()
    for spec in specs:
        counts[spec.dtype.name] += spec.nbytes
    return max(counts, key=lambda dtype: counts[dtype], default=None)


def progress_counter(progress: Callable[[int, int], object] | None, total: int) -> Callable[[int], None]:
    """Return a function that adds its argument, a number of bytes, to a sum, and reports the sum and the total."""
    bytes_done = 0

    def add(nbytes: int) -> None:
        nonlocal bytes_done
        bytes_done += nbytes
        if progress:
            progress(bytes_done, total)

    return add


def content_digest(path: Path) -> str | None:
    """Return the SHA-256 of a file's contents, or of the names and digests of a folder's files.

    For a file of more than 64 MiB, the digest covers the size, the first MiB, and blocks that are spread over the file.
    The first MiB has the header of weights. Return None if the path cannot be read, or if the folder has more than
    `MAX_DIGEST_FILES` files.
    """
    try:
        if os.path.isfile(path):  # `isfile` returns False for invalid names
            return _file_digest(path)
        if not os.path.isdir(path):
            return None
        files = sorted(islice((file for file in path.rglob("*") if file.is_file()), MAX_DIGEST_FILES + 1))
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.relative_to(path).as_posix()!r} {_file_digest(file)}\n".encode())
    except OSError:
        return None
    return digest.hexdigest() if len(files) <= MAX_DIGEST_FILES else None


def _file_digest(path: Path) -> str:
    status = path.stat()
    return _read_digest(path.absolute(), status.st_size, (status.st_mtime_ns, status.st_ctime_ns))


@lru_cache(maxsize=2 * MAX_DIGEST_FILES)
def _read_digest(path: Path, size: int, changed: tuple[int, int]) -> str:
    with path.open("rb") as stream:
        if size <= MAX_FULL_DIGEST:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for index in range(NUM_BLOCKS):
            stream.seek((size - BLOCK_BYTES) * index // (NUM_BLOCKS - 1))
            digest.update(stream.read(BLOCK_BYTES if index else HEADER_BYTES))
        return digest.hexdigest()


class CorruptError(Exception):
    """A fault in a file's contents."""


class TensorLocation(NamedTuple):
    """A tensor's shape and dtype, its first byte in the file, and its strides in elements."""

    spec: Spec
    start: int
    strides: tuple[int, ...]


def row_by_row(spec: Spec, start: int) -> TensorLocation:
    """Return the location of a tensor that is stored row by row, from the byte `start` of the file on."""
    return TensorLocation(spec, start, tuple(math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape))))


class MappedFile(ABC):
    """A file of tensors, each memory-mapped when it is read.

    Raises WanjaxError if the file is missing, truncated or corrupt.
    """

    valid_file_text = "a complete copy of the file"
    """The advice in the error for an unreadable file."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metadata: dict[str, str] = {}
        try:
            if not self.path.is_file():
                raise WanjaxError(missing_file(self.path))
            self._locations = self._locate_tensors()
        except (OSError, CorruptError) as error:
            raise unreadable(self.path, error, self.valid_file_text) from error
        self.specs = {key: location.spec for key, location in self._locations.items()}

    @abstractmethod
    def _locate_tensors(self) -> dict[str, TensorLocation]:
        """Return the location of each tensor; raise OSError or CorruptError if the file cannot be read."""

    @property
    def paths(self) -> Sequence[Path]:
        """The paths of the files with tensors: this file alone."""
        return [self.path]

    def read(self, key: str) -> np.ndarray:
        """Return a read-only view of the tensor in the mapped file. Freeing the view unmaps the file."""
        (shape, dtype), start, strides = self._locations[key]
        if 0 in shape:  # an empty range cannot be mapped
            return np.empty(shape, dtype)
        elements = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        try:
            flat = np.memmap(self.path, dtype, "r", start, (elements,))
        except (OSError, ValueError) as error:  # a file that became shorter raises ValueError
            raise unreadable(self.path, error, self.valid_file_text) from error
        return np.ndarray(shape, dtype, flat, strides=[stride * dtype.itemsize for stride in strides])


class SafetensorsFile(MappedFile):
    """A safetensors file, whose header is checked when it is opened."""

    def _locate_tensors(self) -> dict[str, TensorLocation]:
        try:
            with safe_open(self.path, framework="numpy") as file:
                self.metadata = file.metadata() or {}
                specs = {
                    key: _spec(key, file.get_slice(key)) for key in file.offset_keys()
                }  # `offset_keys` sorts by offset
        except SafetensorError as error:  # the message may contain unprintable characters or newlines
            message = repr(str(error).removeprefix("Error while deserializing header: "))[1:-1]
            raise CorruptError(f"it is not a complete safetensors file ({message})") from error
        start = self.path.stat().st_size - sum(spec.nbytes for spec in specs.values())
        locations = {}
        for key, spec in specs.items():
            locations[key] = row_by_row(spec, start)
            start += spec.nbytes
        return locations


def check_names(folder: str, names: Collection[str]) -> None:
    """Raise WanjaxError unless the file names of a component's folder include complete weights.

    Complete weights are one file, or an index and all shards. Variants such as fp16 do not count.
    """
    for stem in WEIGHT_NAMES:
        if (index := f"{stem}.safetensors.index.json") in names:
            shards = [match for name in names if (match := SHARD_NAME.fullmatch(name)) and match["stem"] == stem]
            if not shards:
                raise WanjaxError(f"{folder} lacks the shards that {index} lists: {COMPLETE_ADVICE}")
            present_numbers, count = {int(shard["number"]) for shard in shards}, int(shards[0]["count"])
            if missing := sorted(set(range(1, count + 1)) - present_numbers):
                name = f"{stem}-{missing[0]:05}-of-{count:05}.safetensors"
                raise WanjaxError(f"{folder} lacks {name}, which {index} lists: {COMPLETE_ADVICE}")
            return
    if not {f"{stem}.safetensors" for stem in WEIGHT_NAMES} & set(names):
        raise _no_weights(folder, names)


class SafetensorsFolder:
    """The weights in a component's folder such as `transformer/`: one file, or shards with an index.

    Variants such as `model.fp16.safetensors` are not read. Raises WanjaxError if a file is missing, truncated or
    corrupt, or contradicts the index.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise WanjaxError(f"there is no folder {self.path}")
        indexes = [self.path / f"{name}.safetensors.index.json" for name in WEIGHT_NAMES]
        single_files = [self.path / f"{name}.safetensors" for name in WEIGHT_NAMES]
        if index := next(filter(os.path.lexists, indexes), None):  # a broken link is reported as missing
            self._files = _open_shards(index)
        elif single_file := next(filter(os.path.lexists, single_files), None):
            file = SafetensorsFile(single_file)
            self._files = dict.fromkeys(file.specs, file)
        else:
            raise _no_weights(self.path, [file.name for file in self.path.iterdir()])
        self.specs = {key: file.specs[key] for key, file in self._files.items()}

    @property
    def paths(self) -> Sequence[Path]:
        """The files with the tensors."""
        return sorted({file.path for file in self._files.values()})

    def read(self, key: str) -> np.ndarray:
        """Return a read-only view of the tensor in its mapped file. Freeing the view unmaps the file."""
        return self._files[key].read(key)


def _no_weights(folder: str | Path, names: Iterable[str]) -> WanjaxError:
    expected = " or ".join(f"{stem}.safetensors" for stem in WEIGHT_NAMES)
    other_files = sorted(name for name in names if name.endswith((".safetensors", ".bin", ".pth")))
    content = f"it contains {', '.join(other_files)}" if other_files else "it contains no weights"
    return WanjaxError(f"{folder} must have {expected}, or shards with an index, but {content}")


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array aligned to 64 bytes, which JAX on a CPU uses without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def load_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Return all tensors of a file as read-only memory maps; raise WanjaxError if the file cannot be read."""
    file = SafetensorsFile(path)
    return {key: file.read(key) for key in file.specs}


class Tensors:
    """Arrays in memory as a `TensorReader`."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self.tensors = tensors
        self.specs = {key: Spec(x.shape, np.dtype(x.dtype)) for key, x in tensors.items()}

    def read(self, key: str) -> np.ndarray:
        return self.tensors[key]


def save_safetensors(
    path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to a file. The file appears under its name only when it is complete.

    Raises WanjaxError if the file cannot be written.
    """
    write_safetensors(Path(path), Tensors(tensors), tensors.keys(), metadata)


def write_safetensors(
    path: Path, reader: TensorReader, keys: Iterable[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the tensors with these keys to a file, as `save_safetensors` does. Tensors are read one at a time."""
    specs = {key: reader.specs[key] for key in keys}
    # Wide dtypes first, as in the safetensors library, so that every tensor is aligned to its item size.
    keys = sorted(specs, key=lambda key: (-specs[key].dtype.itemsize, key))
    header: dict = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key in keys:
        begin, end = end, end + specs[key].nbytes
        name = DTYPE_NAMES[specs[key].dtype]
        header[key] = {"dtype": name, "shape": list(specs[key].shape), "data_offsets": [begin, end]}
    header_bytes = json.dumps(header, separators=(",", ":")).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    with atomic_write(path) as partial_path, partial_path.open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for key in keys:
            values = np.ascontiguousarray(reader.read(key))
            check_finite(values, key, path)
            file.write(values.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def check_finite(values: np.ndarray, name: str, path: Path) -> None:
    """Raise WanjaxError if one of the values to write is infinite or NaN."""
    is_narrow = values.dtype.itemsize < 4
    # NumPy gives floats of ml_dtypes the kind "V".
    values = values.reshape(-1) if values.dtype.kind in "fV" else values[:0]
    for start in range(0, len(values), FINITE_CHECK_VALUES):  # a part that fits into a core's cache
        values_slice = values[start : start + FINITE_CHECK_VALUES]
        if not np.isfinite(
            values_slice.astype(np.float32) if is_narrow else values_slice
        ).all():  # for narrow floats this is four times as fast as NumPy's isfinite
            raise WanjaxError(
                f"{path} is not written, because {name!r} is not finite: give valid weights, or a wider dtype"
            )


def split_into_shards(reader: TensorReader, stem: str, limit: int | float = SHARD_BYTES) -> dict[str, list[str]]:
    """Split a component's keys into files of at most `limit` bytes. A larger tensor has a file of its own. Return the
    keys of each file."""
    from huggingface_hub import split_state_dict_into_shards_factory  # imported late: few commands write a component

    return split_state_dict_into_shards_factory(
        dict(reader.specs),
        get_storage_size=lambda spec: spec.nbytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=int(limit),
    ).filename_to_tensors


def save_index(folder: Path, stem: str, files: Mapping[str, Iterable[str]], nbytes: int) -> None:
    """Write the index of a component's shards, which maps each tensor to its file."""
    weight_map = {key: file for file, keys in files.items() for key in keys}
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    with atomic_write(folder / f"{stem}.safetensors.index.json") as partial_path:
        partial_path.write_text(json.dumps(index, indent=2) + "\n")


def unreadable(path: Path, error: Exception, valid_file_text: str = MappedFile.valid_file_text) -> WanjaxError:
    """Build the error for an unreadable file, with its cause and advice."""
    return WanjaxError(f"{path} cannot be read ({reason(error)}): give {valid_file_text}")


def _parse_json(text: bytes) -> dict:
    """Parse a JSON object; duplicate names are an error."""
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CorruptError("its JSON is malformed") from error
    if not isinstance(parsed, dict):
        raise CorruptError("its JSON is not an object")
    return parsed


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if duplicates := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise CorruptError(f"its JSON gives {duplicates[0]!r} twice")
    return dict(pairs)


def _spec(key: str, entry: Any) -> Spec:
    """Return the shape and dtype of a tensor in the header."""
    shape, name = entry.get_shape(), entry.get_dtype()
    if name not in DTYPES:
        raise CorruptError(f"{key!r} has the dtype {name!r}, which is not one of {', '.join(DTYPES)}")
    if not key.isprintable() or len(shape) > MAX_RANK or math.prod(max(size, 1) for size in shape) >= 2**60:
        raise CorruptError(f"the header's entry of {key!r} is malformed")
    return Spec(tuple(shape), DTYPES[name])


def _open_shards(index: Path) -> dict[str, SafetensorsFile]:
    """Open the shards of an index, and compare the index with the files. Return the file of each key."""
    try:
        if index.stat().st_size > HEADER_LIMIT:
            raise CorruptError(f"it has more than {HEADER_LIMIT} bytes")
        weight_map = _checked_weight_map(_parse_json(index.read_bytes()).get("weight_map"))
    except (OSError, CorruptError) as error:
        raise unreadable(index, error) from error
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise WanjaxError(f"{index.parent} lacks {', '.join(missing)}, which {index.name} lists: {COMPLETE_ADVICE}")
    files: dict[str, SafetensorsFile] = {}
    for name in names:
        shard = SafetensorsFile(index.parent / name)
        for key in shard.specs:
            if key in files:
                raise WanjaxError(f"{key!r} is in two shards, {files[key].path} and {shard.path}: {COMPLETE_ADVICE}")
            files[key] = shard
    for key in sorted(files.keys() | weight_map.keys()):
        expected, actual = weight_map.get(key), files[key].path.name if key in files else None
        if expected != actual:
            raise WanjaxError(
                f"{index} lists {key!r} in {expected or 'no file'}, but it is in {actual or 'none'}: {COMPLETE_ADVICE}"
            )
    return files


def _checked_weight_map(weight_map: object) -> dict[str, str]:
    """Return the `weight_map` of an index; raise CorruptError if it names a file outside the index's folder."""
    if not isinstance(weight_map, dict):
        raise CorruptError("it has no weight_map")
    for name in weight_map.values():
        is_plain_name = isinstance(name, str) and name.isprintable() and not set(name) & set("/\\:")
        if not is_plain_name or not name.endswith(".safetensors"):
            raise CorruptError(f"it names {name!r}, which is not a safetensors file in the same folder")
    return weight_map
