# SPDX-License-Identifier: Apache-2.0
"""Price the Pallas kernels of a program one by one, because schedules of a large program need too much memory."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from wanjax.pricing.compile import Compiled
from wanjax.pricing.costs import KERNEL_TARGET, price_compiled
from wanjax.pricing.exporting import TracedCall
from wanjax.pricing.hlo import parse
from wanjax.pricing.lowering import AbstractCall, replicated

DTYPES = {"bf16": "bfloat16", "pred": "bool", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"} | {
    f"{kind}{bits}": f"{name}{bits}"
    for kind, name in (("f", "float"), ("s", "int"), ("u", "uint"))
    for bits in (8, 16, 32)
}


class KernelCall(NamedTuple):
    """A kernel's name, and the dtypes and shapes of its operands."""

    name: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]


def kernel_calls(compiled: Compiled) -> dict[str, KernelCall]:
    """Return the kernel calls of a compiled program, by their names in its HLO module."""
    return {
        instruction.name: KernelCall(
            instruction.name.partition(".")[0],
            tuple(
                (DTYPES.get(array.dtype, array.dtype), array.shape)
                for operand in instruction.operands
                for array in computation.by_name[operand].results
            ),
        )
        for computation in parse(compiled.module).computations.values()
        for instruction in computation.instructions
        if instruction.target == KERNEL_TARGET
    }


def kernels_of(traced: TracedCall) -> dict[KernelCall, AbstractCall]:
    """Return the distinct kernels of a traced program, each as a program that every device runs.

    If several kernels have the same name and operands, only the first is returned.
    """
    kernels: dict[KernelCall, AbstractCall] = {}
    for equation in pallas_calls(traced.jaxpr.jaxpr):
        avals: list[Any] = [x.aval for x in equation.invars]
        call = KernelCall(str(equation.params["name"]), tuple((aval.dtype.name, aval.shape) for aval in avals))
        if call not in kernels:
            kernels[call] = replicated(partial(equation.primitive.bind, **equation.params), traced.mesh, avals)
    return kernels


def find_kernel_of_call(call: KernelCall, kernels: Iterable[KernelCall]) -> KernelCall | None:
    """Return the kernel of a call in a compiled program, or None if no kernel has the operands of the call.

    If several kernels have these operands, prefer the kernel with the call's name. The name may differ, because the
    compiler replaces some letters.
    """
    same_operand_kernels = [kernel for kernel in kernels if kernel.operands == call.operands]
    return next(
        (kernel for kernel in same_operand_kernels if kernel.name == call.name),
        same_operand_kernels[0] if same_operand_kernels else None,
    )


def pallas_calls(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the Pallas calls of a traced program, including the calls in loops and inner functions."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for inner in inner_jaxprs(equation):
                yield from pallas_calls(inner)


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the jaxprs in an equation's parameters: loop bodies, branches and called functions."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, Jaxpr):
                yield inner


class KernelSeconds(NamedTuple):
    """Seconds of a kernel: `typical` excludes rarely needed work, and `worst` includes all of it."""

    typical: float
    worst: float


def kernel_seconds(compiled: Compiled, input_words: Sequence[int | None] | None = None) -> KernelSeconds:
    """Price a kernel that was compiled on its own, with its schedule.

    Args:
        compiled: The kernel, with its schedule.
        input_words: Sample values of the kernel's input words, for a kernel with data-dependent branches to rare cases.
            With None, both sides of every data-dependent branch count.
    """
    if input_words is None:
        seconds = price_compiled(compiled).by_kind["kernels"].mid
        return KernelSeconds(seconds, seconds)
    worst = [price_compiled(compiled, input_word=value).by_kind["kernels"].mid for value in input_words]
    return KernelSeconds(mean_seconds(compiled, input_words), sum(worst) / len(worst))


def mean_seconds(compiled: Compiled, input_words: Iterable[int | None]) -> float:
    """Return the mean seconds of a kernel over several values of its input words, without rare work."""
    prices = [price_compiled(compiled, skip=rare_work(compiled, value), input_word=value) for value in input_words]
    return sum(priced.by_kind["kernels"].mid for priced in prices) / len(prices)


def rare_work(compiled: Compiled, input_word: int | None = None) -> dict[str, frozenset[int]]:
    """Return the blocks whose branch can skip rarely needed work. The result is the argument `skip` of
    `price_compiled`.

    The search repeats until nothing changes, because skipping a block may reveal further blocks.
    """
    skip: dict[str, frozenset[int]] = {}
    while True:
        data_dependent_blocks = price_compiled(compiled, skip=skip, input_word=input_word).data_dependent_blocks
        extended = {name: skip.get(name, frozenset()) | blocks for name, blocks in data_dependent_blocks.items()}
        if extended == skip:
            return skip
        skip = extended
