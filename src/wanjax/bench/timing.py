# SPDX-License-Identifier: Apache-2.0
"""Time compiled programs. The first run is a warm-up, and its time is reported separately."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jax

MIN_RUNS, MAX_RUNS = 2, 20  # the number of runs after the warm-up


@dataclass(frozen=True)
class Timing:
    """The seconds of a compilation, of the first run, and of each run after it."""

    compile_seconds: float
    first_seconds: float
    run_seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.run_seconds)

    @property
    def spread(self) -> float:
        """The difference between the longest and the shortest run, relative to the median."""
        return (max(self.run_seconds) - min(self.run_seconds)) / self.median_seconds


def time_program(
    run: Callable[..., Any], make_arguments: Callable[[], tuple[Any, ...]], compilation: float, budget: float
) -> tuple[Timing, Any]:
    """Run and time a compiled program at least twice, until `budget` seconds have passed. Also return the first result.

    `make_arguments` returns arguments whose buffers the program may reuse. Its time is not measured. `compilation` is
    the number of seconds that compiling took; it is stored in the `Timing`.
    """
    first, result = _time_run(run, make_arguments)
    runs: list[float] = []
    while len(runs) < MIN_RUNS or (sum(runs) + first < budget and len(runs) < MAX_RUNS):
        runs.append(_time_run(run, make_arguments)[0])
    return Timing(compilation, first, tuple(runs)), result


def _time_run(run: Callable[..., Any], make_arguments: Callable[[], tuple[Any, ...]]) -> tuple[float, Any]:
    arguments = jax.block_until_ready(make_arguments())
    start = perf_counter()
    result = jax.block_until_ready(run(*arguments))
    return perf_counter() - start, result
