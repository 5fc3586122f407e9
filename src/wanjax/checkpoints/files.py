# SPDX-License-Identifier: Apache-2.0
"""Reads and writes safetensors: one file, or a component's folder with its shards and their index.

A file is eight bytes that give the length of a JSON header, the header, and the tensors' bytes end to end
(https://huggingface.co/docs/safetensors, format section). The format's library reads the header, and checks every
offset in it against the file. Tensors are mapped here, one at a time: the library copies them, and knows no 8-bit
floats in NumPy. They are written here too, since the library wants all of them in memory at once.
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
from wanjax.stores.writing import writing

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
SUFFIXES = (".safetensors", *TORCH_SUFFIXES, GGUF_SUFFIX)  # of files of weights
SHARD_NAME = re.compile(r"(?P<stem>\w+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.safetensors", re.ASCII)
HEADER_LIMIT = 100_000_000  # bytes, as in the safetensors library
MAX_RANK = 32
CACHE_LINE = 64  # bytes
CHECKED = 1 << 18  # values that are looked at together
SHARD = 5e9  # bytes of a file, as in published checkpoints
FOLDER_FILES = 10_000  # of which a digest is taken
WHOLE = 64 * 2**20  # bytes; of a larger file, a digest is taken of the header and of some blocks
HEADER, BLOCKS, BLOCK = 2**20, 64, 2**16


class Spec(NamedTuple):
    """A tensor's shape and dtype, known without reading it."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class Reader(Protocol):
    """Named tensors whose shapes and dtypes are known before they are read."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Each tensor's shape and dtype by its name."""
        ...

    def read(self, key: str) -> np.ndarray: ...


def main_dtype(specs: Iterable[Spec]) -> str | None:
    """Return the dtype of most of the bytes of tensors; None where there are none."""
    counts: Counter[str] = Counter()
    for spec in specs:
        counts[spec.dtype.name] += spec.nbytes
    return max(counts, key=lambda dtype: counts[dtype], default=None)


def adding(progress: Callable[[int, int], object] | None, total: int) -> Callable[[int], None]:
    """Return a function that adds up the bytes it receives, and report their sum and the total."""
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    return add


def content_digest(path: Path) -> str | None:
    """Return the SHA-256 of a file's contents; of a folder, that of the names and the digests of all its files.

    A file of more than 64 MiB is known by its size, its first MiB, where weights have their header, and blocks from
    end to end. None where there is neither, or it cannot be read, or the folder has more files than a clip or a model.
    """
    try:
        if os.path.isfile(path):  # which raises nothing for names that are none
            return _file_digest(path)
        if not os.path.isdir(path):
            return None
        files = sorted(islice((each for each in path.rglob("*") if each.is_file()), FOLDER_FILES + 1))
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.relative_to(path).as_posix()!r} {_file_digest(file)}\n".encode())
    except OSError:
        return None
    return digest.hexdigest() if len(files) <= FOLDER_FILES else None


def _file_digest(path: Path) -> str:
    status = path.stat()
    return _read_digest(path.absolute(), status.st_size, (status.st_mtime_ns, status.st_ctime_ns))


@lru_cache(maxsize=2 * FOLDER_FILES)
def _read_digest(path: Path, size: int, changed: tuple[int, int]) -> str:
    with path.open("rb") as opened:
        if size <= WHOLE:
            return hashlib.file_digest(opened, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for number in range(BLOCKS):
            opened.seek((size - BLOCK) * number // (BLOCKS - 1))
            digest.update(opened.read(BLOCK if number else HEADER))
        return digest.hexdigest()


class CorruptError(Exception):
    """A fault in a file's contents."""


class TensorLocation(NamedTuple):
    """A tensor's shape and dtype, its first byte in the file, and its strides in elements."""

    spec: Spec
    start: int
    strides: tuple[int, ...]


def row_by_row(spec: Spec, start: int) -> TensorLocation:
    """Return the location of a tensor whose numbers lie row by row, from this byte of the file on."""
    return TensorLocation(spec, start, tuple(math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape))))


class MappedFile(ABC):
    """A file of tensors, each mapped when it is read.

    Raises WanjaxError that names the file if it is missing, truncated or corrupt.
    """

    needed = "a complete copy of the file"
    """What to do about a file that cannot be read."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metadata: dict[str, str] = {}
        try:
            if not self.path.is_file():
                raise WanjaxError(missing_file(self.path))
            self._locations = self._locate_tensors()
        except (OSError, CorruptError) as error:
            raise unreadable(self.path, error, self.needed) from error
        self.specs = {key: location.spec for key, location in self._locations.items()}

    @abstractmethod
    def _locate_tensors(self) -> dict[str, TensorLocation]:
        """Return where each tensor lies; raise OSError or CorruptError where the file cannot be read."""

    @property
    def paths(self) -> Sequence[Path]:
        """The file itself, as the one that holds the tensors."""
        return [self.path]

    def read(self, key: str) -> np.ndarray:
        """Return a read-only view of the tensor's pages in the file, which are unmapped with it."""
        (shape, dtype), start, strides = self._locations[key]
        if 0 in shape:  # an empty range cannot be mapped
            return np.empty(shape, dtype)
        elements = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        try:
            flat = np.memmap(self.path, dtype, "r", start, (elements,))
        except (OSError, ValueError) as error:  # ValueError: the file is now shorter than the range
            raise unreadable(self.path, error, self.needed) from error
        return np.ndarray(shape, dtype, flat, strides=[stride * dtype.itemsize for stride in strides])


class SafetensorsFile(MappedFile):
    """A safetensors file: checks its header, and reads a tensor when asked for it."""

    def _locate_tensors(self) -> dict[str, TensorLocation]:
        try:
            with safe_open(self.path, framework="numpy") as file:
                self.metadata = file.metadata() or {}
                specs = {key: _spec(key, file.get_slice(key)) for key in file.offset_keys()}  # end to end
        except SafetensorError as error:  # it may quote what cannot be printed, or a line's end
            message = repr(str(error).removeprefix("Error while deserializing header: "))[1:-1]
            raise CorruptError(f"it is no whole safetensors file ({message})") from error
        start = self.path.stat().st_size - sum(spec.nbytes for spec in specs.values())
        places = {}
        for key, spec in specs.items():
            places[key] = row_by_row(spec, start)
            start += spec.nbytes
        return places


def check_names(folder: str, names: Collection[str]) -> None:
    """Raise WanjaxError unless a component's folder has weights of the plain variant, by the names of its files.

    They are one file, or an index and each of the shards whose number their names tell.
    """
    for stem in WEIGHT_NAMES:
        if (index := f"{stem}.safetensors.index.json") in names:
            shards = [match for name in names if (match := SHARD_NAME.fullmatch(name)) and match["stem"] == stem]
            there, count = {int(shard["number"]) for shard in shards}, int(shards[0]["count"]) if shards else 0
            if not shards:
                raise WanjaxError(f"{folder} lacks the shards that {index} lists")
            if missing := sorted(set(range(1, count + 1)) - there):
                name = f"{stem}-{missing[0]:05}-of-{count:05}.safetensors"
                raise WanjaxError(f"{folder} lacks {name}, which {index} lists")
            return
    if not {f"{stem}.safetensors" for stem in WEIGHT_NAMES} & set(names):
        raise _no_weights(folder, names)


class SafetensorsFolder:
    """The weights of a component's folder such as `transformer/`: one file, or shards and the index that lists them.

    The plain variant alone is read, not `model.fp16.safetensors` and the like. Raises WanjaxError that names the file
    if one is missing, truncated, corrupt, or at odds with the index.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise WanjaxError(f"there is no folder {self.path}")
        indexes = [self.path / f"{name}.safetensors.index.json" for name in WEIGHT_NAMES]
        singles = [self.path / f"{name}.safetensors" for name in WEIGHT_NAMES]
        if index := next(filter(os.path.lexists, indexes), None):  # a link whose file is gone is named too
            self._files = _open_shards(index)
        elif single := next(filter(os.path.lexists, singles), None):
            file = SafetensorsFile(single)
            self._files = dict.fromkeys(file.specs, file)
        else:
            raise _no_weights(self.path, [file.name for file in self.path.iterdir()])
        self.specs = {key: file.specs[key] for key, file in self._files.items()}

    @property
    def paths(self) -> Sequence[Path]:
        """The files with the tensors."""
        return sorted({file.path for file in self._files.values()})

    def read(self, key: str) -> np.ndarray:
        """Return a read-only view of the tensor's pages in the file, which are unmapped with it."""
        return self._files[key].read(key)


def _no_weights(folder: str | Path, names: Iterable[str]) -> WanjaxError:
    wanted = " or ".join(f"{stem}.safetensors" for stem in WEIGHT_NAMES)
    others = sorted(name for name in names if name.endswith((".safetensors", ".bin", ".pth")))
    holds = f"it holds {', '.join(others)}" if others else "it holds no weights"
    return WanjaxError(f"{folder} should hold {wanted}, whole or as shards with an index, but {holds}")


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array at a multiple of 64 bytes, which JAX on the CPU takes over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def load_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Return all tensors of one file, read-only and mapped to it; raise WanjaxError if it cannot be read."""
    file = SafetensorsFile(path)
    return {key: file.read(key) for key in file.specs}


class Tensors:
    """Arrays in memory as a `Reader`."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self.tensors = tensors
        self.specs = {key: Spec(x.shape, np.dtype(x.dtype)) for key, x in tensors.items()}

    def read(self, key: str) -> np.ndarray:
        return self.tensors[key]


def save_safetensors(
    path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the tensors to one file, which appears under its name only when it is complete.

    Raises WanjaxError if it cannot be written.
    """
    write_safetensors(Path(path), Tensors(tensors), tensors.keys(), metadata)


def write_safetensors(
    path: Path, reader: Reader, keys: Iterable[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the reader's tensors with these keys as `save_safetensors` does, and read each when its turn comes."""
    specs = {key: reader.specs[key] for key in keys}
    # Wide dtypes come first, as in the format's library: every tensor begins at a multiple of its item size.
    keys = sorted(specs, key=lambda key: (-specs[key].dtype.itemsize, key))
    header: dict = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key in keys:
        begin, end = end, end + specs[key].nbytes
        name = DTYPE_NAMES[specs[key].dtype]
        header[key] = {"dtype": name, "shape": list(specs[key].shape), "data_offsets": [begin, end]}
    conditioning = json.dumps(header, separators=(",", ":")).encode()
    conditioning += b" " * (-len(conditioning) % 8)
    with writing(path) as partial_path, partial_path.open("wb") as file:
        file.write(len(conditioning).to_bytes(8, "little") + conditioning)
        for key in keys:
            values = np.ascontiguousarray(reader.read(key))
            check_finite(values, key, path)
            file.write(values.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def check_finite(values: np.ndarray, name: str, path: Path) -> None:
    """Raise WanjaxError if one of the values to write is infinite or NaN."""
    narrow = values.dtype.itemsize < 4
    values = values.reshape(-1) if values.dtype.kind in "fV" else values[:0]  # ml_dtypes' floats are of the second kind
    for start in range(0, len(values), CHECKED):  # in a core's cache
        some = values[start : start + CHECKED]
        if not np.isfinite(some.astype(np.float32) if narrow else some).all():  # NumPy's own way takes four times that
            raise WanjaxError(f"{path} is not written, as {name!r} is not finite: give whole weights, or a wider dtype")


def shards(reader: Reader, stem: str, limit: int | float = SHARD) -> dict[str, list[str]]:
    """Split a component's keys among files of at most `limit` bytes, or of one tensor; return each file's keys."""
    from huggingface_hub import split_state_dict_into_shards_factory  # here: few commands write a component

    return split_state_dict_into_shards_factory(
        dict(reader.specs),
        get_storage_size=lambda spec: spec.nbytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=int(limit),
    ).filename_to_tensors


def save_index(folder: Path, stem: str, files: Mapping[str, Iterable[str]], nbytes: int) -> None:
    """Write the index of a component's shards, which gives each tensor's file."""
    weight_map = {key: file for file, keys in files.items() for key in keys}
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    with writing(folder / f"{stem}.safetensors.index.json") as partial_path:
        partial_path.write_text(json.dumps(index, indent=2) + "\n")


def unreadable(path: Path, error: Exception, needed: str = MappedFile.needed) -> WanjaxError:
    """Return the error for an unreadable file, with its cause and advice."""
    return WanjaxError(f"{path} cannot be read, {reason(error)}: {needed} is needed")


def _parse_json(text: bytes) -> dict:
    """Parse a JSON object in which no name is given twice."""
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise CorruptError("its JSON is malformed") from error
    if not isinstance(parsed, dict):
        raise CorruptError("its JSON is not an object")
    return parsed


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise CorruptError(f"its JSON gives {twice[0]!r} twice")
    return dict(pairs)


def _spec(key: str, described: Any) -> Spec:
    """Return the shape and the dtype of a tensor as the header describes it."""
    shape, name = described.get_shape(), described.get_dtype()
    if name not in DTYPES:
        raise CorruptError(f"{key!r} has the dtype {name!r}, which is not one of {', '.join(DTYPES)}")
    if not key.isprintable() or len(shape) > MAX_RANK or math.prod(max(size, 1) for size in shape) >= 2**60:
        raise CorruptError(f"the header's entry of {key!r} is malformed")
    return Spec(tuple(shape), DTYPES[name])


def _open_shards(index: Path) -> dict[str, SafetensorsFile]:
    """Return the file of each key, as the index says and the files confirm."""
    try:
        if index.stat().st_size > HEADER_LIMIT:
            raise CorruptError(f"it has more than {HEADER_LIMIT} bytes")
        weight_map = _checked_weight_map(_parse_json(index.read_bytes()).get("weight_map"))
    except (OSError, CorruptError) as error:
        raise unreadable(index, error) from error
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise WanjaxError(f"{index.parent} lacks {', '.join(missing)}, which {index.name} lists")
    files: dict[str, SafetensorsFile] = {}
    for name in names:
        shard = SafetensorsFile(index.parent / name)
        for key in shard.specs:
            if key in files:
                raise WanjaxError(f"{key!r} is in two shards, {files[key].path} and {shard.path}")
            files[key] = shard
    for key in sorted(files.keys() | weight_map.keys()):
        listed, actual = weight_map.get(key), files[key].path.name if key in files else None
        if listed != actual:
            raise WanjaxError(f"{index} places {key!r} in {listed or 'no file'}, but it is in {actual or 'none'}")
    return files


def _checked_weight_map(weight_map: object) -> dict[str, str]:
    """The index's file of each key, every one a plain name in the index's own folder."""
    if not isinstance(weight_map, dict):
        raise CorruptError("it has no weight_map")
    for name in weight_map.values():
        plain = isinstance(name, str) and name.isprintable() and not set(name) & set("/\\:")
        if not plain or not name.endswith(".safetensors"):
            raise CorruptError(f"it names {name!r}, which is not a safetensors file in the same folder")
    return weight_map
