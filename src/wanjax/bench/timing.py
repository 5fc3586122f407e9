# SPDX-License-Identifier: Apache-2.0
"""Timing of programs: the warm-up, which compiles, apart from the runs that count."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jax

FEWEST, MOST = 2, 20  # timed runs


@dataclass(frozen=True)
class Timing:
    """Seconds: to compile, of the first run, and of each run that counts."""

    compiling: float
    first: float
    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def spread(self) -> float:
        """The longest run less the shortest, as a share of the median."""
        return (max(self.runs) - min(self.runs)) / self.median


def timed(
    run: Callable[..., Any], fresh: Callable[[], tuple[Any, ...]], compiling: float, budget: float
) -> tuple[Timing, Any]:
    """Time a compiled program until the budget of seconds is spent, at least twice; return the first result too.

    `fresh` returns arguments that the program may reuse; making them does not count, nor does the first run.
    """
    first, result = _once(run, fresh)
    runs: list[float] = []
    while len(runs) < FEWEST or (sum(runs) + first < budget and len(runs) < MOST):
        runs.append(_once(run, fresh)[0])
    return Timing(compiling, first, tuple(runs)), result


def _once(run: Callable[..., Any], fresh: Callable[[], tuple[Any, ...]]) -> tuple[float, Any]:
    arguments = jax.block_until_ready(fresh())
    start = perf_counter()
    result = jax.block_until_ready(run(*arguments))
    return perf_counter() - start, result
