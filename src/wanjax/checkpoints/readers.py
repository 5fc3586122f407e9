# SPDX-License-Identifier: Apache-2.0
"""Open files of tensors, and present a checkpoint in another layout by readers that wrap its reader."""

import math
import os
from collections.abc import Callable, Collection, Sequence
from itertools import dropwhile
from pathlib import Path

import numpy as np

from wanjax.checkpoints.files import (
    GGUF_SUFFIX,
    SUFFIXES,
    TORCH_SUFFIXES,
    MappedFile,
    SafetensorsFile,
    Spec,
    TensorReader,
)
from wanjax.checkpoints.gguf_file import GgufFile
from wanjax.checkpoints.torch_file import TorchFile
from wanjax.converters.name_map import NameMap
from wanjax.converters.transforms import Shape
from wanjax.errors import WanjaxError
from wanjax.stores.paths import missing_file


def open_tensors(path: str | Path) -> MappedFile:
    """Open a file of tensors in the format that its suffix names. Raises WanjaxError if the file cannot be read."""
    path = Path(path).expanduser()
    if not os.path.exists(path):  # os.path raises no error for an invalid name
        raise WanjaxError(missing_file(path))
    if path.suffix not in SUFFIXES:
        raise WanjaxError(f"{path} is not a file of weights: give one that ends in {' or '.join(SUFFIXES)}")
    if path.suffix == GGUF_SUFFIX:
        return GgufFile(path)
    return TorchFile(path) if path.suffix in TORCH_SUFFIXES else SafetensorsFile(path)


class TensorReaderView:
    """A reader that wraps another reader. This is the base class of readers that change tensors."""

    def __init__(self, reader: TensorReader):
        self._reader = reader
        self.specs = reader.specs

    @property
    def paths(self) -> Sequence[Path]:
        """The files with the tensors; empty if the tensors are not in files."""
        return getattr(self._reader, "paths", [])

    @property
    def is_quantized(self) -> bool:
        """Whether weights are stored as 8-bit integers."""
        return getattr(self._reader, "is_quantized", False)

    def read(self, key: str) -> np.ndarray:
        return self._reader.read(key)


class RenamedReader(TensorReaderView):
    """A reader that renames tensors. `rename` returns the new name of a tensor, or None to leave the tensor out."""

    def __init__(self, reader: TensorReader, rename: Callable[[str], str | None]):
        super().__init__(reader)
        self._keys: dict[str, str] = {}
        for key in reader.specs:
            new = rename(key)
            if new in self._keys:
                raise WanjaxError(f"{self._keys[new]!r} and {key!r} are the same tensor {new!r}: leave one of them out")
            if new is not None:
                self._keys[new] = key
        self.specs = {new: reader.specs[key] for new, key in self._keys.items()}

    def read(self, key: str) -> np.ndarray:
        return self._reader.read(self._keys[key])


class CombinedReader:
    """One reader for the tensors of several readers. A name may occur in only one reader."""

    def __init__(self, *readers: TensorReader):
        self._readers = {key: reader for reader in readers for key in reader.specs}
        self.specs = {key: reader.specs[key] for key, reader in self._readers.items()}

    def read(self, key: str) -> np.ndarray:
        return self._readers[key].read(key)


class SwappedHalvesReader(TensorReaderView):
    """A reader that swaps the first and the second half of the rows of some tensors. `names` returns True for these
    tensors."""

    def __init__(self, reader: TensorReader, names: NameMap):
        super().__init__(reader)
        self._names = names

    def read(self, key: str) -> np.ndarray:
        x = self._reader.read(key)
        return np.concatenate(np.split(x, 2)[::-1]) if self._names.swaps_halves(key) else x


class ReshapedReader(TensorReaderView):
    """A reader that reshapes tensors. `reshape` takes a tensor's name and shape, and returns the new shape."""

    def __init__(self, reader: TensorReader, reshape: Callable[[str, Shape], Shape]):
        super().__init__(reader)
        self.specs = {key: Spec(reshape(key, shape), dtype) for key, (shape, dtype) in reader.specs.items()}

    def read(self, key: str) -> np.ndarray:
        return self._reader.read(key).reshape(self.specs[key].shape)


def squeeze_leading(reader: TensorReader, names: Collection[str]) -> ReshapedReader:
    """Remove the leading axes of size 1 of the named tensors."""

    def reshape(key: str, shape: Shape) -> Shape:
        return tuple(dropwhile(lambda size: size == 1, shape)) if key in names else shape

    return ReshapedReader(reader, reshape)


def unflatten_patches(reader: TensorReader, name: str, patch: Shape) -> ReshapedReader:
    """Reshape a patch projection's weight from [out, in · patch] to [out, in, *patch]."""

    def reshape(key: str, shape: Shape) -> Shape:
        if key != name or len(shape) != 2 or shape[1] % math.prod(patch):
            return shape
        return (shape[0], shape[1] // math.prod(patch), *patch)

    return ReshapedReader(reader, reshape)


class UnfusedReader(TensorReaderView):
    """A reader that splits the rows of a fused tensor such as `to_qkv.weight` into the tensors of `to_q`, `to_k` and
    `to_v`.

    A tensor such as `to_kv.weight` is split into the tensors of `to_k` and `to_v`.
    """

    def __init__(self, reader: TensorReader, names: Sequence[str] = ("to_qkv",)):
        super().__init__(reader)
        # the fused tensor, the index of the part, and the number of parts
        self._parts: dict[str, tuple[str, int, int]] = {}
        for key in reader.specs:
            module, _, suffix = key.rpartition(".")
            parent, dot, name = module.rpartition(".")
            if name in names:
                fused = "qkv" if "qkv" in name else "kv"
                parts = (f"{parent}{dot}{name.replace(fused, x)}.{suffix}" for x in fused)
                self._parts |= {part: (key, i, len(fused)) for i, part in enumerate(parts)}
            else:
                self._parts[key] = (key, 0, 1)
        self.specs = {key: self._spec(*location) for key, location in self._parts.items()}

    def _spec(self, fused_key: str, index: int, count: int) -> Spec:
        shape, dtype = self._reader.specs[fused_key]
        return Spec((shape[0] // count, *shape[1:]) if shape else shape, dtype)

    def read(self, key: str) -> np.ndarray:
        fused_key, index, count = self._parts[key]
        x = self._reader.read(fused_key)
        if count == 1:
            return x
        rows = len(x) // count
        return x[index * rows : (index + 1) * rows]
