# SPDX-License-Identifier: Apache-2.0
"""Hooks of runs of the library: the progress that is shown, and what a caller wants to be told."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from wanjax.pipelines import progress
from wanjax.pipelines.run import Hook
from wanjax.pipelines.steps import Step, Switch


class Showing(Hook):
    """Shows stages on stderr: True, False, or None for on a terminal and in a notebook."""

    def __init__(self, shown: bool | None):
        self.shown = shown

    def stage(self, name: str) -> AbstractContextManager[Any]:
        return progress.stage(name, self.shown)

    def count(self, unit: str, done: int, total: int) -> None:
        progress.count(unit, done, total)


class Calling(Hook):
    """Calls a function after every step, which may return False to end the run."""

    def __init__(self, callback: Callable[[Step], bool | None]):
        self.callback = callback

    def stepped(self, step: Step) -> bool | None:
        _ = step.latents, step.x0  # for a callback that keeps the step
        return self.callback(step)


class Switching(Hook):
    """Calls a function when another network takes over."""

    def __init__(self, callback: Callable[[Switch], Any]):
        self.callback = callback

    def switched(self, switch: Switch) -> None:
        self.callback(switch)
