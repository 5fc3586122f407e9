# SPDX-License-Identifier: Apache-2.0
"""Notes about settings that are valid but probably not intended, for any model."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from wanjax.errors import WanjaxError
from wanjax.figures import pluralize
from wanjax.pipelines.model import VideoModel, truncations
from wanjax.pipelines.runtime import Runtime
from wanjax.pipelines.settings import Settings
from wanjax.schedulers import name_of


def guidance_notes(settings: Settings) -> Iterator[str]:
    """Yield a note if the negative prompt is not used.

    Args:
        settings: The settings of the video.
    """
    if not (settings.guided or settings.guidance_rule.nag is not None):
        yield "guidance is off, so the negative prompt has no effect"


def shift_notes(model: VideoModel[Any], settings: Settings, default: float | None) -> Iterator[str]:
    """Yield a note if the flow shift is not the model's default, but the noise levels are those of the default.

    Args:
        model: The model.
        settings: The settings of the video.
        default: The default flow shift.
    """
    if settings.flow_shift is None or default is None or settings.flow_shift == default:
        return
    with suppress(WanjaxError):  # the default can be impossible with the other settings
        first_pass = model.spec.passes_of(settings)[0]
        levels, default_levels = (
            np.asarray(model.spec.schedule(replace(first_pass, flow_shift=shift)).sigmas)
            for shift in (settings.flow_shift, default)
        )
        if np.array_equal(levels, default_levels):
            yield (
                f"the flow shift of {settings.flow_shift:g} has no effect: the noise levels of "
                f"{name_of(model.scheduler)} with sigmas {settings.sigmas} in {pluralize(settings.steps, 'step')} do "
                "not depend on it"
            )


def truncation_notes(
    model: VideoModel[Any], runtime: Runtime, videos: Sequence[Settings], default_negative: str
) -> list[str]:
    """Return a note on each prompt and negative prompt that the tokenizers cut, because it is too long.

    Args:
        model: The model.
        runtime: The networks, devices and strategy.
        videos: The settings of the videos.
        default_negative: The default negative prompt, which the user did not write and which gives no note.
    """
    texts = dict.fromkeys(("prompt", text, video.follow) for video in videos for text in video.prompts)
    texts |= dict.fromkeys(
        ("negative prompt", video.negative_prompt, video.follow)
        for video in videos
        if video.negative_prompt != default_negative
    )
    notes = (
        str(truncation).replace("the prompt", f"the {name}", 1)
        for name, text, follow in texts
        for truncation in truncations(model, runtime, text, follow)
    )
    return list(dict.fromkeys(notes))
