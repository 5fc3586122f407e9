# SPDX-License-Identifier: Apache-2.0
"""The time to compile the trials of each kernel for a TPU, measured with the TPU compiler and without the TPU.

Each trial runs for less than a millisecond on the chip, so the first start mostly waits for the compilation. The
seconds are those of the compiler on this machine, one trial after another, as at a real start.

    python -m benchmarks.admission_cost [--chip v6e]
"""

import argparse
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import jax.numpy as jnp

from wanjax.kernels.admitted import TRIED_WHEN_NEEDED
from wanjax.kernels.trials import KERNELS
from wanjax.pricing.compile import compile_programs
from wanjax.pricing.exporting import CompilerError
from wanjax.pricing.lowering import AbstractCall


def compile_seconds(functions: Sequence[Callable[[], Any]], chip: str) -> float:
    """Return the seconds to trace and compile functions in one process, including the start of the process."""
    start = perf_counter()
    for result in compile_programs([(AbstractCall(function, ()), chip) for function in functions]):
        if isinstance(result, CompilerError):
            raise result
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="v6e-1")
    chip = parser.parse_args().chip
    process_seconds = compile_seconds([lambda: jnp.zeros(8)], chip)
    totals = {False: 0.0, True: 0.0}
    for kernel in KERNELS:
        functions = [lambda trial=trial: trial.run(False) for trial in kernel.trials()]
        seconds = compile_seconds(functions, chip) - process_seconds
        is_rare = kernel.name in TRIED_WHEN_NEEDED
        totals[is_rare] += seconds
        print(
            f"{kernel.name}: {len(functions)} trials, {seconds:.2f} s{', when needed' if is_rare else ''}", flush=True
        )
    print(f"kernels of every model: {totals[False]:.1f} s; kernels tried when needed: {totals[True]:.1f} s")
    print(f"the start of the compiler's process, {process_seconds:.1f} s, is not counted")


if __name__ == "__main__":
    main()
