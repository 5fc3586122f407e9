# SPDX-License-Identifier: Apache-2.0
"""Trace programs and export them as bytes, which a separate process compiles.

Nothing here needs the compiler or a chip. The bytes contain no file names and no line numbers, so they change only when
the program changes. They contain the named scopes, by which a price is split into parts.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, NamedSharding

from wanjax.errors import WanjaxError
from wanjax.pricing.chips import Card, Slice, abstract_mesh
from wanjax.pricing.lowering import AbstractCall, gc_paused

CUDNN_ATTENTION = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
"""Custom calls that a later version of JAX might not read. The bytes are only read by the same version of JAX, so such
calls are allowed.
"""
LOCATION_LIMIT_OPTION = "jax_traceback_in_locations_limit"


class CompilerError(WanjaxError):
    """A program that does not compile for the chip, most often because it does not fit in memory."""


@dataclass(frozen=True)
class CompileJob:
    """A program to compile for a slice.

    `program` is a serialised `jax.export.Exported`, which has the shapes, dtypes and shardings of the arguments. All
    arguments are arrays. `donate` has the indices of the arguments whose buffers the results may reuse. `axes` has the
    sizes of the mesh's axes.
    """

    slice: Slice
    axes: Mapping[str, int]
    program: bytes = field(repr=False)
    donate: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> dict[str, Any]:
        """The JSON of everything that determines the compiler's result, with a digest in place of the program."""
        return {
            "program": hashlib.sha256(self.program).hexdigest(),
            "donate": list(self.donate),
            "options": dict(self.options),
            "slice": self.slice.name,
            "axes": list(self.axes.items()),
        }


class TracedCall(NamedTuple):
    """A program traced for a slice: its jitted function, the shapes of its arguments as a flat list, and the mesh."""

    abstract_call: AbstractCall
    slice: Slice
    mesh: AbstractMesh
    jitted: Any
    leaves: list[Any]

    @property
    def jaxpr(self) -> ClosedJaxpr:
        with jax.sharding.use_abstract_mesh(self.mesh):
            return self.jitted.trace(*self.leaves).jaxpr

    def export(self) -> CompileJob:
        """Export the program as a job. Raises CompilerError if it cannot be lowered for the chip."""
        on_card = isinstance(self.slice.chip, Card)
        checks = [jax.export.DisabledSafetyCheck.custom_call(call) for call in CUDNN_ATTENTION if on_card]
        exporter = jax.export.export(self.jitted, platforms=[self.slice.chip.platform], disabled_checks=checks)
        with (
            as_compiler_errors(self.slice),
            gc_paused(),
            cudnn_without_devices() if on_card else nullcontext(),
            without_locations(),
            jax.sharding.use_abstract_mesh(self.mesh),
        ):
            program = exporter(*self.leaves).serialize()
        end_indices = list(accumulate(len(jax.tree.leaves(argument)) for argument in self.abstract_call.arguments))
        starts = [0, *end_indices]
        donate = tuple(leaf for i in self.abstract_call.donate for leaf in range(starts[i], end_indices[i]))
        options = dict(self.abstract_call.compiler_options or {})
        return CompileJob(self.slice, dict(self.mesh.shape), bytes(program), donate, options)


def trace(abstract_call: AbstractCall, target: Slice) -> TracedCall:
    """Trace a program for a slice. Its arguments have shardings on a mesh of `abstract_mesh`, or no shardings.

    Raises WanjaxError if wanjax rejects the program, and CompilerError for other failures.
    """
    leaves, tree = jax.tree.flatten(abstract_call.arguments)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]  # arrays on the host have no sharding
    mesh = next((x.mesh.abstract_mesh for x in shardings if isinstance(x, NamedSharding)), None) or abstract_mesh(
        target
    )
    if mesh.abstract_device != abstract_mesh(target, mesh.shape).abstract_device:
        raise WanjaxError(
            f"the program is traced for {mesh.abstract_device}, but {target.name} has {target.chip.device_kind}"
        )

    def program(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(abstract_call.function(*jax.tree.unflatten(tree, leaves)))

    # unused arguments stay in memory during the run, so they must be counted
    traced = TracedCall(abstract_call, target, mesh, jax.jit(program, keep_unused=True), leaves)
    with as_compiler_errors(target):
        _ = traced.jaxpr  # traces the program now; JAX caches the jaxpr
    return traced


def export(abstract_call: AbstractCall, target: Slice) -> CompileJob:
    """Trace and export a program as a job for the compiler. Raises the errors of `trace` and `Traced.export`."""
    return trace(abstract_call, target).export()


@contextmanager
def as_compiler_errors(target: Slice) -> Iterator[None]:
    """Convert every error that is not wanjax's into a CompilerError with the name of the slice."""
    try:
        yield
    except WanjaxError:
        raise
    except Exception as error:
        raise CompilerError(compile_failure(target, type(error).__name__, str(error))) from error


def compile_failure(target: Slice, kind: str, message: str) -> str:
    """Return the error message for a program that does not compile."""
    return f"the program does not compile for {target.name}: {kind}: {message}"


@contextmanager
def without_locations() -> Iterator[None]:
    """Lower programs and their kernels without source locations."""
    previous = getattr(jax.config, LOCATION_LIMIT_OPTION)
    jax.config.update(LOCATION_LIMIT_OPTION, 0)
    try:
        yield
    finally:
        jax.config.update(LOCATION_LIMIT_OPTION, previous)


@contextmanager
def cudnn_without_devices() -> Iterator[None]:
    """Lower cuDNN's attention without devices. JAX normally requires devices for this.

    JAX reads the devices to choose a partition of the call. wanjax makes the call inside a `shard_map`, on the arrays
    of one device, so the call needs no partition. JAX has no public option for this.
    """
    from jax._src import dispatch

    primitives = dispatch.prim_requires_devices_during_lowering
    attention = {primitive for primitive in primitives if primitive.name.startswith("dot_product_attention_")}
    primitives -= attention
    try:
        yield
    finally:
        primitives |= attention
