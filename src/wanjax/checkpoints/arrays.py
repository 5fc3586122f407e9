# SPDX-License-Identifier: Apache-2.0
"""Arrays in the layout of Orbax: written chunk by chunk, and restored onto any sharding.

An Orbax checkpoint is a folder with an array in the format zarr 3 for each leaf of a tree, and a file that describes
the tree. Orbax itself saves only arrays that are whole in memory. This module writes the same files a chunk at a time
with tensorstore, the library that Orbax uses, so that a stack of blocks is never whole in memory. Each chunk is a file
of a few megabytes that appears complete or not at all, so that an interrupted run can resume. It ends with a checksum
of its bytes (crc32c), which every reader tests. Restoring reads only the shards of this process's devices.

Format: https://orbax.readthedocs.io and https://zarr-specs.readthedocs.io/en/latest/v3/core
"""

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from wanjax.checkpoints.files import Spec, aligned
from wanjax.errors import WanjaxError

CHUNK = 16 << 20  # bytes in one file, at most
LARGEST_CHUNK = 1 << 30  # bytes that are read as one
CHECKSUM = 4  # bytes at the end of a file
TREE, COMMITTED = "_METADATA", "_CHECKPOINT_METADATA"  # Orbax's own names
ARRAY = "zarr.json"  # zarr's, of what describes an array
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
# Chunks of zeros are written, and missing chunks are faults.
STRICT = {"store_data_equal_to_fill_value": True, "fill_missing_data_reads": False}
NAME = re.compile(r"\w+(\.\w+)*", re.ASCII)
AT_ONCE = 4  # chunks in memory that are being read or written

Piece = tuple[slice, ...]
Fetch = Callable[[Iterable[Path]], object]
"""Downloads files of a folder before they are read, if the folder mirrors one in a store."""


def size_here(file: Path) -> int | None:
    """Return the bytes of a file, None where there is none."""
    return file.stat().st_size if file.is_file() else None


class StoredArray:
    """An array in a folder. Raises WanjaxError that names the folder if it is missing or damaged."""

    def __init__(self, path: Path, metadata: Mapping[str, Any] | None = None, fetch: Fetch = lambda files: None):
        """Open the array, or create it with this `metadata` if there is none."""
        self.path, self._fetch = path, fetch
        # Files are not synchronised one by one: `synchronise` does it for all when they are written.
        files = {"driver": "file", "path": f"{path}/", "file_io_sync": False}
        spec = {"driver": "zarr3", "kvstore": files, "open": True} | STRICT
        if metadata is not None:
            spec |= {"create": True, "metadata": metadata}
        with _one_sentence(f"{path} is no array that can be read", writes=metadata is not None):
            self._array = ts.open(spec).result()
        self.spec = Spec(tuple(self._array.shape), self._array.dtype.numpy_dtype)
        self.shape, self.dtype = self.spec
        self.chunk = tuple(int(size or 0) for size in self._array.chunk_layout.write_chunk.shape or ())
        if prod(self.chunk) * self.dtype.itemsize > LARGEST_CHUNK:
            raise WanjaxError(f"{path} claims chunks of {list(self.chunk)} {self.dtype}: `convert` writes smaller ones")

    def __len__(self) -> int:
        return self.shape[0]

    def pieces(self, part: Sequence[slice] = ()) -> Iterator[Piece]:
        """Yield the ranges of all chunks, or of those that overlap `part`."""
        whole, ranges = [slice(0, size) for size in self.spec.shape[len(part) :]], []
        for size, step, some in zip(self.spec.shape, self.chunk, (*part, *whole), strict=True):
            start, stop, _ = some.indices(size)
            ranges.append(range(start - start % step, stop, step))
        for starts in product(*ranges):
            yield tuple(
                slice(start, min(start + step, size))
                for start, step, size in zip(starts, self.chunk, self.spec.shape, strict=True)
            )

    def file(self, piece: Piece) -> Path:
        """Return a chunk's file."""
        cells = (str(part.start // step) for part, step in zip(piece, self.chunk, strict=True))
        return self.path.joinpath("c", *cells)

    def has(self, piece: Piece) -> bool:
        """Return True if a chunk has been written; its file appears when it is complete."""
        file = self.file(piece)
        return file.is_file() and file.stat().st_size == self._size

    @property
    def _size(self) -> int:
        """The bytes of each chunk's file."""
        return prod(self.chunk) * self.spec.dtype.itemsize + CHECKSUM

    def check_sizes(self, size_of: Callable[[Path], int | None] = size_here) -> None:
        """Raise WanjaxError for the first file that is missing or has the wrong size."""
        for file in map(self.file, self.pieces()):
            if (size := size_of(file)) is None:
                raise WanjaxError(f"there is no {file}, of {self._size:,} bytes: `wanjax convert` writes it again")
            if size != self._size:
                right = f"{size:,} bytes where {self._size:,} are expected"
                raise WanjaxError(f"{file} has {right}: `wanjax convert` writes it again")

    def begin(self, piece: Piece, values: np.ndarray | np.generic) -> ts.WriteFutures:
        """Start to write a chunk; `values` must not change until the write is done."""
        return self._array[piece].write(values)

    def read(self, part: Sequence[slice] = (), dtype: np.dtype | None = None) -> np.ndarray:
        """Read a part of the array, by default all, cast to `dtype`, into memory that JAX on the CPU can take."""
        self._fetch(map(self.file, self.pieces(part)))
        with _one_sentence(f"{self.path} is damaged"):
            source = ts.cast(self._array, dtype or self.spec.dtype)[tuple(part)]
            source = source[ts.d[:].translate_to[0]] if source.ndim else source
            values = aligned(source.shape, source.dtype.numpy_dtype)
            ts.array(values).write(source).result()
        return values

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read one block of a stack, or with `...` the whole array."""
        return self.read() if index is ... else self.read([slice(index, index + 1)])[0]

    def digest(self, progress: Callable[[int], object] = lambda nbytes: None) -> str:
        """Return a checksum of the shape, the dtype and the chunks' checksums; read and tests each chunk."""
        digest = hashlib.sha256(f"{self.spec.shape} {self.spec.dtype} {self.chunk}".encode())
        reading: deque = deque()

        def test() -> None:
            piece, values = reading.popleft()
            with _one_sentence(f"{self.path} is damaged"):
                values.result()
            with self.file(piece).open("rb") as file:
                file.seek(-CHECKSUM, os.SEEK_END)
                digest.update(file.read())
            progress(_nbytes(piece, self.spec.dtype))

        for piece in self.pieces():
            reading.append((piece, self._array[piece].read()))
            if len(reading) == AT_ONCE:
                test()
        while reading:
            test()
        return digest.hexdigest()[:16]

    def files(self) -> set[Path]:
        """Return the files of the folder when everything is written."""
        return {self.path / ARRAY, *map(self.file, self.pieces())}


class Writer:
    """Writes chunks in the background, a few at a time; raises OSError for one at the next chunk or at the end."""

    def __init__(self):
        self._begun: deque[ts.WriteFutures] = deque()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: object) -> None:
        self._wait(0)

    def write(self, array: StoredArray, piece: Piece, values: np.ndarray | np.generic) -> None:
        self._wait(AT_ONCE - 1)
        self._begun.append(array.begin(piece, values))

    def _wait(self, count: int) -> None:
        """Wait until at most `count` chunks are being written."""
        while len(self._begun) > count:
            try:
                self._begun.popleft().result()
            except ValueError as error:
                raise (_of_the_system(error) or OSError(reason(error))) from error


class Arrays:
    """The arrays of an Orbax checkpoint by their dotted names. Raises WanjaxError if it cannot be read."""

    def __init__(self, path: Path, fetch: Fetch = lambda files: None):
        self.path = path
        fetch([path / TREE, path / COMMITTED])
        try:
            leaves = json.loads((path / TREE).read_bytes())["tree_metadata"].values()
            names = [".".join(str(key["key"]) for key in leaf["key_metadata"]) for leaf in leaves]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WanjaxError(f"{path / TREE} cannot be read: `wanjax convert` writes a whole checkpoint") from error
        if strange := [name for name in names if not NAME.fullmatch(name)]:
            raise WanjaxError(f"{path / TREE} names {strange[0]!r}, which is not the name of an array")
        fetch(path / name / ARRAY for name in names)
        self._arrays = {name: StoredArray(path / name, fetch=fetch) for name in names}
        self.specs = {name: array.spec for name, array in self._arrays.items()}

    @classmethod
    def create(cls, path: Path, specs: Mapping[str, Spec], chunks: Mapping[str, Sequence[int]]) -> "Arrays":
        """Create arrays with chunks of these shapes; keep the chunks that are already written."""
        path.mkdir(parents=True, exist_ok=True)
        for name, spec in specs.items():
            metadata = {
                "shape": spec.shape,
                "data_type": spec.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks[name]}},
                "codecs": CODECS,
            }
            StoredArray(path / name, metadata)
        leaves = {str(tuple(name.split("."))): _leaf(name, spec) for name, spec in specs.items()}
        tree = {"tree_metadata": leaves, "use_ocdbt": False, "use_zarr3": True, "custom_metadata": None}
        handler = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
        (path / TREE).write_text(json.dumps(tree | {"store_array_data_equal_to_fill_value": True}))
        (path / COMMITTED).write_text(json.dumps({"item_handlers": handler, "metrics": {}, "custom_metadata": {}}))
        return cls(path)

    def __getitem__(self, name: str) -> StoredArray:
        return self._arrays[name]

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name].read()

    @property
    def paths(self) -> Sequence[Path]:
        return sorted(self.files())

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def restore(
        self, targets: Mapping[str, Any], progress: Callable[[int], object] = lambda nbytes: None
    ) -> dict[str, jax.Array]:
        """Read the arrays that `targets` names, each in its target's dtype and sharding.

        Args:
            targets: By name, such as `jax.ShapeDtypeStruct`; without a sharding an array goes to one device.
            progress: Receives the bytes of each array that is read.
        """
        restored = {}
        for name, target in targets.items():
            restored[name] = make_array(self[name].read, target)
            progress(self.specs[name].nbytes)
        return restored

    def check_sizes(self, size_of: Callable[[Path], int | None] = size_here) -> None:
        """Raise WanjaxError for the first file that is missing or has the wrong size."""
        for array in self._arrays.values():
            array.check_sizes(size_of)

    def files(self) -> set[Path]:
        """Return the files of the folder when everything is written."""
        return {self.path / TREE, self.path / COMMITTED}.union(*(array.files() for array in self._arrays.values()))


def make_array(read: Callable[[Piece, np.dtype], np.ndarray], target: Any) -> jax.Array:
    """Make an array with its target's sharding; read each of `shard_slices` once, and compile nothing."""
    values = {str(part): read(part, target.dtype) for part, _ in shard_slices(target)}
    if (sharding := getattr(target, "sharding", None)) is None:
        return jax.device_put(*values.values())
    return jax.make_array_from_callback(target.shape, sharding, lambda part: values[str(part)])


def shard_slices(target: Any) -> list[tuple[Piece, tuple[int, ...]]]:
    """Return the distinct slices of an array that this process's devices hold, with their shapes."""
    shape, sharding = tuple(target.shape), getattr(target, "sharding", None)
    if sharding is None:
        return [((slice(None),) * len(shape), shape)]
    slices = sharding.addressable_devices_indices_map(shape).values()
    return [(part, sharding.shard_shape(shape)) for part in {str(part): part for part in slices}.values()]


def chunk_shape(spec: Spec, stacked: bool) -> tuple[int, ...]:
    """Return a chunk's sizes: as many blocks of a stack as fit, then the longest axes halved until it fits."""
    chunk = list(spec.shape)
    if stacked:
        fitting = max(1, CHUNK * spec.shape[0] // spec.nbytes)
        chunk[0] = next(n for n in range(min(fitting, spec.shape[0]), 0, -1) if spec.shape[0] % n == 0)
    while prod(chunk) * spec.dtype.itemsize > CHUNK:
        longest = chunk.index(max(chunk))
        chunk[longest] = ceil(chunk[longest] / 2)
    return tuple(chunk)


def synchronise(files: set[Path]) -> None:
    """Wait until the files are on the disk."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _leaf(name: str, spec: Spec) -> dict[str, Any]:
    """Return Orbax's description of an array in its tree."""
    return {
        "key_metadata": [{"key": key, "key_type": 2} for key in name.split(".")],  # 2: a key of a dictionary
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(spec.shape)},
    }


def _nbytes(piece: Piece, dtype: np.dtype) -> int:
    return prod(part.stop - part.start for part in piece) * dtype.itemsize


@contextmanager
def _one_sentence(problem: str, *, writes: bool = False) -> Iterator[None]:
    """Raise tensorstore's errors, of several lines, in one sentence; those of a disk, where it `writes`, as OSError."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        if writes and (failure := _of_the_system(error)) is not None:
            raise failure from error
        raise WanjaxError(f"{problem} ({reason(error)}): `wanjax convert` writes it again") from error


def _of_the_system(error: Exception) -> OSError | None:
    """Return the system's error that one of tensorstore's names, None where it names none."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else None


def reason(error: Exception) -> str:
    """Return an error's cause, in the system's words if it has any."""
    text = str(error)
    if failure := _of_the_system(error):
        return str(failure.strerror)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return text.partition("\n")[0].partition(" [")[0].partition(": ")[2]  # without the kind of error and the trace
