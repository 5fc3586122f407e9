# SPDX-License-Identifier: Apache-2.0
"""Read files that `torch.save` wrote, without torch and without executing the pickle in the file.

Since torch 1.6 such a file is a zip archive of uncompressed records: `NAME/data.pkl`, a pickle that describes a table
of tensors, and `NAME/data/0`, `NAME/data/1` ..., their storages. A pickle is a program that may call any function. This
module turns the names and calls in the pickle into inert descriptions, and `_locate` accepts only descriptions of
tensors. Each tensor is memory-mapped when it is read (https://pytorch.org/docs/stable/notes/serialization.html).
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
UNTYPED_DTYPES = {  # dtypes without a storage class
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64),
}
GENERATORS = ("generator_ema", "generator")  # the keys of the student model's weights in a file of a distillation run
# Libraries that store quantized tensors as objects of their own classes
QUANTIZER_MODULES = ("torchao", "optimum.quanto", "bitsandbytes")
MAX_PICKLE_BYTES = 1 << 22  # bytes; a thousand tensors take about 120,000
MAX_OPERATIONS = 250_000  # a thousand tensors take 30,000 to 50,000 operations of at least 2.5 bytes
# The opcodes that a pickled table of tensors needs, in protocol 2 and later.
STRING_OPCODES = {"BINUNICODE", "SHORT_BINUNICODE"}
ALLOWED_OPCODES = STRING_OPCODES | {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "BINPERSID", "REDUCE", "BUILD"),
}
LOCAL_HEADER = struct.Struct("<4s22xHH")  # a zip record's signature, and the lengths of its name and extra field


class PickledCall(NamedTuple):
    """A call in the pickle, which is not executed."""

    function: object
    arguments: object


class PickledName(NamedTuple):
    """A class or function in the pickle, which is not imported."""

    module: str
    name: str

    def __call__(self, *arguments: object) -> "PickledCall | PickledTable":
        return PickledTable() if self == ORDERED_TABLE and not arguments else PickledCall(self, arguments)


ORDERED_TABLE = PickledName("collections", "OrderedDict")


class PickledTable(dict):
    """An `OrderedDict` in the pickle; its attributes are ignored."""

    def __setstate__(self, state: object) -> None:
        pass


class TorchStorage(NamedTuple):
    """A storage in the pickle: a reference to the record with the values."""

    identity: object


class TorchFile(MappedFile):
    """A reader of a file that `torch.save` wrote.

    If the file is the checkpoint of a training run, only its table `state_dict` is read. If it is the checkpoint of a
    distillation run, only its table `generator_ema` or, without this table, `generator` is read. The name of the table
    then becomes the first part of each tensor's name.

    Raises WanjaxError if the file is missing, truncated, corrupt, written before torch 1.6, or not a table of tensors.
    """

    valid_file_text = "a complete file of tensors that `torch.save` wrote"

    def _locate_tensors(self) -> dict[str, TensorLocation]:
        try:
            with _BoundedReader(self.path) as file, zipfile.ZipFile(file) as archive:
                return _locations(_Archive(archive, file))
        except zipfile.BadZipFile as error:
            problem = f"it is not a zip archive ({error}), which `torch.save` writes since torch 1.6"
            raise CorruptError(problem) from error
        except (ValueError, NotImplementedError, RuntimeError, EOFError, struct.error) as error:
            raise CorruptError(str(error)) from error  # zipfile raises these


class _BoundedReader:
    """A file for `zipfile` that refuses to read more than `HEADER_LIMIT` bytes at once, in case the archive is
    corrupt."""

    def __init__(self, path: Path):
        self._file = path.open("rb")
        self.size = os.fstat(self._file.fileno()).st_size
        self.seek, self.tell, self.close = self._file.seek, self._file.tell, self._file.close

    def __enter__(self) -> "_BoundedReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def seekable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        remaining = max(self.size - self.tell(), 0)
        count = remaining if count < 0 else min(count, remaining)
        if count > HEADER_LIMIT:
            raise CorruptError(f"its table of contents has {count} bytes")
        return self._file.read(count)


class _Archive:
    """The records of the zip archive, by their names without the leading `NAME/`."""

    def __init__(self, archive: zipfile.ZipFile, file: _BoundedReader):
        self._archive, self._file = archive, file
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CorruptError(f"it contains {len(pickles) or 'no'} data.pkl, expected one")
        self._root = pickles[0].removesuffix("data.pkl")

    def record(self, name: str) -> tuple[int, int]:
        """Return a record's offset and size. Raises CorruptError unless the file contains the whole record."""
        try:
            info = self._archive.getinfo(self._root + name)
        except KeyError:
            raise CorruptError(f"it lacks the record {name!r}") from None
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise CorruptError(f"its record {name!r} is compressed or encrypted, but `torch.save` does neither")
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
    """Return the location of each tensor of the archive, after checking that the record of the tensor is complete."""
    if archive.has("byteorder") and (order := archive.read("byteorder")) != b"little":
        raise CorruptError(f"its byte order is {order[:16]!r}, but only b'little' is supported")
    if archive.record("data.pkl")[1] > MAX_PICKLE_BYTES:
        raise CorruptError(f"its pickle has more than {MAX_PICKLE_BYTES} bytes")
    data = archive.read("data.pkl")
    if library := next((name for name in QUANTIZER_MODULES if f"{name}.".encode() in data), None):
        raise CorruptError(f"it contains objects of {library} instead of tensors: give its safetensors")
    table = describe(data)
    if isinstance(table, dict):
        table = _select_weights(table)
    if not isinstance(table, dict) or not all(isinstance(key, str) and key.isprintable() for key in table):
        raise CorruptError("it is not a table of tensors by name")
    return {key: _locate(key, value, archive) for key, value in table.items()}


def _select_weights(table: dict) -> dict:
    """Select the weights in the checkpoint of a training run. EMA weights are preferred. Return other tables
    unchanged."""
    if isinstance(inner := table.get("state_dict"), dict):
        return inner
    for name in GENERATORS:
        if isinstance(inner := table.get(name), dict) and all(isinstance(key, str) for key in inner):
            return {f"{name}.{key}": value for key, value in inner.items()}
    return table


def _locate(key: str, value: object, archive: _Archive) -> TensorLocation:
    """Return a tensor's location. Raises CorruptError if `value` is not a tensor, or lies outside of its storage."""
    match value:
        case PickledCall(PickledName("torch._utils", "_rebuild_parameter"), (inner, *_)):
            return _locate(key, inner, archive)
        case PickledCall(
            PickledName("torch._utils", "_rebuild_tensor_v2"), (TorchStorage(identity), offset, shape, strides, *_)
        ):
            untyped_dtype = None
        case PickledCall(
            PickledName("torch._utils", "_rebuild_tensor_v3"),
            (TorchStorage(identity), offset, shape, strides, _, _, untyped_dtype),
        ):
            pass
        case PickledCall(PickledName(module, name), _):
            raise CorruptError(f"{key!r} needs a call of {module}.{name}, which wanjax does not execute")
        case _:
            raise CorruptError(f"{key!r} is not a tensor")
    match identity:
        case ("storage", PickledName("torch" | "torch.storage", kind), str(record), _, _) if kind in STORAGES:
            dtype = STORAGES[kind]
        case _:
            raise CorruptError(f"{key!r} is in a storage of an unknown kind")
    if untyped_dtype is not None:
        if not isinstance(untyped_dtype, PickledName) or untyped_dtype.name not in UNTYPED_DTYPES:
            raise CorruptError(f"{key!r} has an unknown dtype")
        dtype = UNTYPED_DTYPES[untyped_dtype.name]
    if not (_are_counts(shape) and _are_counts(strides) and len(shape) == len(strides) and _are_counts((offset,))):
        raise CorruptError(f"{key!r} has a malformed shape")
    start, nbytes = archive.record(f"data/{record}")
    last_element = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last_element + 1) * dtype.itemsize > nbytes:
        raise CorruptError(f"{key!r} of shape {list(shape)} lies outside of its storage of {nbytes} bytes")
    if math.prod(shape) * dtype.itemsize > nbytes:
        raise CorruptError(f"{key!r} of shape {list(shape)} repeats its storage of {nbytes} bytes")
    return TensorLocation(Spec(tuple(shape), dtype), start + offset * dtype.itemsize, tuple(strides))


def _are_counts(numbers: object) -> bool:
    return (
        isinstance(numbers, tuple)
        and len(numbers) <= MAX_RANK
        and all(type(number) is int and 0 <= number < 2**60 for number in numbers)
    )


class _Unpickler(pickle.Unpickler):
    """An unpickler that imports nothing. It builds only plain values, `PickledName`, `PickledCall`, `PickledTable` and
    `TorchStorage`."""

    def find_class(self, module: str, name: str) -> PickledName:
        if not (module.isprintable() and name.isprintable()):
            raise pickle.UnpicklingError("the pickle has a name that cannot be printed")
        return PickledName(module, name)

    def persistent_load(self, pid: object) -> TorchStorage:
        return TorchStorage(pid)


def describe(data: bytes) -> Any:
    """Parse a pickle without executing it: an import becomes a `PickledName`, a call a `PickledCall`.

    Raises ValueError if the pickle is malformed, or has an opcode or key that a table of tensors does not need.
    """
    _check_pickle(data)
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a malformed pickle can raise any kind of error
        raise ValueError("its pickle is malformed") from error


def _check_pickle(data: bytes) -> None:
    """Raise ValueError for a pickle that could cost `pickle.Unpickler` excessive memory or time.

    It rejects more operations than tensors need, and opcodes outside of `ALLOWED_OPCODES`. It rejects memo entries out
    of order, because the unpickler allocates memory up to the index of an entry. It rejects keys other than strings,
    because hashing nested tuples can take exponential time.
    """
    stack: list[str] = []  # the opcode that created each value
    memo: list[str] = []
    marks: list[int] = []  # the height of the stack at each open mark
    for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
        if opcode.name == "STOP":
            break
        if count >= MAX_OPERATIONS or count > max(position or 0, 10_000) / 2.25:
            raise ValueError(f"its pickle has {count} operations in {position} bytes, more than tensors need")
        if opcode.name not in ALLOWED_OPCODES:
            raise ValueError(f"its pickle has the operation {opcode.name}, which no table of tensors needs")
        try:
            _simulate(opcode, argument, stack, memo, marks)
        except IndexError:
            raise ValueError(f"its pickle is malformed at byte {position}") from None
    if len(stack) != 1:
        raise ValueError("its pickle is malformed at its end")


def _simulate(opcode: Any, argument: Any, stack: list[str], memo: list[str], marks: list[int]) -> None:
    """Apply an operation to the simulated stack. Raises IndexError for an operation that `_check_pickle` must
    reject."""
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
        if name in ("SETITEM", "SETITEMS") and not STRING_OPCODES.issuperset(stack[first + 1 :: 2]):
            raise IndexError
        stack[first:] = [name] * len(opcode.stack_after)
