# SPDX-License-Identifier: Apache-2.0
"""The price of a compiled program in seconds on its chip: a low, a middle and a high value.

- A matrix product costs between its roofline (operations at the peak, bytes at the bandwidth) and the compiler's
  estimate. The middle is the geometric mean of the two; the low value takes operations at the best rate of a schedule.
- A kernel costs the LLO bundles that it runs, or the bytes that it moves if that takes longer.
- Another operation costs its bytes at the achieved bandwidth, or its bundles if a schedule is available.
- A collective costs its bytes on the wire.
- An asynchronous operation costs only the time that the work between its start and its end does not hide.

The range covers what published measurements show to be uncertain. Nothing here prices the fetch of instructions (the
flash kernel's code is 1.6 MB), the wait of a grid step for its DMAs, or the work of the host.
"""

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from wanjax.pricing.chips import Card, Chip
from wanjax.pricing.compile import Compiled
from wanjax.pricing.hlo import Computation, Instruction, Module, parse
from wanjax.pricing.schedule import Schedule
from wanjax.pricing.work import COLLECTIVES, PRODUCT_OPCODES, branches, flops, traffic, trip_count, wire_bytes

KINDS = ("kernels", "products", "elementwise", "copies", "collectives")
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
ACHIEVED_BANDWIDTH = 0.8  # fraction of the nominal bandwidth
KERNEL_LOW = 0.98  # splash attention: 43.93 ms measured by others, 44.4 by its bundles
KERNEL_HIGH = 1.17  # a product of 8192 x 8192 x 8192: 2.644 M cycles measured by others, 2.255 M by its bundles
BEST_PRODUCT = 0.93  # fraction of the peak that the bundles of that product reach
ACHIEVED_LINK = 0.8  # fraction of a link's nominal rate at the high end: an assumption, with no published measurement
MAX_OVER_BYTES = 3  # an estimate above this multiple of the price by bytes points to a bad memory layout
VECTOR_BYTES = 2 * 4096  # read and written by the vector unit per cycle, at best


class Cost(NamedTuple):
    """A time in seconds, with a low, a middle and a high value."""

    low: float
    mid: float
    high: float

    def scaled(self, factor: int | float) -> "Cost":
        """Multiply all three values by a factor."""
        return Cost(*(factor * seconds for seconds in self))


@dataclass(frozen=True)
class Item:
    """One operation of the program: its kind, how often it runs, and the total cost of its runs."""

    name: str
    kind: str
    times: int
    cost: Cost
    flops: int = 0  # total of all runs
    bytes: int = 0  # total HBM traffic of all runs; for a collective, bytes on the wire
    group: int = 1  # devices in each group of a collective
    scope: str = ""  # path of named scopes in which it was traced


@dataclass(frozen=True)
class ItemizedPrice:
    """All operations of a program with their costs, and what makes the price uncertain.

    `unpriced` names kernels without a schedule, which count as free. `unknown_loops` names loops whose trip count is
    unknown, which count once. `undecided` has, for each kernel, the blocks whose branch depends on data.
    """

    items: tuple[Item, ...]
    unpriced: tuple[str, ...]
    unknown_loops: tuple[str, ...]
    undecided: Mapping[str, frozenset[int]]

    @property
    def total(self) -> Cost:
        return _sum(self.items)

    @property
    def by_kind(self) -> dict[str, Cost]:
        return {kind: _sum([item for item in self.items if item.kind == kind]) for kind in KINDS}

    @property
    def flops(self) -> int:
        """Operations of all products on one device. For a model this is about 2 × parameters × tokens."""
        return sum(item.flops for item in self.items)


def _sum(items: Sequence[Item]) -> Cost:
    return Cost(*(math.fsum(item.cost[i] for item in items) for i in range(3)))


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
            whole model needs this, because it is compiled without schedules. Its kernels are compiled and priced on
            their own.
        skip: For each kernel, the blocks among `undecided` whose branch skips the code that it guards. By default all
            guarded code runs, including both sides of a conditional.
        input_word: As in `Schedule.run`.
        cheapest: Whether the cheapest branch of a conditional counts; by default, the most expensive one.
    """
    options = (kernels or {}, skip or {}, input_word, min if cheapest else max)
    reader = Reader(parse(compiled.module), compiled.slice.chip, compiled.schedules, *options)
    items = reader.price_computation(reader.module.entry, 1)
    return ItemizedPrice(tuple(items), tuple(reader.unpriced), tuple(reader.unknown_loops), reader.undecided)


@dataclass
class Reader:
    """Walk through a module in scheduled order, price its operations, and collect what makes the price uncertain."""

    module: Module
    chip: Chip | Card
    schedules: Mapping[str, Schedule]
    kernels: Mapping[str, float]
    skip: Mapping[str, Container[int]]
    input_word: int | None
    choose: Callable[..., list[Item]]
    undecided: dict[str, frozenset[int]] = field(default_factory=dict)
    unpriced: list[str] = field(default_factory=list)
    unknown_loops: list[str] = field(default_factory=list)

    def price_computation(self, computation: Computation, times: int) -> list[Item]:
        """Price a computation that runs `times` times."""
        items: list[Item] = []
        in_flight: dict[str, tuple[Item, float]] = {}  # asynchronous operations, and when they end
        elapsed = links_free_at = 0.0

        def end_time_of(item: Item) -> float:
            nonlocal links_free_at
            if item.kind != "collectives":
                return elapsed + item.cost.mid
            links_free_at = (
                max(elapsed, links_free_at) + item.cost.mid
            )  # collectives share the links, so they run one after another
            return links_free_at

        for instruction in computation.instructions:
            if instruction.name.startswith("async-collective-done"):  # its work is in the fusions since its start
                continue
            if instruction.opcode.endswith("-start"):
                item = self.price_operation(instruction, computation, times)
                in_flight[instruction.name] = item, end_time_of(item)
                continue
            if instruction.opcode.endswith(("-update", "-done")) and instruction.operands[0] in in_flight:
                item, end_time = in_flight.pop(instruction.operands[0])
                if instruction.opcode.endswith("-update"):
                    in_flight[instruction.name] = item, end_time
                    continue
                new_items = [_with_seconds(item, end_time - elapsed)]
            else:
                new_items = self.price_instruction(instruction, computation, times)
                if [item.kind for item in new_items] == ["collectives"]:
                    new_items = [_with_seconds(new_items[0], end_time_of(new_items[0]) - elapsed)]
            items += new_items
            elapsed += _sum(new_items).mid
        return items

    def price_instruction(self, instruction: Instruction, computation: Computation, times: int) -> list[Item]:
        """Price an instruction. A loop or a call may give several items."""
        if instruction.opcode in FREE_OPCODES:
            return []
        if instruction.opcode == "while":
            trips = trip_count(self.module, instruction, computation)
            if trips is None:
                self.unknown_loops.append(instruction.name)
            return self.price_computation(
                self.module.computations[instruction.computation_name("body")], times * (trips or 1)
            )
        if instruction.opcode in ("call", "conditional"):
            callees = [self.module.computations[name] for name in branches(instruction)]
            return self.choose(
                (self.price_computation(part, times) for part in callees), key=lambda part: _sum(part).mid
            )
        return [self.price_operation(instruction, computation, times)]

    def price_operation(self, instruction: Instruction, computation: Computation, times: int) -> Item:
        call, _ = self.find_kernel(instruction, computation)
        return replace(self._price_without_scope(instruction, computation, times), scope=(call or instruction).scope)

    def _price_without_scope(self, instruction: Instruction, computation: Computation, times: int) -> Item:
        if instruction.opcode in ("async-start", "call-start"):  # wraps a computation with one operation
            inner = self.module.computations[instruction.called or instruction.computation_name("to_apply")]
            return self.price_operation(inner.root, inner, times)
        traffic_bytes = traffic(self.module, instruction, computation)
        call, kernel_computation = self.find_kernel(instruction, computation)
        if call is not None:
            traffic_bytes = traffic(self.module, call, kernel_computation)
            return Item(
                instruction.name,
                "kernels",
                times,
                self.kernel_cost(call, traffic_bytes).scaled(times),
                bytes=times * traffic_bytes,
            )
        opcodes = {part.opcode for part in (instruction, *self.module.nested_instructions(instruction))}
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            sent_bytes = wire_bytes(instruction, computation)
            links = 1 if instruction.group_size == 2 else 2  # links of a chip that the group uses
            seconds = sent_bytes / (links * self.chip.link)
            cost = Cost(seconds, seconds, seconds / ACHIEVED_LINK).scaled(times)
            return Item(
                instruction.name, "collectives", times, cost, bytes=times * sent_bytes, group=instruction.group_size
            )
        if opcodes & set(PRODUCT_OPCODES):
            operations = flops(self.module, instruction, computation)
            cost = self.product_cost(instruction, operations, traffic_bytes).scaled(times)
            return Item(instruction.name, "products", times, cost, times * operations, times * traffic_bytes)
        kind = "copies" if opcodes <= MOVE_OPCODES | FREE_OPCODES | {"fusion", "copy-start"} else "elementwise"
        byte_cost = self.vector_cost(instruction, computation, traffic_bytes)
        estimate = (instruction.estimated_cycles or 0) / self.chip.clock
        cost = byte_cost._replace(high=min(max(byte_cost.mid, estimate), MAX_OVER_BYTES * byte_cost.mid)).scaled(times)
        return Item(instruction.name, kind, times, cost, bytes=times * traffic_bytes)

    def find_kernel(self, instruction: Instruction, computation: Computation) -> tuple[Instruction | None, Computation]:
        """Return the kernel that an operation is or that its fusion contains, and the kernel's computation."""
        if instruction.target == KERNEL_TARGET:
            return instruction, computation
        inner = None if instruction.called is None else self.module.computations[instruction.called]
        fused_instructions = () if inner is None else inner.instructions
        return next(
            (fused for fused in fused_instructions if fused.target == KERNEL_TARGET), None
        ), inner or computation

    def kernel_cost(self, instruction: Instruction, traffic_bytes: int) -> Cost:
        bandwidth, price_range = ACHIEVED_BANDWIDTH * self.chip.bandwidth, Cost(KERNEL_LOW, 1, KERNEL_HIGH)
        for name in (instruction.name, re.sub(r"\.\d+$", "", instruction.name)):
            if name in self.kernels:
                return price_range.scaled(
                    max(self.kernels[name], traffic_bytes / bandwidth)
                )  # it reads its operands and writes its results
        if instruction.name in self.schedules:
            schedule = self.schedules[instruction.name]
            execution = schedule.run(self.skip.get(instruction.name, ()), input_word=self.input_word)
            if execution.undecided:
                self.undecided[instruction.name] = execution.undecided
            dma_seconds = self.chip.cores * execution.traffic_bytes / bandwidth
            return price_range.scaled(max(schedule.cycles(execution.times) / self.chip.clock, dma_seconds))
        self.unpriced.append(instruction.name)
        return Cost(0, 0, 0)

    def product_cost(self, instruction: Instruction, operations: int, traffic_bytes: int) -> Cost:
        by_bytes = traffic_bytes / self.chip.bandwidth
        floor = max(operations / self.chip.flops, by_bytes)
        estimate = max((instruction.estimated_cycles or 0) / self.chip.clock, floor)
        mid = math.sqrt(floor * estimate)
        low = max(operations / (BEST_PRODUCT * self.chip.flops), by_bytes)
        return Cost(min(low, mid), mid, estimate)

    def vector_cost(self, instruction: Instruction, computation: Computation, traffic_bytes: int) -> Cost:
        """Price vector work: its HBM traffic at the bandwidth, or the vector unit's cycles if these take longer."""
        accessed = [
            *instruction.results,
            *(array for name in instruction.operands for array in computation.by_name[name].results),
        ]
        if instruction.name in self.schedules:
            schedule = self.schedules[instruction.name]
            cycles = schedule.cycles(schedule.run().times)
        else:
            largest = max((array.bytes for array in accessed if array.space), default=0)
            cycles = max(largest, traffic_bytes) / VECTOR_BYTES / self.chip.cores
        low = traffic_bytes / self.chip.bandwidth
        mid = max(low / ACHIEVED_BANDWIDTH, cycles / self.chip.clock)
        return Cost(low, mid, mid)


def _with_seconds(item: Item, seconds: float) -> Item:
    """Scale an item's cost to the `seconds` that other work does not hide."""
    share = max(0.0, seconds) / item.cost.mid if item.cost.mid else 0.0
    return replace(item, cost=item.cost.scaled(share))
