# SPDX-License-Identifier: Apache-2.0
"""Orbax checkpoints that are written chunk by chunk and restored onto any sharding.

An Orbax checkpoint is a folder with a zarr 3 array for each leaf of a tree, and a file that describes the tree. Orbax
needs each array in memory to save it. This module writes the same files with tensorstore, the library that Orbax uses,
but one chunk at a time. A stack of blocks is therefore never in memory as a whole. Each chunk is a file of a few
megabytes. The file appears only when it is complete, so an interrupted run can resume. It ends with a checksum (crc32c)
that every reader verifies. Restoring reads only the shards of this process's devices.

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

from wanjax.checkpoints.files import Spec, aligned_empty
from wanjax.errors import WanjaxError

MAX_CHUNK_BYTES = 16 << 20  # the largest chunk to write
MAX_READ_CHUNK_BYTES = 1 << 30  # the largest chunk to read
CHECKSUM_BYTES = 4  # the checksum at the end of a chunk's file
TREE_FILE, CHECKPOINT_FILE = "_METADATA", "_CHECKPOINT_METADATA"  # Orbax's file names for the tree and the checkpoint
ARRAY_FILE = "zarr.json"  # zarr's file with an array's metadata
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
# Write chunks of zeros too, so that a missing chunk is an error.
STRICT_CHUNKS = {"store_data_equal_to_fill_value": True, "fill_missing_data_reads": False}
ARRAY_NAME = re.compile(r"\w+(\.\w+)*", re.ASCII)
RECONVERT_ADVICE = "delete the checkpoint's folder and convert the original again, or convert it to a new folder"
MAX_PENDING = 4  # the number of chunks that are in memory to be read or written

ChunkSlice = tuple[slice, ...]
Fetch = Callable[[Iterable[Path]], object]
"""A function that downloads files before they are read, for a folder that mirrors a folder in a store."""


def local_size(file: Path) -> int | None:
    """Return the size of a file in bytes, or None if the file is missing."""
    return file.stat().st_size if file.is_file() else None


class StoredArray:
    """A zarr array in a folder. Raises WanjaxError if the array is missing or damaged."""

    def __init__(self, path: Path, metadata: Mapping[str, Any] | None = None, fetch: Fetch = lambda files: None):
        """Open the array, or create it with this `metadata` if it does not exist."""
        self.path, self._fetch = path, fetch
        # Files are not flushed one by one: `fsync_files` flushes all of them at the end.
        location = os.path.realpath(path)  # tensorstore refuses a path with `..`
        files = {"driver": "file", "path": f"{location}/", "file_io_sync": False}
        spec = {"driver": "zarr3", "kvstore": files, "open": True} | STRICT_CHUNKS
        if metadata is not None:
            spec |= {"create": True, "metadata": metadata}
        with _tensorstore_errors(f"{path} is not a readable array", writes=metadata is not None):
            self._array = ts.open(spec).result()
        self.spec = Spec(tuple(self._array.shape), self._array.dtype.numpy_dtype)
        self.shape, self.dtype = self.spec
        self.chunk_sizes = tuple(int(size or 0) for size in self._array.chunk_layout.write_chunk.shape or ())
        if prod(self.chunk_sizes) * self.dtype.itemsize > MAX_READ_CHUNK_BYTES:
            raise WanjaxError(
                f"{path} claims chunks of {list(self.chunk_sizes)} {self.dtype}, but `wanjax convert` writes "
                f"smaller chunks: {RECONVERT_ADVICE}"
            )

    def __len__(self) -> int:
        return self.shape[0]

    def chunk_slices(self, selection: Sequence[slice] = ()) -> Iterator[ChunkSlice]:
        """Yield the index ranges of all chunks, or of the chunks that overlap `selection`."""
        remaining, ranges = [slice(0, size) for size in self.spec.shape[len(selection) :]], []
        for size, step, axis_slice in zip(self.spec.shape, self.chunk_sizes, (*selection, *remaining), strict=True):
            start, stop, _ = axis_slice.indices(size)
            ranges.append(range(start - start % step, stop, step))
        for starts in product(*ranges):
            yield tuple(
                slice(start, min(start + step, size))
                for start, step, size in zip(starts, self.chunk_sizes, self.spec.shape, strict=True)
            )

    def chunk_file(self, chunk: ChunkSlice) -> Path:
        """Return the path of a chunk's file."""
        indices = (str(axis_slice.start // step) for axis_slice, step in zip(chunk, self.chunk_sizes, strict=True))
        return self.path.joinpath("c", *indices)

    def is_written(self, chunk: ChunkSlice) -> bool:
        """Return whether a chunk is written. The file of a chunk appears only when it is complete."""
        file = self.chunk_file(chunk)
        return file.is_file() and file.stat().st_size == self._file_bytes

    @property
    def _file_bytes(self) -> int:
        """The size of each chunk's file in bytes."""
        return prod(self.chunk_sizes) * self.spec.dtype.itemsize + CHECKSUM_BYTES

    def check_sizes(self, size_of: Callable[[Path], int | None] = local_size) -> None:
        """Raise WanjaxError for the first file that is missing or has the wrong size."""
        for file in map(self.chunk_file, self.chunk_slices()):
            if (size := size_of(file)) is None:
                raise WanjaxError(f"{file} is missing: {RECONVERT_ADVICE}")
            if size != self._file_bytes:
                raise WanjaxError(f"{file} has {size:,} bytes, expected {self._file_bytes:,}: {RECONVERT_ADVICE}")

    def start_write(self, chunk: ChunkSlice, values: np.ndarray | np.generic) -> ts.WriteFutures:
        """Start writing a chunk; `values` must not change until the write is done."""
        return self._array[chunk].write(values)

    def read(self, selection: Sequence[slice] = (), dtype: np.dtype | None = None) -> np.ndarray:
        """Read a part of the array, or all of it, and cast it to `dtype`. The memory is aligned for JAX on a CPU."""
        self._fetch(map(self.chunk_file, self.chunk_slices(selection)))
        with _tensorstore_errors(f"{self.path} is damaged"):
            source = ts.cast(self._array, dtype or self.spec.dtype)[tuple(selection)]
            source = source[ts.d[:].translate_to[0]] if source.ndim else source
            values = aligned_empty(source.shape, source.dtype.numpy_dtype)
            ts.array(values).write(source).result()
        return values

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read one block of a stack, or with `...` the whole array."""
        return self.read() if index is ... else self.read([slice(index, index + 1)])[0]

    def digest(self, progress: Callable[[int], object] = lambda nbytes: None) -> str:
        """Return a digest of the shape, the dtype and the chunks' checksums, after reading and verifying each chunk."""
        digest = hashlib.sha256(f"{self.spec.shape} {self.spec.dtype} {self.chunk_sizes}".encode())
        pending: deque = deque()

        def verify_next() -> None:
            chunk, values = pending.popleft()
            with _tensorstore_errors(f"{self.path} is damaged"):
                values.result()
            with self.chunk_file(chunk).open("rb") as file:
                file.seek(-CHECKSUM_BYTES, os.SEEK_END)
                digest.update(file.read())
            progress(_chunk_bytes(chunk, self.spec.dtype))

        for chunk in self.chunk_slices():
            pending.append((chunk, self._array[chunk].read()))
            if len(pending) == MAX_PENDING:
                verify_next()
        while pending:
            verify_next()
        return digest.hexdigest()[:16]

    def files(self) -> set[Path]:
        """Return the files of the folder when everything is written."""
        return {self.path / ARRAY_FILE, *map(self.chunk_file, self.chunk_slices())}


class Writer:
    """Write chunks in the background, a few at a time.

    After a failed write, a later write or the end raises OSError.
    """

    def __init__(self):
        self._pending: deque[ts.WriteFutures] = deque()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: object) -> None:
        self._wait(0)

    def write(self, array: StoredArray, chunk: ChunkSlice, values: np.ndarray | np.generic) -> None:
        self._wait(MAX_PENDING - 1)
        self._pending.append(array.start_write(chunk, values))

    def _wait(self, count: int) -> None:
        """Wait until at most `count` chunks are being written."""
        while len(self._pending) > count:
            try:
                self._pending.popleft().result()
            except ValueError as error:
                raise (_system_error(error) or OSError(reason(error))) from error


class OrbaxCheckpoint:
    """An Orbax checkpoint: its arrays by dotted names. Raises WanjaxError if the checkpoint cannot be read."""

    def __init__(self, path: Path, fetch: Fetch = lambda files: None):
        self.path = path
        fetch([path / TREE_FILE, path / CHECKPOINT_FILE])
        try:
            leaves = json.loads((path / TREE_FILE).read_bytes())["tree_metadata"].values()
            names = [".".join(str(key["key"]) for key in leaf["key_metadata"]) for leaf in leaves]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WanjaxError(f"{path / TREE_FILE} cannot be read: {RECONVERT_ADVICE}") from error
        if invalid := [name for name in names if not ARRAY_NAME.fullmatch(name)]:
            problem = f"{path / TREE_FILE} lists {invalid[0]!r}, which is not the name of an array"
            raise WanjaxError(f"{problem}: {RECONVERT_ADVICE}")
        fetch(path / name / ARRAY_FILE for name in names)
        self._arrays = {name: StoredArray(path / name, fetch=fetch) for name in names}
        self.specs = {name: array.spec for name, array in self._arrays.items()}

    @classmethod
    def create(cls, path: Path, specs: Mapping[str, Spec], chunks: Mapping[str, Sequence[int]]) -> "OrbaxCheckpoint":
        """Create arrays with chunks of these shapes. Keep chunks that are already written."""
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
        (path / TREE_FILE).write_text(json.dumps(tree | {"store_array_data_equal_to_fill_value": True}))
        (path / CHECKPOINT_FILE).write_text(
            json.dumps({"item_handlers": handler, "metrics": {}, "custom_metadata": {}})
        )
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
        """Read the arrays in `targets`, each with its target's dtype and sharding.

        Args:
            targets: An object such as `jax.ShapeDtypeStruct` by name. An array without a sharding goes to one device.
            progress: Called with the bytes of each array that is read.
        """
        restored = {}
        for name, target in targets.items():
            restored[name] = make_array(self[name].read, target)
            progress(self.specs[name].nbytes)
        return restored

    def check_sizes(self, size_of: Callable[[Path], int | None] = local_size) -> None:
        """Raise WanjaxError for the first file that is missing or has the wrong size."""
        for array in self._arrays.values():
            array.check_sizes(size_of)

    def files(self) -> set[Path]:
        """Return the files of the folder when everything is written."""
        return {self.path / TREE_FILE, self.path / CHECKPOINT_FILE}.union(
            *(array.files() for array in self._arrays.values())
        )


def make_array(read: Callable[[ChunkSlice, np.dtype], np.ndarray], target: Any) -> jax.Array:
    """Build an array with the sharding of `target`.

    JAX compiles nothing. `read` is called once for each slice of `shard_slices`.
    """
    values = {str(shard): read(shard, target.dtype) for shard, _ in shard_slices(target)}
    if (sharding := getattr(target, "sharding", None)) is None:
        return jax.device_put(*values.values())
    return jax.make_array_from_callback(target.shape, sharding, lambda shard: values[str(shard)])


def shard_slices(target: Any) -> list[tuple[ChunkSlice, tuple[int, ...]]]:
    """Return the distinct slices of an array that this process's devices hold, with their shapes."""
    shape, sharding = tuple(target.shape), getattr(target, "sharding", None)
    if sharding is None:
        return [((slice(None),) * len(shape), shape)]
    slices = sharding.addressable_devices_indices_map(shape).values()
    return [(shard, sharding.shard_shape(shape)) for shard in {str(shard): shard for shard in slices}.values()]


def chunk_shape(spec: Spec, stacked: bool) -> tuple[int, ...]:
    """Choose a chunk's shape: as many blocks of a stack as fit.

    If a single block does not fit, halve its longest axis until it fits.
    """
    chunk_sizes = list(spec.shape)
    if stacked:
        max_blocks = max(1, MAX_CHUNK_BYTES * spec.shape[0] // spec.nbytes)
        chunk_sizes[0] = next(
            blocks for blocks in range(min(max_blocks, spec.shape[0]), 0, -1) if spec.shape[0] % blocks == 0
        )
    while prod(chunk_sizes) * spec.dtype.itemsize > MAX_CHUNK_BYTES:
        longest = chunk_sizes.index(max(chunk_sizes))
        chunk_sizes[longest] = ceil(chunk_sizes[longest] / 2)
    return tuple(chunk_sizes)


def fsync_files(files: set[Path]) -> None:
    """Flush files to the disk."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _leaf(name: str, spec: Spec) -> dict[str, Any]:
    """Return Orbax's metadata of an array in its tree."""
    return {
        "key_metadata": [{"key": key, "key_type": 2} for key in name.split(".")],  # 2 means a key of a dictionary
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(spec.shape)},
    }


def _chunk_bytes(chunk: ChunkSlice, dtype: np.dtype) -> int:
    return prod(axis_slice.stop - axis_slice.start for axis_slice in chunk) * dtype.itemsize


@contextmanager
def _tensorstore_errors(problem: str, *, writes: bool = False) -> Iterator[None]:
    """Turn tensorstore's errors, which have several lines, into WanjaxError.

    With `writes`, errors of the disk become OSError.
    """
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        if writes and (failure := _system_error(error)) is not None:
            raise failure from error
        raise WanjaxError(f"{problem} ({reason(error)}): {RECONVERT_ADVICE}") from error


def _system_error(error: Exception) -> OSError | None:
    """Return the operating system's error that a tensorstore error contains, or None."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else None


def reason(error: Exception) -> str:
    """Return the cause of an error, in the operating system's words if the error contains them."""
    text = str(error)
    if failure := _system_error(error):
        return str(failure.strerror)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # The message is between the kind of the error and the trace.
    return text.partition("\n")[0].partition(" [")[0].partition(": ")[2]
