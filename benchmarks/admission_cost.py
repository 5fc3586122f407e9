# SPDX-License-Identifier: Apache-2.0
"""The cost of admission, estimated for a TPU that is not here: what its compiler takes for the trials of each kernel.

The trials run for less than a millisecond each on the chip; compiling them is what a first start waits for. The seconds
are those of this machine's compiler, one trial after another, as a start would take them.

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
from wanjax.pricing.lowering import Lowering


def seconds_of(functions: Sequence[Callable[[], Any]], chip: str) -> float:
    """Return the seconds of tracing and compiling functions in one process, with its start."""
    start = perf_counter()
    for result in compile_programs([(Lowering(function, ()), chip) for function in functions]):
        if isinstance(result, CompilerError):
            raise result
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="v6e-1")
    chip = parser.parse_args().chip
    started = seconds_of([lambda: jnp.zeros(8)], chip)
    totals = {False: 0.0, True: 0.0}
    for kernel in KERNELS:
        runs = [lambda trial=trial: trial.run(False) for trial in kernel.trials()]
        seconds = seconds_of(runs, chip) - started
        is_rare = kernel.name in TRIED_WHEN_NEEDED
        totals[is_rare] += seconds
        print(f"{kernel.name}: {len(runs)} trials, {seconds:.2f} s{', when needed' if is_rare else ''}", flush=True)
    print(f"of every model: {totals[False]:.1f} s; when needed: {totals[True]:.1f} s")
    print(f"the start of a compiler's process, {started:.1f} s, is not counted")


if __name__ == "__main__":
    main()
