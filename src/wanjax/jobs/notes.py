# SPDX-License-Identifier: Apache-2.0
"""Notes on a video that can be made, but perhaps not as meant: the command prints them, and a server tells them."""

from collections.abc import Iterator, Sequence

from wanjax import registry
from wanjax.figures import quantity
from wanjax.pipelines.family import TrainingDomain
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings

MAX_WORDS = 3  # that a note on unknown words names


def domain_of(model: str) -> TrainingDomain | None:
    """Return all that a model knows, for one whose knowledge can be listed.

    Args:
        model: The name of the model.
    """
    preset = registry.presets().get(model)
    return preset and preset.domain


def video_notes(pipe: Pipeline, settings: Settings) -> list[str]:
    """Return all notes on a video.

    A note on guidance that is off is among them only if the negative prompt differs from the model's own.

    Args:
        pipe: The pipeline that makes it.
        settings: The settings of the video.
    """
    notes = [] if settings.negative_prompt == pipe.defaults.negative_prompt else [*guidance_notes(settings)]
    notes += [*shape_notes(settings), *prompt_notes(settings.model, settings.prompts)]
    for name, text in texts_of(settings):
        notes += truncation_notes(pipe, name, text, settings.follow)
    return list(dict.fromkeys(notes))


def guidance_notes(settings: Settings) -> Iterator[str]:
    """Yield a note if the negative prompt is not used.

    Args:
        settings: The settings of the video.
    """
    if not (settings.guided or settings.guidance_rule.nag is not None):
        yield "guidance is off, so the negative prompt has no effect"


def shape_notes(settings: Settings) -> Iterator[str]:
    """Yield a note on a size or a length on which a small model was not trained.

    Args:
        settings: The settings of the video.
    """
    if (domain := domain_of(settings.model)) and (differences := domain.unlike(settings)):
        yield (
            f"{settings.model} was trained on {domain.size[1]}x{domain.size[0]} and "
            f"{quantity(domain.frames, 'frame')} alone: {' and '.join(differences)} may show nothing but grey"
        )


def prompt_notes(model: str, prompts: Sequence[str]) -> Iterator[str]:
    """Yield notes on prompts that are empty, or have words that a small model does not know.

    Args:
        model: The name of the model.
        prompts: The prompts.
    """
    if not all(prompt.strip() for prompt in prompts):
        yield "the prompt is empty, so the video shows what the model likes"
    if (domain := domain_of(model)) and (unknown := domain.unknown(" ".join(prompts))):
        words = ", ".join(map(repr, unknown[:MAX_WORDS])) + (" ..." if len(unknown) > MAX_WORDS else "")
        yield f"{model} does not know {words}: it was trained on {domain.about}"


def texts_of(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the texts that a model reads, each with its name.

    Args:
        settings: The settings of the video.
    """
    yield "prompt", settings.prompt
    yield "negative prompt", settings.negative_prompt


def truncation_notes(pipe: Pipeline, name: str, text: str, follow: str) -> list[str]:
    """Return notes on the parts of a text that the tokenizers cut off.

    Args:
        pipe: The pipeline whose tokenizers are used.
        name: The name of the text in the notes.
        text: The text.
        follow: The reference implementation to match.
    """
    return [str(one).replace("the prompt", f"the {name}", 1) for one in pipe.truncations(text, follow=follow)]
