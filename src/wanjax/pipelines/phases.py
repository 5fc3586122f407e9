# SPDX-License-Identifier: Apache-2.0
"""Phases: which network takes which steps of a video, and with what guidance scale."""

import math
from typing import NamedTuple


class Phase(NamedTuple):
    """Consecutive steps of one network.

    Args:
        network: The component that takes them.
        start: The first of them; steps are counted from 0.
        scales: The guidance scale of each.
        total: The steps of the whole video.
        number: The phases before this one.
        skipped: Steps that a video leaves out before the first, where it starts from a given one.
    """

    network: str
    start: int
    scales: tuple[float, ...]
    total: int
    number: int = 0
    skipped: int = 0

    @property
    def steps(self) -> range:
        """The steps, counted from the video's first."""
        return range(self.start, self.start + len(self.scales))

    @property
    def guided(self) -> bool:
        """True where some step also runs the negative prompt."""
        return max(self.scales) > 1


def dense_steps(total: int) -> int:
    """Return the number of first steps that take all of self-attention where later ones take it sparsely.

    The share is that of Radial Attention's authors, 12 of 50.

    Args:
        total: Steps of the video.
    """
    return min(math.ceil(0.24 * total), total - 1)
