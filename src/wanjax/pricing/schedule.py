# SPDX-License-Identifier: Apache-2.0
"""The schedule of one operation on a TPU core: its LLO bundles, the units that they use, and how often each runs.

The compiler's dump lists every bundle of an operation once. The bundles between two branches form a basic block. An
interpreter of the scalar instructions (scalar.py) walks through the blocks as the chip would, so each block counts as
often as it runs: the loop over the grid, the body under its condition, the tail. A bundle takes one cycle unless it
waits for memory.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from glob import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from wanjax.pricing.chips import Chip
from wanjax.pricing.scalar import ASSUMED, GRANULE, Condition, Registers, Step, condition, steps, transfers

CODE, UNITS = "final_bundles", "final_hlo-static-per-bundle-utilization"
BUFFERS = "pre-finalize-registers-and-allocations"
WHOLE_PROGRAM = "TLP"  # the top-level program, which calls the operations
CORE_INDEX = "[#allocation0]"  # in scratch memory; the cores of a v5p split a grid, and the first core is priced
LONGEST_RUN = 20_000_000  # blocks; a longer run means that a loop was misread

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*: ", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"(Start(?:/End empty)?) region (\d+)")
_BRANCH = re.compile(r"sbr\.rel\s*(\(!?%\w+\))?,?\s*target = \$region(\d+)")


class Branch(NamedTuple):
    """A branch at the end of a block; without a condition it is always taken."""

    condition: Condition | None
    target: int


@dataclass(frozen=True)
class Block:
    """A basic block: the addresses of its bundles, and how many slots of each unit they fill."""

    start: int
    stop: int
    units: Mapping[str, int]
    branch: Branch | None
    steps: tuple[Step, ...] = field(repr=False)
    transfers: tuple[tuple[Condition | None, str | int], ...] = field(repr=False)

    @property
    def bundles(self) -> int:
        return self.stop - self.start


class Execution(NamedTuple):
    """One execution of a schedule."""

    times: Mapping[int, int]  # runs of each block, by address
    moved: int  # HBM traffic in bytes
    undecided: frozenset[int]  # addresses of the blocks whose branch depends on data


@dataclass(frozen=True)
class Schedule:
    """An operation's blocks by ascending address, the slots per bundle of each unit, and its VMEM in bytes."""

    name: str
    blocks: tuple[Block, ...]
    slots: Mapping[str, int]
    vmem: int

    @property
    def bundles(self) -> int:
        """Number of bundles, each counted once."""
        return sum(block.bundles for block in self.blocks)

    def units(self, times: Mapping[int, int] | None = None) -> dict[str, int]:
        """Return the filled slots of each unit; each block counts `times` times or, without `times`, once."""
        weights = {block.start: 1 for block in self.blocks} if times is None else times
        return {
            unit: sum(weights.get(block.start, 0) * block.units[unit] for block in self.blocks) for unit in self.slots
        }

    def occupancy(self, times: Mapping[int, int] | None = None) -> dict[str, float]:
        """Return the filled fraction of each unit's slots; `times` as for `units`."""
        cycles = self.bundles if times is None else self.cycles(times)
        return {unit: filled / (cycles * self.slots[unit]) for unit, filled in self.units(times).items()}

    def cycles(self, times: Mapping[int, int]) -> int:
        """Return the cycles of an execution in which no bundle waits for memory."""
        return sum(block.bundles * times.get(block.start, 0) for block in self.blocks)

    def run(self, skip: Container[int] = (), *, words: int | None = None) -> Execution:
        """Walk through the blocks as the chip does. `words` is the value of the kernel's input words.

        A forward branch that depends on data is taken, and skips the code that it guards, only if its block's address
        is in `skip`. A backward branch that depends on data is not taken, so its loop counts once. Instructions of the
        block under the same predicate follow the branch. Raises RuntimeError if the walk does not end.
        """
        order = [block.start for block in self.blocks]
        index = {start: i for i, start in enumerate(order)}
        registers, memory = Registers(), Registers({CORE_INDEX: 0})
        memory.unassigned = words
        times = dict.fromkeys(order, 0)
        undecided: set[int] = set()
        moved, here, again = 0, 0, False
        for _ in range(LONGEST_RUN):
            block = self.blocks[here]
            times[block.start] += 1
            if block.branch is not None and block.branch.condition is not None:
                name, wanted = block.branch.condition
                skips = block.start in skip and block.branch.target > block.start
                registers[ASSUMED + name] = wanted if skips else not wanted
            for step in block.steps:
                step(registers, memory, again)
            for when, size in block.transfers:
                if when is None or when.holds(registers) is not False:
                    moved += GRANULE * ((size if isinstance(size, int) else registers[size]) or 0)
            jumps = block.branch is not None
            if block.branch is not None and block.branch.condition is not None:
                holds = block.branch.condition.holds(registers)
                if holds is None:
                    undecided.add(block.start)
                    holds = skips
                jumps = bool(holds)
            if block.branch is not None and jumps:
                again = block.branch.target <= block.start
                here = index[block.branch.target]
            else:
                again, here = False, here + 1
            if here == len(self.blocks):
                return Execution(times, moved, frozenset(undecided))
        raise RuntimeError(f"the schedule of {self.name} did not end in {LONGEST_RUN} blocks")


def parse(name: str, code: str, units: str, buffers: str, branch_delay: int) -> Schedule:
    """Parse the texts of a dump: final bundles, utilization of each bundle, and allocations."""
    header, *rows = [line for line in units.splitlines() if line and not line.startswith("==")]
    names = [unit.strip() for unit in header.split(",")]
    slots, *filled = [[int(count) for count in row.split()] for row in rows]
    marks = list(_BUNDLE.finditer(code))
    stops = [mark.start() for mark in marks[1:]] + [len(code)]
    texts = {int(mark[1], 0): code[mark.end() : stop] for mark, stop in zip(marks, stops, strict=True)}
    last = max(texts) + 1
    labels: dict[int, int] = {}
    branches: dict[int, Branch] = {}
    for address, text in texts.items():
        for _, label in _LABEL.findall(text):
            labels.setdefault(int(label), address)
    for address, text in texts.items():
        if match := _BRANCH.search(text):
            branches[address + branch_delay + 1] = Branch(
                condition(match[1] or ""), _start(int(match[2]), labels, last)
            )
    edges = sorted({0, last, *branches, *(branch.target for branch in branches.values())})
    blocks = []
    for start, stop in pairwise(edges):
        bundles = [_COMMENT.sub("", texts[address]) for address in range(start, stop) if address in texts]
        blocks.append(
            Block(
                start,
                stop,
                {unit: sum(row[i] for row in filled[start:stop]) for i, unit in enumerate(names)},
                branches.get(stop),
                tuple(step for bundle in bundles for step in steps(bundle)),
                tuple(transfer for bundle in bundles for transfer in transfers(bundle)),
            )
        )
    vmem = sum(int(size, 16) for size in re.findall(r"space=vmem, size = 0x([0-9a-f]+), .*scoped", buffers))
    return Schedule(name, tuple(blocks), dict(zip(names, slots, strict=True)), vmem)


def _start(region: int, labels: Mapping[int, int], last: int) -> int:
    """Return the address of a region; one that is empty may have no label, and begins with the region after it."""
    return labels.get(region, min((labels[other] for other in labels if other > region), default=last))


def read_dump(folder: Path, chip: Chip) -> dict[str, Schedule]:
    """Read the schedules of a compiler's dump, by the names of their operations in the HLO module."""
    schedules = {}
    for code in sorted(folder.glob(f"*-[0-9][0-9]-{CODE}.txt")):
        stamp, operation = re.fullmatch(rf"(\d+)-(.*)-\d\d-{CODE}\.txt", code.name).groups()  # type: ignore[union-attr]
        if operation.startswith("<") or operation == WHOLE_PROGRAM:
            continue
        units, buffers = (_dump_file(folder, f"{stamp}-{operation}", kind) for kind in (UNITS, BUFFERS))
        texts = (path.read_text(encoding="utf-8") for path in (code, units, buffers))
        schedules[operation] = parse(operation, *texts, branch_delay=chip.branch_delay)
    return schedules


def _dump_file(folder: Path, name: str, kind: str) -> Path:
    """Return a dump's file of this kind; raise RuntimeError where the dump lacks it."""
    for path in folder.glob(f"{escape(name)}-[0-9][0-9]-{kind}.txt"):
        return path
    raise RuntimeError(f"the compiler's dump of {name} lacks its {kind}")
