# SPDX-License-Identifier: Apache-2.0
"""Phases: runs of consecutive steps by one network, with their guidance scales."""

import math
from typing import NamedTuple


class Phase(NamedTuple):
    """Consecutive steps of one network.

    Args:
        network: The component that runs them.
        start: The first step, counted from 0.
        scales: The guidance scale of each step.
        total: The number of steps of the whole video.
        number: The number of earlier phases.
        skipped: The number of skipped first steps, if the video starts from an input video.
    """

    network: str
    start: int
    scales: tuple[float, ...]
    total: int
    number: int = 0
    skipped: int = 0

    @property
    def steps(self) -> range:
        """The indices of the steps, counted from the video's first."""
        return range(self.start, self.start + len(self.scales))

    @property
    def guided(self) -> bool:
        """True if a step also runs the negative prompt."""
        return max(self.scales) > 1


def dense_steps(total: int) -> int:
    """Return how many first steps use full self-attention where later ones use sparse attention.

    The share is 12 of 50, as in Radial Attention's code.

    Args:
        total: The number of steps of the video.
    """
    return min(math.ceil(0.24 * total), total - 1)
