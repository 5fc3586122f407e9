# SPDX-License-Identifier: Apache-2.0
"""Time functions, and compare the speed of equivalent functions, on a machine with other load."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

Run = Callable[[], Any]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Timing:
    """The seconds that each repetition took."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)


def seconds(run: Run, clock: Clock = time.perf_counter) -> float:
    """Return the time of one call, until its result is computed."""
    start = clock()
    jax.block_until_ready(run())
    return clock() - start


def time_alternately(
    functions: Mapping[str, Run], repeats: int, *, warm_up: int = 1, clock: Clock = time.perf_counter
) -> dict[str, Timing]:
    """Time functions in turns, A B A B, so that other load affects all of them equally.

    The first `warm_up` calls of each, which compile, do not count. `clock` is the wall clock by default.
    """
    for run in functions.values():
        for _ in range(warm_up):
            jax.block_until_ready(run())
    rounds = [{name: seconds(run, clock) for name, run in functions.items()} for _ in range(repeats)]
    return {name: Timing(tuple(round_[name] for round_ in rounds)) for name in functions}


def speed_ratio(ours: Timing, theirs: Timing) -> float:
    """Return the speedup of our function: the median of theirs / ours over alternating runs."""
    return statistics.median(b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True))
