# SPDX-License-Identifier: Apache-2.0
"""Count the work of an HLO operation: trip counts, operations of products, HBM traffic and bytes on the wire."""

import math
import re
from collections.abc import Callable, Mapping

from wanjax.pricing.hlo import HOST, Array, Computation, Instruction, Module

PRODUCT_OPCODES = ("dot", "convolution")
COLLECTIVES: Mapping[str, Callable[[int], float]] = {
    "all-gather": lambda count: count - 1,
    "reduce-scatter": lambda count: (count - 1) / count,
    "all-reduce": lambda count: 2 * (count - 1) / count,
    "all-to-all": lambda count: _hops(count) / count,
    "ragged-all-to-all": lambda count: _hops(count) / count,
    "collective-permute": lambda count: 1,
    "collective-broadcast": lambda count: 1,
}
"""For each collective, the bytes that each of `count` devices in a ring sends per byte of the operand. Forwarded bytes
count."""
PASS_THROUGH_OPCODES = ("copy", "bitcast", "convert", "reshape")  # operations that do not change a scalar
SLICE_OPCODES = ("slice", "dynamic-slice", "gather")


def trip_count(module: Module, loop: Instruction, computation: Computation) -> int | None:
    """Return how often the body of a loop runs: (bound − start) / step, for the loop's counter.

    Returns None if start, bound or step is not a constant.
    """
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(match[1])
    condition, body = (module.computations[loop.computation_name(role)] for role in ("condition", "body"))
    start = _constant_elements(computation, loop.operands[0])
    comparison = condition.root
    # the fusion contains the comparison; the parameters of the comparison are the fusion's operands
    if comparison.opcode == "fusion":
        comparison = next(
            (nested for nested in module.nested_instructions(comparison) if nested.opcode == "compare"), comparison
        )
        operand_names = [_outer_operand(module, condition.root, name) for name in comparison.operands]
    else:
        operand_names = list(comparison.operands)
    if comparison.opcode != "compare" or comparison.attribute("direction") not in ("LT", "LE"):
        return None
    counter = _element_index(condition, operand_names[0])
    bound = _constant_value(condition, operand_names[1], start)
    if counter is None or bound is None or start.get(counter) is None:
        return None
    step = _counter_step(module, body, counter, start)
    length = bound - start[counter] + (comparison.attribute("direction") == "LE")
    return None if not step else max(0, -(-length // step))


def _outer_operand(module: Module, fusion: Instruction, name: str) -> str:
    """Return the operand of a fusion for one of its parameters, or `name` itself if it is not a parameter."""
    assert fusion.called_computation is not None
    inner = module.computations[fusion.called_computation].by_name.get(name)
    return fusion.operands[int(inner.arguments)] if inner is not None and inner.opcode == "parameter" else name


def _constant_elements(computation: Computation, name: str) -> dict[int, int]:
    """Return the integers among a tuple's elements that are constants, by index."""
    instruction = computation.by_name[name]
    if instruction.opcode in PASS_THROUGH_OPCODES:
        return _constant_elements(computation, instruction.operands[0])
    values = (
        {i: _constant_value(computation, operand, {}) for i, operand in enumerate(instruction.operands)}
        if instruction.opcode == "tuple"
        else {}
    )
    return {i: value for i, value in values.items() if value is not None}


def _element_index(computation: Computation, name: str) -> int | None:
    """Return the index of a value in the tuple that is the computation's only parameter, or None."""
    instruction = computation.by_name.get(name)
    if instruction is not None and instruction.opcode in PASS_THROUGH_OPCODES:
        return _element_index(computation, instruction.operands[0])
    return (
        int(instruction.attribute("index") or 0)
        if instruction is not None and instruction.opcode == "get-tuple-element"
        else None
    )


def _constant_value(computation: Computation, name: str, elements: Mapping[int, int]) -> int | None:
    """Return the value of a constant integer, or of a constant element of a tuple. Return None for other values."""
    instruction = computation.by_name.get(name)
    if instruction is None:
        return None
    if instruction.opcode == "constant":
        return int(instruction.arguments) if re.fullmatch(r"-?\d+", instruction.arguments) else None
    if instruction.opcode in PASS_THROUGH_OPCODES:
        return _constant_value(computation, instruction.operands[0], elements)
    if instruction.opcode == "get-tuple-element" and computation.by_name[instruction.operands[0]].opcode == "parameter":
        return elements.get(int(instruction.attribute("index") or 0))
    return None


def _counter_step(module: Module, body: Computation, counter: int, elements: Mapping[int, int]) -> int | None:
    """Return the constant that one iteration adds to the counter, or None."""
    instruction = body.by_name.get(body.root.operands[counter]) if body.root.opcode == "tuple" else None
    while instruction is not None and instruction.opcode in PASS_THROUGH_OPCODES:
        instruction = body.by_name.get(instruction.operands[0])
    if instruction is None:
        return None
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called_computation or ""]
        if inner.root.opcode != "add":
            return None
        operand_names = [_outer_operand(module, instruction, name) for name in inner.root.operands]
        values = [
            _constant_value(body, operand_name, elements) or _constant_value(inner, operand_name, {})
            for operand_name in operand_names
        ]
    elif instruction.opcode == "add":
        operand_names = list(instruction.operands)
        values = [_constant_value(body, operand_name, elements) for operand_name in operand_names]
    else:
        return None
    counters = [_element_index(body, operand_name) == counter for operand_name in operand_names]
    return next((value for value, is_counter in zip(values, counters, strict=True) if not is_counter), None)


def branches(instruction: Instruction) -> list[str]:
    """Return the names of the computations that a call or conditional may run.

    Each run executes one of these computations.
    """
    return re.findall(r"(?:to_apply=|_computation=|[{ ])%([\w.\-]+)", instruction.attributes.partition("metadata=")[0])


def wire_bytes(collective: Instruction, computation: Computation, *, uses_switch: bool = False) -> int:
    """Return the bytes that each device sends in a ring algorithm. Forwarded bytes count.

    With `uses_switch`, a switch connects all devices. No device then forwards bytes in an all-to-all.
    """
    operand_bytes = sum(array.bytes for name in collective.operands for array in computation.by_name[name].results)
    kind, count = collective.opcode.removesuffix("-start"), collective.group_size
    bytes_per_operand_byte = (
        (count - 1) / count if uses_switch and kind.endswith("all-to-all") else COLLECTIVES[kind](count)
    )
    return round(operand_bytes * bytes_per_operand_byte)


def _hops(count: int) -> int:
    """Return the sum of the distances from one device of a ring to all others, in links."""
    return sum(min(distance, count - distance) for distance in range(1, count))


def flops(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Return the operations of the products in an instruction. A multiply-add counts as two."""
    if instruction.opcode in PRODUCT_OPCODES:
        return product_flops(instruction, computation)
    total = 0
    if instruction.called_computation is not None:
        inner = module.computations[instruction.called_computation]
        total = sum(flops(module, nested, inner) for nested in inner.instructions)
    return total


def product_flops(product: Instruction, computation: Computation) -> int:
    """Return the operations of one matrix product or convolution."""
    lhs, rhs = (computation.by_name[name].results[0] for name in product.operands[:2])
    if product.opcode == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.attributes)
        contracted_size = math.prod(lhs.shape[int(axis)] for axis in axes[1].split(",") if axis) if axes else 1
        return 2 * product.results[0].elements * contracted_size
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", product.attributes)
    assert labels is not None, product.name
    kernel, out = labels[2], labels[3]
    total = 2 * rhs.shape[kernel.index("i")]
    for axis, label in enumerate(out):
        if not label.isdigit():
            total *= product.results[0].shape[axis]
    for label in filter(str.isdigit, kernel):
        sizes = (lhs.shape[labels[1].index(label)], product.results[0].shape[out.index(label)])
        total *= _count_taps(product, int(label), rhs.shape[kernel.index(label)], *sizes)
    return total


def _count_taps(product: Instruction, axis: int, taps: int, length: int, out: int) -> int:
    """Count the pairs of an output and a kernel tap that read an input, along one axis of a convolution.

    Pairs that read padding do not count.

    XLA writes a batched product as a dilated convolution in which each output reads one input.
    """
    window = re.search(r"window=\{([^}]*)\}", product.attributes)

    def field(name: str, default: str) -> str:
        match = re.search(rf"\b{name}=([\dx_\-]+)", window[1]) if window else None
        return match[1].split("x")[axis] if match else default

    stride, lhs_dilation, dilation = (int(field(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    padding = int(field("pad", "0_0").split("_")[0])
    last_entry = (length - 1) * lhs_dilation
    entries = (position * stride + tap * dilation - padding for position in range(out) for tap in range(taps))
    return sum(0 <= entry <= last_entry and entry % lhs_dilation == 0 for entry in entries)


def bytes_from_host(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Return the bytes that an operation copies from the host's memory to the device. Return 0 for other operations.

    Compilers write such a copy as a slice or as a copy of an array in the host's memory.
    """
    operands = [
        x for name in instruction.operands if name in computation.by_name for x in computation.by_name[name].results
    ]
    if instruction.opcode.endswith("-done") or not any(array.space == HOST for array in operands):
        return 0
    if instruction.opcode in ("tuple", "while", "conditional", "call", "get-tuple-element", "bitcast", "parameter"):
        return 0
    copied_arrays = [array for array in instruction.results if array.space != HOST]
    return max((array.bytes for array in copied_arrays), default=0)


def traffic(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Return the bytes that an operation reads from and writes to HBM.

    Operands in VMEM are free. If an operation reads only a slice of an operand, only the slice counts. If an output is
    updated in place, only the update counts.
    """
    inner = module.computations[instruction.called_computation] if instruction.called_computation is not None else None
    operands = [computation.by_name[name].results for name in instruction.operands if name in computation.by_name]
    if inner is None:
        if instruction.opcode in SLICE_OPCODES:
            return 2 * sum(result.traffic for result in instruction.results)
        if instruction.opcode == "dynamic-update-slice":
            return 2 * sum(result.traffic for result in operands[1])
        return sum(array.traffic for results in operands for array in results) + _total_traffic(instruction.results)
    read_bytes = sum(_read_bytes(module, inner, parameter) for parameter in inner.parameters)
    outputs = zip(_output_names(inner), instruction.results, strict=False)
    return read_bytes + sum(_written_bytes(inner, name, array) for name, array in outputs)


def _total_traffic(results: tuple[Array, ...]) -> int:
    return sum(array.traffic for array in results)


def _read_bytes(module: Module, inner: Computation, value: Instruction) -> int:
    """Return the bytes that a fusion reads from a parameter, or from a bitcast of a parameter."""
    users = inner.users(value.name)
    if not value.results or value.results[0].space:
        return 0
    if value.is_root:  # the fusion returns the whole parameter
        return _total_traffic(value.results)
    read_bytes = 0
    for user in users:
        if user.opcode in SLICE_OPCODES and user.operands[0] == value.name:
            read_bytes += _total_traffic(user.results)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue  # an update in place reads nothing
        elif user.opcode == "bitcast":
            read_bytes += _read_bytes(module, inner, user)
        elif user.opcode == "fusion" and user.called_computation is not None:
            computation_called = module.computations[user.called_computation]
            if _changes_only_layout(computation_called):
                # the users of the result decide how much is read
                read_bytes += _read_bytes(module, inner, user)
                continue
            positions = [i for i, name in enumerate(user.operands) if name == value.name]
            read_bytes += sum(
                _read_bytes(module, computation_called, computation_called.parameters[i]) for i in positions
            )
        else:
            return _total_traffic(value.results)
    return min(read_bytes, _total_traffic(value.results))


def _changes_only_layout(computation: Computation) -> bool:
    """Return True if a computation copies its only parameter to another tiling."""
    root = computation.root
    return root.opcode == "copy" and [root.operands[0]] == [parameter.name for parameter in computation.parameters]


def _output_names(inner: Computation) -> tuple[str, ...]:
    return inner.root.operands if inner.root.opcode == "tuple" else (inner.root.name,)


def _written_bytes(inner: Computation, name: str, array: Array) -> int:
    instruction = inner.by_name[name]
    while instruction.opcode == "bitcast" and instruction.operands[0] in inner.by_name:
        instruction = inner.by_name[instruction.operands[0]]
    if instruction.opcode == "dynamic-update-slice" and not array.space:
        return _total_traffic(inner.by_name[instruction.operands[1]].results)
    return array.traffic
