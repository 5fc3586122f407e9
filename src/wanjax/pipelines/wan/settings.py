# SPDX-License-Identifier: Apache-2.0
"""Wan's own settings, beside those of every model."""

import math
from dataclasses import dataclass

from wanjax.errors import WanjaxError
from wanjax.pipelines.settings import Settings


@dataclass(frozen=True, kw_only=True)
class WanSettings(Settings):
    """The settings of Wan's videos.

    Models of two experts have a `boundary`, a noise level in [0, 1]. The second expert takes the steps that begin below
    it, with `guidance_scale_2`. Both are None for other models. The guidance scale at high noise comes first, as in
    diffusers; in the official configs it comes second.
    """

    guidance_scale_2: float | None
    boundary: float | None
    flow_shift: float
    sigmas: str

    @property
    def guidance_scales(self) -> tuple[float, ...]:
        return tuple(scale for scale in (self.guidance_scale, self.guidance_scale_2) if scale is not None)

    def check(self, *, spatial: int, temporal: int) -> None:
        super().check(spatial=spatial, temporal=temporal)
        if not 0 <= (self.boundary or 0.0) <= 1:
            raise WanjaxError(f"the boundary {self.boundary} is not a noise level from 0 to 1: 0.875 is usual")
        if not 0 < self.flow_shift < math.inf:
            raise WanjaxError(f"the flow shift {self.flow_shift} is not a finite number above 0: 3 to 12 is usual")
