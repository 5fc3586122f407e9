# SPDX-License-Identifier: Apache-2.0
"""Read GGUF files of networks, as llama.cpp and ComfyUI-GGUF write them; dequantise each tensor while reading it.

A GGUF file has a header and then the tensors' bytes. The header lists fields and tensors. For a tensor it has the
dimensions in reverse order, the type and the offset (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

This module reads the header itself, because a header from an untrusted source needs checks. The package `gguf` would
also make an array for each of the 256,000 tokens in the file of a text encoder. The package (the extra `gguf`)
dequantises the numbers, except for the types in `gguf_blocks.py`.

A row must consist of whole blocks. If a tensor's rows do not, ComfyUI-GGUF stores its values in rows of 256, and
writes the original shape of the tensor to a field of the header.
"""

import math
import struct
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from wanjax.checkpoints.files import DTYPES, MAX_RANK, CorruptError, MappedFile, Spec, TensorLocation, row_by_row
from wanjax.checkpoints.gguf_blocks import FAST_DEQUANTIZERS
from wanjax.checkpoints.pieces import row_pieces
from wanjax.errors import WanjaxError, install_extra

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT, ALIGNMENT_FIELD = 32, "general.alignment"
SHAPE_FIELD = "comfy.gguf.orig_shape."
STRING_TYPE, ARRAY_TYPE = 8, 9
STRUCT_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The letters of `struct` for the types of fields."""
MAX_NAME = 1 << 16  # bytes
MAX_NESTING = 4  # the depth of arrays within arrays
UNQUANTIZED_TYPES = {name: DTYPES[name] for name in ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")}
"""The types without quantisation. GGUF and safetensors have the same names for them."""


class Field(NamedTuple):
    """A field of the header: its type, and the position of its value, which is parsed on demand."""

    value_type: int
    start: int


class GgufFile(MappedFile):
    """A GGUF file, whose header is checked when it is opened. Reading a tensor dequantises it.

    Attributes:
        fields: The header's fields by their names.

    Raises:
        WanjaxError: The file is missing, truncated or corrupt, or has a type that the package `gguf` cannot dequantise,
            or `gguf` is not installed.
    """

    def __init__(self, path: Any):
        super().__init__(path)
        quantised = sorted(
            {tensor_type for tensor_type in self._types.values() if tensor_type not in UNQUANTIZED_TYPES}
        )
        for tensor_type in quantised:
            if not _is_dequantised(tensor_type):
                raise WanjaxError(
                    f"{self.path} has tensors of the type {tensor_type}, which the package gguf cannot dequantise: "
                    "get the file in another type"
                )
        self.specs: Mapping[str, Spec] = {
            name: Spec(shape, UNQUANTIZED_TYPES.get(self._types[name], np.dtype(np.float32)))
            for name, shape in self._shapes.items()
        }

    def _locate_tensors(self) -> dict[str, TensorLocation]:
        header = _Header(np.memmap(self.path, np.uint8, "r") if self.path.stat().st_size else np.empty(0, np.uint8))
        if header.take(4) != MAGIC:
            raise CorruptError("it does not begin with the letters GGUF")
        if (version := header.number("I")) not in VERSIONS:
            raise CorruptError(f"it has GGUF's version {version}, but only 2 and 3 are supported")
        num_tensors, num_fields = header.number("Q"), header.number("Q")
        self.fields: dict[str, Field] = {}
        for _ in range(num_fields):
            name, value_type = header.text(), header.number("I")
            self.fields[name] = Field(value_type, header.position)
            header.skip(value_type)
        self._header = header
        entries = [_tensor_entry(header) for _ in range(num_tensors)]
        alignment = self.value(ALIGNMENT_FIELD, ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise CorruptError(f"{ALIGNMENT_FIELD} is {alignment!r}")
        data_start = -(-header.position // alignment) * alignment
        self._types: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        locations = {}
        for name, shape, tensor_type, offset in entries:
            if name in locations:
                raise CorruptError(f"it has two tensors named {name!r}")
            self._types[name], locations[name] = (
                tensor_type,
                _location(name, shape, tensor_type, data_start + offset, header.size),
            )
            self._shapes[name] = self._published_shape(name, shape)
        return locations

    def read(self, key: str) -> np.ndarray:
        """Return a tensor: a view of the mapped file, or dequantised float32 if its type is quantised."""
        raw = super().read(key)
        if (tensor_type := self._types[key]) not in UNQUANTIZED_TYPES:
            raw = dequantise(raw, tensor_type)
        return raw.reshape(self._shapes[key])

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a field: a number, a string or a list. Returns `default` if there is no such field."""
        if (field := self.fields.get(name)) is None:
            return default
        return _Header(self._header.data, field.start).value(field.value_type)

    def _published_shape(self, name: str, stored_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a tensor had before it was stored in rows of 256."""
        shape = self.value(SHAPE_FIELD + name)
        if shape is None:
            return stored_shape
        is_shape = isinstance(shape, list) and len(shape) <= MAX_RANK and all(type(n) is int and n >= 0 for n in shape)
        if not is_shape or math.prod(shape) != math.prod(stored_shape):
            raise CorruptError(f"{SHAPE_FIELD}{name} is {shape!r}, but the tensor is stored as {list(stored_shape)}")
        return tuple(shape)


class _Header:
    """A header, and the position of the next value.

    Reading a value moves the position, and raises CorruptError past the end of the file.
    """

    def __init__(self, data: np.ndarray, position: int = 0):
        self.data, self.position, self.size = data, position, len(data)

    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if count > self.size - start:
            raise CorruptError("it ends within its header")
        return self.data[start : self.position].tobytes()

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self, limit: int = MAX_NAME) -> str:
        if (length := self.number("Q")) > limit:
            raise CorruptError(f"a name in it claims {length} bytes, and the limit is {limit}")
        return self.take(length).decode(errors="replace")

    def value(self, value_type: int, nesting: int = 0) -> Any:
        """Read a value of this type at the position."""
        if value_type == STRING_TYPE:
            return self.text(self.size)
        if value_type != ARRAY_TYPE:
            return self.number(_struct_code(value_type))
        item_type, count = self._read_array_header(nesting)
        if item_type in STRUCT_CODES:
            return list(
                struct.unpack(
                    f"<{count}{STRUCT_CODES[item_type]}",
                    self.take(count * struct.calcsize(f"<{STRUCT_CODES[item_type]}")),
                )
            )
        return [self.value(item_type, nesting + 1) for _ in range(count)]

    def skip(self, value_type: int, nesting: int = 0) -> None:
        """Skip a value of this type at the position."""
        if value_type == STRING_TYPE:
            self._advance(self.number("Q"))
        elif value_type != ARRAY_TYPE:
            self._advance(struct.calcsize(f"<{_struct_code(value_type)}"))
        else:
            item_type, count = self._read_array_header(nesting)
            if item_type in STRUCT_CODES:
                self._advance(count * struct.calcsize(f"<{STRUCT_CODES[item_type]}"))
            else:
                for _ in range(count):
                    self.skip(item_type, nesting + 1)

    def _read_array_header(self, nesting: int) -> tuple[int, int]:
        if nesting == MAX_NESTING:
            raise CorruptError(f"it has arrays nested {MAX_NESTING} deep or more")
        item_type, count = self.number("I"), self.number("Q")
        if count > self.size - self.position:  # each value takes at least one byte
            raise CorruptError("it ends within its header")
        return item_type, count

    def _advance(self, count: int) -> None:
        if count > self.size - self.position:
            raise CorruptError("it ends within its header")
        self.position += count


def _struct_code(value_type: int) -> str:
    if value_type not in STRUCT_CODES:
        raise CorruptError(f"it has a field of the unknown type {value_type}")
    return STRUCT_CODES[value_type]


def _tensor_entry(header: _Header) -> tuple[str, tuple[int, ...], str, int]:
    """Read the name, the shape, the type and the offset of the next tensor in a header."""
    name, rank = header.text(), header.number("I")
    if rank > MAX_RANK:
        raise CorruptError(f"{name!r} has {rank} dimensions")
    shape = tuple(header.number("Q") for _ in range(rank))[::-1]
    return name, shape, _type_name(header.number("I"), name), header.number("Q")


def _location(name: str, shape: tuple[int, ...], tensor_type: str, start: int, size: int) -> TensorLocation:
    """Return the location of a tensor's numbers. The location of a quantised tensor has bytes [rows, bytes of a
    row]."""
    if tensor_type in UNQUANTIZED_TYPES:
        spec = Spec(shape, UNQUANTIZED_TYPES[tensor_type])
    else:
        block, nbytes = _block_size(tensor_type)
        if not shape or shape[-1] % block:
            raise CorruptError(f"{name!r} is {list(shape)} in {tensor_type}, whose blocks have {block} numbers")
        spec = Spec((math.prod(shape[:-1]), shape[-1] // block * nbytes), np.dtype(np.uint8))
    if start + spec.nbytes > size:
        raise CorruptError(f"it ends at byte {size}, before the end of {name!r}")
    return row_by_row(spec, start)


@cache
def _library() -> Any:
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise WanjaxError(f"a GGUF file needs the package gguf: {install_extra('gguf')}") from error
    return gguf


def _type_name(number: int, name: str) -> str:
    types = _library().GGMLQuantizationType
    try:
        return types(number).name
    except ValueError as error:
        raise CorruptError(f"{name!r} is of the type {number}, which this version of the package gguf lacks") from error


def _block_size(tensor_type: str) -> tuple[int, int]:
    """Return the number of values in a block, and the number of its bytes."""
    gguf = _library()
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor_type]]


@cache
def _is_dequantised(tensor_type: str) -> bool:
    """Return whether the package can dequantise a type, by trying it on a block of zeros."""
    try:
        dequantise(np.zeros((1, _block_size(tensor_type)[1]), np.uint8), tensor_type)
    except NotImplementedError:
        return False
    return True


def dequantise(raw: np.ndarray, tensor_type: str) -> np.ndarray:
    """Dequantise blocks to float32.

    Args:
        raw: The blocks' bytes, uint8 [rows, bytes of a row].
        tensor_type: The type of the blocks, as the package `gguf` names it.
    """
    gguf = _library()
    with np.errstate(all="ignore"):  # a damaged block may contain any number
        if tensor_type not in FAST_DEQUANTIZERS:
            return np.asarray(gguf.dequantize(raw, gguf.GGMLQuantizationType[tensor_type]), np.float32)
        block, nbytes = _block_size(tensor_type)
        out = np.empty((len(raw), raw.shape[1] // nbytes * block), np.float32)
        for piece in row_pieces(out.shape):
            FAST_DEQUANTIZERS[tensor_type](
                np.ascontiguousarray(raw[piece]).reshape(-1, nbytes), out[piece].reshape(-1, block)
            )
        return out
