# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files of networks, as llama.cpp and ComfyUI-GGUF write them, and dequantises each tensor as it is read.

A file has a header of fields and of tensors, each with its dimensions in reverse order, its type and its offset, and
then the tensors' bytes (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The header is read here: it comes
from a stranger, and the package `gguf` makes an array for each of the 256,000 tokens that a text encoder's file holds.
Numbers are dequantised by that package (`pip install 'wanjax[gguf]'`).

ComfyUI-GGUF stores a tensor whose rows are no whole number of blocks as rows of 256, with its shape in a field.
"""

import math
import struct
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from wanjax.checkpoints.files import DTYPES, MAX_RANK, CorruptError, MappedFile, Spec, TensorLocation, row_by_row
from wanjax.errors import WanjaxError

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT, ALIGNMENT_FIELD = 32, "general.alignment"
SHAPE_FIELD = "comfy.gguf.orig_shape."
STRING, ARRAY = 8, 9
STRUCT_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of fields, as `struct` spells them."""
MAX_NAME = 1 << 16  # bytes
MAX_NESTING = 4  # arrays in arrays
PLAIN = {name: DTYPES[name] for name in ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")}
"""The types that are stored as they are, by the names that safetensors has for them too."""


class Field(NamedTuple):
    """A field of the header, whose value is parsed when it is asked for."""

    kind: int
    start: int


class GgufFile(MappedFile):
    """A GGUF file: checks its header, and dequantises a tensor when asked for it.

    Attributes:
        fields: The header's fields by their names.

    Raises:
        WanjaxError: The file is missing, truncated or corrupt, has a type that cannot be read, or the package `gguf` is
            not installed.
    """

    def __init__(self, path: Any):
        super().__init__(path)
        quantised = sorted({kind for kind in self._types.values() if kind not in PLAIN})
        for kind in quantised:
            if not _is_dequantised(kind):
                raise WanjaxError(
                    f"{self.path} has tensors of GGUF's type {kind}, which the package gguf does not read"
                )
        self.specs: Mapping[str, Spec] = {
            name: Spec(shape, PLAIN.get(self._types[name], np.dtype(np.float32)))
            for name, shape in self._shapes.items()
        }

    def _locate_tensors(self) -> dict[str, TensorLocation]:
        header = _Header(np.memmap(self.path, np.uint8, "r") if self.path.stat().st_size else np.empty(0, np.uint8))
        if header.take(4) != MAGIC:
            raise CorruptError("it does not begin as a GGUF file")
        if (version := header.number("I")) not in VERSIONS:
            raise CorruptError(f"it is of version {version} of GGUF, and 2 and 3 are read")
        tensors, fields = header.number("Q"), header.number("Q")
        self.fields: dict[str, Field] = {}
        for _ in range(fields):
            name, kind = header.text(), header.number("I")
            self.fields[name] = Field(kind, header.position)
            header.skip(kind)
        self._header = header
        entries = [_tensor_entry(header) for _ in range(tensors)]
        alignment = self.value(ALIGNMENT_FIELD, ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise CorruptError(f"{ALIGNMENT_FIELD} is {alignment!r}")
        data = -(-header.position // alignment) * alignment
        self._types: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        locations = {}
        for name, shape, kind, offset in entries:
            if name in locations:
                raise CorruptError(f"it has two tensors of the name {name!r}")
            self._types[name], locations[name] = kind, _location(name, shape, kind, data + offset, header.size)
            self._shapes[name] = self._published_shape(name, shape)
        return locations

    def read(self, key: str) -> np.ndarray:
        """Return a tensor: plain numbers as a view of the file's pages, others dequantised to float32."""
        raw = super().read(key)
        if (kind := self._types[key]) not in PLAIN:
            raw = dequantise(raw, kind)
        return raw.reshape(self._shapes[key])

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a field: a number, a string or a list; `default` where there is none."""
        if (field := self.fields.get(name)) is None:
            return default
        return _Header(self._header.data, field.start).value(field.kind)

    def _published_shape(self, name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a tensor had before it was stored in rows of 256."""
        shape = self.value(SHAPE_FIELD + name)
        if shape is None:
            return stored
        whole = isinstance(shape, list) and len(shape) <= MAX_RANK and all(type(n) is int and n >= 0 for n in shape)
        if not whole or math.prod(shape) != math.prod(stored):
            raise CorruptError(f"{SHAPE_FIELD}{name} is {shape!r} of a tensor {list(stored)}")
        return tuple(shape)


class _Header:
    """A position in a header, which moves as values are taken; raises CorruptError at the end of the file."""

    def __init__(self, data: np.ndarray, position: int = 0):
        self.data, self.position, self.size = data, position, len(data)

    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if count > self.size - start:
            raise CorruptError("it ends within its header")
        return self.data[start : self.position].tobytes()

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def text(self, limit: int = MAX_NAME) -> str:
        if (length := self.number("Q")) > limit:
            raise CorruptError(f"it has a name of {length} bytes")
        return self.take(length).decode(errors="replace")

    def value(self, kind: int, nesting: int = 0) -> Any:
        """Return a value of one of the format's types, and move behind it."""
        if kind == STRING:
            return self.text(self.size)
        if kind != ARRAY:
            return self.number(_struct_code(kind))
        of, count = self._array(nesting)
        if of in STRUCT_CODES:
            return list(
                struct.unpack(f"<{count}{STRUCT_CODES[of]}", self.take(count * struct.calcsize(f"<{STRUCT_CODES[of]}")))
            )
        return [self.value(of, nesting + 1) for _ in range(count)]

    def skip(self, kind: int, nesting: int = 0) -> None:
        """Move behind a value without keeping it."""
        if kind == STRING:
            self._move(self.number("Q"))
        elif kind != ARRAY:
            self._move(struct.calcsize(f"<{_struct_code(kind)}"))
        else:
            of, count = self._array(nesting)
            if of in STRUCT_CODES:
                self._move(count * struct.calcsize(f"<{STRUCT_CODES[of]}"))
            else:
                for _ in range(count):
                    self.skip(of, nesting + 1)

    def _array(self, nesting: int) -> tuple[int, int]:
        if nesting == MAX_NESTING:
            raise CorruptError("it has arrays in arrays beyond reason")
        of, count = self.number("I"), self.number("Q")
        if count > self.size - self.position:  # a value takes a byte at the least
            raise CorruptError("it ends within its header")
        return of, count

    def _move(self, count: int) -> None:
        if count > self.size - self.position:
            raise CorruptError("it ends within its header")
        self.position += count


def _struct_code(kind: int) -> str:
    if kind not in STRUCT_CODES:
        raise CorruptError(f"it has a field of the unknown type {kind}")
    return STRUCT_CODES[kind]


def _tensor_entry(header: _Header) -> tuple[str, tuple[int, ...], str, int]:
    """Return the name, the shape, the type and the offset of the next tensor of a header."""
    name, rank = header.text(), header.number("I")
    if rank > MAX_RANK:
        raise CorruptError(f"{name!r} has {rank} dimensions")
    shape = tuple(header.number("Q") for _ in range(rank))[::-1]
    return name, shape, _type_name(header.number("I"), name), header.number("Q")


def _location(name: str, shape: tuple[int, ...], kind: str, start: int, size: int) -> TensorLocation:
    """Return where a tensor's numbers lie, those of blocks as bytes [rows, bytes of a row]."""
    if kind in PLAIN:
        spec = Spec(shape, PLAIN[kind])
    else:
        block, nbytes = _block_size(kind)
        if not shape or shape[-1] % block:
            raise CorruptError(f"{name!r} is {list(shape)} in {kind}, whose blocks have {block} numbers")
        spec = Spec((math.prod(shape[:-1]), shape[-1] // block * nbytes), np.dtype(np.uint8))
    if start + spec.nbytes > size:
        raise CorruptError(f"it ends at byte {size}, before the end of {name!r}")
    return row_by_row(spec, start)


@cache
def _library() -> Any:
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise WanjaxError("a GGUF file is read with the package gguf: pip install 'wanjax[gguf]'") from error
    return gguf


def _type_name(number: int, name: str) -> str:
    types = _library().GGMLQuantizationType
    try:
        return types(number).name
    except ValueError as error:
        raise CorruptError(f"{name!r} is of the type {number}, which this version of the package gguf lacks") from error


def _block_size(kind: str) -> tuple[int, int]:
    """Return how many numbers a block has, and its bytes."""
    gguf = _library()
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


@cache
def _is_dequantised(kind: str) -> bool:
    """Return whether the package reads a type, by a block of zeros."""
    try:
        dequantise(np.zeros((1, _block_size(kind)[1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def dequantise(raw: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers of blocks as float32.

    Args:
        raw: The blocks' bytes, uint8 [rows, bytes of a row].
        kind: Their type, as the package `gguf` names it.
    """
    gguf = _library()
    with np.errstate(all="ignore"):  # a damaged block may hold any number
        return np.asarray(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]), np.float32)
