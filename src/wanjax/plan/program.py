# SPDX-License-Identifier: Apache-2.0
"""What is compiled: a function and the shapes of its arguments, as a builder makes them in the compiling process."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Program(NamedTuple):
    """A function to trace, its arguments (trees of `jax.ShapeDtypeStruct` with shardings), and which it may overwrite.

    Compiler options are XLA's own.
    """

    function: Callable
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    compiler_options: Mapping[str, Any] | None = None


def find(path: str) -> Any:
    """What an import path `package.module:name` names."""
    module, _, names = path.partition(":")
    found: Any = import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def of_function(
    mesh: Mesh, *, function: str, operands: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]
) -> Program:
    """A function named by its import path, called with arrays of given `shape`, `dtype`, `spec`, and with keywords."""
    arguments = tuple(
        jax.ShapeDtypeStruct(
            tuple(operand["shape"]),
            jnp.dtype(operand["dtype"]),
            sharding=NamedSharding(mesh, PartitionSpec(*(_axes(axes) for axes in operand["spec"]))),
        )
        for operand in operands
    )
    return Program(partial(find(function), **keywords), arguments)


def _axes(axes: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    return axes if axes is None or isinstance(axes, str) else tuple(axes)
