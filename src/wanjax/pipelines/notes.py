# SPDX-License-Identifier: Apache-2.0
"""Notes about settings that are valid but probably not intended."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from wanjax.errors import WanjaxError
from wanjax.figures import pluralize
from wanjax.pipelines.family import TrainingDomain
from wanjax.pipelines.model import VideoModel, truncations
from wanjax.pipelines.runtime import Runtime
from wanjax.pipelines.settings import Settings
from wanjax.schedulers import name_of

MAX_WORDS = 3  # the maximum number of unknown words that a note lists


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


def shape_notes(domain: TrainingDomain | None, settings: Settings) -> Iterator[str]:
    """Yield a note if a small model was not trained on the size or the length of the video.

    Args:
        domain: The training domain of the model, or None.
        settings: The settings of the video.
    """
    if domain and (differences := domain.differences(settings)):
        yield (
            f"{settings.model} was trained only on {domain.size[1]}x{domain.size[0]} and "
            f"{pluralize(domain.frames, 'frame')}: {' and '.join(differences)} may show only grey"
        )


def word_notes(domain: TrainingDomain | None, model: str, prompts: Sequence[str]) -> Iterator[str]:
    """Yield a note if prompts have words that a small model does not know.

    Args:
        domain: The training domain of the model, or None.
        model: The name of the model.
        prompts: The prompts.
    """
    if domain and (unknown := domain.unknown_words(" ".join(prompts))):
        quoted_words = ", ".join(map(repr, unknown[:MAX_WORDS])) + (" ..." if len(unknown) > MAX_WORDS else "")
        yield f"{model} does not know {quoted_words}: it was trained on {domain.about}"


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
