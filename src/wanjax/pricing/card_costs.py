# SPDX-License-Identifier: Apache-2.0
"""An estimate of the time of a program compiled for an NVIDIA card, by the operations and bytes of each kernel.

XLA's GPU compiler reports no times, so a model gives them. A kernel takes the longest of three: its operations at a
fraction of the card's peak, its bytes at a fraction of the bandwidth, and the time of a launch. The fractions are
assumptions, from published figures of good and of poor kernels of each kind, and make the range. No card has confirmed
them.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from wanjax.pricing.chips import Card
from wanjax.pricing.compile import Compiled
from wanjax.pricing.costs import FREE, MOVES, Cost, Item, ItemizedPrice, Reader
from wanjax.pricing.hlo import Computation, Instruction, parse
from wanjax.pricing.work import COLLECTIVES, PRODUCTS, flops, product_flops, traffic, wire_bytes


class Reached(NamedTuple):
    """Fractions of a peak that kernels of a kind reach: at best, usually, and at worst."""

    best: float
    usual: float
    worst: float

    def cost(self, amount: float, rate: float) -> Cost:
        return Cost(*(amount / (rate * part) for part in self))


ATTENTION = Reached(0.75, 0.6, 0.45)  # FlashAttention 3 is reported at 0.75 of an H100's peak
MATMULS = Reached(0.8, 0.6, 0.4)
CONVOLUTIONS = Reached(0.7, 0.4, 0.2)
BANDWIDTH = Reached(0.92, 0.8, 0.55)
LINKS = Reached(0.9, 0.75, 0.5)
LAUNCH = Cost(1e-6, 3e-6, 6e-6)
FLOAT32 = 0.5  # of the peak in bfloat16: XLA multiplies float32 as TF32
NARROW = {"bf16", "f16"}


@dataclass
class CardReader(Reader):
    """Walk through a module of the GPU's compiler in scheduled order, and estimate its kernels."""

    def _item(self, instruction: Instruction, within: Computation, times: int) -> Item:
        card = self.chip
        assert isinstance(card, Card)
        if instruction.opcode == "async-start" and instruction.called:
            inner = self.module.computations[instruction.called]
            return self._item(inner.root, inner, times)
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            sent = wire_bytes(instruction, within, switched=True)
            cost = _longest(LINKS.cost(sent, card.link), LAUNCH).times(times)
            return Item(instruction.name, "collectives", times, cost, bytes=times * sent, group=instruction.group_size)
        moved = traffic(self.module, instruction, within)
        reached, work = self._products(instruction, within)
        peak = card.flops * (1 if card.peak_dtype == "float32" or self._is_narrow(instruction, within) else FLOAT32)
        cost = _longest(reached.cost(work, peak), BANDWIDTH.cost(moved, card.bandwidth), LAUNCH).times(times)
        opcodes = {part.opcode for part in (instruction, *self.module.nested_instructions(instruction))}
        kind = "products" if work else "copies" if opcodes <= {*MOVES, *FREE, "fusion"} else "elementwise"
        return Item(instruction.name, kind, times, cost, times * work, times * moved)

    def _products(self, instruction: Instruction, within: Computation) -> tuple[Reached, int]:
        """Return the operations of a kernel's products, and the fractions of the peak that they reach."""
        target = instruction.target or ""
        if target.startswith("__cudnn$fmha"):
            q, k = (within.by_name[name].results[0].shape for name in instruction.operands[:2])
            return ATTENTION, 4 * math.prod(q) * k[1]  # batch, length, heads, width
        if target.startswith("__cudnn$conv"):
            return CONVOLUTIONS, product_flops(instruction, within)
        if target.startswith("__cublas$"):
            summed = re.search(r'"lhs_contracting_dimensions":\["?(\d+)', instruction.attributes)
            left = within.by_name[instruction.operands[0]].results[0].shape
            return MATMULS, 2 * instruction.results[0].elements * (left[int(summed[1])] if summed else 1)
        parts = {part.opcode for part in self.module.nested_instructions(instruction)} | {instruction.opcode}
        work = flops(self.module, instruction, within) if parts & set(PRODUCTS) else 0
        return CONVOLUTIONS if "convolution" in parts else MATMULS, work

    def _is_narrow(self, instruction: Instruction, within: Computation) -> bool:
        """Tell whether an operand is of 16 bits, with which tensor cores run at their peak."""
        operands = [within.by_name[name].results for name in instruction.operands if name in within.by_name]
        return any(array.dtype in NARROW for results in operands for array in results)


def price_on_card(compiled: Compiled, *, cheapest: bool = False) -> ItemizedPrice:
    """Estimate one run of a program; a choice between computations takes the dearest, or the `cheapest`."""
    choose = min if cheapest else max
    reader = CardReader(parse(compiled.module), compiled.slice.chip, {}, {}, {}, None, choose)
    items = reader.sequence(reader.module.entry, 1)
    return ItemizedPrice(tuple(items), (), tuple(reader.unknown_loops), {})


def count_kernels(compiled: Compiled, priced: ItemizedPrice) -> Mapping[str, int]:
    """Return how often one run starts each kind of kernel, most often first."""
    module = parse(compiled.module)
    instructions = {each.name: each for part in module.computations.values() for each in part.instructions}
    counts: Counter[str] = Counter()
    for item in priced.items:
        counts[kernel_kind(instructions[item.name])] += item.times
    return dict(counts.most_common())


def kernel_kind(instruction: Instruction) -> str:
    """Return the library's function that an instruction calls, or the kind of its fusion, or its opcode."""
    if instruction.target:
        return instruction.target
    if instruction.opcode != "fusion":
        return instruction.opcode.removesuffix("-start")
    fusion_kind = re.search(r'"kind":"(__\w+)"', instruction.attributes)
    return (
        fusion_kind[1].strip("_")
        if fusion_kind
        else f"{(instruction.attribute('kind') or '').removeprefix('k').lower()} fusion"
    )


def _longest(*costs: Cost) -> Cost:
    return Cost(*(max(each) for each in zip(*costs, strict=True)))
