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

    An argument of the host has no parts.
    """

    stage: str
    program: Program
    static: Any
    tree: Any
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.stage}: {self.program.name} of {[(shape, dtype) for shape, dtype, _ in self.arguments]}"


class Counting(Execute):
    """Executes programs, and counts their calls; `shardings` are those that the compiler gave the results of each."""

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


def recorded_calls(record: Trace) -> Counter[Call]:
    """Return the calls of a run that was recorded."""
    result: Counter[Call] = Counter()
    for noted in record.programs:
        instance = noted.traced_program
        call = _call(noted.stage, instance.program, instance.compile_context, instance.static, instance.shapes)
        assert call not in result, f"{call} is noted twice"
        result[call] = noted.calls
    return result


def traced_call(instance: TracedProgram) -> Call:
    """Return the call of an instance, of no stage."""
    return _call("", instance.program, instance.compile_context, instance.static, instance.shapes)


def differences(executed: Counter[Call], recorded: Counter[Call]) -> list[str]:
    """Return a sentence for each call that is not made as often in both."""
    return [
        f"{call} is executed {executed[call]} times and recorded {recorded[call]} times"
        for call in executed | recorded
        if executed[call] != recorded[call]
    ]


def steps(calls: Counter[Call]) -> Counter[bool]:
    """Return the numbers of steps by whether they are given what another kept."""
    result: Counter[bool] = Counter()
    for call, times in calls.items():
        if call.program is take_step:
            state, *_ = jax.tree.unflatten(call.tree, call.arguments)
            result[state.cached is not None] += times
    return result


def wrong_shardings(compiled: Sequence[tuple[TracedProgram, list[Any]]]) -> list[str]:
    """Return a sentence for each result that has another sharding than its program states."""
    actual = []
    for instance, options in compiled:
        stated = jax.tree.leaves(instance.results)
        for number, (result, sharding) in enumerate(zip(stated, options, strict=True)):
            if not sharding.is_equivalent_to(result.sharding, result.ndim):
                actual.append(f"result {number} of {instance.program.name}, {result}, has {sharding}")
    return actual


def _call(stage: str, program: Program, compile_context: CompileContext, static: Any, arguments: Any) -> Call:
    leaves, tree = jax.tree.flatten(arguments)
    return Call(stage, program, static, tree, tuple(_argument(x, compile_context.partitioner) for x in leaves))


def _argument(x: Any, partitioner: Partitioner) -> Any:
    """Return the shape of an argument, its dtype, and the part of it on each device of a mesh."""
    if isinstance(x, jax.Array):
        here = x.sharding.device_set == set(partitioner.mesh.devices.flat)
        if not here and not x.committed:
            return x.shape, x.dtype, None
        sharding = x.sharding if here else partitioner.replicated
    elif isinstance(x, jax.ShapeDtypeStruct):
        sharding = x.sharding
    else:
        x = np.asarray(x)
        return x.shape, jax.dtypes.canonicalize_dtype(x.dtype), None
    if sharding is None:
        return x.shape, x.dtype, None
    parts = sharding.devices_indices_map(x.shape)
    return x.shape, x.dtype, tuple(sorted((device.id, str(index)) for device, index in parts.items()))
