# SPDX-License-Identifier: Apache-2.0
"""A lower bound of the memory that a program needs, from its jaxpr, without compiling it.

A compiler fuses elementwise operations into the operations that use them. Only these arrays therefore count as live:
arguments, results, outputs of matrix products, convolutions and loops, and arrays that are smaller than their inputs.
An elementwise result keeps its inputs alive. It counts as an array only if a product or a convolution reads it while
its inputs are still needed. A loop's carry reuses the buffer of its initial value if possible.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from wanjax.pricing.lowering import AbstractCall
from wanjax.pricing.pallas_kernels import inner_jaxprs

CONTROL_FLOW_PRIMITIVES = ("scan", "while", "cond")
MATERIALIZED_PRIMITIVES = (
    *CONTROL_FLOW_PRIMITIVES,
    "dot_general",
    "conv_general_dilated",
    "sort",
    "scatter",
    "scatter-add",
    "pallas_call",
)
PRODUCT_PRIMITIVES = ("dot_general", "conv_general_dilated")
VIEW_PRIMITIVES = (
    "reshape",
    "squeeze",
    "expand_dims",
    "broadcast_in_dim",
    "transpose",
    "slice",
    "copy",
    "sharding_constraint",
)
CALL_PRIMITIVES = (
    "jit",
    "pjit",
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
    "checkpoint",
    "shard_map",
)

VariableId = tuple[int, Any]  # a variable, with the number of the call that it belongs to
FlatEquation = tuple[JaxprEqn, list[VariableId | None], list[VariableId]]


def min_live_bytes(abstract_call: AbstractCall) -> int:
    """Return the peak bytes of a program's run, including arguments and results.

    A donated buffer is freed after its last use.
    """
    jaxpr = jax.make_jaxpr(abstract_call.function)(*abstract_call.arguments).jaxpr
    starts = [0, *accumulate(len(jax.tree.leaves(argument)) for argument in abstract_call.arguments)]
    donated = [i for argument in abstract_call.donate for i in range(starts[argument], starts[argument + 1])]
    return _peak_bytes(jaxpr, donated)


def _peak_bytes(jaxpr: Jaxpr, donated: Iterable[int]) -> int:
    names: dict[Any, VariableId | None] = {}
    arguments: list[VariableId] = [(0, x) for x in (*jaxpr.constvars, *jaxpr.invars)]
    size = {name: _bytes(name[1]) for name in arguments}
    roots: dict[VariableId, frozenset[VariableId]] = {name: frozenset([name]) for name in arguments}
    freeable = {arguments[len(jaxpr.constvars) + i] for i in donated}
    view_sources: dict[VariableId, VariableId] = {}  # the array behind each view
    steps: list[tuple[list[VariableId], int | None, list[VariableId], frozenset[VariableId]]] = []
    """For each equation: its new arrays; the peak bytes inside the equation, or None if it is fused; the elementwise
    results that it reads; and the arrays whose buffers its results may reuse.
    """
    last_uses: dict[VariableId, int] = {}
    for index, (equation, inputs, outputs) in enumerate(_flatten(jaxpr, names, iter(range(1, 1 << 30)), 0)):
        sources = frozenset[VariableId]().union(*(roots[x] for x in inputs if x is not None))
        is_array = equation.primitive.name in MATERIALIZED_PRIMITIVES
        for name in outputs:
            size[name] = _bytes(name[1])
            is_materialized = is_array or (sources and size[name] < sum(size[source] for source in sources))
            roots[name] = frozenset([name]) if is_materialized else sources
        if equation.primitive.name in VIEW_PRIMITIVES and inputs[0] is not None:
            view_sources[outputs[0]] = view_sources.get(inputs[0], inputs[0])
        last_uses |= dict.fromkeys(sources, index)
        reads = (
            [view_sources.get(x, x) for x in inputs if x is not None]
            if equation.primitive.name in PRODUCT_PRIMITIVES
            else []
        )
        fused_inputs = [x for x in dict.fromkeys(reads) if x not in roots[x] and roots[x]]
        in_place = frozenset[VariableId]().union(
            *(roots[x] for x in _reusable_inputs(equation, inputs) if x is not None)
        )
        inner_bytes = _inner_bytes(equation) if is_array else None
        steps.append(([x for x in outputs if x in roots[x]], inner_bytes, fused_inputs, in_place))
    results = [x for x in jaxpr.outvars if not isinstance(x, Literal)]
    for x in results:
        if (name := names.get(x, (0, x))) is not None:
            last_uses |= dict.fromkeys(roots[name], len(steps))
    last_uses |= {name: last_uses.get(name, -1) if name in freeable else len(steps) for name in arguments}
    last_used_at: dict[int, list[VariableId]] = {}
    for name, index in last_uses.items():
        last_used_at.setdefault(index, []).append(name)
    live_bytes = peak = sum(size[name] for name in arguments)
    for index, (arrays, inner_bytes, fused_inputs, in_place) in enumerate(steps):
        new_bytes = sum(size[name] for name in arrays if name in last_uses)
        if inner_bytes is not None:
            input_copies = sum(size[x] for x in fused_inputs if all(last_uses[root] > index for root in roots[x]))
            reused_bytes = sum(size[root] for root in in_place if last_uses[root] == index)
            peak = max(peak, live_bytes + input_copies + max(new_bytes - reused_bytes, inner_bytes))
        live_bytes += new_bytes - sum(size[name] for name in last_used_at.get(index, ()))
    return max(peak, sum(size[name] for name in arguments if name not in freeable) + sum(map(_bytes, results)))


def _flatten(
    jaxpr: Jaxpr, names: dict[Any, VariableId | None], call_numbers: Iterator[int], call: int
) -> Iterator[FlatEquation]:
    """Yield the equations of a jaxpr and of the functions that it calls.

    `names` maps variables that are defined outside the call to their names, or to None for a constant.
    """

    def name_of(x: Any) -> VariableId | None:
        return None if isinstance(x, Literal) else names.get(x, (call, x))

    for equation in jaxpr.eqns:
        inner = next(inner_jaxprs(equation), None) if equation.primitive.name in CALL_PRIMITIVES else None
        if inner is None:
            yield equation, list(map(name_of, equation.invars)), [(call, x) for x in equation.outvars]
            continue
        number = next(call_numbers)
        inputs = equation.invars[len(equation.invars) - len(inner.invars) :]
        inner_names = dict(zip(inner.invars, map(name_of, inputs), strict=True))
        yield from _flatten(inner, inner_names, call_numbers, number)
        for outer, x in zip(equation.outvars, inner.outvars, strict=True):
            names[outer] = None if isinstance(x, Literal) else inner_names.get(x, (number, x))


def _reusable_inputs(equation: JaxprEqn, inputs: list[VariableId | None]) -> list[VariableId | None]:
    """Return the inputs of an equation whose buffers its results may reuse."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return inputs[params["num_consts"] :][: params["num_carry"]]
    if name == "while":
        return inputs[params["cond_nconsts"] + params["body_nconsts"] :]
    return inputs if name in ("cond", "sort") else inputs[:1] if name in ("scatter", "scatter-add") else []


def _inner_bytes(equation: JaxprEqn) -> int:
    """Return the peak bytes inside the body of a loop or a branch, without its inputs."""
    if equation.primitive.name not in CONTROL_FLOW_PRIMITIVES:
        return 0
    first_reusable = (
        equation.params["num_consts"] if equation.primitive.name == "scan" else 0
    )  # the first reusable input
    inner_programs = ((inner, range(first_reusable, len(inner.invars))) for inner in inner_jaxprs(equation))
    return max(0, *(_peak_bytes(inner, donated) - sum(map(_bytes, inner.invars)) for inner, donated in inner_programs))


def _bytes(x: Any) -> int:
    return x.aval.size * x.aval.dtype.itemsize
