# SPDX-License-Identifier: Apache-2.0
"""Notes about settings that are valid but probably not intended. The command prints the notes, and a server sends them
to its clients."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from wanjax.errors import WanjaxWarning
from wanjax.media.pictures import DECODE_LOCK
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings


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


def video_notes(pipe: Pipeline, settings: Settings) -> list[str]:
    """Return all notes on a video.

    Args:
        pipe: The pipeline that makes the video.
        settings: The settings of the video.
    """
    return [*empty_prompt_notes(settings.prompts), *pipe.notes(settings)]


def empty_prompt_notes(prompts: Sequence[str]) -> Iterator[str]:
    """Yield a note if a prompt is empty. In Python, an empty prompt is a choice.

    Args:
        prompts: The prompts.
    """
    if not all(prompt.strip() for prompt in prompts):
        yield "the prompt is empty, so the model chooses what the video shows"
