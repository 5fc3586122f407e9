# SPDX-License-Identifier: Apache-2.0
"""The calls of programs that a run makes, executed or recorded, as values that can be compared."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from wanjax.execution import CompileContext, Execute, Program, Trace, TracedProgram
from wanjax.pipelines.denoiser import take_step
from wanjax.sharding import Partitioner


class Call(NamedTuple):
    """A call of a program in a stage. Each argument is its shape, its dtype and the part of it on each device.

    An argument on the host has no parts.
    """

    stage: str
    program: Program
    static: Any
    tree: Any
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.stage}: {self.program.name} of {[(shape, dtype) for shape, dtype, _ in self.arguments]}"


class Counting(Execute):
    """Executes programs and counts their calls. `shardings` lists the output shardings of each compiled program."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()
        self.shardings: list[tuple[TracedProgram, list[Any]]] = []

    def call(self, program: Program, compile_context: CompileContext, static: Any, *arguments: Any) -> Any:
        self.calls[_call(self._stage, program, compile_context, static, arguments)] += 1
        return super().call(program, compile_context, static, *arguments)

    def _compile(self, instance: TracedProgram, cache: Any) -> Any:
        result: Any = super()._compile(instance, cache)
        self.shardings.append((instance, jax.tree.leaves(result.output_shardings)))
        return result


def recorded_calls(trace: Trace) -> Counter[Call]:
    """Return the calls in a program trace."""
    result: Counter[Call] = Counter()
    for entry in trace.programs:
        instance = entry.traced_program
        call = _call(entry.stage, instance.program, instance.compile_context, instance.static, instance.shapes)
        assert call not in result, f"{call} is in the trace twice"
        result[call] = entry.calls
    return result


def traced_call(instance: TracedProgram) -> Call:
    """Return the call of a traced program, without a stage."""
    return _call("", instance.program, instance.compile_context, instance.static, instance.shapes)


def differences(executed: Counter[Call], recorded: Counter[Call]) -> list[str]:
    """Return a message for each call whose two counts differ."""
    return [
        f"{call} is executed {executed[call]} times and recorded {recorded[call]} times"
        for call in executed | recorded
        if executed[call] != recorded[call]
    ]


def steps(calls: Counter[Call]) -> Counter[bool]:
    """Count the steps, by whether they reuse cached values."""
    result: Counter[bool] = Counter()
    for call, times in calls.items():
        if call.program is take_step:
            state, *_ = jax.tree.unflatten(call.tree, call.arguments)
            result[state.cached is not None] += times
    return result


def wrong_shardings(compiled: Sequence[tuple[TracedProgram, list[Any]]]) -> list[str]:
    """Return a message for each result whose sharding differs from that of its program."""
    messages = []
    for instance, shardings in compiled:
        results = jax.tree.leaves(instance.results)
        for number, (result, sharding) in enumerate(zip(results, shardings, strict=True)):
            if not sharding.is_equivalent_to(result.sharding, result.ndim):
                messages.append(f"result {number} of {instance.program.name}, {result}, has {sharding}")
    return messages


def _call(stage: str, program: Program, compile_context: CompileContext, static: Any, arguments: Any) -> Call:
    leaves, tree = jax.tree.flatten(arguments)
    return Call(stage, program, static, tree, tuple(_argument(x, compile_context.partitioner) for x in leaves))


def _argument(x: Any, partitioner: Partitioner) -> Any:
    """Return the shape of an argument, its dtype, and the part of it on each device of a mesh."""
    if isinstance(x, jax.Array):
        on_mesh = x.sharding.device_set == set(partitioner.mesh.devices.flat)
        if not on_mesh and not x.committed:
            return x.shape, x.dtype, None
        sharding = x.sharding if on_mesh else partitioner.replicated
    elif isinstance(x, jax.ShapeDtypeStruct):
        sharding = x.sharding
    else:
        x = np.asarray(x)
        return x.shape, jax.dtypes.canonicalize_dtype(x.dtype), None
    if sharding is None:
        return x.shape, x.dtype, None
    parts = sharding.devices_indices_map(x.shape)
    return x.shape, x.dtype, tuple(sorted((device.id, str(index)) for device, index in parts.items()))
