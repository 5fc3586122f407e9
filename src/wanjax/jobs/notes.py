# SPDX-License-Identifier: Apache-2.0
"""Notes about settings that are valid but probably not intended. The command prints the notes, and a server sends them
to its clients."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from wanjax import registry
from wanjax.errors import WanjaxWarning
from wanjax.figures import pluralize
from wanjax.media.pictures import DECODE_LOCK
from wanjax.pipelines.family import TrainingDomain
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings

MAX_WORDS = 3  # the maximum number of unknown words that a note lists


@contextmanager
def noting_warnings(note: Callable[[str], object]) -> Iterator[None]:
    """Within the block, pass the warnings of wanjax in this thread to a function instead of printing them.

    Args:
        note: Receives the message of each warning.
    """
    thread = get_ident()

    def show(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
        if get_ident() == thread and issubclass(category, WanjaxWarning):
            note(str(message))
        else:
            show_elsewhere(message, category, *location, **options)

    # a thread that reads pictures replaces the state of warnings under this lock, and then restores the state
    with DECODE_LOCK:
        previous_state = warnings.catch_warnings()
        previous_state.__enter__()
        show_elsewhere, warnings.showwarning = warnings.showwarning, show
        warnings.simplefilter("always", WanjaxWarning)
    try:
        yield
    finally:
        with DECODE_LOCK:
            previous_state.__exit__(None, None, None)


def domain_of(model: str) -> TrainingDomain | None:
    """Return the training domain of a small model, or None for a model whose training data cannot be listed.

    Args:
        model: The name of the model, or the folder of a copy that `wanjax convert` wrote.
    """
    preset = registry.presets().get(model) or registry.find_preset_of_converted(model)
    return preset and preset.domain


def video_notes(pipe: Pipeline, settings: Settings) -> list[str]:
    """Return all notes on a video.

    Args:
        pipe: The pipeline that makes the video.
        settings: The settings of the video.
    """
    model_notes = [*shape_notes(settings), *prompt_notes(settings.model, settings.prompts)]
    return list(dict.fromkeys([*model_notes, *pipe.notes(settings)]))


def shape_notes(settings: Settings) -> Iterator[str]:
    """Yield a note if a small model was not trained on the size or the length of the video.

    Args:
        settings: The settings of the video.
    """
    if (domain := domain_of(settings.model)) and (differences := domain.differences(settings)):
        yield (
            f"{settings.model} was trained only on {domain.size[1]}x{domain.size[0]} and "
            f"{pluralize(domain.frames, 'frame')}: {' and '.join(differences)} may show only grey"
        )


def prompt_notes(model: str, prompts: Sequence[str]) -> Iterator[str]:
    """Yield notes on prompts that are empty, or have words that a small model does not know.

    Args:
        model: The name of the model.
        prompts: The prompts.
    """
    if not all(prompt.strip() for prompt in prompts):
        yield "the prompt is empty, so the model chooses what the video shows"
    if (domain := domain_of(model)) and (unknown := domain.unknown_words(" ".join(prompts))):
        quoted_words = ", ".join(map(repr, unknown[:MAX_WORDS])) + (" ..." if len(unknown) > MAX_WORDS else "")
        yield f"{model} does not know {quoted_words}: it was trained on {domain.about}"
