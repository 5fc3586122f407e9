# SPDX-License-Identifier: Apache-2.0
"""The price of a compiled program in seconds on its chip: a middle, with a low and a high one around it.

Products cost between their floor (operations at the peak, bytes at the bandwidth) and the compiler's estimate, and the
geometric mean of the two in the middle. Kernels cost the bundles that run, or the bytes that they move where that takes
longer. Other operations cost their bytes at the bandwidth that is reached, or the bundles that run where a schedule is
there. Collectives cost their bytes on the wire. What runs beside other work costs only what that work does not cover.
"""

import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from wanjax.plan.chips import Chip
from wanjax.plan.compile import Compiled
from wanjax.plan.hlo import Computation, Instruction, Module, parse
from wanjax.plan.schedule import Run, Schedule
from wanjax.plan.work import COLLECTIVES, PRODUCTS, branches, flops, traffic, trips, wire_bytes

KINDS = ("kernels", "products", "elementwise", "layout", "collectives")
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
ACHIEVED_BANDWIDTH = 0.8  # of the nominal one
CHEAPER, DEARER = 6 / 7, 1.1  # of a kernel's price: how far published measurements stand from it
SMELL = 3  # an estimate so many times the price by bytes says that the layout is bad
VECTOR_BYTES = 2 * 4096  # that the vector unit reads and writes in a cycle, at best


class Cost(NamedTuple):
    """Seconds."""

    low: float
    mid: float
    high: float

    def times(self, factor: float) -> "Cost":
        return Cost(*(factor * seconds for seconds in self))


@dataclass(frozen=True)
class Item:
    """One operation of the program: how often it runs, and what all its runs cost together."""

    name: str
    kind: str
    times: int
    cost: Cost
    flops: int = 0  # of all runs
    bytes: int = 0  # moved from and to HBM, or for a collective over the wire, of all runs
    group: int = 1  # devices that a collective joins
    smells: bool = False  # costs far more by the compiler's estimate than its bytes do
    scope: str = ""  # where in the traced program it comes from


@dataclass(frozen=True)
class Price:
    """Every operation with its cost, and what the price leaves open.

    `unpriced` names kernels whose schedule is not there, `unknown_loops` loops whose trips are not known, which count
    once, and `undecided` the blocks of each kernel whose data says whether they jump.
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
        """Of the products, on one device: 2 × parameters × tokens in a model, or a loop was misread."""
        return sum(item.flops for item in self.items)


def _sum(items: Sequence[Item]) -> Cost:
    return Cost(*(math.fsum(item.cost[i] for item in items) for i in range(3)))


def price(
    compiled: Compiled,
    kernels: Mapping[str, float] | None = None,
    skip: Mapping[str, Container[int]] | None = None,
) -> Price:
    """What a run of the program costs.

    `kernels` gives seconds for kernels by their names in the module (`flash.3`, or `flash` for all such): of a whole
    model, which is compiled without schedules, kernels are compiled alone and priced with `price_schedule`. `skip`
    gives for kernels the blocks, of those that `undecided` lists, that jump over what they guard: unless it does, all
    is run, both sides of a choice too.
    """
    reader = _Reader(parse(compiled.module), compiled.slice.chip, compiled.schedules, kernels or {}, skip or {})
    items = reader.sequence(reader.module.entry, 1)
    return Price(tuple(items), tuple(reader.unpriced), tuple(reader.unknown_loops), reader.undecided)


def price_schedule(schedule: Schedule, chip: Chip, skip: Container[int] = ()) -> Cost:
    """Of one operation by its bundles; `skip` holds the blocks whose data makes them jump (`Schedule.run`)."""
    return _price_run(schedule, schedule.run(skip), chip)


def _price_run(schedule: Schedule, run: Run, chip: Chip) -> Cost:
    moved = chip.cores * run.moved / (ACHIEVED_BANDWIDTH * chip.bandwidth)
    seconds = max(schedule.cycles(run.times) / chip.clock, moved)
    return Cost(CHEAPER * seconds, seconds, DEARER * seconds)


class _Reader:
    """Goes through a module in the order of its schedule."""

    def __init__(
        self,
        module: Module,
        chip: Chip,
        schedules: Mapping[str, Schedule],
        kernels: Mapping[str, float],
        skip: Mapping[str, Container[int]],
    ):
        self.module, self.chip, self.schedules, self.kernels, self.skip = module, chip, schedules, kernels, skip
        self.undecided: dict[str, frozenset[int]] = {}
        self.unpriced: list[str] = []
        self.unknown_loops: list[str] = []

    def sequence(self, within: Computation, times: int) -> list[Item]:
        """The items of a computation that runs so many times."""
        items: list[Item] = []
        begun: dict[str, tuple[Item, float]] = {}  # what runs beside, and when it will have ended
        passed = links_free = 0.0

        def end_of(item: Item) -> float:
            nonlocal links_free
            if item.kind != "collectives":
                return passed + item.cost.mid
            links_free = max(passed, links_free) + item.cost.mid  # one after another: they share the links
            return links_free

        for instruction in within.instructions:
            if instruction.name.startswith("async-collective-done"):  # its work is done in the fusions since its start
                continue
            if instruction.opcode.endswith("-start"):
                item = self.item(instruction, within, times)
                begun[instruction.name] = item, end_of(item)
                continue
            if instruction.opcode.endswith(("-update", "-done")) and instruction.operands[0] in begun:
                item, end = begun.pop(instruction.operands[0])
                if instruction.opcode.endswith("-update"):
                    begun[instruction.name] = item, end
                    continue
                new = [_waited_for(item, end - passed)]
            else:
                new = self.items(instruction, within, times)
                if [item.kind for item in new] == ["collectives"]:
                    new = [_waited_for(new[0], end_of(new[0]) - passed)]
            items += new
            passed += _sum(new).mid
        return items

    def items(self, instruction: Instruction, within: Computation, times: int) -> list[Item]:
        if instruction.opcode in FREE:
            return []
        if instruction.opcode == "while":
            turns = trips(self.module, instruction, within)
            if turns is None:
                self.unknown_loops.append(instruction.name)
            return self.sequence(self.module.computations[instruction.named("body")], times * (turns or 1))
        if instruction.opcode in ("call", "conditional"):
            inner = [self.module.computations[name] for name in branches(instruction)]
            return max((self.sequence(part, times) for part in inner), key=lambda part: _sum(part).mid)
        return [self.item(instruction, within, times)]

    def item(self, instruction: Instruction, within: Computation, times: int) -> Item:
        call, _ = self.kernel_in(instruction, within)
        return replace(self._item(instruction, within, times), scope=(call or instruction).scope)

    def _item(self, instruction: Instruction, within: Computation, times: int) -> Item:
        if instruction.opcode in ("async-start", "call-start"):  # a computation that holds one operation
            inner = self.module.computations[instruction.called or instruction.named("to_apply")]
            return self.item(inner.root, inner, times)
        moved = traffic(self.module, instruction, within)
        call, around = self.kernel_in(instruction, within)
        if call is not None:
            moved = traffic(self.module, call, around)
            return Item(instruction.name, "kernels", times, self.kernel(call, moved).times(times), bytes=times * moved)
        opcodes = {part.opcode for part in (instruction, *self.module.inside(instruction))}
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            sent = wire_bytes(instruction, within)
            rings = 1 if instruction.group_size == 2 else 2  # links of a chip in its group
            seconds = sent / (rings * self.chip.link)
            cost = Cost(seconds, seconds, seconds).times(times)
            return Item(instruction.name, "collectives", times, cost, bytes=times * sent, group=instruction.group_size)
        if opcodes & set(PRODUCTS):
            work = flops(self.module, instruction, within)
            cost = self.products(instruction, work, moved).times(times)
            return Item(instruction.name, "products", times, cost, times * work, times * moved)
        kind = "layout" if opcodes <= MOVES | FREE | {"fusion", "copy-start"} else "elementwise"
        by_bytes = self.by_bytes(instruction, within, moved)
        estimate = (instruction.estimated_cycles or 0) / self.chip.clock
        cost = by_bytes._replace(high=min(max(by_bytes.mid, estimate), SMELL * by_bytes.mid)).times(times)
        return Item(instruction.name, kind, times, cost, bytes=times * moved, smells=estimate > SMELL * by_bytes.mid)

    def kernel_in(self, instruction: Instruction, within: Computation) -> tuple[Instruction | None, Computation]:
        """The kernel that an operation is, or that is fused with a part of a collective, and where it stands."""
        if instruction.target == KERNEL:
            return instruction, within
        inner = None if instruction.called is None else self.module.computations[instruction.called]
        parts = () if inner is None else inner.instructions
        return next((part for part in parts if part.target == KERNEL), None), inner or within

    def kernel(self, instruction: Instruction, moved: int) -> Cost:
        least = moved / (ACHIEVED_BANDWIDTH * self.chip.bandwidth)  # reads what it is given, and writes what it gives
        for name in (instruction.name, re.sub(r"\.\d+$", "", instruction.name)):
            if name in self.kernels:
                return Cost(CHEAPER, 1, DEARER).times(max(self.kernels[name], least))
        if instruction.name in self.schedules:
            schedule = self.schedules[instruction.name]
            run = schedule.run(self.skip.get(instruction.name, ()))
            if run.undecided:
                self.undecided[instruction.name] = run.undecided
            return _price_run(schedule, run, self.chip)
        self.unpriced.append(instruction.name)
        return Cost(0, 0, 0)

    def products(self, instruction: Instruction, work: int, moved: int) -> Cost:
        floor = max(work / self.chip.flops, moved / self.chip.bandwidth)
        estimate = max((instruction.estimated_cycles or 0) / self.chip.clock, floor)
        return Cost(floor, math.sqrt(floor * estimate), estimate)

    def by_bytes(self, instruction: Instruction, within: Computation, moved: int) -> Cost:
        """Of vector work: the bytes at the bandwidth, or what the vector unit has to pass on."""
        everything = [*instruction.results, *(a for name in instruction.operands for a in within.by_name[name].results)]
        if instruction.name in self.schedules:
            schedule = self.schedules[instruction.name]
            cycles = schedule.cycles(schedule.run().times)
        else:
            largest = max((array.bytes for array in everything if array.space), default=0)
            cycles = max(largest, moved) / VECTOR_BYTES / self.chip.cores
        low = moved / self.chip.bandwidth
        mid = max(low / ACHIEVED_BANDWIDTH, cycles / self.chip.clock)
        return Cost(low, mid, mid)


def _waited_for(item: Item, seconds: float) -> Item:
    """What is left of an operation beside which other work ran."""
    part = max(0.0, seconds) / item.cost.mid if item.cost.mid else 0.0
    return replace(item, cost=item.cost.times(part))
