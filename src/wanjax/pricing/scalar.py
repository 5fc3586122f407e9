# SPDX-License-Identifier: Apache-2.0
"""An interpreter of a TPU core's scalar instructions.

The interpreter supports only the instructions that control flow needs.

Most branches of a kernel depend on grid indices and constants. The scalar instructions therefore suffice to count how
often each branch is taken. Values that come from data (a mask in memory, the sum of a vector) are unknown. A result is
unknown if an operand is unknown, unless the other operands determine the result: `false and unknown` is false.
"""

import re
from collections.abc import Callable
from itertools import starmap
from typing import NamedTuple

Scalar = int | bool | None  # None is an unknown value
WORD = 1 << 32
PHI_OPCODES = ("sphi", "pphi")
OPERAND_OPCODE = "inlined_call_operand."
ASSUMED_PREFIX = "assumed "  # marks the values that a block's branch assumes for unknown predicates
GRANULE = 32  # a DMA's size is a number of granules of this many bytes

_ASSIGN = re.compile(r"%([\w.]+) = ([a-z][\w.]*)\s*([^;}]*)")
_SLOT = r"\[smem:(\[#\w+(?: \+ \$0x[0-9a-f]+)?\])\]"
_STORE = re.compile(rf"%\w+ = sst {_SLOT} (\(!?%\w+\),\s*)?%(\w+)")
_PREDICATE = re.compile(r"\((!?)%(\w+)\)")
_CONDITIONAL_MOVE = re.compile(r"\((!?)%(\w+),\s*([^)]*)\),\s*(.*)")
_TRANSFER = re.compile(r"%\w+ = dma\.(?:hbm_to_vmem|vmem_to_hbm)\b([^;}]*)")


def signed(value: int) -> int:
    """Read a 32-bit word as a two's complement number."""
    return value - WORD if value >= WORD // 2 else value


def _and(a: Scalar, b: Scalar) -> Scalar:
    return False if a is False or b is False else None if a is None or b is None else bool(a and b)


def _not(a: Scalar) -> Scalar:
    return None if a is None else not a


def _or(a: Scalar, b: Scalar) -> Scalar:
    return _not(_and(_not(a), _not(b)))


def _modulo_word(operation: Callable[[int, int], int]) -> Callable[[Scalar, Scalar], Scalar]:
    return lambda a, b: None if a is None or b is None else operation(a, b) % WORD


def _compare(operation: Callable[[int, int], bool], kind: str) -> Callable[[Scalar, Scalar], Scalar]:
    read = signed if kind == "s32" else int
    return lambda a, b: None if a is None or b is None else operation(read(a), read(b))


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
BINARY: dict[str, Callable[[Scalar, Scalar], Scalar]] = {
    "sadd.s32": _modulo_word(lambda a, b: a + b),
    "ssub.s32": _modulo_word(lambda a, b: a - b),
    "smul.u32": _modulo_word(lambda a, b: a * b),
    "sand.u32": _modulo_word(lambda a, b: a & b),
    "sor.u32": _modulo_word(lambda a, b: a | b),
    "sxor.u32": _modulo_word(lambda a, b: a ^ b),
    "sshll.u32": _modulo_word(lambda a, b: a << b),
    "sshrl.u32": _modulo_word(lambda a, b: a >> b),
    "sshra.s32": _modulo_word(lambda a, b: signed(a) >> b),
    "smin.u32": _modulo_word(min),
    "smax.u32": _modulo_word(max),
    "smin.s32": _modulo_word(lambda a, b: min(signed(a), signed(b))),
    "smax.s32": _modulo_word(lambda a, b: max(signed(a), signed(b))),
    "pand": _and,
    "por": _or,
    "pnand": lambda a, b: _not(_and(a, b)),
    "pnor": lambda a, b: _not(_or(a, b)),
} | {
    f"scmp.{name}.{kind}{order}": _compare(operation, kind)
    for name, operation in _COMPARISONS.items()
    for kind in ("s32", "u32")
    for order in ("", ".totalorder")
}


class Registers(dict[str, Scalar]):
    """Values by the compiler's names, which are assigned once. A name without a value has the value `unassigned`."""

    unassigned: Scalar = None

    def __missing__(self, name: str) -> Scalar:
        return self.unassigned


class BranchCondition(NamedTuple):
    """The condition of a predicated instruction: it runs if the predicate `name` has the value `expected`."""

    name: str
    expected: bool

    def evaluate(self, registers: Registers) -> Scalar:
        """Return whether the condition holds, or None if the predicate is unknown."""
        return self._matches(registers[self.name])

    def holds_or_assumed(self, registers: Registers) -> Scalar:
        """Return whether the condition holds. For an unknown predicate, use the value that the block's branch
        assumes."""
        is_met = self.evaluate(registers)
        return self._matches(registers[ASSUMED_PREFIX + self.name]) if is_met is None else is_met

    def _matches(self, value: Scalar) -> Scalar:
        return None if value is None else bool(value) is self.expected


ScalarStep = Callable[
    [Registers, Registers, bool], None
]  # takes registers, scratch memory, and True after a backward branch


def condition(text: str) -> BranchCondition | None:
    """Return the condition in an instruction's arguments, or None."""
    match = _PREDICATE.search(text)
    return None if match is None else BranchCondition(_value_name(match[2]), not match[1])


def scalar_steps(bundle: str) -> list[ScalarStep]:
    """Return the effects of a bundle on the scalar registers, and on the scratch memory for spilled registers.

    The bundle's text must have no comments. The result of an unsupported instruction is unknown.
    """
    assigned = [
        assignment for assignment in _ASSIGN.findall(bundle) if assignment[0][0] in "sp" and assignment[1] != "sst"
    ]
    phis, other_assignments = (
        [assignment for assignment in assigned if (assignment[1] in PHI_OPCODES) is expected]
        for expected in (True, False)
    )
    stores = [_store(slot, condition(predicate), _value_name(name)) for slot, predicate, name in _STORE.findall(bundle)]
    make_step = lambda name, opcode, arguments: _assign(_value_name(name), opcode, arguments)  # noqa: E731
    return [
        *starmap(make_step, phis),
        *stores,
        *starmap(make_step, other_assignments),
    ]  # phi instructions take effect first


def transfers(bundle: str) -> list[tuple[BranchCondition | None, str | int]]:
    """Return a bundle's DMAs between HBM and VMEM.

    Each has a condition, and a size in granules or the name of the register with the size.
    """
    conditional_sizes = []
    for arguments in _TRANSFER.findall(bundle):
        sizes = [operand_text.strip() for operand_text in arguments.split(",")]
        skip = 2 if _PREDICATE.search(sizes[0]) else 1  # after an optional predicate: the source and the size
        size = sizes[skip]
        conditional_sizes.append((condition(sizes[0]), int(size) if size.isdigit() else _value_name(size.lstrip("%"))))
    return conditional_sizes


def _value_name(name: str) -> str:
    """Return the compiler's name of a value, without the suffix for the physical register."""
    return name.split("_")[0]


def _operand(text: str) -> Callable[[Registers], Scalar]:
    if text.startswith("%"):
        name = _value_name(text[1:])
        return lambda registers: registers[name]
    constant = int(text, 0) % WORD if re.fullmatch(r"-?(\d+|0x[0-9a-f]+)", text) else None
    return lambda registers: constant


def _store(slot: str, predicate: BranchCondition | None, name: str) -> ScalarStep:
    def step(registers, memory, after_backward_branch):
        is_met = True if predicate is None else predicate.holds_or_assumed(registers)
        if is_met is not False:
            memory[slot] = registers[name] if is_met else None

    return step


def _assign(name: str, opcode: str, arguments: str) -> ScalarStep:
    if opcode == "smov" and (match := _CONDITIONAL_MOVE.match(arguments)):
        if_false, if_true = match[3].strip(), match[4].strip()
        return _choice(name, BranchCondition(_value_name(match[2]), not match[1]), if_true, if_false)
    operand_texts = [operand_text.strip() for operand_text in re.sub(r"\(!?%\w+\),?", "", arguments).split(",")]
    if opcode == "scalar_select":
        return _choice(
            name, BranchCondition(_value_name(operand_texts[0].lstrip("%")), True), operand_texts[1], operand_texts[2]
        )
    value = _value(opcode, operand_texts)
    predicate = condition(arguments)

    def step(registers, memory, after_backward_branch):
        is_met = True if predicate is None else predicate.holds_or_assumed(registers)
        if is_met is not False:
            registers[name] = value(registers, memory, after_backward_branch) if is_met else None

    return step


def _choice(name: str, predicate: BranchCondition, if_true: str, if_false: str) -> ScalarStep:
    read_if_true, read_if_false = _operand(if_true), _operand(if_false)

    def step(registers, memory, after_backward_branch):
        is_met = predicate.evaluate(registers)
        registers[name] = None if is_met is None else (read_if_true if is_met else read_if_false)(registers)

    return step


def _value(opcode: str, operand_texts: list[str]) -> Callable[[Registers, Registers, bool], Scalar]:
    operands = [_operand(operand_text) for operand_text in operand_texts]
    if opcode in BINARY and len(operands) == 2:
        operation, (a, b) = BINARY[opcode], operands
        return lambda registers, memory, after_backward_branch: operation(a(registers), b(registers))
    if opcode in ("smov", "pmov"):
        return lambda registers, memory, after_backward_branch: operands[0](registers)
    if opcode == "pneg":
        return lambda registers, memory, after_backward_branch: _not(operands[0](registers))
    if opcode in PHI_OPCODES:  # the first operand on entry to the loop, otherwise the last operand
        return lambda registers, memory, after_backward_branch: operands[-1 if after_backward_branch else 0](registers)
    if opcode == "sld" and (match := re.fullmatch(_SLOT, operand_texts[0])):
        return lambda registers, memory, after_backward_branch: memory[match[1]]
    if opcode == "sld" or (
        opcode == OPERAND_OPCODE and operand_texts[0].startswith("<no memory space>")
    ):  # an input word of the kernel
        return lambda registers, memory, after_backward_branch: memory.unassigned
    return lambda registers, memory, after_backward_branch: None
