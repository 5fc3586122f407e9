# SPDX-License-Identifier: Apache-2.0
"""A stand-in for what a test cannot have at will: the memory, the disk and the bounds of its machine."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from wanjax.execution import Execute
from wanjax.media.bounds import MEDIA_LIMITS, MediaLimits
from wanjax.pipelines import components, memory


class Machine:
    """The machine of a test, whose sizes are what the test says until it ends."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def has_memory(self, size: int | None) -> None:
        """Give each device so many bytes of memory; None if it is unknown."""
        self._patch.setattr(memory, "total_memory", lambda device: size)

    def has_free_memory(self, size: Callable[[], float] | float) -> None:
        """Leave each device so many bytes for networks."""
        self._patch.setattr(components, "free_memory", lambda device: size() if callable(size) else size)

    def has_disk(self, free: int) -> None:
        """Leave every disk so many bytes."""
        self._patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**15, 10**15 - free, free))

    def reads_at_most(self, **bounds: int) -> None:
        """Bound pictures and clips; None is the default bound."""
        for name, value in vars(MediaLimits(**bounds)).items():
            self._patch.setattr(MEDIA_LIMITS, name, value)


class RefuseExecution(Execute):
    """Stands for a machine that has not begun: raises where the first program would be executed."""

    def call(self, *_: Any) -> Any:
        raise AssertionError("a program is executed")
