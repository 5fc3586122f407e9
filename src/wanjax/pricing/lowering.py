# SPDX-License-Identifier: Apache-2.0
"""A function to lower, with the shapes of its arguments and its compiler options. Helpers lower and compile the
function."""

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Result = TypeVar("Result")


class AbstractCall(NamedTuple):
    """A call that can be lowered: a function, and its arguments as trees of `jax.ShapeDtypeStruct` with shardings.

    An argument without a sharding is on the host. `donate` has the indices of the arguments whose buffers the results
    may reuse. `compiler_options` are options of XLA.
    """

    function: Callable
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    compiler_options: Mapping[str, Any] | None = None


def replicated(function: Callable, mesh: Mesh | AbstractMesh, shapes: Iterable[Any]) -> AbstractCall:
    """Create the abstract call of a function that every device of a mesh runs on replicated arrays of these shapes."""
    spec = PartitionSpec()
    sharded_function = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    arguments = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)) for x in shapes)
    return AbstractCall(sharded_function, tuple(arguments))


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector, because tracing and lowering allocate many long-lived objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def retry_without_rejected_options(
    options: dict[str, Any], attempt: Callable[[dict[str, Any]], Result], report: Callable[[str], Any]
) -> Result:
    """Compile a program with `attempt(options)`. If the compiler rejects options, try again without them.

    The rejected options are the options that the error message names. If the message names no option, all options count
    as rejected. `report` is called with one sentence about the rejected options. An out-of-memory error is not a
    rejection.
    """
    try:
        return attempt(options)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if not options or "RESOURCE_EXHAUSTED" in message:
            raise
        rejected = [name for name in options if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message)] or list(options)
        accepted = {name: value for name, value in options.items() if name not in rejected}
        result = retry_without_rejected_options(accepted, attempt, report)
        report(f"compiled without {' and '.join(rejected)}, which the compiler rejected: {_first_line(message)}")
        return result


def _first_line(text: str, max_length: int = 200) -> str:
    line, _, _ = text.partition("\n")
    return line if len(line) <= max_length else f"{line[:max_length]} …"
