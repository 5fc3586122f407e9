# SPDX-License-Identifier: Apache-2.0
"""Estimate the time of a program that was compiled for an NVIDIA card, from the operations and bytes of each kernel.

XLA's GPU compiler reports no times, so this module estimates them with a model. A kernel takes the longest of three
times: the time of its operations at a fraction of the card's peak, the time of its bytes at a fraction of the
bandwidth, and the time of a launch. The fractions are assumptions, based on published figures of good and of poor
kernels of each kind. The spread of the fractions gives the range of a price. Nobody has checked the fractions on a
card.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from wanjax.pricing.chips import Card
from wanjax.pricing.compile import Compiled
from wanjax.pricing.costs import FREE_OPCODES, MOVE_OPCODES, ItemizedPrice, OperationPricer, PricedOperation, ValueRange
from wanjax.pricing.hlo import Computation, Instruction, parse
from wanjax.pricing.work import COLLECTIVES, PRODUCT_OPCODES, flops, product_flops, traffic, wire_bytes


class Efficiency(NamedTuple):
    """The fractions of a peak rate that kernels of one kind reach at best, typically and at worst."""

    best: float
    typical: float
    worst: float

    def cost(self, amount: float, rate: float) -> ValueRange:
        """Return the seconds for a number of operations or bytes, at the three fractions of a peak rate."""
        return ValueRange(*(amount / (rate * fraction) for fraction in self))


ATTENTION_EFFICIENCY = Efficiency(0.75, 0.6, 0.45)  # FlashAttention 3 is reported at 0.75 of an H100's peak
MATMUL_EFFICIENCY = Efficiency(0.8, 0.6, 0.4)
CONVOLUTION_EFFICIENCY = Efficiency(0.7, 0.4, 0.2)
BANDWIDTH_EFFICIENCY = Efficiency(0.92, 0.8, 0.55)
LINK_EFFICIENCY = Efficiency(0.9, 0.75, 0.5)
LAUNCH_SECONDS = ValueRange(1e-6, 3e-6, 6e-6)
FLOAT32_FRACTION = 0.5  # float32's fraction of the bfloat16 peak: XLA multiplies in TF32
EIGHT_BITS_FRACTION = 2.0  # the dense rate of int8 and fp8 divided by the rate of bfloat16, from the data sheets
DTYPES_OF_16_BITS = {"bf16", "f16"}
DTYPES_OF_8_BITS = {"s8", "f8e4m3fn", "f8e5m2"}


@dataclass
class CardOperationPricer(OperationPricer):
    """Walk through a module of XLA's GPU compiler in scheduled order, and estimate the time of its kernels."""

    def _price_without_scope(
        self, instruction: Instruction, computation: Computation, num_executions: int
    ) -> PricedOperation:
        card = self.chip
        assert isinstance(card, Card)
        if instruction.opcode == "async-start" and instruction.called_computation:
            inner = self.module.computations[instruction.called_computation]
            return self._price_without_scope(inner.root, inner, num_executions)
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            sent_bytes = wire_bytes(instruction, computation, uses_switch=True)
            cost = _max_cost(LINK_EFFICIENCY.cost(sent_bytes, card.link), LAUNCH_SECONDS).scaled_by(num_executions)
            return PricedOperation(
                instruction.name,
                "collectives",
                num_executions,
                cost,
                bytes=num_executions * sent_bytes,
                group=instruction.group_size,
            )
        traffic_bytes = traffic(self.module, instruction, computation)
        efficiency, operations = self._matmul_work(instruction, computation)
        peak = card.flops * self._peak_fraction(card, instruction, computation)
        cost = _max_cost(
            efficiency.cost(operations, peak), BANDWIDTH_EFFICIENCY.cost(traffic_bytes, card.bandwidth), LAUNCH_SECONDS
        ).scaled_by(num_executions)
        opcodes = {fused.opcode for fused in (instruction, *self.module.nested_instructions(instruction))}
        kind = (
            "matmuls"
            if operations
            else "copies"
            if opcodes <= {*MOVE_OPCODES, *FREE_OPCODES, "fusion"}
            else "elementwise"
        )
        return PricedOperation(
            instruction.name, kind, num_executions, cost, num_executions * operations, num_executions * traffic_bytes
        )

    def _matmul_work(self, instruction: Instruction, computation: Computation) -> tuple[Efficiency, int]:
        """Return the efficiency and the number of operations of a kernel's matrix products or convolutions."""
        target = instruction.target or ""
        if target.startswith("__cudnn$fmha"):
            q, k = (computation.by_name[name].results[0].shape for name in instruction.operands[:2])
            return ATTENTION_EFFICIENCY, 4 * math.prod(q) * k[1]  # batch, length, heads, width
        if target.startswith("__cudnn$conv"):
            return CONVOLUTION_EFFICIENCY, product_flops(instruction, computation)
        if target.startswith("__cublas$"):
            contracted = re.search(r'"lhs_contracting_dimensions":\["?(\d+)', instruction.attributes)
            lhs_shape = computation.by_name[instruction.operands[0]].results[0].shape
            contracted_size = lhs_shape[int(contracted[1])] if contracted else 1
            return MATMUL_EFFICIENCY, 2 * instruction.results[0].elements * contracted_size
        opcodes = {fused.opcode for fused in self.module.nested_instructions(instruction)} | {instruction.opcode}
        operations = flops(self.module, instruction, computation) if opcodes & set(PRODUCT_OPCODES) else 0
        return CONVOLUTION_EFFICIENCY if "convolution" in opcodes else MATMUL_EFFICIENCY, operations

    def _peak_fraction(self, card: Card, instruction: Instruction, computation: Computation) -> float:
        """Return the rate of a kernel's products as a fraction of the card's peak. The dtypes of the operands determine
        the rate."""
        if card.peak_dtype == "float32":
            return 1.0
        operands = [computation.by_name[name].results for name in instruction.operands if name in computation.by_name]
        dtypes = [array.dtype for results in operands for array in results]
        if sum(dtype in DTYPES_OF_8_BITS for dtype in dtypes) >= 2:  # both factors of a product
            return EIGHT_BITS_FRACTION
        return 1.0 if any(dtype in DTYPES_OF_16_BITS for dtype in dtypes) else FLOAT32_FRACTION


def price_on_gpu(compiled: Compiled, *, cheapest: bool = False) -> ItemizedPrice:
    """Estimate one run of a program.

    Only the most expensive branch of a conditional counts. With `cheapest`, only the cheapest branch counts.
    """
    choose = min if cheapest else max
    pricer = CardOperationPricer(parse(compiled.module), compiled.slice.chip, {}, {}, {}, None, choose)
    items = pricer.price_computation(pricer.module.entry, 1)
    return ItemizedPrice(tuple(items), (), tuple(pricer.unknown_loops), {})


def count_kernels(compiled: Compiled, priced: ItemizedPrice) -> Mapping[str, int]:
    """Count how often one run starts each kind of kernel. The most frequent kind comes first."""
    module = parse(compiled.module)
    instructions = {
        instruction.name: instruction
        for computation in module.computations.values()
        for instruction in computation.instructions
    }
    counts: Counter[str] = Counter()
    for item in priced.items:
        counts[kernel_kind(instructions[item.name])] += item.num_executions
    return dict(counts.most_common())


def kernel_kind(instruction: Instruction) -> str:
    """Name the kind of an instruction: the library function that it calls, the kind of its fusion, or its opcode."""
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


def _max_cost(*costs: ValueRange) -> ValueRange:
    return ValueRange(*(max(seconds) for seconds in zip(*costs, strict=True)))
