# SPDX-License-Identifier: Apache-2.0
"""Phases: the consecutive steps of one network, with their guidance scales."""

import math
from typing import NamedTuple


class Phase(NamedTuple):
    """Consecutive steps of one network.

    Args:
        network: The component that runs them.
        start: The index of the first step, from 0.
        scales: The guidance scale of each step.
        total: The number of steps of the whole video.
        index: The index of the phase, from 0.
        skipped: The number of steps at the start of the schedule that are skipped because the video starts from an
            input video.
        timesteps: The timestep of each step, from 1000 for noise to 0.
    """

    network: str
    start: int
    scales: tuple[float, ...]
    total: int
    index: int = 0
    skipped: int = 0
    timesteps: tuple[float, ...] = ()

    @property
    def steps(self) -> range:
        """The indices of the steps, counted from the video's first."""
        return range(self.start, self.start + len(self.scales))

    @property
    def guided(self) -> bool:
        """True if at least one step also runs the negative prompt."""
        return max(self.scales) > 1


def dense_steps(total: int) -> int:
    """Count the steps with full self-attention. They come before the steps with sparse attention.

    The fraction is 12 of 50 steps, as in Radial Attention's code.

    Args:
        total: The number of steps of the video.
    """
    return min(math.ceil(0.24 * total), total - 1)
