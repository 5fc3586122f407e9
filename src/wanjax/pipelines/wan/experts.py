# SPDX-License-Identifier: Apache-2.0
"""Wan 2.2's two experts: one transformer takes the steps at high noise, another those at low noise."""

from collections.abc import Sequence

import numpy as np

from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Segment
from wanjax.schedulers.base import TRAIN_STEPS

EXPERTS = ("transformer", "transformer_2")


def segments(timesteps: Sequence[float] | np.ndarray, settings: Settings) -> list[Segment]:
    """Returns each expert's steps and guidance scales; the second takes the timesteps below the boundary."""
    steps, first = len(timesteps), settings.guidance_scale
    if settings.boundary is None:
        return [Segment(EXPERTS[0], 0, (first,) * steps)]
    high = int(np.sum(np.asarray(timesteps) >= settings.boundary * TRAIN_STEPS))
    second = first if settings.guidance_scale_2 is None else settings.guidance_scale_2
    both = (Segment(EXPERTS[0], 0, (first,) * high), Segment(EXPERTS[1], high, (second,) * (steps - high)))
    return [segment for segment in both if segment.scales]
