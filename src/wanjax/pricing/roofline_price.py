# SPDX-License-Identifier: Apache-2.0
"""Price a program from its jaxpr with a roofline model, for devices whose compiler is not available.

The trace shows the operations of attention, of other matrix products and of convolutions. It also shows the bytes that
products read and write, and the peak of live bytes if nothing is fused. The scores of attention do not count as live,
because a kernel never stores them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from wanjax.pricing.lowering import AbstractCall
from wanjax.pricing.pallas_kernels import inner_jaxprs
from wanjax.pricing.pricer import Price
from wanjax.pricing.roofline import Machine


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one run of a program on one device."""

    attention: int  # operations
    matmuls: int  # operations of products outside attention
    convolutions: int  # operations
    matmul_bytes: int  # read and written by products
    written_bytes: int  # by products and convolutions; elementwise work reads and writes these bytes again
    argument_bytes: int
    live_bytes: int  # live bytes at the peak, without the arguments


def price_abstract_call(machine: Machine, abstract_call: AbstractCall, attention: str | None = None) -> Price:
    """Price a program with a roofline model. `attention` is the named scope in which the program computes attention."""
    jaxpr = jax.make_jaxpr(abstract_call.function)(*abstract_call.arguments).jaxpr
    work = count_work(jaxpr, attention=attention)
    seconds = _seconds(machine, work)
    total = sum(seconds.values())
    return Price(
        argument_bytes=work.argument_bytes,
        peak_bytes=work.argument_bytes + work.live_bytes,
        seconds=total,
        least=sum(_seconds(machine, count_work(jaxpr, attention=attention, cheapest=True)).values()),
        low=total,
        high=total,
        breakdown=seconds,
        self_attention=seconds["attention"],
    )


def _seconds(machine: Machine, work: Work) -> dict[str, float]:
    """Return the seconds of each part of the work."""
    bandwidth = machine.bandwidth_fraction * machine.bandwidth
    return {
        "attention": work.attention / (machine.attention_fraction * machine.flops),
        "matmuls": max(work.matmuls / (machine.matmul_fraction * machine.flops), work.matmul_bytes / bandwidth)
        + work.convolutions / (machine.convolution_fraction * machine.flops),
        "elementwise": 2 * work.written_bytes / bandwidth,
        "copies": 0.0,
        "communication": 0.0,
    }


def count_work(jaxpr: Jaxpr, *, attention: str | None = None, cheapest: bool = False) -> Work:
    """Count the work of a program on one device.

    Products in the named scope `attention` count as attention. Of a conditional, only the most expensive branch counts;
    with `cheapest`, only the cheapest branch counts.
    """
    choose = min if cheapest else max
    counts: dict[str, int] = dict.fromkeys(("attention", "matmuls", "convolutions", "matmul_bytes", "written_bytes"), 0)
    for kind, flops, equation, num_executions in _matmuls(jaxpr, "", 1, choose, attention):
        written_bytes = sum(_bytes(x) for x in equation.outvars)
        counts[kind] += num_executions * flops
        if kind == "matmuls":
            counts["matmul_bytes"] += num_executions * (written_bytes + sum(_bytes(x) for x in equation.invars))
        if kind != "attention":
            counts["written_bytes"] += num_executions * written_bytes
    argument_bytes = sum(_bytes(x) for x in jaxpr.invars)
    return Work(**counts, argument_bytes=argument_bytes, live_bytes=_peak_live_bytes(jaxpr, "", attention))


def _matmuls(
    jaxpr: Jaxpr, scope: str, num_executions: int, choose: Callable[..., Jaxpr], attention: str | None
) -> Iterator[tuple[str, int, JaxprEqn, int]]:
    """Yield the kind, the operations, the equation and the number of runs of every matrix product and convolution."""
    for equation in jaxpr.eqns:
        inner_scope = f"{scope}/{equation.source_info.name_stack}"
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            contracted_size = prod(_shape(equation.invars[0])[axis] for axis in contracted)
            kind = "attention" if _is_in(attention, inner_scope) else "matmuls"
            yield kind, 2 * contracted_size * prod(_shape(equation.outvars[0])), equation, num_executions
        elif name == "conv_general_dilated":
            kernel = _shape(equation.invars[1])
            output_sizes = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
            yield (
                "convolutions",
                2 * prod(_shape(equation.outvars[0])) * prod(kernel) // output_sizes,
                equation,
                num_executions,
            )
        runs = equation.params["length"] if name == "scan" else 1
        inner_programs = list(inner_jaxprs(equation))
        if name == "cond":  # only one branch of a conditional runs
            inner_programs = [choose(inner_programs, key=lambda branch: _flops(branch, inner_scope, choose, attention))]
        for inner in inner_programs:
            yield from _matmuls(inner, inner_scope, num_executions * runs, choose, attention)


def _flops(jaxpr: Jaxpr, scope: str, choose: Callable[..., Jaxpr], attention: str | None) -> int:
    return sum(flops * num_executions for _, flops, _, num_executions in _matmuls(jaxpr, scope, 1, choose, attention))


def _peak_live_bytes(jaxpr: Jaxpr, scope: str, attention: str | None) -> int:
    """Return the peak of the live bytes of the values that the jaxpr computes."""
    last_uses: dict[Any, int] = {}
    for index, variables in enumerate([*(equation.invars for equation in jaxpr.eqns), jaxpr.outvars]):
        last_uses |= {x: index for x in variables if not isinstance(x, Literal)}
    live_sizes: dict[Any, int] = {}
    live_bytes = peak = 0
    for index, equation in enumerate(jaxpr.eqns):
        inner_scope = f"{scope}/{equation.source_info.name_stack}"
        is_fused = _is_in(attention, inner_scope)
        inner_bytes = (
            0
            if is_fused
            else max((_peak_live_bytes(inner, inner_scope, attention) for inner in inner_jaxprs(equation)), default=0)
        )
        output_sizes = {x: _bytes(x) for x in equation.outvars if x in last_uses and not (is_fused and _is_scores(x))}
        peak = max(peak, live_bytes + max(inner_bytes, sum(output_sizes.values())))
        live_sizes |= output_sizes
        live_bytes += sum(output_sizes.values())
        live_bytes -= sum(
            live_sizes.pop(x, 0) for x in equation.invars if not isinstance(x, Literal) and last_uses[x] == index
        )
    return peak


def _is_in(name: str | None, scope: str) -> bool:
    return name in scope.split("/")


def _is_scores(x: Any) -> bool:
    """Return True if an array in attention is large enough to hold the scores."""
    shape = _shape(x)
    return len(shape) >= 2 and min(shape[-2:]) > 256


def _shape(x: Any) -> tuple[int, ...]:
    return x.aval.shape


def _bytes(x: Any) -> int:
    return x.aval.size * x.aval.dtype.itemsize
