# SPDX-License-Identifier: Apache-2.0
"""Reads what `torch.save` wrote, without torch and without running the pickle that is in it.

Since torch 1.6 such a file is a zip archive whose records are not compressed: `NAME/data.pkl`, a pickle that describes
a table of tensors, and `NAME/data/0`, `NAME/data/1` ..., the storages that they lie in. A pickle is a program, and
what it may call is anything. So it is only read here: `describe` follows the few operations that tables of tensors are
made of, and notes a call instead of making it. Tensors are mapped to the file one at a time
(https://pytorch.org/docs/stable/notes/serialization.html; the operations are documented in Python's pickletools).
"""

import math
import mmap
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from wanjax.checkpoint import HEADER_LIMIT, MAX_RANK, Spec
from wanjax.errors import WanjaxError

SUFFIXES = (".pth", ".pt", ".ckpt", ".bin")
STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
    "UntypedStorage": np.dtype(np.uint8),
}
LATER_DTYPES = {  # those that have no storage of their own
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64),
}
PICKLE_LIMIT = 1 << 24  # bytes; a thousand tensors take about 200,000
LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip record: signature, lengths of its name and of its extra field


class Name(NamedTuple):
    """A class or function that the pickle names; nothing is imported."""

    module: str
    name: str


class Call(NamedTuple):
    """A call that the pickle asks for; it is not made."""

    function: object
    arguments: object


class Storage(NamedTuple):
    """What the pickle says of a record with values."""

    identity: object


class _Place(NamedTuple):
    """A tensor's shape and dtype, the number of elements between neighbours, and its first byte in the file."""

    spec: Spec
    strides: tuple[int, ...]
    start: int


class _CorruptError(Exception):
    """What is wrong with a file's contents."""


class TorchFile:
    """The tensors of a file by `torch.save`, read when asked for, like `wanjax.checkpoint.SafetensorsFile`.

    Raises WanjaxError that names the file if it is missing, truncated or corrupt, older than torch 1.6, or anything but
    a table of tensors.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise WanjaxError(f"there is no file {self.path}")
        try:
            with _Bounded(self.path) as file, zipfile.ZipFile(file) as archive:
                self._places = _places(_Archive(archive, file))
        except zipfile.BadZipFile as error:
            why = f"it is no zip archive ({error}), which `torch.save` writes since torch 1.6"
            raise _unreadable(self.path, why) from error
        except OSError as error:
            raise _unreadable(self.path, error.strerror or str(error)) from error
        except (_CorruptError, ValueError, NotImplementedError, RuntimeError, EOFError, struct.error) as error:
            raise _unreadable(self.path, str(error).partition("\n")[0]) from error  # what zipfile raises of its own

    @property
    def paths(self) -> Sequence[Path]:
        """The files with the tensors."""
        return [self.path]

    def keys(self) -> Sequence[str]:
        return tuple(self._places)

    def spec(self, key: str) -> Spec:
        """The tensor's shape and dtype, from the pickle alone."""
        return self._places[key].spec

    def read(self, key: str) -> np.ndarray:
        """The tensor, a read-only view of the file's pages that lets go of them when it is dropped."""
        (shape, dtype), strides, start = self._places[key]
        if 0 in shape:  # an empty range cannot be mapped
            return np.empty(shape, dtype)
        elements = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        page = start - start % mmap.ALLOCATIONGRANULARITY
        try:
            with self.path.open("rb") as file:
                length = start + elements * dtype.itemsize - page
                pages = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=page)
        except (OSError, ValueError) as error:  # ValueError: the file has become shorter than the range
            raise _unreadable(self.path, str(error)) from error
        flat = np.frombuffer(pages, np.uint8, elements * dtype.itemsize, start - page)
        steps = [stride * dtype.itemsize for stride in strides]
        return np.ndarray(shape, dtype, flat, strides=steps)


def _unreadable(path: Path, why: str) -> WanjaxError:
    return WanjaxError(f"{path} cannot be read, {why}: a complete file of tensors by `torch.save` is needed")


class _Bounded:
    """A file that is not read in pieces larger than any table of contents, whatever its own header claims."""

    def __init__(self, path: Path):
        self._file = path.open("rb")
        self.size = os.fstat(self._file.fileno()).st_size
        self.seek, self.tell, self.close = self._file.seek, self._file.tell, self._file.close

    def __enter__(self) -> "_Bounded":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def seekable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        left = max(self.size - self.tell(), 0)
        count = left if count < 0 else min(count, left)
        if count > HEADER_LIMIT:
            raise _CorruptError(f"its table of contents has {count} bytes")
        return self._file.read(count)


class _Archive:
    """The records of the zip archive, by their names behind `NAME/`."""

    def __init__(self, archive: zipfile.ZipFile, file: _Bounded):
        self._archive, self._file = archive, file
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise _CorruptError(f"it holds {len(pickles) or 'no'} data.pkl where one is right")
        self._root = pickles[0].removesuffix("data.pkl")

    def record(self, name: str) -> tuple[int, int]:
        """The first byte of a record and how many there are; raises _CorruptError unless the file holds them."""
        try:
            info = self._archive.getinfo(self._root + name)
        except KeyError:
            raise _CorruptError(f"it lacks the record {name!r}") from None
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise _CorruptError(f"its record {name!r} is compressed or encrypted, which `torch.save` does not do")
        self._file.seek(info.header_offset)
        signature, name_length, extra_length = LOCAL_HEADER.unpack(self._file.read(LOCAL_HEADER.size))
        start = info.header_offset + LOCAL_HEADER.size + name_length + extra_length
        if signature != b"PK\x03\x04" or start + info.file_size > self._file.size:
            raise _CorruptError(f"its record {name!r} does not lie where its table of contents says")
        return start, info.file_size

    def read(self, name: str) -> bytes:
        start, size = self.record(name)
        self._file.seek(start)
        return self._file.read(size)

    def has(self, name: str) -> bool:
        return self._root + name in self._archive.NameToInfo


def _places(archive: _Archive) -> dict[str, _Place]:
    """Where the tensors of the archive's table lie, checked against its records."""
    if archive.has("byteorder") and (order := archive.read("byteorder")) != b"little":
        raise _CorruptError(f"its byte order is {order[:16]!r} where b'little' is right")
    if archive.record("data.pkl")[1] > PICKLE_LIMIT:
        raise _CorruptError(f"its pickle has more than {PICKLE_LIMIT} bytes")
    table = describe(archive.read("data.pkl"))
    if not isinstance(table, dict) or not all(isinstance(key, str) and key.isprintable() for key in table):
        raise _CorruptError("it is not a table of tensors by name")
    return {key: _place(key, value, archive) for key, value in table.items()}


def _place(key: str, value: object, archive: _Archive) -> _Place:
    """Where one tensor lies; raises _CorruptError where it is none, or lies outside of its storage."""
    match value:
        case Call(Name("torch._utils", "_rebuild_parameter"), (inner, *_)):
            return _place(key, inner, archive)
        case Call(Name("torch._utils", "_rebuild_tensor_v2"), (Storage(identity), offset, shape, strides, *_)):
            later = None
        case Call(Name("torch._utils", "_rebuild_tensor_v3"), (Storage(identity), offset, shape, strides, _, _, later)):
            pass
        case Call(Name(module, name), _):
            raise _CorruptError(f"{key!r} asks for a call of {module}.{name}, which is not made")
        case _:
            raise _CorruptError(f"{key!r} is not a tensor")
    match identity:
        case ("storage", Name("torch" | "torch.storage", kind), str(record), _, _) if kind in STORAGES:
            dtype = STORAGES[kind]
        case _:
            raise _CorruptError(f"{key!r} lies in a storage of an unknown kind")
    if later is not None:
        if not isinstance(later, Name) or later.name not in LATER_DTYPES:
            raise _CorruptError(f"{key!r} has an unknown dtype")
        dtype = LATER_DTYPES[later.name]
    if not (_are_counts(shape) and _are_counts(strides) and len(shape) == len(strides) and _are_counts((offset,))):
        raise _CorruptError(f"{key!r} has a malformed shape")
    start, nbytes = archive.record(f"data/{record}")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > nbytes:
        raise _CorruptError(f"{key!r} of shape {list(shape)} lies outside of its storage of {nbytes} bytes")
    if math.prod(shape) * dtype.itemsize > nbytes:
        raise _CorruptError(f"{key!r} of shape {list(shape)} repeats its storage of {nbytes} bytes")
    return _Place(Spec(tuple(shape), dtype), tuple(strides), start + offset * dtype.itemsize)


def _are_counts(numbers: object) -> bool:
    return (
        isinstance(numbers, tuple)
        and len(numbers) <= MAX_RANK
        and all(type(n) is int and 0 <= n < 2**60 for n in numbers)
    )


MARK = object()  # on the stack, where a tuple, a list's items or a table's begin


def describe(pickle: bytes) -> Any:
    """What a pickle would build, with `Call`s where it would call and `Name`s where it would import.

    Raises ValueError for an operation that has no place in a table of tensors, and where the pickle is malformed.
    """
    stack: list[Any] = []
    memo: list[Any] = []
    argument: Any
    for opcode, argument, position in pickletools.genops(pickle):
        if opcode.name == "STOP":
            break
        try:
            if opcode.name in _CONSTANTS:
                stack.append(_CONSTANTS[opcode.name])
            elif opcode.name in _NUMBERS_AND_TEXTS:
                stack.append(argument)
            elif opcode.name in _STORE:
                _store(memo, len(memo) if argument is None else argument, stack[-1])
            elif opcode.name in _RECALL:
                stack.append(memo[argument])
            else:
                _OPERATIONS[opcode.name](stack, argument)
        except KeyError:
            raise ValueError(f"its pickle has the operation {opcode.name}, which no table of tensors needs") from None
        except (IndexError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"its pickle is malformed at byte {position}") from error
    if len(stack) != 1:
        raise ValueError("its pickle is malformed at its end")
    return stack[0]


def _store(memo: list[Any], index: int, value: Any) -> None:
    """Keeps a value for later; they are numbered as they come."""
    if index > len(memo):
        raise IndexError
    memo[index : index + 1] = [value]


def _since_mark(stack: list[Any]) -> list[Any]:
    """Takes what lies above the last mark, and the mark."""
    start = len(stack) - 1
    while stack[start] is not MARK:  # raises IndexError below the stack
        start -= 1
        if start < 0:
            raise IndexError
    items = stack[start + 1 :]
    del stack[start:]
    return items


def _last(stack: list[Any], count: int) -> tuple[Any, ...]:
    if len(stack) < count:
        raise IndexError
    items = tuple(stack[len(stack) - count :])
    del stack[len(stack) - count :]
    return items


def _fill(stack: list[Any], items: Sequence[Any]) -> None:
    """Puts keys and values into the table on top of the stack; only texts are keys, which are quick to look up."""
    if len(items) % 2 or type(stack[-1]) is not dict or not all(isinstance(key, str) for key in items[::2]):
        raise TypeError
    stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _extend(stack: list[Any], items: Sequence[Any]) -> None:
    if type(stack[-1]) is not list:
        raise TypeError
    stack[-1].extend(items)


def _call(stack: list[Any]) -> None:
    """An ordered table is one; every other call is only noted."""
    function, arguments = _last(stack, 2)
    empty = function == Name("collections", "OrderedDict") and arguments == ()
    stack.append({} if empty else Call(function, arguments))


def _name(stack: list[Any], argument: str | None) -> None:
    module, name = argument.split(" ") if argument else _last(stack, 2)
    if not (isinstance(module, str) and isinstance(name, str) and module.isprintable() and name.isprintable()):
        raise TypeError
    stack.append(Name(module, name))


_STORE = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}
_RECALL = {"BINGET", "LONG_BINGET"}
_NUMBERS_AND_TEXTS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_OPERATIONS: dict[str, Callable[[list[Any], Any], object]] = {
    "PROTO": lambda stack, _: None,
    "FRAME": lambda stack, _: None,
    "MARK": lambda stack, _: stack.append(MARK),
    "EMPTY_DICT": lambda stack, _: stack.append({}),
    "EMPTY_LIST": lambda stack, _: stack.append([]),
    "EMPTY_TUPLE": lambda stack, _: stack.append(()),
    "TUPLE": lambda stack, _: stack.append(tuple(_since_mark(stack))),
    "TUPLE1": lambda stack, _: stack.append(_last(stack, 1)),
    "TUPLE2": lambda stack, _: stack.append(_last(stack, 2)),
    "TUPLE3": lambda stack, _: stack.append(_last(stack, 3)),
    "SETITEM": lambda stack, _: _fill(stack, _last(stack, 2)),
    "SETITEMS": lambda stack, _: _fill(stack, _since_mark(stack)),
    "APPEND": lambda stack, _: _extend(stack, _last(stack, 1)),
    "APPENDS": lambda stack, _: _extend(stack, _since_mark(stack)),
    "GLOBAL": _name,
    "STACK_GLOBAL": _name,
    "BINPERSID": lambda stack, _: stack.append(Storage(*_last(stack, 1))),
    "REDUCE": lambda stack, _: _call(stack),
    "BUILD": lambda stack, _: _last(stack, 1),  # attributes of a table, which say nothing of its tensors
}
