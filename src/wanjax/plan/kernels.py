# SPDX-License-Identifier: Apache-2.0
"""The kernels of a large program, each compiled alone: schedules of the whole would take too much memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wanjax.plan.compile import Compiled, Job
from wanjax.plan.hlo import parse
from wanjax.plan.pricing import price
from wanjax.plan.program import Program, find

KERNEL = "tpu_custom_call"
DTYPES = {"bf16": "bfloat16", "pred": "bool"} | {
    f"{kind}{bits}": f"{name}{bits}"
    for kind, name in (("f", "float"), ("s", "int"), ("u", "uint"))
    for bits in (8, 16, 32)
}
WITH_RARE_WORK = ("flash_attention",)  # what data decides there is seldom wanted; in others' kernels it is all there is


class Call(NamedTuple):
    """A kernel's name, and the dtypes and shapes of what it is given."""

    kernel: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]


def kernels(compiled: Compiled) -> dict[str, Call]:
    """The kernels of a program by their names in its module."""
    return {
        instruction.name: Call(
            instruction.name.partition(".")[0],
            tuple(
                (DTYPES[array.dtype], array.shape)
                for operand in instruction.operands
                for array in computation.by_name[operand].results
            ),
        )
        for computation in parse(compiled.module).computations.values()
        for instruction in computation.instructions
        if instruction.target == KERNEL
    }


def alone(job: Job, call: Call) -> Job:
    """A kernel of a job's program, by what it is given, as a job that every device does."""
    settings = {"builder": job.builder, "settings": dict(job.settings), "operands": call.operands}
    return replace(job, builder=f"{__name__}:one_kernel", settings=settings)


def one_kernel(
    mesh: Mesh, *, builder: str, settings: Mapping[str, Any], operands: Sequence[tuple[str, Sequence[int]]]
) -> Program:
    """The kernel of these operands in the program that a builder makes."""
    program = find(builder)(mesh, **settings)
    wanted = [(dtype, tuple(shape)) for dtype, shape in operands]
    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(program.function)(*program.arguments)
    call = next(call for call in pallas_calls(traced.jaxpr) if _given(call) == wanted)
    everywhere = PartitionSpec()
    sharding = NamedSharding(mesh, everywhere)
    function = jax.shard_map(
        lambda *given: call.primitive.bind(*given, **call.params),
        mesh=mesh,
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    return Program(function, tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for dtype, shape in wanted))


def _given(call: JaxprEqn) -> list[tuple[str, tuple[int, ...]]]:
    avals: list[Any] = [x.aval for x in call.invars]
    return [(aval.dtype.name, aval.shape) for aval in avals]


def pallas_calls(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Those of a traced program, of its loops and of the functions that it calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr):
                    yield from pallas_calls(inner.jaxpr)
                elif isinstance(inner, Jaxpr):
                    yield from pallas_calls(inner)


def kernel_seconds(call: Call, compiled: Compiled) -> float:
    """The price of a kernel that was compiled alone, with its schedule; what only rare data asks for is not run."""
    priced = price(compiled)
    if call.kernel in WITH_RARE_WORK:
        priced = price(compiled, skip=priced.undecided)
    return priced.by_kind["kernels"].mid
