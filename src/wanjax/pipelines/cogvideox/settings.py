# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's own settings, beside those of every model."""

from dataclasses import dataclass

from wanjax.pipelines.settings import Settings


@dataclass(frozen=True, kw_only=True)
class CogVideoXSettings(Settings):
    """The settings of CogVideoX's videos.

    With `dynamic_guidance` the guidance scale follows a cosine of the timestep, from 1 to `guidance_scale` + 1.
    """

    dynamic_guidance: bool
