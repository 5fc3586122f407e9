# SPDX-License-Identifier: Apache-2.0
"""The keyword arguments of a pipeline's methods.

Editors read types without running code. `typed_settings` therefore spells out the settings' types; it is generated from
`Settings`.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from textwrap import fill
from typing import ParamSpec, TypeVar, get_type_hints

from jax import Array

from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import INPUTS
from wanjax.media.pictures import ClipSource, PictureSource
from wanjax.pipelines.noise_inputs import NoiseInput
from wanjax.pipelines.observers import Step
from wanjax.pipelines.other_names import unknown_keyword
from wanjax.pipelines.settings import Settings, schema
from wanjax.pipelines.typed_settings import SettingsKeywords

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
ARGUMENT = re.compile(r" {4}\*\*\w+:.*\n(?: {8}.*\n)*")  # of a docstring
PictureGiven = PictureSource | Array
ClipGiven = ClipSource | Sequence[Array] | Array


class InputKeywords(SettingsKeywords, total=False):
    """The settings, the images and clips, and how these are fitted to the video's size."""

    image: PictureGiven | None
    last_image: PictureGiven | None
    video: ClipGiven | None
    mask: ClipGiven | None
    references: Iterable[PictureGiven] | None
    resize: str | None


class CallKeywords(InputKeywords, total=False):
    """The keywords of a call for videos."""

    negative_prompt: str | None
    noise: NoiseInput | None
    callback: Callable[[Step], bool | None] | None
    tiling: Tiling | None
    batch_guidance: bool


def knows_keywords(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function so that an unknown keyword, such as another library's, raises a helpful WanjaxError."""
    parameters = inspect.signature(function).parameters
    names = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name in kwargs:
            if name not in parameters:
                raise unknown_keyword(name, names, of_call=CallKeywords.__annotations__)
        return function(*args, **kwargs)

    return run


def spelled_out(keywords: type) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function whose `**` takes the keywords of a TypedDict: `help` then lists each with its help."""

    def spell(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        signature = inspect.signature(function)
        named = {p.name: p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        spelled = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in get_type_hints(keywords).items()
            if name not in named
        ]
        function.__signature__ = signature.replace(parameters=[*named.values(), *spelled])  # pyright: ignore[reportFunctionMemberAccess]
        function.__doc__ = _with_helps(inspect.getdoc(function), [parameter.name for parameter in spelled])
        return function

    return spell


def _with_helps(doc: str | None, names: Iterable[str]) -> str | None:
    """Insert the help of each keyword into a docstring, below the entry of `**` in its arguments."""
    if not (entry := ARGUMENT.search(doc or "")):
        return doc
    helps = {"size": '(height, width), a text such as "832x480", width first, or a name in the pipeline\'s `sizes`.'}
    helps |= {name: setting.help.partition("  [")[0] for name, setting in schema(Settings).items()}
    helps |= {name: spec.help for name, spec in INPUTS.items()}
    lines = [
        fill(f"{name}: {helps[name]}", 110, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name in names
        if name in helps
    ]
    return entry.string[: entry.end()] + "\n".join([*lines, ""]) + entry.string[entry.end() :]
