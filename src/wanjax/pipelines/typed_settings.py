# SPDX-License-Identifier: Apache-2.0
"""The settings of a call as typed keywords. `python -m tests.support.typed_settings` writes this file."""

from collections.abc import Sequence
from typing import TypedDict

from wanjax.pipelines.caching.rules import CacheRule
from wanjax.pipelines.guidance import GuidanceRule


class SettingsKeywords(TypedDict, total=False):
    """The settings of a call. None is the model's default. `size` is (height, width), a text or a name."""

    size: tuple[int, int] | str | None
    height: int | None
    width: int | None
    frames: int | None
    windows: int | None
    overlap: int | None
    match: str | None
    then: str | Sequence[str] | None
    clip_prompt: str | None
    fps: int | None
    steps: int | None
    guidance_scale: float | None
    guidance_scale_2: float | None
    boundary: float | None
    boundary_step: int | None
    strength: float | None
    dynamic_guidance: bool | None
    guidance_rule: GuidanceRule | str | None
    flow_shift: float | None
    follow: str | None
    sigmas: str | None
    cache: CacheRule | str | None
    seed: int | str | None
    rng: str | None
