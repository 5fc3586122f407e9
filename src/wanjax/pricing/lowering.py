# SPDX-License-Identifier: Apache-2.0
"""Functions that are to be compiled, and how."""

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


def everywhere(function: Callable, mesh: Mesh | AbstractMesh, shapes: Iterable[Any]) -> Lowering:
    """Returns a function as each device of a mesh runs it, on arrays of these shapes that every device has whole."""
    spec = PartitionSpec()
    each = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    arguments = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)) for x in shapes)
    return Lowering(each, tuple(arguments))


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps Python's garbage collector off: what is traced or lowered is many objects, and nearly all of them stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def without_refused(
    options: dict[str, Any], attempt: Callable[[dict[str, Any]], Result], tell: Callable[[str], Any]
) -> Result:
    """Returns `attempt(options)`, which compiles a program. If the compiler refuses options, attempts it without them.

    The refused options are those that the compiler's message names, or all of them if it names none. `tell` then
    receives one sentence. A lack of memory is not a refusal.
    """
    try:
        return attempt(options)
    except jax.errors.JaxRuntimeError as error:
        why = str(error)
        if not options or "RESOURCE_EXHAUSTED" in why:
            raise
        refused = [name for name in options if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", why)] or list(options)
        left = {name: value for name, value in options.items() if name not in refused}
        result = without_refused(left, attempt, tell)
        tell(f"compiled without {' and '.join(refused)}, which the compiler refused: {_first_line(why)}")
        return result


def _first_line(text: str, longest: int = 200) -> str:
    line, _, _ = text.partition("\n")
    return line if len(line) <= longest else f"{line[:longest]} …"
