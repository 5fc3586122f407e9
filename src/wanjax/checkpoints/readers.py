# SPDX-License-Identifier: Apache-2.0
"""Opens files of tensors of either format, and reads a checkpoint as one of another layout."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import dropwhile
from pathlib import Path

import numpy as np

from wanjax.checkpoints.files import Reader, SafetensorsFile, Spec
from wanjax.checkpoints.torch_file import SUFFIXES as TORCH
from wanjax.checkpoints.torch_file import TorchFile
from wanjax.converters.names import Names
from wanjax.errors import WanjaxError

SUFFIXES = (".safetensors", *TORCH)


def open_tensors(path: str | Path) -> SafetensorsFile | TorchFile:
    """Opens a file of tensors in the format of its suffix; raises WanjaxError if it cannot be read."""
    path = Path(path).expanduser()
    if path.suffix not in SUFFIXES:
        raise WanjaxError(f"{path} is no file of weights that can be read: one that ends in {' or '.join(SUFFIXES)} is")
    return TorchFile(path) if path.suffix in TORCH else SafetensorsFile(path)


class View:
    """A reader of another reader's tensors, unchanged; the base of those that change them."""

    def __init__(self, reader: Reader):
        self._reader = reader

    @property
    def paths(self) -> Sequence[Path]:
        """The files that hold the tensors; none if they are not in files."""
        return getattr(self._reader, "paths", [])

    def keys(self) -> Sequence[str]:
        return tuple(self._reader.keys())

    def spec(self, key: str) -> Spec:
        return self._reader.spec(key)

    def read(self, key: str) -> np.ndarray:
        return self._reader.read(key)


class Renamed(View):
    """A checkpoint by other names: `rename` returns each one, None for a tensor that is left out."""

    def __init__(self, reader: Reader, rename: Callable[[str], str | None]):
        super().__init__(reader)
        self._keys: dict[str, str] = {}
        for key in reader.keys():  # noqa: SIM118
            new = rename(key)
            if new in self._keys:
                raise WanjaxError(f"{self._keys[new]!r} and {key!r} are the same tensor {new!r}: one of them is right")
            if new is not None:
                self._keys[new] = key

    def keys(self) -> Sequence[str]:
        return tuple(self._keys)

    def spec(self, key: str) -> Spec:
        return self._reader.spec(self._keys[key])

    def read(self, key: str) -> np.ndarray:
        return self._reader.read(self._keys[key])


class Together:
    """Several checkpoints, which have no tensor in common, as one."""

    def __init__(self, *readers: Reader):
        self._readers = {key: reader for reader in readers for key in reader.keys()}  # noqa: SIM118

    def keys(self) -> Sequence[str]:
        return tuple(self._readers)

    def spec(self, key: str) -> Spec:
        return self._readers[key].spec(key)

    def read(self, key: str) -> np.ndarray:
        return self._readers[key].read(key)


class Exchanged(View):
    """A checkpoint with the two halves of the rows of some modules' tensors exchanged, as `names` says."""

    def __init__(self, reader: Reader, names: Names):
        super().__init__(reader)
        self._names = names

    def read(self, key: str) -> np.ndarray:
        x = self._reader.read(key)
        return np.concatenate(np.split(x, 2)[::-1]) if self._names.exchanges(key) else x


class Reshaped(View, ABC):
    """A checkpoint in which some tensors have other shapes; subclasses say which."""

    def spec(self, key: str) -> Spec:
        shape, dtype = self._reader.spec(key)
        return Spec(self._shape(key, shape), dtype)

    def read(self, key: str) -> np.ndarray:
        x = self._reader.read(key)
        return x.reshape(self._shape(key, x.shape))

    @abstractmethod
    def _shape(self, key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the new shape of a tensor."""


class Flattened(Reshaped):
    """A checkpoint without the leading axes of size 1 of the named tensors."""

    def __init__(self, reader: Reader, names: Iterable[str]):
        super().__init__(reader)
        self._names = set(names)

    def _shape(self, key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dropwhile(lambda size: size == 1, shape)) if key in self._names else shape


class Unflattened(Reshaped):
    """A checkpoint in which the named kernel of a projection of patches [out, in · patch] is [out, in, *patch]."""

    def __init__(self, reader: Reader, name: str, patch: tuple[int, ...]):
        super().__init__(reader)
        self._name, self._patch = name, patch

    def _shape(self, key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if key != self._name or len(shape) != 2 or shape[1] % math.prod(self._patch):
            return shape
        return (shape[0], shape[1] // math.prod(self._patch), *self._patch)


class Unfused(View):
    """A checkpoint with each module of a name such as `to_qkv` split by rows into `to_q`, `to_k` and `to_v`."""

    def __init__(self, reader: Reader, names: Sequence[str] = ("to_qkv",)):
        super().__init__(reader)
        self._parts: dict[str, tuple[str, int | None]] = {}
        for key in reader.keys():  # noqa: SIM118
            module, _, leaf = key.rpartition(".")
            before, dot, name = module.rpartition(".")
            if name in names:
                parts = (f"{before}{dot}{name.replace('qkv', x)}.{leaf}" for x in "qkv")
                self._parts |= {part: (key, i) for i, part in enumerate(parts)}
            else:
                self._parts[key] = (key, None)

    def keys(self) -> Sequence[str]:
        return tuple(self._parts)

    def spec(self, key: str) -> Spec:
        whole, part = self._parts[key]
        (shape, dtype) = self._reader.spec(whole)
        return Spec((shape[0] // 3, *shape[1:]) if shape and part is not None else shape, dtype)

    def read(self, key: str) -> np.ndarray:
        whole, part = self._parts[key]
        x = self._reader.read(whole)
        if part is None:
            return x
        rows = len(x) // 3
        return x[part * rows : (part + 1) * rows]
