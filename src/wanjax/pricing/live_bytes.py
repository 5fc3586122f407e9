# SPDX-License-Identifier: Apache-2.0
"""The least memory that a program holds, from its jaxpr, before anything is compiled.

A compiler fuses elementwise work into what uses it. So an array counts only where it has to be in memory: an argument,
a result, what a matrix product, a convolution or a loop makes, and what is smaller than all that it is made from. What
is computed elementwise from one such array keeps that one alive, and is an array of its own where a product or a
convolution reads it while the other is still needed. What a loop carries is made where its initial value was, if that
is needed no more.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from wanjax.pricing.lowering import Lowering
from wanjax.pricing.pallas_kernels import inner_jaxprs

LOOPS = ("scan", "while", "cond")
MADE = (*LOOPS, "dot_general", "conv_general_dilated", "sort", "scatter", "scatter-add", "pallas_call")
READ = ("dot_general", "conv_general_dilated")
VIEWS = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "slice", "copy", "sharding_constraint")
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint", "shard_map")

Name = tuple[int, Any]  # a variable, and the call that it is in
Step = tuple[JaxprEqn, list[Name | None], list[Name]]


def min_live_bytes(lowering: Lowering) -> int:
    """Return bytes that a run of a program holds at once, its arguments and results among them.

    A buffer that is donated is free once it was used for the last time.
    """
    jaxpr = jax.make_jaxpr(lowering.function)(*lowering.arguments).jaxpr
    starts = [0, *accumulate(len(jax.tree.leaves(argument)) for argument in lowering.arguments)]
    donated = [i for argument in lowering.donate for i in range(starts[argument], starts[argument + 1])]
    return _held(jaxpr, donated)


def _held(jaxpr: Jaxpr, donated: Iterable[int]) -> int:
    names: dict[Any, Name | None] = {}
    arguments: list[Name] = [(0, x) for x in (*jaxpr.constvars, *jaxpr.invars)]
    size = {name: _bytes(name[1]) for name in arguments}
    roots: dict[Name, frozenset[Name]] = {name: frozenset([name]) for name in arguments}
    freed = {arguments[len(jaxpr.constvars) + i] for i in donated}
    viewed: dict[Name, Name] = {}  # what a view has its elements from
    steps: list[tuple[list[Name], int | None, list[Name], frozenset[Name]]] = []
    """What each makes, the most within it (None where it is fused), what it reads that was computed for it, and the
    arrays in whose place its results may be."""
    last: dict[Name, int] = {}
    for number, (equation, inputs, outputs) in enumerate(_flat(jaxpr, names, iter(range(1, 1 << 30)), 0)):
        sources = frozenset[Name]().union(*(roots[x] for x in inputs if x is not None))
        is_array = equation.primitive.name in MADE
        for name in outputs:
            size[name] = _bytes(name[1])
            is_own_array = is_array or (sources and size[name] < sum(size[source] for source in sources))
            roots[name] = frozenset([name]) if is_own_array else sources
        if equation.primitive.name in VIEWS and inputs[0] is not None:
            viewed[outputs[0]] = viewed.get(inputs[0], inputs[0])
        last |= dict.fromkeys(sources, number)
        reads = [viewed.get(x, x) for x in inputs if x is not None] if equation.primitive.name in READ else []
        computed = [x for x in dict.fromkeys(reads) if x not in roots[x] and roots[x]]
        in_place = frozenset[Name]().union(*(roots[x] for x in _overwritten(equation, inputs) if x is not None))
        within = _within(equation) if is_array else None
        steps.append(([x for x in outputs if x in roots[x]], within, computed, in_place))
    results = [x for x in jaxpr.outvars if not isinstance(x, Literal)]
    for x in results:
        if (name := names.get(x, (0, x))) is not None:
            last |= dict.fromkeys(roots[name], len(steps))
    last |= {name: last.get(name, -1) if name in freed else len(steps) for name in arguments}
    ends: dict[int, list[Name]] = {}
    for name, number in last.items():
        ends.setdefault(number, []).append(name)
    now = most = sum(size[name] for name in arguments)
    for number, (arrays, within, computed, in_place) in enumerate(steps):
        new = sum(size[name] for name in arrays if name in last)
        if within is not None:
            beside = sum(size[x] for x in computed if all(last[root] > number for root in roots[x]))
            reused = sum(size[root] for root in in_place if last[root] == number)
            most = max(most, now + beside + max(new - reused, within))
        now += new - sum(size[name] for name in ends.get(number, ()))
    return max(most, sum(size[name] for name in arguments if name not in freed) + sum(map(_bytes, results)))


def _flat(jaxpr: Jaxpr, names: dict[Any, Name | None], calls: Iterator[int], call: int) -> Iterator[Step]:
    """Yield the equations of a jaxpr and of the functions that it calls.

    `names` are those of the variables that are not the call's own; None is a constant.
    """

    def named(x: Any) -> Name | None:
        return None if isinstance(x, Literal) else names.get(x, (call, x))

    for equation in jaxpr.eqns:
        inner = next(inner_jaxprs(equation), None) if equation.primitive.name in CALLS else None
        if inner is None:
            yield equation, list(map(named, equation.invars)), [(call, x) for x in equation.outvars]
            continue
        number = next(calls)
        inputs = equation.invars[len(equation.invars) - len(inner.invars) :]
        within = dict(zip(inner.invars, map(named, inputs), strict=True))
        yield from _flat(inner, within, calls, number)
        for outer, x in zip(equation.outvars, inner.outvars, strict=True):
            names[outer] = None if isinstance(x, Literal) else within.get(x, (number, x))


def _overwritten(equation: JaxprEqn, inputs: list[Name | None]) -> list[Name | None]:
    """Return the inputs of an equation in whose memory its results may be made."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return inputs[params["num_consts"] :][: params["num_carry"]]
    if name == "while":
        return inputs[params["cond_nconsts"] + params["body_nconsts"] :]
    return inputs if name in ("cond", "sort") else inputs[:1] if name in ("scatter", "scatter-add") else []


def _within(equation: JaxprEqn) -> int:
    """Return the bytes that a loop's body or a branch holds beside its inputs."""
    if equation.primitive.name not in LOOPS:
        return 0
    first = equation.params["num_consts"] if equation.primitive.name == "scan" else 0  # that the body may overwrite
    each = ((inner, range(first, len(inner.invars))) for inner in inner_jaxprs(equation))
    return max(0, *(_held(inner, donated) - sum(map(_bytes, inner.invars)) for inner, donated in each))


def _bytes(x: Any) -> int:
    return x.aval.size * x.aval.dtype.itemsize
