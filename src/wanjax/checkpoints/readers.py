# SPDX-License-Identifier: Apache-2.0
"""Opens files of tensors of either format, and reads a checkpoint as one of another layout."""

import math
import os
from collections.abc import Callable, Collection, Sequence
from itertools import dropwhile
from pathlib import Path

import numpy as np

from wanjax.checkpoints.files import GGUF_SUFFIX, SUFFIXES, TORCH_SUFFIXES, MappedFile, Reader, SafetensorsFile, Spec
from wanjax.checkpoints.gguf_file import GgufFile
from wanjax.checkpoints.torch_file import TorchFile
from wanjax.converters.name_map import NameMap
from wanjax.converters.transforms import Shape
from wanjax.errors import WanjaxError
from wanjax.stores.paths import missing_file


def open_tensors(path: str | Path) -> MappedFile:
    """Open a file of tensors in the format of its suffix; raise WanjaxError if it cannot be read."""
    path = Path(path).expanduser()
    if not os.path.exists(path):  # which raises nothing for names that are none
        raise WanjaxError(missing_file(path))
    if path.suffix not in SUFFIXES:
        raise WanjaxError(f"{path} is no file of weights that can be read: one that ends in {' or '.join(SUFFIXES)} is")
    if path.suffix == GGUF_SUFFIX:
        return GgufFile(path)
    return TorchFile(path) if path.suffix in TORCH_SUFFIXES else SafetensorsFile(path)


class View:
    """A reader of another reader's tensors, unchanged; the base class of readers that change them."""

    def __init__(self, reader: Reader):
        self._reader = reader
        self.specs = reader.specs

    @property
    def paths(self) -> Sequence[Path]:
        """The files that hold the tensors; none if they are not in files."""
        return getattr(self._reader, "paths", [])

    def read(self, key: str) -> np.ndarray:
        return self._reader.read(key)


class Renamed(View):
    """A checkpoint by other names: `rename` returns each one, None for a tensor that is left out."""

    def __init__(self, reader: Reader, rename: Callable[[str], str | None]):
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


class Combined:
    """Several checkpoints, which have no tensor in common, as one."""

    def __init__(self, *readers: Reader):
        self._readers = {key: reader for reader in readers for key in reader.specs}
        self.specs = {key: reader.specs[key] for key, reader in self._readers.items()}

    def read(self, key: str) -> np.ndarray:
        return self._readers[key].read(key)


class Exchanged(View):
    """A checkpoint with the two halves of the rows of some modules' tensors exchanged, as `names` says."""

    def __init__(self, reader: Reader, names: NameMap):
        super().__init__(reader)
        self._names = names

    def read(self, key: str) -> np.ndarray:
        x = self._reader.read(key)
        return np.concatenate(np.split(x, 2)[::-1]) if self._names.exchanges(key) else x


class Reshaped(View):
    """A checkpoint in which tensors have the shapes that `reshape` returns, given their names and shapes."""

    def __init__(self, reader: Reader, reshape: Callable[[str, Shape], Shape]):
        super().__init__(reader)
        self.specs = {key: Spec(reshape(key, shape), dtype) for key, (shape, dtype) in reader.specs.items()}

    def read(self, key: str) -> np.ndarray:
        return self._reader.read(key).reshape(self.specs[key].shape)


def flattened(reader: Reader, names: Collection[str]) -> Reshaped:
    """Return a checkpoint without the leading axes of size 1 of the named tensors."""

    def reshape(key: str, shape: Shape) -> Shape:
        return tuple(dropwhile(lambda size: size == 1, shape)) if key in names else shape

    return Reshaped(reader, reshape)


def unflattened(reader: Reader, name: str, patch: Shape) -> Reshaped:
    """Return a checkpoint in which the kernel of a projection of patches [out, in · patch] is [out, in, *patch]."""

    def reshape(key: str, shape: Shape) -> Shape:
        if key != name or len(shape) != 2 or shape[1] % math.prod(patch):
            return shape
        return (shape[0], shape[1] // math.prod(patch), *patch)

    return Reshaped(reader, reshape)


class Unfused(View):
    """A checkpoint with each module of a name such as `to_qkv` split by rows into `to_q`, `to_k` and `to_v`."""

    def __init__(self, reader: Reader, names: Sequence[str] = ("to_qkv",)):
        super().__init__(reader)
        self._parts: dict[str, tuple[str, int | None]] = {}
        for key in reader.specs:
            module, _, leaf = key.rpartition(".")
            before, dot, name = module.rpartition(".")
            if name in names:
                parts = (f"{before}{dot}{name.replace('qkv', x)}.{leaf}" for x in "qkv")
                self._parts |= {part: (key, i) for i, part in enumerate(parts)}
            else:
                self._parts[key] = (key, None)
        self.specs = {key: self._spec(*place) for key, place in self._parts.items()}

    def _spec(self, whole: str, part: int | None) -> Spec:
        shape, dtype = self._reader.specs[whole]
        return Spec((shape[0] // 3, *shape[1:]) if shape and part is not None else shape, dtype)

    def read(self, key: str) -> np.ndarray:
        whole, part = self._parts[key]
        x = self._reader.read(whole)
        if part is None:
            return x
        rows = len(x) // 3
        return x[part * rows : (part + 1) * rows]
