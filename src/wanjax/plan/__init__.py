# SPDX-License-Identifier: Apache-2.0
"""Prices of programs on TPUs that need not be present: compile for a described chip, then read memory and time.

    from wanjax.plan import Operand, compile_function, price
    x = Operand((8192, 8192), "bfloat16")
    print(price(compile_function("v6e-1", "jax.numpy:matmul", x, x)))

The compiler is libtpu's own (the extra `plan`), which needs no chip. It runs in a process of its own, and its dumps
are deleted once they are read. Prices are estimates, not measurements: docs/performance.md compares the two.
"""

from wanjax.plan.chips import SLICES, Chip, Slice, find_slice
from wanjax.plan.compile import (
    Compiled,
    CompilerError,
    Job,
    Memory,
    Operand,
    compile_all,
    compile_function,
    compile_job,
)
from wanjax.plan.pricing import Cost, Item, Price, price, price_schedule
from wanjax.plan.schedule import Schedule

__all__ = [
    "SLICES",
    "Chip",
    "Compiled",
    "CompilerError",
    "Cost",
    "Item",
    "Job",
    "Memory",
    "Operand",
    "Price",
    "Schedule",
    "Slice",
    "compile_all",
    "compile_function",
    "compile_job",
    "find_slice",
    "price",
    "price_schedule",
]
