# SPDX-License-Identifier: Apache-2.0
"""A parser of optimised HLO: the final module of a compiled program, as computations, instructions and arrays.

The text is XLA's HLO after scheduling and layout assignment. Sizes are sizes in memory, where the two minor-most
dimensions are padded to whole tiles. For example, bfloat16[300, 100] in tiles of (8, 128) takes 304 × 128 × 2 bytes.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$", re.DOTALL)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_TILE = re.compile(r"T\(([\d,*]+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
HOST = 5  # memory space of the host's memory
BITS = {"pred": 8, "token": 0, "u2": 2, "s2": 2, "u4": 4, "s4": 4, "c64": 64, "c128": 128}


@dataclass(frozen=True)
class Array:
    """An array's type and memory layout.

    `space` is 0 for HBM, 1 for VMEM, and `HOST` for the host's memory. Access to VMEM counts as free.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions from minor-most to major-most
    tile: tuple[int, ...]
    space: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes in memory, including padding."""
        dims = [self.shape[axis] for axis in self.order]
        for i, size in enumerate(reversed(self.tile)):
            if i < len(dims):
                dims[i] = -(-dims[i] // size) * size
        bits = BITS[self.dtype] if self.dtype in BITS else int(re.sub(r"\D*(\d+).*", r"\1", self.dtype))
        return math.prod(dims) * bits // 8

    @property
    def traffic(self) -> int:
        """Bytes that one read or one write of the array moves from or to HBM."""
        return 0 if self.space else self.bytes


def arrays(text: str) -> tuple[Array, ...]:
    """Parse an HLO shape into its arrays, in order. A tuple has several arrays."""
    parsed = []
    for dtype, sizes, order, memory_layout in _ARRAY.findall(text):
        shape = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        tile = _TILE.search(memory_layout)
        space = re.search(r"S\((\d+)\)", memory_layout)
        dims = tuple(int(axis) for axis in order.split(",") if axis) or tuple(reversed(range(len(shape))))
        tiles = tuple(int(size) for size in tile[1].split(",")) if tile and "*" not in tile[1] else ()
        parsed.append(Array(dtype, shape, dims, tiles, int(space[1]) if space else 0))
    return tuple(parsed)


@dataclass(frozen=True)
class Instruction:
    """One operation: its name, opcode, results, operands by name, and the rest of its line as text."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    arguments: str = field(repr=False)  # text in the parentheses: the operands, or a constant's value
    attributes: str = field(repr=False)
    is_root: bool

    def attribute(self, name: str) -> str | None:
        return self._match(rf"\b{name}=(\{{.*?\}}|\[[^ ]*|[^, ]+)")

    def _match(self, pattern: str) -> str | None:
        """Match a pattern in the attributes. Return the text of its group, or None without a match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    def computation_name(self, role: str) -> str:
        """Return the name of the computation in a role: `calls`, `body`, `condition` or `to_apply`."""
        computation = self._match(rf"\b{role}=%([\w.\-]+)")
        assert computation is not None, f"{self.name} has no {role}"
        return computation

    @property
    def called_computation(self) -> str | None:
        return self.computation_name("calls") if " calls=%" in self.attributes else None

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's estimate of the operation's cycles. Only fusions and copies have an estimate."""
        cycles = self._match(r'"estimated_cycles":"(\d+)"')
        return None if cycles is None else int(cycles)

    @property
    def scope(self) -> str:
        """The path of functions, named scopes and loops in which the operation was traced, joined by slashes."""
        return self._match(r'op_name="([^"]*)"') or ""

    @property
    def target(self) -> str | None:
        return self._match(r'custom_call_target="([^"]+)"')

    @property
    def group_size(self) -> int:
        """Number of devices in each replica group of a collective.

        HLO writes the groups as lists of devices, as a reshaped array of devices, or as mesh axes. A mesh axis may be
        split: `'a':(2)4` makes 2 groups of 4 devices along axis a.
        """
        if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", self.attributes):
            return int(match[2])
        if match := re.search(r"replica_groups=\{\{([\d,]+)\}", self.attributes):
            return match[1].count(",") + 1
        if match := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^{}]*)\}", self.attributes):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
            split_axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
            return math.prod(int(size or sizes[axis]) for axis, size in split_axes)
        return 2 if self.sent_between else 1

    @property
    def sent_between(self) -> frozenset[tuple[int, int]]:
        """The pairs of devices of a permute: the device that sends, and the device that receives."""
        match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", self.attributes)
        pairs = re.findall(r"(\d+),(\d+)", match[1]) if match else ()
        return frozenset((int(source), int(target)) for source, target in pairs)


@dataclass(frozen=True)
class Computation:
    """A computation: its instructions in scheduled order."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.is_root)

    @property
    def parameters(self) -> list[Instruction]:
        parameters = [instruction for instruction in self.instructions if instruction.opcode == "parameter"]
        return sorted(parameters, key=lambda parameter: int(parameter.arguments))

    def users(self, name: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if name in instruction.operands]


@dataclass(frozen=True)
class Module:
    """An HLO module: all computations by name, and the entry computation."""

    computations: Mapping[str, Computation]
    entry: Computation

    def nested_instructions(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield the instructions of a fusion or call, including the instructions of nested fusions and calls."""
        if instruction.called_computation is not None:
            for nested in self.computations[instruction.called_computation].instructions:
                yield nested
                yield from self.nested_instructions(nested)


def parse(text: str) -> Module:
    """Parse a module from the text that `compiled.as_text()` returns."""
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name, lines = match[2], []
            entry = name if match[1] else entry
        elif name and re.match(r"}($|, execution_thread=)", line):
            computations[name] = Computation(name, tuple(map(_instruction, lines)))
            name = ""
        elif name and _INSTRUCTION.match(line):
            lines.append(line)
        elif name:  # an attribute that spans several lines
            lines[-1] += line
    return Module(computations, computations[entry])


def _instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    assert match is not None
    definition = match[3]
    shape = definition[: _closing_index(definition, 0)] if definition.startswith("(") else definition.partition(" ")[0]
    opcode, _, _ = definition[len(shape) + 1 :].partition("(")
    start = len(shape) + 1 + len(opcode)
    stop = _closing_index(definition, start)
    arguments = definition[start + 1 : stop - 1]
    return Instruction(
        match[2], opcode, arrays(shape), tuple(_NAME.findall(arguments)), arguments, definition[stop:], bool(match[1])
    )


def _closing_index(text: str, start: int) -> int:
    """Return the index after the parenthesis that closes the parenthesis at `start`."""
    depth = 0
    for parenthesis in re.compile(r"[()]").finditer(text, start):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.end()
    raise ValueError(f"a parenthesis does not close: {text[start : start + 80]}")
