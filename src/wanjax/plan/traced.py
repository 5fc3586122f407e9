# SPDX-License-Identifier: Apache-2.0
"""What a program does, read from its trace: for devices whose compiler is not at hand.

Counted are the operations of attention, of other products and of convolutions, the bytes that products read and write,
and the most bytes that are alive at a time if nothing is fused, in which scores of attention have no part.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from wanjax.cache import keep, recall
from wanjax.plan.compile import Job
from wanjax.plan.digest import Digest
from wanjax.plan.program import find
from wanjax.plan.roofline import Machine
from wanjax.sharding import make_mesh

KEPT = "works"


@dataclass(frozen=True)
class Work:
    """Of one run of a program: operations, bytes of products, bytes of its arguments, and bytes at most beside them."""

    attention: int
    products: int
    convolutions: int
    product_bytes: int
    written: int  # by products and convolutions, which what stands between them reads and writes again
    arguments: int
    alive: int


def digest(machine: Machine, job: Job) -> Digest:
    """A program's bytes, and its price by the machine's stated model."""
    work = work_of(job)
    bandwidth = machine.vectors * machine.bandwidth
    seconds = {
        "attention": work.attention / (machine.attention * machine.flops),
        "matmuls": max(work.products / (machine.products * machine.flops), work.product_bytes / bandwidth)
        + work.convolutions / (machine.convolutions * machine.flops),
        "elementwise": 2 * work.written / bandwidth,
        "copies": 0.0,
        "communication": 0.0,
    }
    total = sum(seconds.values())
    return Digest(
        arguments=work.arguments,
        peak=work.arguments + work.alive,
        seconds=total,
        low=total,
        high=total,
        breakdown=seconds,
        self_attention=seconds["attention"],
    )


def work_of(job: Job) -> Work:
    """What the program of a job does on one device."""
    key = {"builder": job.builder, "settings": dict(job.settings)}
    if (found := recall(KEPT, key)) is not None:
        return Work(**found)
    program = find(job.builder)(make_mesh(devices=jax.devices("cpu")[:1]), **job.settings)
    traced = jax.make_jaxpr(program.function)(*program.arguments)
    counts: dict[str, int] = dict.fromkeys(("attention", "products", "convolutions", "product_bytes", "written"), 0)
    for kind, flops, equation, times in _products(traced.jaxpr, "", 1):
        written = sum(_bytes(x) for x in equation.outvars)
        counts[kind] += times * flops
        if kind == "products":
            counts["product_bytes"] += times * (written + sum(_bytes(x) for x in equation.invars))
        if kind != "attention":
            counts["written"] += times * written
    arguments = sum(_bytes(x) for x in traced.jaxpr.invars)
    work = Work(**counts, arguments=arguments, alive=_alive(traced.jaxpr, ""))
    keep(KEPT, key, asdict(work))
    return work


def _products(jaxpr: Jaxpr, scope: str, times: int) -> Iterator[tuple[str, int, JaxprEqn, int]]:
    """Each product: its kind, its operations, and how often it runs."""
    for equation in jaxpr.eqns:
        within = f"{scope}/{equation.source_info.name_stack}"
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            summed = prod(_shape(equation.invars[0])[axis] for axis in contracted)
            kind = "attention" if _is_attention(within) else "products"
            yield kind, 2 * summed * prod(_shape(equation.outvars[0])), equation, times
        elif name == "conv_general_dilated":
            kernel = _shape(equation.invars[1])
            outs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
            yield "convolutions", 2 * prod(_shape(equation.outvars[0])) * prod(kernel) // outs, equation, times
        runs = equation.params["length"] if name == "scan" else 1
        for inner in _inner(equation.params):
            yield from _products(inner, within, times * runs)


def _alive(jaxpr: Jaxpr, scope: str) -> int:
    """The most bytes that are made within and alive at a time."""
    last: dict[Any, int] = {}
    for index, given in enumerate([*(equation.invars for equation in jaxpr.eqns), jaxpr.outvars]):
        last |= {x: index for x in given if not isinstance(x, Literal)}
    made: dict[Any, int] = {}
    now = most = 0
    for index, equation in enumerate(jaxpr.eqns):
        within = f"{scope}/{equation.source_info.name_stack}"
        fused = _is_attention(within)
        inside = 0 if fused else max((_alive(inner, within) for inner in _inner(equation.params)), default=0)
        outs = {x: _bytes(x) for x in equation.outvars if x in last and not (fused and _scores(x))}
        most = max(most, now + max(inside, sum(outs.values())))
        made |= outs
        now += sum(outs.values())
        now -= sum(made.pop(x, 0) for x in equation.invars if not isinstance(x, Literal) and last[x] == index)
    return most


def _is_attention(scope: str) -> bool:
    return "attention" in scope.split("/")


def _scores(x: Any) -> bool:
    """Whether an array within attention is as large as its scores: a kernel never holds them."""
    shape = _shape(x)
    return len(shape) >= 2 and min(shape[-2:]) > 256


def _inner(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, Jaxpr):
                yield inner


def _shape(x: Any) -> tuple[int, ...]:
    return x.aval.shape


def _bytes(x: Any) -> int:
    return x.aval.size * x.aval.dtype.itemsize
