# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels of a large program, each compiled on its own: schedules of the whole would take too much memory."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from wanjax.pricing.compile import Compiled
from wanjax.pricing.costs import KERNEL, price_compiled
from wanjax.pricing.exporting import Traced
from wanjax.pricing.hlo import parse
from wanjax.pricing.lowering import Lowering, replicated

DTYPES = {"bf16": "bfloat16", "pred": "bool"} | {
    f"{kind}{bits}": f"{name}{bits}"
    for kind, name in (("f", "float"), ("s", "int"), ("u", "uint"))
    for bits in (8, 16, 32)
}


class Call(NamedTuple):
    """A kernel's name, and the dtypes and shapes of its operands."""

    kernel: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]


def kernel_calls(compiled: Compiled) -> dict[str, Call]:
    """Return the kernel calls of a compiled program, by their names in its HLO module."""
    return {
        instruction.name: Call(
            instruction.name.partition(".")[0],
            tuple(
                (DTYPES.get(array.dtype, array.dtype), array.shape)
                for operand in instruction.operands
                for array in computation.by_name[operand].results
            ),
        )
        for computation in parse(compiled.module).computations.values()
        for instruction in computation.instructions
        if instruction.target == KERNEL
    }


def kernels_of(traced: Traced) -> dict[Call, Lowering]:
    """Return the distinct kernels of a traced program, each as a program that every device runs.

    Among kernels of one name that take the same operands the first counts.
    """
    kernels: dict[Call, Lowering] = {}
    for equation in pallas_calls(traced.jaxpr.jaxpr):
        avals: list[Any] = [x.aval for x in equation.invars]
        call = Call(str(equation.params["name"]), tuple((aval.dtype.name, aval.shape) for aval in avals))
        if call not in kernels:
            kernels[call] = replicated(partial(equation.primitive.bind, **equation.params), traced.mesh, avals)
    return kernels


def same_kernel(call: Call, kernels: Iterable[Call]) -> Call | None:
    """Return the known kernel that a call in a compiled program is: by its name and its operands, else by these alone.

    The compiler replaces some letters of a name.
    """
    alike = [each for each in kernels if each.operands == call.operands]
    return next((each for each in alike if each.kernel == call.kernel), alike[0] if alike else None)


def pallas_calls(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the Pallas calls of a traced program, including those in its loops and inner functions."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for inner in inner_jaxprs(equation):
                yield from pallas_calls(inner)


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the jaxprs among an equation's parameters: bodies of loops, branches, called functions."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, Jaxpr):
                yield inner


class KernelSeconds(NamedTuple):
    """Seconds of a kernel: `typical` without its rare work, `worst` with all of it."""

    typical: float
    worst: float


def kernel_seconds(compiled: Compiled, words: Sequence[int | None] | None = None) -> KernelSeconds:
    """Price a kernel that was compiled on its own, with its schedule.

    Args:
        compiled: The kernel, with its schedule.
        words: Sample values of the kernel's input words, for a kernel whose data-dependent branches guard rare cases.
            Without them, such branches may guard all the work, so both sides count.
    """
    if words is None:
        seconds = price_compiled(compiled).by_kind["kernels"].mid
        return KernelSeconds(seconds, seconds)
    worst = [price_compiled(compiled, words=value).by_kind["kernels"].mid for value in words]
    return KernelSeconds(mean_seconds(compiled, words), sum(worst) / len(worst))


def mean_seconds(compiled: Compiled, words: Iterable[int | None]) -> float:
    """Return the mean price of a kernel over several values of its input words, without rare work."""
    prices = [price_compiled(compiled, skip=rare_work(compiled, value), words=value) for value in words]
    return sum(priced.by_kind["kernels"].mid for priced in prices) / len(prices)


def rare_work(compiled: Compiled, words: int | None = None) -> dict[str, frozenset[int]]:
    """Return the blocks that guard rarely needed work, in the form of `skip` of `price_compiled`.

    The search repeats until it is stable, since skipping a block may reveal more.
    """
    skip: dict[str, frozenset[int]] = {}
    while True:
        undecided = price_compiled(compiled, skip=skip, words=words).undecided
        more = {name: skip.get(name, frozenset()) | blocks for name, blocks in undecided.items()}
        if more == skip:
            return skip
        skip = more
