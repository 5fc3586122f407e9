# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a value: equal in each process in which the value means the same.

It covers values of which a program is made: settings, definitions of networks, functions by their names, trees, shapes
and shardings. What code does is not looked at: whoever keeps something by a fingerprint adds that of the code.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial, singledispatch
from types import FunctionType, NoneType
from typing import Any

import jax
import numpy as np
from flax.nnx import GraphDef
from jax.sharding import Mesh, NamedSharding, PartitionSpec

KNOWN = {"wanjax", "flax", "jax", "jaxlib", "numpy", "ml_dtypes", "builtins", "functools"}
"""Packages whose code is known by its version or its digest."""


class NoFingerprint(TypeError):
    """A value that cannot be told from others of its kind, such as a closure, or that has code of a stranger's."""


def fingerprint(value: Any) -> str:
    """Returns the fingerprint of a value, in hexadecimal; raises NoFingerprint where it can have none."""
    told: list[str] = []
    open_ = [value]
    while open_:  # a stack: values are nested deeply
        name, parts = _told(open_.pop())
        told.append(f"{len(name)} {len(parts)} {name}")
        open_.extend(parts)
    return hashlib.sha256("".join(told).encode("utf-8", "surrogatepass")).hexdigest()


@singledispatch
def _told(value: Any) -> tuple[str, tuple[Any, ...] | list[Any]]:
    """Returns a value as a text, and the values of which it is made beside."""
    if is_dataclass(value):
        return _name(type(value)), [getattr(value, name) for name in _fields(type(value))]
    if isinstance(wrapped := getattr(value, "__wrapped__", None), FunctionType):  # by jax.jit
        return _name(type(value)), (wrapped,)
    raise NoFingerprint(f"a {type(value).__name__}")


@_told.register(NoneType | bool | int | float | complex | str | bytes | np.dtype)
def _(value: Any) -> Any:
    return f"{type(value).__name__} {value!r}", ()


@_told.register(type | FunctionType)
def _(value: Any) -> Any:
    return _name(value), ()


@_told.register
def _(value: Enum) -> Any:
    return f"{_name(type(value))} {value.name}", ()


@_told.register(np.ndarray | np.generic)
def _(value: Any) -> Any:
    return f"array {value.dtype!r} {value.shape} {value.tobytes().hex()}", ()


@_told.register
def _(value: Mesh) -> Any:
    devices = [f"{device.id} {device.platform} {device.device_kind}" for device in value.devices.flat]
    return f"mesh {value.devices.shape} {value.axis_names} {value.axis_types} {devices}", ()


@_told.register
def _(value: NamedSharding) -> Any:
    return _name(type(value)), (value.mesh, value.spec, value.memory_kind)


@_told.register
def _(value: GraphDef) -> Any:
    return f"network {_of_network(value)}", ()


@cache
def _of_network(value: Any) -> str:
    """Returns the fingerprint of a network's definition, which several programs share."""
    return fingerprint((value.nodes, value.attributes, value.num_leaves))


@_told.register(jax.tree_util.PyTreeDef)
def _(value: Any) -> Any:
    return "tree", (value.node_data(), *value.children())


@_told.register
def _(value: partial) -> Any:
    return "partial", (value.func, value.args, value.keywords)


@_told.register(Mapping)
def _(value: Any) -> Any:
    return _name(type(value)), [*value.keys(), *value.values()]


@_told.register(set | frozenset)
def _(value: Any) -> Any:
    return _name(type(value)), sorted(map(fingerprint, value))


@_told.register(tuple | list | PartitionSpec)
def _(value: Iterable[Any]) -> Any:
    return _name(type(value)), tuple(value)


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _name(named: Any) -> str:
    """Returns the name of a class or a function; raises NoFingerprint where it alone does not tell what it does."""
    if named.__module__.partition(".")[0] not in KNOWN or "<" in named.__qualname__:
        raise NoFingerprint(f"{named.__module__}.{named.__qualname__}")
    return f"{named.__module__}.{named.__qualname__}"
