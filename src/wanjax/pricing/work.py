# SPDX-License-Identifier: Apache-2.0
"""The work of an HLO operation: trip counts, operations of products, HBM traffic, and bytes on the wire."""

import math
import re
from collections.abc import Callable, Mapping

from wanjax.pricing.hlo import Array, Computation, Instruction, Module

PRODUCTS = ("dot", "convolution")
COLLECTIVES: Mapping[str, Callable[[int], float]] = {
    "all-gather": lambda count: count - 1,
    "reduce-scatter": lambda count: (count - 1) / count,
    "all-reduce": lambda count: 2 * (count - 1) / count,
    "all-to-all": lambda count: _hops(count) / count,
    "ragged-all-to-all": lambda count: _hops(count) / count,
    "collective-permute": lambda count: 1,
    "collective-broadcast": lambda count: 1,
}
"""Bytes sent per operand byte by each of `count` devices in a ring, forwarded bytes included."""
PASS_THROUGH = ("copy", "bitcast", "convert", "reshape")  # pass a scalar on unchanged
SLICES = ("slice", "dynamic-slice", "gather")


def trip_count(module: Module, loop: Instruction, within: Computation) -> int | None:
    """Return how often a loop's body runs: (bound − start) / step of its counter.

    None if start, bound or step is not a constant.
    """
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(match[1])
    condition, body = (module.computations[loop.computation_name(role)] for role in ("condition", "body"))
    start = _elements(within, loop.operands[0])
    test = condition.root
    if test.opcode == "fusion":  # the comparison is inside; its parameters stand for the fusion's operands
        test = next((part for part in module.nested_instructions(test) if part.opcode == "compare"), test)
        sides = [_outer_operand(module, condition.root, name) for name in test.operands]
    else:
        sides = list(test.operands)
    if test.opcode != "compare" or test.attribute("direction") not in ("LT", "LE"):
        return None
    counter = _element(condition, sides[0])
    bound = _constant(condition, sides[1], start)
    if counter is None or bound is None or start.get(counter) is None:
        return None
    step = _step(module, body, counter, start)
    length = bound - start[counter] + (test.attribute("direction") == "LE")
    return None if not step else max(0, -(-length // step))


def _outer_operand(module: Module, fusion: Instruction, name: str) -> str:
    """Return the operand that a fusion's parameter stands for, or `name` itself if it is no parameter."""
    assert fusion.called is not None
    inner = module.computations[fusion.called].by_name.get(name)
    return fusion.operands[int(inner.arguments)] if inner is not None and inner.opcode == "parameter" else name


def _elements(within: Computation, name: str) -> dict[int, int]:
    """Return the constant integers of a tuple, by index."""
    instruction = within.by_name[name]
    if instruction.opcode in PASS_THROUGH:
        return _elements(within, instruction.operands[0])
    values = (
        {i: _constant(within, part, {}) for i, part in enumerate(instruction.operands)}
        if instruction.opcode == "tuple"
        else {}
    )
    return {i: value for i, value in values.items() if value is not None}


def _element(within: Computation, name: str) -> int | None:
    """Return the index of a value in the tuple that is the computation's only parameter, or None."""
    instruction = within.by_name.get(name)
    if instruction is not None and instruction.opcode in PASS_THROUGH:
        return _element(within, instruction.operands[0])
    return (
        int(instruction.attribute("index") or 0)
        if instruction is not None and instruction.opcode == "get-tuple-element"
        else None
    )


def _constant(within: Computation, name: str, elements: Mapping[int, int]) -> int | None:
    """Return the value of a constant or of a constant element of the computation's parameter, or None."""
    instruction = within.by_name.get(name)
    if instruction is None:
        return None
    if instruction.opcode == "constant":
        return int(instruction.arguments) if re.fullmatch(r"-?\d+", instruction.arguments) else None
    if instruction.opcode in PASS_THROUGH:
        return _constant(within, instruction.operands[0], elements)
    if instruction.opcode == "get-tuple-element" and within.by_name[instruction.operands[0]].opcode == "parameter":
        return elements.get(int(instruction.attribute("index") or 0))
    return None


def _step(module: Module, body: Computation, counter: int, elements: Mapping[int, int]) -> int | None:
    """Return the constant that one iteration adds to the counter, or None."""
    instruction = body.by_name.get(body.root.operands[counter]) if body.root.opcode == "tuple" else None
    while instruction is not None and instruction.opcode in PASS_THROUGH:
        instruction = body.by_name.get(instruction.operands[0])
    if instruction is None:
        return None
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called or ""]
        if inner.root.opcode != "add":
            return None
        sides = [_outer_operand(module, instruction, name) for name in inner.root.operands]
        values = [_constant(body, side, elements) or _constant(inner, side, {}) for side in sides]
    elif instruction.opcode == "add":
        sides = list(instruction.operands)
        values = [_constant(body, side, elements) for side in sides]
    else:
        return None
    counters = [_element(body, side) == counter for side in sides]
    return next((value for value, same in zip(values, counters, strict=True) if not same), None)


def branches(instruction: Instruction) -> list[str]:
    """Return the computations that a call or conditional may run; it runs one of them."""
    return re.findall(r"(?:to_apply=|_computation=|[{ ])%([\w.\-]+)", instruction.attributes.partition("metadata=")[0])


def wire_bytes(collective: Instruction, within: Computation, *, switched: bool = False) -> int:
    """Return the bytes that each device sends in a ring algorithm, including those that it forwards.

    Where a switch joins all devices (`switched`), what each sends to another is forwarded by none.
    """
    operand_bytes = sum(array.bytes for name in collective.operands for array in within.by_name[name].results)
    kind, count = collective.opcode.removesuffix("-start"), collective.group_size
    each = (count - 1) / count if switched and kind.endswith("all-to-all") else COLLECTIVES[kind](count)
    return round(operand_bytes * each)


def _hops(count: int) -> int:
    """Return the sum of distances from one device of a ring to all others, in links."""
    return sum(min(distance, count - distance) for distance in range(1, count))


def flops(module: Module, instruction: Instruction, within: Computation) -> int:
    """Return the operations of the products in an instruction; one multiply-add counts as two."""
    if instruction.opcode in PRODUCTS:
        return product_flops(instruction, within)
    total = 0
    if instruction.called is not None:
        inner = module.computations[instruction.called]
        total = sum(flops(module, part, inner) for part in inner.instructions)
    return total


def product_flops(product: Instruction, within: Computation) -> int:
    """Return the operations of a product, or of a convolution that a library computes."""
    left, right = (within.by_name[name].results[0] for name in product.operands[:2])
    if product.opcode == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.attributes)
        summed = math.prod(left.shape[int(axis)] for axis in axes[1].split(",") if axis) if axes else 1
        return 2 * product.results[0].elements * summed
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", product.attributes)
    assert labels is not None, product.name
    kernel, out = labels[2], labels[3]
    total = 2 * right.shape[kernel.index("i")]
    for axis, label in enumerate(out):
        if not label.isdigit():
            total *= product.results[0].shape[axis]
    for label in filter(str.isdigit, kernel):
        sizes = (left.shape[labels[1].index(label)], product.results[0].shape[out.index(label)])
        total *= _count_taps(product, int(label), right.shape[kernel.index(label)], *sizes)
    return total


def _count_taps(product: Instruction, axis: int, taps: int, length: int, out: int) -> int:
    """Count, along one axis of a convolution, the pairs of an output and a tap that read an entry and not padding.

    XLA writes batched products as such convolutions, dilated so that each output reads one entry.
    """
    window = re.search(r"window=\{([^}]*)\}", product.attributes)

    def field(name: str, default: str) -> str:
        match = re.search(rf"\b{name}=([\dx_\-]+)", window[1]) if window else None
        return match[1].split("x")[axis] if match else default

    stride, lhs_dilation, dilation = (int(field(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(field("pad", "0_0").split("_")[0])
    reach = (length - 1) * lhs_dilation
    entries = (position * stride + tap * dilation - before for position in range(out) for tap in range(taps))
    return sum(0 <= entry <= reach and entry % lhs_dilation == 0 for entry in entries)


def traffic(module: Module, instruction: Instruction, within: Computation) -> int:
    """Return the bytes that an operation reads from and write to HBM.

    Operands in VMEM are free. An operand that is only sliced counts the slice, and an output that is updated in place
    counts the update.
    """
    inner = module.computations[instruction.called] if instruction.called is not None else None
    operands = [within.by_name[name].results for name in instruction.operands if name in within.by_name]
    if inner is None:
        if instruction.opcode in SLICES:
            return 2 * sum(result.traffic for result in instruction.results)
        if instruction.opcode == "dynamic-update-slice":
            return 2 * sum(result.traffic for result in operands[1])
        return sum(array.traffic for results in operands for array in results) + _total(instruction.results)
    read = sum(_read(module, inner, parameter) for parameter in inner.parameters)
    outputs = zip(_outputs(inner), instruction.results, strict=False)
    return read + sum(_written(inner, name, array) for name, array in outputs)


def _total(results: tuple[Array, ...]) -> int:
    return sum(array.traffic for array in results)


def _read(module: Module, inner: Computation, value: Instruction) -> int:
    """Return the bytes that a fusion reads of a parameter, or of a bitcast of one."""
    users = inner.users(value.name)
    if not value.results or value.results[0].space:
        return 0
    if value.root:  # returned whole
        return _total(value.results)
    read = 0
    for user in users:
        if user.opcode in SLICES and user.operands[0] == value.name:
            read += _total(user.results)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue  # updated in place, which reads nothing
        elif user.opcode == "bitcast":
            read += _read(module, inner, user)
        elif user.opcode == "fusion" and user.called is not None:
            deeper = module.computations[user.called]
            positions = [i for i, name in enumerate(user.operands) if name == value.name]
            read += sum(_read(module, deeper, deeper.parameters[i]) for i in positions)
        else:
            return _total(value.results)
    return min(read, _total(value.results))


def _outputs(inner: Computation) -> tuple[str, ...]:
    return inner.root.operands if inner.root.opcode == "tuple" else (inner.root.name,)


def _written(inner: Computation, name: str, array: Array) -> int:
    instruction = inner.by_name[name]
    while instruction.opcode == "bitcast" and instruction.operands[0] in inner.by_name:
        instruction = inner.by_name[instruction.operands[0]]
    if instruction.opcode == "dynamic-update-slice" and not array.space:
        return _total(inner.by_name[instruction.operands[1]].results)
    return array.traffic
