# SPDX-License-Identifier: Apache-2.0
"""What a program needs and costs on a TPU that is not there: compile it for a described chip, and read the price.

    from wanjax.plan import Operand, compile_function, price
    x = Operand((8192, 8192), "bfloat16")
    print(price(compile_function("v6e-1", "jax.numpy:matmul", x, x)))

The compiler is libtpu's own (the extra `plan`), which needs no chip. It runs in a process of its own, and what it dumps
is removed when it has been read. Prices are prices, not measurements: docs/performance.md says how near they come.
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
