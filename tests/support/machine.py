# SPDX-License-Identifier: Apache-2.0
"""Set the memory, the disk space and the limits of inputs that the library sees in a test."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from wanjax.execution import Execute
from wanjax.media.bounds import MEDIA_LIMITS, MediaLimits
from wanjax.pipelines import components, memory


class Machine:
    """The machine that the library sees, with sizes that hold until the test ends."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def has_memory(self, size: int | None) -> None:
        """Set the bytes of memory of each device; None if they are unknown."""
        self._patch.setattr(memory, "total_memory", lambda device: size)

    def has_free_memory(self, size: Callable[[], float] | float) -> None:
        """Set the free bytes of each device."""
        self._patch.setattr(components, "free_memory", lambda device: size() if callable(size) else size)

    def has_disk(self, free: int) -> None:
        """Set the free bytes of every disk."""
        self._patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**15, 10**15 - free, free))

    def reads_at_most(self, **bounds: int) -> None:
        """Set limits of pictures and clips; the others have their defaults."""
        for name, value in vars(MediaLimits(**bounds)).items():
            self._patch.setattr(MEDIA_LIMITS, name, value)


class RefuseExecution(Execute):
    """Raises when a program is executed, for code that must not run any."""

    def call(self, *_: Any) -> Any:
        raise AssertionError("a program is executed")
