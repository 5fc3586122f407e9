# SPDX-License-Identifier: Apache-2.0
"""The schedule of one operation on a TPU core: its LLO bundles, the units they use, and how often each bundle runs.

The compiler's dump lists every bundle of an operation once. The bundles between two branches form a basic block. An
interpreter of the scalar instructions (scalar.py) walks through the blocks as the chip does. Each block counts as often
as it runs. For example, the body of the loop over the grid counts once for each iteration. A bundle takes one cycle
unless it waits for memory.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from glob import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from wanjax.pricing.chips import Chip
from wanjax.pricing.scalar import (
    ASSUMED_PREFIX,
    GRANULE,
    BranchCondition,
    Registers,
    ScalarStep,
    condition,
    scalar_steps,
    transfers,
)

BUNDLES_FILE, UNITS_FILE = "final_bundles", "final_hlo-static-per-bundle-utilization"
ALLOCATIONS_FILE = "pre-finalize-registers-and-allocations"
WHOLE_PROGRAM = "TLP"  # the top-level program, which calls the operations
# a position in scratch memory; the cores of a v5p share a grid, and only the first core is priced
CORE_INDEX = "[#allocation0]"
MAX_BLOCKS = 20_000_000  # a walk through more blocks means that a loop was parsed wrongly

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*: ", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"(Start(?:/End empty)?) region (\d+)")
_BRANCH = re.compile(r"sbr\.rel\s*(\(!?%\w+\))?,?\s*target = \$region(\d+)")


class Branch(NamedTuple):
    """A branch at the end of a block. Without a condition it is always taken."""

    condition: BranchCondition | None
    target: int


@dataclass(frozen=True)
class Block:
    """A basic block: the addresses of its bundles, the slots of each unit that they use, and their effects."""

    start: int
    stop: int
    units: Mapping[str, int]
    branch: Branch | None
    steps: tuple[ScalarStep, ...] = field(repr=False)
    transfers: tuple[tuple[BranchCondition | None, str | int], ...] = field(repr=False)

    @property
    def bundles(self) -> int:
        return self.stop - self.start


class Execution(NamedTuple):
    """The counts of one walk through a schedule."""

    run_counts: Mapping[int, int]  # number of runs of each block, by address
    traffic_bytes: int  # HBM traffic in bytes
    data_dependent_blocks: frozenset[int]  # addresses of basic blocks that end with a branch on data


@dataclass(frozen=True)
class KernelSchedule:
    """An operation: its blocks by ascending address, the slots of each unit in a bundle, and its VMEM in bytes."""

    name: str
    blocks: tuple[Block, ...]
    slots: Mapping[str, int]
    vmem: int

    @property
    def bundles(self) -> int:
        """The number of bundles, each counted once."""
        return sum(block.bundles for block in self.blocks)

    def units(self, run_counts: Mapping[int, int] | None = None) -> dict[str, int]:
        """Count the used slots of each unit.

        `run_counts` has the number of runs of each block; None counts each block once.
        """
        weights = {block.start: 1 for block in self.blocks} if run_counts is None else run_counts
        return {
            unit: sum(weights.get(block.start, 0) * block.units[unit] for block in self.blocks) for unit in self.slots
        }

    def occupancy(self, run_counts: Mapping[int, int] | None = None) -> dict[str, float]:
        """Return the fraction of each unit's slots that are used. `run_counts` is as in `units`."""
        cycles = self.bundles if run_counts is None else self.cycles(run_counts)
        return {unit: filled / (cycles * self.slots[unit]) for unit, filled in self.units(run_counts).items()}

    def cycles(self, run_counts: Mapping[int, int]) -> int:
        """Return the cycles of an execution if no bundle waits for memory."""
        return sum(block.bundles * run_counts.get(block.start, 0) for block in self.blocks)

    def run(self, skip: Container[int] = (), *, input_word: int | None = None) -> Execution:
        """Walk through the blocks as the chip does. `input_word` is the value of all input words of the kernel.

        A forward branch that depends on data is taken only if its block's address is in `skip`. A taken branch skips
        the code behind it. A backward branch that depends on data is not taken, so its loop counts once. Instructions
        of the block with the same predicate assume the same value of the predicate. Raises RuntimeError if the walk
        does not end.
        """
        order = [block.start for block in self.blocks]
        index = {start: i for i, start in enumerate(order)}
        registers, memory = Registers(), Registers({CORE_INDEX: 0})
        memory.unassigned = input_word
        run_counts = dict.fromkeys(order, 0)
        data_dependent_blocks: set[int] = set()
        traffic_bytes, position, after_backward_branch = 0, 0, False
        for _ in range(MAX_BLOCKS):
            block = self.blocks[position]
            run_counts[block.start] += 1
            if block.branch is not None and block.branch.condition is not None:
                name, expected = block.branch.condition
                is_skipped = block.start in skip and block.branch.target > block.start
                registers[ASSUMED_PREFIX + name] = expected if is_skipped else not expected
            for step in block.steps:
                step(registers, memory, after_backward_branch)
            for transfer_condition, size in block.transfers:
                if transfer_condition is None or transfer_condition.evaluate(registers) is not False:
                    traffic_bytes += GRANULE * ((size if isinstance(size, int) else registers[size]) or 0)
            takes_branch = block.branch is not None
            if block.branch is not None and block.branch.condition is not None:
                is_taken = block.branch.condition.evaluate(registers)
                if is_taken is None:
                    data_dependent_blocks.add(block.start)
                    is_taken = is_skipped
                takes_branch = bool(is_taken)
            if block.branch is not None and takes_branch:
                after_backward_branch = block.branch.target <= block.start
                position = index[block.branch.target]
            else:
                after_backward_branch, position = False, position + 1
            if position == len(self.blocks):
                return Execution(run_counts, traffic_bytes, frozenset(data_dependent_blocks))
        raise RuntimeError(f"the schedule of {self.name} did not end in {MAX_BLOCKS} blocks")


def parse(name: str, code: str, units: str, buffers: str, branch_delay: int) -> KernelSchedule:
    """Parse the texts of a dump: the final bundles, the units that each bundle uses, and the allocations."""
    header, *rows = [line for line in units.splitlines() if line and not line.startswith("==")]
    names = [unit.strip() for unit in header.split(",")]
    slots, *used_slots = [[int(count) for count in row.split()] for row in rows]
    bundle_matches = list(_BUNDLE.finditer(code))
    stops = [bundle_match.start() for bundle_match in bundle_matches[1:]] + [len(code)]
    texts = {
        int(bundle_match[1], 0): code[bundle_match.end() : stop]
        for bundle_match, stop in zip(bundle_matches, stops, strict=True)
    }
    end_address = max(texts) + 1
    labels: dict[int, int] = {}
    branches: dict[int, Branch] = {}
    for address, text in texts.items():
        for _, label in _LABEL.findall(text):
            labels.setdefault(int(label), address)
    for address, text in texts.items():
        if match := _BRANCH.search(text):
            branches[address + branch_delay + 1] = Branch(
                condition(match[1] or ""), _region_address(int(match[2]), labels, end_address)
            )
    boundaries = sorted({0, end_address, *branches, *(branch.target for branch in branches.values())})
    blocks = []
    for start, stop in pairwise(boundaries):
        bundles = [_COMMENT.sub("", texts[address]) for address in range(start, stop) if address in texts]
        blocks.append(
            Block(
                start,
                stop,
                {unit: sum(row[i] for row in used_slots[start:stop]) for i, unit in enumerate(names)},
                branches.get(stop),
                tuple(step for bundle in bundles for step in scalar_steps(bundle)),
                tuple(transfer for bundle in bundles for transfer in transfers(bundle)),
            )
        )
    vmem = sum(int(size, 16) for size in re.findall(r"space=vmem, size = 0x([0-9a-f]+), .*scoped", buffers))
    return KernelSchedule(name, tuple(blocks), dict(zip(names, slots, strict=True)), vmem)


def _region_address(region: int, labels: Mapping[int, int], end_address: int) -> int:
    """Return the address of a region.

    An empty region has no label. It starts at the address of the next region.
    """
    return labels.get(
        region, min((labels[later_region] for later_region in labels if later_region > region), default=end_address)
    )


def read_dump(folder: Path, chip: Chip) -> dict[str, KernelSchedule]:
    """Read the schedules in a compiler's dump, by the names of their operations in the HLO module."""
    schedules = {}
    for code in sorted(folder.glob(f"*-[0-9][0-9]-{BUNDLES_FILE}.txt")):
        stamp, operation = re.fullmatch(rf"(\d+)-(.*)-\d\d-{BUNDLES_FILE}\.txt", code.name).groups()  # type: ignore[union-attr]
        if operation.startswith("<") or operation == WHOLE_PROGRAM:
            continue
        units, buffers = (_dump_file(folder, f"{stamp}-{operation}", kind) for kind in (UNITS_FILE, ALLOCATIONS_FILE))
        texts = (path.read_text(encoding="utf-8") for path in (code, units, buffers))
        schedules[operation] = parse(operation, *texts, branch_delay=chip.branch_delay)
    return schedules


def _dump_file(folder: Path, name: str, kind: str) -> Path:
    """Find the file of one kind in a dump; raise RuntimeError if the file is missing."""
    for path in folder.glob(f"{escape(name)}-[0-9][0-9]-{kind}.txt"):
        return path
    raise RuntimeError(f"the compiler's dump of {name} has no file {kind}")
