# SPDX-License-Identifier: Apache-2.0
"""Price a compiled program in seconds on its chip. A price has a low, a middle and a high value.

- A matrix product costs between its roofline (operations at the peak, bytes at the bandwidth) and the compiler's
  estimate. The middle value is the geometric mean of the roofline and the estimate. The low value assumes the best rate
  of operations that a schedule reaches.
- A kernel costs the LLO bundles that it runs, or the bytes that it moves, whichever takes longer.
- Any other operation costs its bytes at the achieved bandwidth, or its bundles if a schedule is available.
- A collective costs its bytes on the wire, and a copy from the host's memory its bytes on the link to the host.
- An asynchronous operation costs only the part of its time that is not hidden behind other work.

The range covers the uncertainty that published measurements show. The price does not include the fetch of instructions
(the flash kernel's code is 1.6 MB), the wait of a grid step for its DMAs, or the work of the host.
"""

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

from wanjax.pricing.chips import Card, Chip
from wanjax.pricing.compile import Compiled
from wanjax.pricing.hlo import Computation, Instruction, Module, parse
from wanjax.pricing.schedule import KernelSchedule
from wanjax.pricing.work import (
    COLLECTIVES,
    PRODUCT_OPCODES,
    branches,
    bytes_from_host,
    flops,
    traffic,
    trip_count,
    wire_bytes,
)

KINDS = ("kernels", "matmuls", "elementwise", "copies", "collectives", "offload")
FREE_OPCODES = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
} | {
    "opt-barrier",
    "add-dependency",
}
MOVE_OPCODES = {
    "copy",
    "transpose",
    "reshape",
    "slice",
    "dynamic-slice",
    "dynamic-update-slice",
    "concatenate",
    "pad",
    "broadcast",
}
KERNEL_TARGET = "tpu_custom_call"
ACHIEVED_BANDWIDTH_FRACTION = 0.8  # fraction of the nominal bandwidth
KERNEL_LOW_FACTOR = 0.98  # splash attention: 43.93 ms in a published measurement, 44.4 ms by its bundles
# a product of 8192 x 8192 x 8192: 2.644 M cycles in a published measurement, 2.255 M by its bundles
KERNEL_HIGH_FACTOR = 1.17
BEST_MATMUL_FRACTION = 0.93  # the fraction of the peak that this product reaches by its bundles
# the best, typical and worst fractions of the host link's rate; these are assumptions
HOST_LINK_FRACTIONS = 0.9, 0.8, 0.5
# the fraction of a link's nominal rate at the high end; an assumption without a published measurement
ACHIEVED_LINK_FRACTION = 0.8
MAX_BYTE_TIME_RATIO = 3  # a compiler's estimate above this multiple of the price by bytes hints at a bad memory layout
VECTOR_BYTES_PER_CYCLE = 2 * 4096  # the maximum number of bytes that the vector unit reads and writes per cycle


class ValueRange(NamedTuple):
    """A time in seconds, with a low, a middle and a high value."""

    low: float
    mid: float
    high: float

    def scaled_by(self, factor: int | float) -> "ValueRange":
        """Multiply all three values by a factor."""
        return ValueRange(*(factor * seconds for seconds in self))

    def plus(self, other: "ValueRange") -> "ValueRange":
        """Add another time, value by value."""
        return ValueRange(self.low + other.low, self.mid + other.mid, self.high + other.high)


@dataclass(frozen=True)
class PricedOperation:
    """One operation of the program: its kind, how often it runs, and the total cost of its runs."""

    name: str
    kind: str
    num_executions: int
    cost: ValueRange
    flops: int = 0  # operations of all runs
    bytes: int = 0  # HBM traffic of all runs; for a collective, bytes on the wire
    group: int = 1  # devices in each group of a collective
    scope: str = ""  # the path of named scopes in which the operation was traced


@dataclass(frozen=True)
class ItemizedPrice:
    """All operations of a program with their costs, and the causes of uncertainty.

    `unpriced_kernels` names kernels without a schedule. They count as free. `unknown_loops` names loops with an unknown
    trip count. The body of such a loop counts once. `data_dependent_blocks` lists the blocks of each kernel whose
    branch depends on data.
    """

    items: tuple[PricedOperation, ...]
    unpriced_kernels: tuple[str, ...]
    unknown_loops: tuple[str, ...]
    data_dependent_blocks: Mapping[str, frozenset[int]]

    @property
    def total(self) -> ValueRange:
        return _sum(self.items)

    @property
    def by_kind(self) -> dict[str, ValueRange]:
        return {kind: _sum([item for item in self.items if item.kind == kind]) for kind in KINDS}

    @property
    def flops(self) -> int:
        """Operations of all products on one device. For a model this is about 2 × parameters × tokens."""
        return sum(item.flops for item in self.items)


def _sum(items: Sequence[PricedOperation]) -> ValueRange:
    return ValueRange(*(math.fsum(item.cost[i] for item in items) for i in range(3)))


def price_compiled(
    compiled: Compiled,
    kernels: Mapping[str, float] | None = None,
    skip: Mapping[str, Container[int]] | None = None,
    *,
    input_word: int | None = None,
    cheapest: bool = False,
) -> ItemizedPrice:
    """Price one run of a compiled program.

    Args:
        compiled: The program.
        kernels: Seconds of kernels by their names in the module: `flash.3`, or `flash` for all kernels of that name. A
            whole model needs `kernels`, because it is compiled without schedules; its kernels are compiled and priced
            separately.
        skip: For each kernel, some of its `data_dependent_blocks`. The branches of these blocks are taken, and the code
            that they skip does not run. By default all code behind such branches runs, including both sides of a
            conditional.
        input_word: As in `KernelSchedule.run`.
        cheapest: Whether the cheapest branch of a conditional counts; by default, the most expensive branch counts.
    """
    options = (kernels or {}, skip or {}, input_word, min if cheapest else max)
    pricer = OperationPricer(parse(compiled.module), compiled.slice.chip, compiled.schedules, *options)
    items = pricer.price_computation(pricer.module.entry, 1)
    return ItemizedPrice(
        tuple(items), tuple(pricer.unpriced_kernels), tuple(pricer.unknown_loops), pricer.data_dependent_blocks
    )


@dataclass
class OperationPricer:
    """Walk through a module in scheduled order, price its operations, and collect the causes of uncertainty."""

    module: Module
    chip: Chip | Card
    schedules: Mapping[str, KernelSchedule]
    kernels: Mapping[str, float]
    skip: Mapping[str, Container[int]]
    input_word: int | None
    choose: Callable[..., list[PricedOperation]]
    data_dependent_blocks: dict[str, frozenset[int]] = field(default_factory=dict)
    unpriced_kernels: list[str] = field(default_factory=list)
    unknown_loops: list[str] = field(default_factory=list)

    def price_computation(self, computation: Computation, num_executions: int) -> list[PricedOperation]:
        """Price a computation that runs `num_executions` times."""
        items: list[PricedOperation] = []
        in_flight: dict[
            str, tuple[PricedOperation, ValueRange]
        ] = {}  # the running asynchronous operations, and when each ends
        # the end has a low and a high value, because the rate of copies from the host is uncertain
        elapsed = ValueRange(0, 0, 0)
        free_at: dict[_Links, ValueRange] = {}  # when the last transfer over these links ends

        def end_time_of(item: PricedOperation, instruction: Instruction) -> ValueRange:
            """Return when an operation ends. Transfers over the same links run one after another."""
            links = _Links(item.kind, instruction.sent_between)
            ends = (end for other, end in free_at.items() if other.overlaps(links))
            end = reduce(_elementwise_max, ends, elapsed).plus(item.cost)
            if item.kind in ("collectives", "offload"):
                free_at[links] = end
            return end

        for instruction in computation.instructions:
            # the fusions since the start of the operation contain its work
            if instruction.name.startswith("async-collective-done"):
                continue
            if instruction.opcode.endswith("-start"):
                item = self.price_operation(instruction, computation, num_executions)
                in_flight[instruction.name] = item, end_time_of(item, instruction)
                continue
            if instruction.opcode.endswith(("-update", "-done")) and instruction.operands[0] in in_flight:
                item, end_time = in_flight.pop(instruction.operands[0])
                if instruction.opcode.endswith("-update"):
                    in_flight[instruction.name] = item, end_time
                    continue
                new_items = [_exposed(item, end_time, elapsed)]
            else:
                new_items = self.price_instruction(instruction, computation, num_executions)
                if [item.kind for item in new_items] == ["collectives"]:
                    new_items = [_exposed(new_items[0], end_time_of(new_items[0], instruction), elapsed)]
            items += new_items
            for item in new_items:
                mid = item.cost.mid
                elapsed = elapsed.plus(item.cost if item.kind == "offload" else ValueRange(mid, mid, mid))
        return items

    def price_instruction(
        self, instruction: Instruction, computation: Computation, num_executions: int
    ) -> list[PricedOperation]:
        """Price an instruction. A loop or a call may give several items."""
        if instruction.opcode in FREE_OPCODES:
            return []
        if instruction.opcode == "while":
            trips = trip_count(self.module, instruction, computation)
            if trips is None:
                self.unknown_loops.append(instruction.name)
            return self.price_computation(
                self.module.computations[instruction.computation_name("body")], num_executions * (trips or 1)
            )
        if instruction.opcode in ("call", "conditional"):
            callees = [self.module.computations[name] for name in branches(instruction)]
            return self.choose(
                (self.price_computation(callee, num_executions) for callee in callees),
                key=lambda priced: _sum(priced).mid,
            )
        return [self.price_operation(instruction, computation, num_executions)]

    def price_operation(
        self, instruction: Instruction, computation: Computation, num_executions: int
    ) -> PricedOperation:
        if (copied_bytes := bytes_from_host(self.module, instruction, computation)) > 0:
            seconds = (copied_bytes / (fraction * self.chip.host_link) for fraction in HOST_LINK_FRACTIONS)
            cost = ValueRange(*seconds).scaled_by(num_executions)
            name, scope = instruction.name, instruction.scope
            return PricedOperation(
                name, "offload", num_executions, cost, bytes=num_executions * copied_bytes, scope=scope
            )
        call, _ = self.find_kernel(instruction, computation)
        return replace(
            self._price_without_scope(instruction, computation, num_executions), scope=(call or instruction).scope
        )

    def _price_without_scope(
        self, instruction: Instruction, computation: Computation, num_executions: int
    ) -> PricedOperation:
        if instruction.opcode in ("async-start", "call-start"):  # the called computation has a single operation
            inner = self.module.computations[instruction.called_computation or instruction.computation_name("to_apply")]
            return self.price_operation(inner.root, inner, num_executions)
        traffic_bytes = traffic(self.module, instruction, computation)
        call, kernel_computation = self.find_kernel(instruction, computation)
        if call is not None:
            traffic_bytes = traffic(self.module, call, kernel_computation)
            return PricedOperation(
                instruction.name,
                "kernels",
                num_executions,
                self.kernel_cost(call, traffic_bytes).scaled_by(num_executions),
                bytes=num_executions * traffic_bytes,
            )
        opcodes = {executed.opcode for executed in (instruction, *self.module.nested_instructions(instruction))}
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            sent_bytes = wire_bytes(instruction, computation)
            links = 1 if instruction.group_size == 2 else 2  # how many of a chip's links the group uses
            seconds = sent_bytes / (links * self.chip.link)
            cost = ValueRange(seconds, seconds, seconds / ACHIEVED_LINK_FRACTION).scaled_by(num_executions)
            return PricedOperation(
                instruction.name,
                "collectives",
                num_executions,
                cost,
                bytes=num_executions * sent_bytes,
                group=instruction.group_size,
            )
        if opcodes & set(PRODUCT_OPCODES):
            operations = flops(self.module, instruction, computation)
            cost = self.matmul_cost(instruction, operations, traffic_bytes).scaled_by(num_executions)
            return PricedOperation(
                instruction.name,
                "matmuls",
                num_executions,
                cost,
                num_executions * operations,
                num_executions * traffic_bytes,
            )
        kind = "copies" if opcodes <= MOVE_OPCODES | FREE_OPCODES | {"fusion", "copy-start"} else "elementwise"
        byte_cost = self.vector_cost(instruction, computation, traffic_bytes)
        estimate = (instruction.estimated_cycles or 0) / self.chip.clock
        high = min(max(byte_cost.mid, estimate), MAX_BYTE_TIME_RATIO * byte_cost.mid)
        cost = byte_cost._replace(high=high).scaled_by(num_executions)
        return PricedOperation(instruction.name, kind, num_executions, cost, bytes=num_executions * traffic_bytes)

    def find_kernel(self, instruction: Instruction, computation: Computation) -> tuple[Instruction | None, Computation]:
        """Find the kernel of an operation. The kernel is the operation itself, or a part of its fusion. Also return the
        computation of the kernel.
        """
        if instruction.target == KERNEL_TARGET:
            return instruction, computation
        inner = (
            None if instruction.called_computation is None else self.module.computations[instruction.called_computation]
        )
        fused_instructions = () if inner is None else inner.instructions
        return next(
            (fused for fused in fused_instructions if fused.target == KERNEL_TARGET), None
        ), inner or computation

    def kernel_cost(self, instruction: Instruction, traffic_bytes: int) -> ValueRange:
        bandwidth = ACHIEVED_BANDWIDTH_FRACTION * self.chip.bandwidth
        price_range = ValueRange(KERNEL_LOW_FACTOR, 1, KERNEL_HIGH_FACTOR)
        for name in (instruction.name, re.sub(r"\.\d+$", "", instruction.name)):
            if name in self.kernels:
                return price_range.scaled_by(
                    max(self.kernels[name], traffic_bytes / bandwidth)
                )  # at least the time of the traffic
        if instruction.name in self.schedules:
            schedule = self.schedules[instruction.name]
            execution = schedule.run(self.skip.get(instruction.name, ()), input_word=self.input_word)
            if execution.data_dependent_blocks:
                self.data_dependent_blocks[instruction.name] = execution.data_dependent_blocks
            dma_seconds = self.chip.cores * execution.traffic_bytes / bandwidth
            return price_range.scaled_by(max(schedule.cycles(execution.run_counts) / self.chip.clock, dma_seconds))
        self.unpriced_kernels.append(instruction.name)
        return ValueRange(0, 0, 0)

    def matmul_cost(self, instruction: Instruction, operations: int, traffic_bytes: int) -> ValueRange:
        traffic_seconds = traffic_bytes / self.chip.bandwidth
        roofline = max(operations / self.chip.flops, traffic_seconds)
        estimate = max((instruction.estimated_cycles or 0) / self.chip.clock, roofline)
        mid = math.sqrt(roofline * estimate)
        low = max(operations / (BEST_MATMUL_FRACTION * self.chip.flops), traffic_seconds)
        return ValueRange(min(low, mid), mid, estimate)

    def vector_cost(self, instruction: Instruction, computation: Computation, traffic_bytes: int) -> ValueRange:
        """Price vector work: the time of its HBM traffic, or the time of the vector unit's cycles, whichever is
        longer."""
        accessed = [
            *instruction.results,
            *(array for name in instruction.operands for array in computation.by_name[name].results),
        ]
        if instruction.name in self.schedules:
            schedule = self.schedules[instruction.name]
            cycles = schedule.cycles(schedule.run().run_counts)
        else:
            largest = max((array.bytes for array in accessed if array.space), default=0)
            cycles = max(largest, traffic_bytes) / VECTOR_BYTES_PER_CYCLE / self.chip.cores
        low = traffic_bytes / self.chip.bandwidth
        mid = max(low / ACHIEVED_BANDWIDTH_FRACTION, cycles / self.chip.clock)
        return ValueRange(low, mid, mid)


class _Links(NamedTuple):
    """The links of a transfer: the kind of the transfer, and the pairs of devices of a permute."""

    kind: str
    pairs: frozenset[tuple[int, int]]

    def overlaps(self, other: "_Links") -> bool:
        """Return whether another transfer uses some of these links.

        A link carries data in both directions at the full rate. Two permutes therefore use the same links only if both
        send from one device to the same other device. Every other collective uses all links.
        """
        return self.kind == other.kind and not (self.pairs and other.pairs and self.pairs.isdisjoint(other.pairs))


def _elementwise_max(a: ValueRange, b: ValueRange) -> ValueRange:
    return ValueRange(*map(max, a, b))


def _exposed(item: PricedOperation, end_time: ValueRange, elapsed: ValueRange) -> PricedOperation:
    """Reduce an item's cost to the part that other work does not hide. The program needs the result after `elapsed`
    seconds.

    For a copy from the host's memory, other work may hide the low value but not the high value.
    """
    if item.kind == "offload":
        return replace(
            item, cost=ValueRange(*(max(0.0, end - start) for start, end in zip(elapsed, end_time, strict=True)))
        )
    share = max(0.0, end_time.mid - elapsed.mid) / item.cost.mid if item.cost.mid else 0.0
    return replace(item, cost=item.cost.scaled_by(share))
