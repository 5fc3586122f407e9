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
from wanjax.pricing.work import COLLECTIVES, PRODUCTS, branches, flops, traffic, trip_count, wire_bytes

KINDS = ("kernels", "products", "elementwise", "copies", "collectives")
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"} | {
    "opt-barrier",
    "add-dependency",
}
MOVES = {
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
KERNEL = "tpu_custom_call"
ACHIEVED_BANDWIDTH = 0.8  # fraction of the nominal bandwidth
CHEAPER = 0.98  # splash attention: 43.93 ms measured by others, 44.4 by its bundles
DEARER = 1.17  # a product of 8192 x 8192 x 8192: 2.644 M cycles measured by others, 2.255 M by its bundles
BEST_PRODUCT = 0.93  # fraction of the peak that the bundles of that product reach
ACHIEVED_LINK = 0.8  # fraction of a link's nominal rate at the high end: an assumption, with no published measurement
SUSPECT = 3  # an estimate above this multiple of the price by bytes points to a bad memory layout
VECTOR_BYTES = 2 * 4096  # read and written by the vector unit per cycle, at best


class Cost(NamedTuple):
    """A price in seconds."""

    low: float
    mid: float
    high: float

    def times(self, factor: int | float) -> "Cost":
        return Cost(*(factor * seconds for seconds in self))


@dataclass(frozen=True)
class Item:
    """One operation of the program: how often it runs, and the total cost of its runs."""

    name: str
    kind: str
    times: int
    cost: Cost
    flops: int = 0  # of all runs
    bytes: int = 0  # HBM traffic of all runs; of a collective, bytes on the wire
    group: int = 1  # devices in each group of a collective
    scope: str = ""  # its named scope in the traced program


@dataclass(frozen=True)
class ItemizedPrice:
    """Every operation with its cost, and the uncertainties of the price.

    `unpriced` names kernels without a schedule, which cost nothing. `unknown_loops` names loops of unknown trip count,
    which count once. `undecided` gives, per kernel, the blocks whose branch depends on data.
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
        """Operations of all products on one device: for a model 2 × parameters × tokens, unless a loop was misread."""
        return sum(item.flops for item in self.items)


def _sum(items: Sequence[Item]) -> Cost:
    return Cost(*(math.fsum(item.cost[i] for item in items) for i in range(3)))


def price_compiled(
    compiled: Compiled,
    kernels: Mapping[str, float] | None = None,
    skip: Mapping[str, Container[int]] | None = None,
    *,
    words: int | None = None,
    cheapest: bool = False,
) -> ItemizedPrice:
    """Price one run of the program.

    `kernels` gives the seconds of kernels by their names in the module (`flash.3`, or `flash` for all such). A whole
    model needs it: it is compiled without schedules, and its kernels are compiled and priced on their own. `skip`
    gives, per kernel, the blocks among `undecided` whose branch is taken and skips the code that it guards. By default
    all of that code runs, both sides of a choice too. `words` is that of `Schedule.run`. A choice between computations
    takes the dearest, or with `cheapest` the cheapest.
    """
    options = (kernels or {}, skip or {}, words, min if cheapest else max)
    reader = Reader(parse(compiled.module), compiled.slice.chip, compiled.schedules, *options)
    items = reader.sequence(reader.module.entry, 1)
    return ItemizedPrice(tuple(items), tuple(reader.unpriced), tuple(reader.unknown_loops), reader.undecided)


@dataclass
class Reader:
    """Walk through a module in scheduled order, price its operations, and collect uncertainties of the price."""

    module: Module
    chip: Chip | Card
    schedules: Mapping[str, Schedule]
    kernels: Mapping[str, float]
    skip: Mapping[str, Container[int]]
    words: int | None
    choose: Callable[..., list[Item]]
    undecided: dict[str, frozenset[int]] = field(default_factory=dict)
    unpriced: list[str] = field(default_factory=list)
    unknown_loops: list[str] = field(default_factory=list)

    def sequence(self, within: Computation, times: int) -> list[Item]:
        """Price a computation that runs `times` times."""
        items: list[Item] = []
        in_flight: dict[str, tuple[Item, float]] = {}  # asynchronous operations and when they end
        passed = links_free = 0.0

        def end_of(item: Item) -> float:
            nonlocal links_free
            if item.kind != "collectives":
                return passed + item.cost.mid
            links_free = max(passed, links_free) + item.cost.mid  # collectives share the links, so they queue
            return links_free

        for instruction in within.instructions:
            if instruction.name.startswith("async-collective-done"):  # the fusions since its start include its work
                continue
            if instruction.opcode.endswith("-start"):
                item = self.item(instruction, within, times)
                in_flight[instruction.name] = item, end_of(item)
                continue
            if instruction.opcode.endswith(("-update", "-done")) and instruction.operands[0] in in_flight:
                item, end = in_flight.pop(instruction.operands[0])
                if instruction.opcode.endswith("-update"):
                    in_flight[instruction.name] = item, end
                    continue
                new = [_with_seconds(item, end - passed)]
            else:
                new = self.items(instruction, within, times)
                if [item.kind for item in new] == ["collectives"]:
                    new = [_with_seconds(new[0], end_of(new[0]) - passed)]
            items += new
            passed += _sum(new).mid
        return items

    def items(self, instruction: Instruction, within: Computation, times: int) -> list[Item]:
        """Price an instruction; a loop or a call may consist of several items."""
        if instruction.opcode in FREE:
            return []
        if instruction.opcode == "while":
            trips = trip_count(self.module, instruction, within)
            if trips is None:
                self.unknown_loops.append(instruction.name)
            return self.sequence(self.module.computations[instruction.computation_name("body")], times * (trips or 1))
        if instruction.opcode in ("call", "conditional"):
            inner = [self.module.computations[name] for name in branches(instruction)]
            return self.choose((self.sequence(part, times) for part in inner), key=lambda part: _sum(part).mid)
        return [self.item(instruction, within, times)]

    def item(self, instruction: Instruction, within: Computation, times: int) -> Item:
        call, _ = self.kernel_in(instruction, within)
        return replace(self._item(instruction, within, times), scope=(call or instruction).scope)

    def _item(self, instruction: Instruction, within: Computation, times: int) -> Item:
        if instruction.opcode in ("async-start", "call-start"):  # wraps a computation of one operation
            inner = self.module.computations[instruction.called or instruction.computation_name("to_apply")]
            return self.item(inner.root, inner, times)
        moved = traffic(self.module, instruction, within)
        call, around = self.kernel_in(instruction, within)
        if call is not None:
            moved = traffic(self.module, call, around)
            return Item(instruction.name, "kernels", times, self.kernel(call, moved).times(times), bytes=times * moved)
        opcodes = {part.opcode for part in (instruction, *self.module.nested_instructions(instruction))}
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            sent = wire_bytes(instruction, within)
            rings = 1 if instruction.group_size == 2 else 2  # links of a chip that the group uses
            seconds = sent / (rings * self.chip.link)
            cost = Cost(seconds, seconds, seconds / ACHIEVED_LINK).times(times)
            return Item(instruction.name, "collectives", times, cost, bytes=times * sent, group=instruction.group_size)
        if opcodes & set(PRODUCTS):
            work = flops(self.module, instruction, within)
            cost = self.products(instruction, work, moved).times(times)
            return Item(instruction.name, "products", times, cost, times * work, times * moved)
        kind = "copies" if opcodes <= MOVES | FREE | {"fusion", "copy-start"} else "elementwise"
        by_bytes = self.by_bytes(instruction, within, moved)
        estimate = (instruction.estimated_cycles or 0) / self.chip.clock
        cost = by_bytes._replace(high=min(max(by_bytes.mid, estimate), SUSPECT * by_bytes.mid)).times(times)
        return Item(instruction.name, kind, times, cost, bytes=times * moved)

    def kernel_in(self, instruction: Instruction, within: Computation) -> tuple[Instruction | None, Computation]:
        """Return the kernel that an operation is, or that its fusion contains, and the computation that holds it."""
        if instruction.target == KERNEL:
            return instruction, within
        inner = None if instruction.called is None else self.module.computations[instruction.called]
        parts = () if inner is None else inner.instructions
        return next((part for part in parts if part.target == KERNEL), None), inner or within

    def kernel(self, instruction: Instruction, moved: int) -> Cost:
        bandwidth, spread = ACHIEVED_BANDWIDTH * self.chip.bandwidth, Cost(CHEAPER, 1, DEARER)
        for name in (instruction.name, re.sub(r"\.\d+$", "", instruction.name)):
            if name in self.kernels:
                return spread.times(max(self.kernels[name], moved / bandwidth))  # it reads operands, writes results
        if instruction.name in self.schedules:
            schedule = self.schedules[instruction.name]
            run = schedule.run(self.skip.get(instruction.name, ()), words=self.words)
            if run.undecided:
                self.undecided[instruction.name] = run.undecided
            read = self.chip.cores * run.moved / bandwidth
            return spread.times(max(schedule.cycles(run.times) / self.chip.clock, read))
        self.unpriced.append(instruction.name)
        return Cost(0, 0, 0)

    def products(self, instruction: Instruction, work: int, moved: int) -> Cost:
        by_bytes = moved / self.chip.bandwidth
        floor = max(work / self.chip.flops, by_bytes)
        estimate = max((instruction.estimated_cycles or 0) / self.chip.clock, floor)
        mid = math.sqrt(floor * estimate)
        low = max(work / (BEST_PRODUCT * self.chip.flops), by_bytes)
        return Cost(min(low, mid), mid, estimate)

    def by_bytes(self, instruction: Instruction, within: Computation, moved: int) -> Cost:
        """Price vector work: its HBM traffic at the bandwidth, or the cycles of the vector unit if they are more."""
        accessed = [*instruction.results, *(a for name in instruction.operands for a in within.by_name[name].results)]
        if instruction.name in self.schedules:
            schedule = self.schedules[instruction.name]
            cycles = schedule.cycles(schedule.run().times)
        else:
            largest = max((array.bytes for array in accessed if array.space), default=0)
            cycles = max(largest, moved) / VECTOR_BYTES / self.chip.cores
        low = moved / self.chip.bandwidth
        mid = max(low / ACHIEVED_BANDWIDTH, cycles / self.chip.clock)
        return Cost(low, mid, mid)


def _with_seconds(item: Item, seconds: float) -> Item:
    """Scale an item's cost to the `seconds` that other work did not hide."""
    share = max(0.0, seconds) / item.cost.mid if item.cost.mid else 0.0
    return replace(item, cost=item.cost.times(share))
