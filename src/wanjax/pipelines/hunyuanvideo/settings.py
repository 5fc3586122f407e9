# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's own settings, beside those of every model."""

import math
from dataclasses import dataclass

from wanjax.errors import WanjaxError
from wanjax.pipelines.settings import Settings


@dataclass(frozen=True, kw_only=True)
class HunyuanVideoSettings(Settings):
    """The settings of HunyuanVideo's videos. A `flow_shift` above 1 moves steps to high noise."""

    flow_shift: float

    def check(self, *, spatial: int, temporal: int) -> None:
        super().check(spatial=spatial, temporal=temporal)
        if not 0 < self.flow_shift < math.inf:
            raise WanjaxError(f"the flow shift {self.flow_shift} is not a finite number above 0: 5 to 9 is usual")
