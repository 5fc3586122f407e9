# SPDX-License-Identifier: Apache-2.0
"""Functions to compile, with their shapes and compiler options."""

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Result = TypeVar("Result")


class Lowering(NamedTuple):
    """A function to lower, and its arguments as trees of `jax.ShapeDtypeStruct` with shardings.

    An argument without a sharding is on the host. `donate` are the indices of the arguments whose buffers the results
    may reuse. `compiler_options` are XLA's.
    """

    function: Callable
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    compiler_options: Mapping[str, Any] | None = None


def replicated(function: Callable, mesh: Mesh | AbstractMesh, shapes: Iterable[Any]) -> Lowering:
    """Return the lowering of a function that every device of a mesh runs on unsharded arrays of these shapes."""
    spec = PartitionSpec()
    each = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    arguments = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)) for x in shapes)
    return Lowering(each, tuple(arguments))


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector: tracing and lowering allocate many long-lived objects."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def retry_without_rejected_options(
    options: dict[str, Any], attempt: Callable[[dict[str, Any]], Result], tell: Callable[[str], Any]
) -> Result:
    """Return `attempt(options)`, which compiles a program; if the compiler rejects options, try again without them.

    The rejected options are those that the compiler's message names, or all of them if it names none. `tell` then
        receives one sentence. Running out of memory is not a rejection.
    """
    try:
        return attempt(options)
    except jax.errors.JaxRuntimeError as error:
        why = str(error)
        if not options or "RESOURCE_EXHAUSTED" in why:
            raise
        refused = [name for name in options if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", why)] or list(options)
        left = {name: value for name, value in options.items() if name not in refused}
        result = retry_without_rejected_options(left, attempt, tell)
        tell(f"compiled without {' and '.join(refused)}, which the compiler rejected: {_first_line(why)}")
        return result


def _first_line(text: str, longest: int = 200) -> str:
    line, _, _ = text.partition("\n")
    return line if len(line) <= longest else f"{line[:longest]} …"
