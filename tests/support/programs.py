# SPDX-License-Identifier: Apache-2.0
"""Calls of programs in tests."""

from collections.abc import Callable
from typing import Any

import numpy as np

from wanjax.pipelines.run import latents_of
from wanjax.pipelines.sampler import Beginning, Given, State, begin
from wanjax.pipelines.seeds import words_of
from wanjax.programs import EXECUTE, Execute, Program, Site
from wanjax.sharding import Partitioner, one_device


def caller(partitioner: Partitioner | None = None) -> Callable[..., Any]:
    """Returns a function that executes a program, on one device or on a mesh."""

    def call(program: Program, static: Any, *arguments: Any) -> Any:
        return EXECUTE.call(program, Site(partitioner or one_device()), static, *arguments)

    return call


def compiled(program: Program | None = None, strategy: Execute = EXECUTE) -> int:
    """Returns the number of programs that a strategy has compiled, or of those of one program."""
    return sum(program is None or known is program for known, *_ in list(strategy._compiled))


def begun(pipe: Any, encoded: Any, settings: Any, noise: Any = None) -> tuple[Any, State]:
    """Returns the schedule of a video, and the state before its first step."""
    schedule, shape = pipe.architecture.schedule(settings, encoded), pipe.architecture.noise_shape(settings)
    static, given = Beginning(pipe.architecture.ends, pipe.scheduler, shape), Given(noise)
    words, number = words_of([settings.seed]), np.int32(0)
    state, _ = pipe.call(begin, static, words, given, schedule, latents_of(encoded), number)
    return schedule, state
