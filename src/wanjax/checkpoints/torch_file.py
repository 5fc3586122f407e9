# SPDX-License-Identifier: Apache-2.0
"""Reads files by `torch.save` without torch, and without running the pickle in them.

Since torch 1.6 such a file is a zip archive of uncompressed records: `NAME/data.pkl`, a pickle that describes a table
of tensors, and `NAME/data/0`, `NAME/data/1` ..., their storages. A pickle is a program that may call anything. Here its
names and calls become inert descriptions, of which `_place` accepts those of tensors. Each tensor is mapped to the file
when it is read (https://pytorch.org/docs/stable/notes/serialization.html).
"""

import io
import math
import os
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from wanjax.checkpoints.files import HEADER_LIMIT, MAX_RANK, CorruptError, MappedFile, Spec, TensorLocation

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
LATER_DTYPES = {  # dtypes without a storage class
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64),
}
GENERATORS = ("generator_ema", "generator")  # tables of the model that generates, in a run that distils it
LIBRARIES = ("torchao", "optimum.quanto", "bitsandbytes")  # whose quantised tensors are objects of their own
PICKLE_LIMIT = 1 << 22  # bytes; a thousand tensors take about 120,000
OPERATIONS_LIMIT = 250_000  # a thousand tensors take 30,000 to 50,000, of 2.5 bytes and more each
# The operations that tables of tensors are made of, for pickles of protocol 2 and later.
TEXTS = {"BINUNICODE", "SHORT_BINUNICODE"}
OPERATIONS = TEXTS | {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "BINPERSID", "REDUCE", "BUILD"),
}
LOCAL_HEADER = struct.Struct("<4s22xHH")  # a zip record's signature, and the lengths of its name and extra field


class Call(NamedTuple):
    """A call that the pickle asks for; it is not made."""

    function: object
    arguments: object


class Name(NamedTuple):
    """A class or function that the pickle names; it is not imported."""

    module: str
    name: str

    def __call__(self, *arguments: object) -> "Call | Table":
        return Table() if self == ORDERED_TABLE and not arguments else Call(self, arguments)


ORDERED_TABLE = Name("collections", "OrderedDict")


class Table(dict):
    """An ordered table whose attributes, which say nothing of its tensors, are dropped."""

    def __setstate__(self, state: object) -> None:
        pass


class Storage(NamedTuple):
    """The pickle's description of a record with values."""

    identity: object


class TorchFile(MappedFile):
    """A file by `torch.save`; reads a tensor when asked for it.

    A training run's checkpoint is read as the table that it calls `state_dict`; one that is distilled from another
    model, as the table `generator_ema` or `generator`, whose name is then the first part of each tensor's name.

    Raises WanjaxError that names the file if it is missing, truncated, corrupt, written before torch 1.6, or not a
    table of tensors.
    """

    needed = "a complete file of tensors by `torch.save`"

    def _locate_tensors(self) -> dict[str, TensorLocation]:
        try:
            with _Bounded(self.path) as file, zipfile.ZipFile(file) as archive:
                return _locations(_Archive(archive, file))
        except zipfile.BadZipFile as error:
            why = f"it is not a zip archive ({error}), which `torch.save` writes since torch 1.6"
            raise CorruptError(why) from error
        except (ValueError, NotImplementedError, RuntimeError, EOFError, struct.error) as error:
            raise CorruptError(str(error)) from error  # as zipfile raises them


class _Bounded:
    """A file for `zipfile` that refuses to read more at once than a table of contents may take."""

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
            raise CorruptError(f"its table of contents has {count} bytes")
        return self._file.read(count)


class _Archive:
    """The records of the zip archive, by their names without the leading `NAME/`."""

    def __init__(self, archive: zipfile.ZipFile, file: _Bounded):
        self._archive, self._file = archive, file
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CorruptError(f"it holds {len(pickles) or 'no'} data.pkl where it should hold one")
        self._root = pickles[0].removesuffix("data.pkl")

    def record(self, name: str) -> tuple[int, int]:
        """Return a record's first byte and its size; raise CorruptError unless the file holds it whole."""
        try:
            info = self._archive.getinfo(self._root + name)
        except KeyError:
            raise CorruptError(f"it lacks the record {name!r}") from None
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise CorruptError(f"its record {name!r} is compressed or encrypted, which `torch.save` does not do")
        self._file.seek(info.header_offset)
        signature, name_length, extra_length = LOCAL_HEADER.unpack(self._file.read(LOCAL_HEADER.size))
        start = info.header_offset + LOCAL_HEADER.size + name_length + extra_length
        if signature != b"PK\x03\x04" or start + info.file_size > self._file.size:
            raise CorruptError(f"its record {name!r} is not where its table of contents says")
        return start, info.file_size

    def read(self, name: str) -> bytes:
        start, size = self.record(name)
        self._file.seek(start)
        return self._file.read(size)

    def has(self, name: str) -> bool:
        return self._root + name in self._archive.NameToInfo


def _locations(archive: _Archive) -> dict[str, TensorLocation]:
    """Return where each tensor of the archive's table lies, checked against its records."""
    if archive.has("byteorder") and (order := archive.read("byteorder")) != b"little":
        raise CorruptError(f"its byte order is {order[:16]!r}, and only b'little' is read")
    if archive.record("data.pkl")[1] > PICKLE_LIMIT:
        raise CorruptError(f"its pickle has more than {PICKLE_LIMIT} bytes")
    data = archive.read("data.pkl")
    if library := next((name for name in LIBRARIES if f"{name}.".encode() in data), None):
        raise CorruptError(f"it holds objects of {library} in place of tensors, which its safetensors have")
    table = describe(data)
    if isinstance(table, dict):
        table = _trained(table)
    if not isinstance(table, dict) or not all(isinstance(key, str) and key.isprintable() for key in table):
        raise CorruptError("it is not a table of tensors by name")
    return {key: _place(key, value, archive) for key, value in table.items()}


def _trained(table: dict) -> dict:
    """Return the tensors of a training run's checkpoint, the averaged ones first; other tables as they are."""
    if isinstance(inner := table.get("state_dict"), dict):
        return inner
    for name in GENERATORS:
        if isinstance(inner := table.get(name), dict) and all(isinstance(key, str) for key in inner):
            return {f"{name}.{key}": value for key, value in inner.items()}
    return table


def _place(key: str, value: object, archive: _Archive) -> TensorLocation:
    """Return where a tensor lies; raise CorruptError if `value` is no tensor, or one outside of its storage."""
    match value:
        case Call(Name("torch._utils", "_rebuild_parameter"), (inner, *_)):
            return _place(key, inner, archive)
        case Call(Name("torch._utils", "_rebuild_tensor_v2"), (Storage(identity), offset, shape, strides, *_)):
            later = None
        case Call(Name("torch._utils", "_rebuild_tensor_v3"), (Storage(identity), offset, shape, strides, _, _, later)):
            pass
        case Call(Name(module, name), _):
            raise CorruptError(f"{key!r} asks for a call of {module}.{name}, which is not made")
        case _:
            raise CorruptError(f"{key!r} is not a tensor")
    match identity:
        case ("storage", Name("torch" | "torch.storage", kind), str(record), _, _) if kind in STORAGES:
            dtype = STORAGES[kind]
        case _:
            raise CorruptError(f"{key!r} lies in a storage of an unknown kind")
    if later is not None:
        if not isinstance(later, Name) or later.name not in LATER_DTYPES:
            raise CorruptError(f"{key!r} has an unknown dtype")
        dtype = LATER_DTYPES[later.name]
    if not (_are_counts(shape) and _are_counts(strides) and len(shape) == len(strides) and _are_counts((offset,))):
        raise CorruptError(f"{key!r} has a malformed shape")
    start, nbytes = archive.record(f"data/{record}")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > nbytes:
        raise CorruptError(f"{key!r} of shape {list(shape)} lies outside of its storage of {nbytes} bytes")
    if math.prod(shape) * dtype.itemsize > nbytes:
        raise CorruptError(f"{key!r} of shape {list(shape)} repeats its storage of {nbytes} bytes")
    return TensorLocation(Spec(tuple(shape), dtype), start + offset * dtype.itemsize, tuple(strides))


def _are_counts(numbers: object) -> bool:
    return (
        isinstance(numbers, tuple)
        and len(numbers) <= MAX_RANK
        and all(type(n) is int and 0 <= n < 2**60 for n in numbers)
    )


class _Unpickler(pickle.Unpickler):
    """Builds numbers, texts, tuples, lists, tables and this module's inert stand-ins; imports nothing of the file."""

    def find_class(self, module: str, name: str) -> Name:
        if not (module.isprintable() and name.isprintable()):
            raise pickle.UnpicklingError("a name that cannot be printed")
        return Name(module, name)

    def persistent_load(self, pid: object) -> Storage:
        return Storage(pid)


def describe(data: bytes) -> Any:
    """Parse a pickle, with a `Name` in place of each import and a `Call` in place of each call.

    Raises ValueError where it is malformed, or has an operation or a key that no table of tensors needs.
    """
    _check(data)
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # malformed pickles raise errors of many kinds
        raise ValueError("its pickle is malformed") from error


def _check(data: bytes) -> None:
    """Raise ValueError for a pickle that costs `pickle.Unpickler` more memory or time than its length.

    Refused are more operations than tensors take, and operations outside of `OPERATIONS`; memo entries out of order,
    since the unpickler allocates its memo up to any index; and keys other than texts, since hashing nested tuples can
    take exponential time.
    """
    stack: list[str] = []  # the operation that made each value
    memo: list[str] = []
    marks: list[int] = []  # heights of the stack
    for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
        if opcode.name == "STOP":
            break
        if count >= OPERATIONS_LIMIT or count > max(position or 0, 10_000) / 2.25:
            raise ValueError(f"its pickle has {count} operations in {position} bytes, more than tensors take")
        if opcode.name not in OPERATIONS:
            raise ValueError(f"its pickle has the operation {opcode.name}, which no table of tensors needs")
        try:
            _follow(opcode, argument, stack, memo, marks)
        except IndexError:
            raise ValueError(f"its pickle is malformed at byte {position}") from None
    if len(stack) != 1:
        raise ValueError("its pickle is malformed at its end")


def _follow(opcode: Any, argument: Any, stack: list[str], memo: list[str], marks: list[int]) -> None:
    """Apply one operation to the stack; raise IndexError for one that `_check` has to refuse."""
    name, operands = opcode.name, opcode.stack_before
    if name == "MARK":
        marks.append(len(stack))
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
        index = len(memo) if argument is None else argument
        if index > len(memo):
            raise IndexError
        memo[index : index + 1] = [stack[-1]]
    else:
        to_mark = pickletools.markobject in operands
        first = marks.pop() - operands.index(pickletools.markobject) if to_mark else len(stack) - len(operands)
        if first < (marks[-1] if marks else 0):
            raise IndexError
        if name in ("SETITEM", "SETITEMS") and not TEXTS.issuperset(stack[first + 1 :: 2]):
            raise IndexError
        stack[first:] = [name] * len(opcode.stack_after)
