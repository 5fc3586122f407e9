# SPDX-License-Identifier: Apache-2.0
"""Builders: functions named by an import path, which build a program in the compiling process."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wanjax.compilation import Lowering

TYPE = "type"  # the key of the import path of a dataclass or named tuple in JSON


def find(path: str) -> Any:
    """Returns the object at an import path `package.module:name`."""
    module, _, names = path.partition(":")
    found: Any = import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def path_of(named: Any) -> str:
    """Returns the import path of a function or a class."""
    return f"{named.__module__}:{named.__qualname__}"


def to_json(value: Any) -> Any:
    """Converts frozen dataclasses, named tuples, tuples, numbers and texts to values that JSON can hold."""
    if hasattr(value, "_asdict"):
        return {TYPE: path_of(type(value))} | {name: to_json(x) for name, x in value._asdict().items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {TYPE: path_of(type(value))} | {x.name: to_json(getattr(value, x.name)) for x in fields(value)}
    if isinstance(value, tuple | list):
        return [to_json(x) for x in value]
    return value


def from_json(json: Any) -> Any:
    """Inverts `to_json`; other sequences become tuples."""
    if isinstance(json, Mapping):
        return find(json[TYPE])(**{name: from_json(x) for name, x in json.items() if name != TYPE})
    return tuple(from_json(x) for x in json) if isinstance(json, list | tuple) else json


def of_function(
    mesh: Mesh, *, function: str, operands: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]
) -> Lowering:
    """Lowers the function at an import path, for keywords and operands given by `shape`, `dtype` and `spec`."""
    arguments = tuple(
        jax.ShapeDtypeStruct(
            tuple(operand["shape"]),
            jnp.dtype(operand["dtype"]),
            sharding=NamedSharding(mesh, PartitionSpec(*(_axes(axes) for axes in operand["spec"]))),
        )
        for operand in operands
    )
    return Lowering(partial(find(function), **keywords), arguments)


def _axes(axes: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    return axes if axes is None or isinstance(axes, str) else tuple(axes)
