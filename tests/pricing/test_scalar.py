# SPDX-License-Identifier: Apache-2.0
"""The interpreter of a TPU core's scalar instructions evaluates single bundles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanjax.pricing.scalar import BINARY, Registers, scalar_steps

WORDS = st.integers(0, 2**32 - 1)


def evaluate(bundle, **options):
    registers, memory = Registers(options), Registers()
    for step in scalar_steps(bundle):
        step(registers, memory, False)
    return registers["s9"] if "s9" in registers else registers["p9"]


@given(WORDS, WORDS)
def test_arithmetic_is_that_of_32_bit_words(a, b):
    x, y = np.uint32(a), np.uint32(b)
    signed = (x.view(np.int32), y.view(np.int32))
    with np.errstate(over="ignore"):
        assert evaluate("%s9_s1 = sadd.s32 %s1_s1, %s2", s1=a, s2=b) == int(x + y)
        assert evaluate("%s9 = ssub.s32 %s1, %s2_s7", s1=a, s2=b) == int(x - y)
        assert evaluate("%s9 = smul.u32 %s1, %s2", s1=a, s2=b) == int(x * y)
    assert evaluate("%p9 = scmp.lt.s32.totalorder %s1, %s2", s1=a, s2=b) == (signed[0] < signed[1])
    assert evaluate("%p9 = scmp.lt.u32.totalorder %s1, %s2", s1=a, s2=b) == (a < b)
    assert evaluate("%s9 = sshra.s32 %s1, 3", s1=a) == int((signed[0] >> 3).view(np.uint32))
    assert evaluate("%s9 = sshll.u32 %s1, 4", s1=a) == a * 16 % 2**32


@pytest.mark.parametrize(
    ("bundle", "value"),
    [
        ("%s9 = smov (%p1, %s1), 8", 8),  # a predicated move; otherwise the older value
        ("%s9 = smov (!%p1, %s1), 8", 5),
        ("%s9 = scalar_select %p1, %s1, 8", 5),
        ("%s9 = sadd.s32 (!%p1), 1, %s1", None),  # does not run
        ("%s9 = sadd.s32 (%p1), 4294967295, %s1", 4),
        ("%p9 = pand %p2, %p3", False),  # false and unknown
        ("%p9 = por %p2, %p3", None),
        ("%p9 = pnand %p2, %p3", True),
        ("%p9 = pneg %p3", None),
        ("%s9 = sld [smem:[#allocation4 + %s1]]", None),
        ("%s9 = scalar_lea.vmem [#allocation3], %s1", None),
    ],
)
def test_scalar_values_are_evaluated(bundle, value):
    assert evaluate(bundle, p1=True, p2=False, p3=None, s1=5) == value


@pytest.mark.parametrize(
    ("bundle", "value"),
    [
        ("%s9_s0 = inlined_call_operand.<no memory space> [shape: s32[1], index: 0, kind: input]", 8192),
        ("%s9_s0 = inlined_call_operand.hbm [shape: bf16[1,8192,128], index: 1, kind: input]", None),  # an address
        ("%s9 = sld [smem:%s2]", 8192),
        ("%s8 = smov 3  ;;  %7 = sst [smem:[#allocation4]] %s8  ;;  %s9 = sld [smem:[#allocation4]]", 3),
    ],
)
def test_arguments_of_a_kernel_are_read(bundle, value):
    registers, memory = Registers(), Registers()
    memory.unassigned = 8192
    for part in bundle.split("  ;;  "):
        for step in scalar_steps(part):
            step(registers, memory, False)
    assert registers["s9"] == value


def test_a_spilled_register_is_restored():
    bundle = "%8 = sst [smem:[#allocation8_spill]] %s1_s4  ;;  %s9_s2 = sld [smem:[#allocation8_spill]] (%p1)"
    assert evaluate(bundle, s1=7, p1=True) == 7


def test_logic_with_unknown_values_is_evaluated():
    for name, value in (("pand", False), ("pnand", True)):
        assert BINARY[name](None, False) is value
    for name, value in (("por", True), ("pnor", False)):
        assert BINARY[name](True, None) is value
