# SPDX-License-Identifier: Apache-2.0
"""A flow scheduler with a fixed shift and sigma schedule, for tests that need no random key."""

from dataclasses import dataclass
from typing import Any

import jax

from wanjax.schedulers import FlowEuler, Scheduler, UniPC


@dataclass(frozen=True)
class Flow:
    """A scheduler, a flow shift and a sigma schedule."""

    scheduler: Scheduler
    shift: float
    sigmas: Any = "official"

    def schedule(self, steps: int, skip: int = 0) -> Any:
        return self.scheduler.schedule(steps, skip=skip, shift=self.shift, sigma_schedule=self.sigmas)

    def init(self, schedule: Any, x: Any) -> Any:
        return self.scheduler.init(schedule, x, jax.random.key(0)[None])

    def step(self, schedule: Any, index: Any, prediction: Any, x: Any, state: Any) -> Any:
        return self.scheduler.step(schedule, index, prediction, x, state)

    def x0(self, schedule: Any, index: Any, prediction: Any, x: Any) -> Any:
        return self.scheduler.x0(schedule, index, prediction, x)

    def add_noise(self, schedule: Any, x0: Any, noise: Any) -> Any:
        return self.scheduler.add_noise(schedule, x0, noise)


def unipc(shift: float, sigmas: Any = "official", order: int = 2) -> Flow:
    return Flow(UniPC(order=order), shift, sigmas)


def flow_euler(shift: float, sigmas: Any = "official") -> Flow:
    return Flow(FlowEuler(), shift, sigmas)
