# SPDX-License-Identifier: Apache-2.0
"""Compute fingerprints of values. The fingerprint of a value is the same in every process. The module supports the
values that determine a program: settings, definitions of networks, functions by their names, pytrees, shapes and
shardings. A fingerprint does not cover the code of functions. A key that depends on code must add a digest of the code.
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

VERSIONED_PACKAGES = {"wanjax", "flax", "jax", "jaxlib", "numpy", "ml_dtypes", "builtins", "functools"}
"""Packages whose functions may have fingerprints, because keys contain the package's version or a digest of its
code."""


class NoFingerprint(TypeError):
    """A value, such as a closure or a function of another package, has no fingerprint."""


def fingerprint(value: Any) -> str:
    """Return the fingerprint of a value in hexadecimal. Raises NoFingerprint if the value has no fingerprint."""
    texts: list[str] = []
    stack = [value]
    while stack:  # a loop instead of recursion, because values are deeply nested
        name, parts = _describe(stack.pop())
        texts.append(f"{len(name)} {len(parts)} {name}")
        stack.extend(parts)
    return hashlib.sha256("".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


@singledispatch
def _describe(value: Any) -> tuple[str, tuple[Any, ...] | list[Any]]:
    """Return a value's kind as text, and the values that it contains."""
    if is_dataclass(value):
        return _name(type(value)), [getattr(value, name) for name in _fields(type(value))]
    if isinstance(wrapped := getattr(value, "__wrapped__", None), FunctionType):  # a function in jax.jit
        return _name(type(value)), (wrapped,)
    raise NoFingerprint(f"a {type(value).__name__}")


@_describe.register(NoneType | bool | int | float | complex | str | bytes | np.dtype)
def _(value: Any) -> Any:
    return f"{type(value).__name__} {value!r}", ()


@_describe.register(type | FunctionType)
def _(value: Any) -> Any:
    return _name(value), ()


@_describe.register
def _(value: Enum) -> Any:
    return f"{_name(type(value))} {value.name}", ()


@_describe.register(np.ndarray | np.generic)
def _(value: Any) -> Any:
    return f"array {value.dtype!r} {value.shape} {value.tobytes().hex()}", ()


@_describe.register
def _(value: Mesh) -> Any:
    devices = [f"{device.id} {device.platform} {device.device_kind}" for device in value.devices.flat]
    return f"mesh {value.devices.shape} {value.axis_names} {value.axis_types} {devices}", ()


@_describe.register
def _(value: NamedSharding) -> Any:
    return _name(type(value)), (value.mesh, value.spec, value.memory_kind)


@_describe.register
def _(value: GraphDef) -> Any:
    return f"network {_network_fingerprint(value)}", ()


@cache
def _network_fingerprint(value: Any) -> str:
    """Return the fingerprint of a network's definition. The result is cached, because many programs share a
    definition."""
    return fingerprint((value.nodes, value.attributes, value.num_leaves))


@_describe.register(jax.tree_util.PyTreeDef)
def _(value: Any) -> Any:
    return "tree", (value.node_data(), *value.children())


@_describe.register
def _(value: partial) -> Any:
    return "partial", (value.func, value.args, value.keywords)


@_describe.register(Mapping)
def _(value: Any) -> Any:
    return _name(type(value)), [*value.keys(), *value.values()]


@_describe.register(set | frozenset)
def _(value: Any) -> Any:
    return _name(type(value)), sorted(map(fingerprint, value))


@_describe.register(tuple | list | PartitionSpec)
def _(value: Iterable[Any]) -> Any:
    return _name(type(value)), tuple(value)


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _name(item: Any) -> str:
    """Return the name of a class or a function. Raises NoFingerprint if the name does not determine the code."""
    if item.__module__.partition(".")[0] not in VERSIONED_PACKAGES or "<" in item.__qualname__:
        raise NoFingerprint(f"{item.__module__}.{item.__qualname__}")
    return f"{item.__module__}.{item.__qualname__}"
