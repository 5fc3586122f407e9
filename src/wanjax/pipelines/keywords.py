# SPDX-License-Identifier: Apache-2.0
"""The keyword arguments of a pipeline's methods.

Editors read types without running code. The module `typed_settings` therefore lists the types of all settings; it is
generated from `Settings`.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from textwrap import fill
from typing import ParamSpec, TypeVar, get_type_hints

from jax import Array

from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import INPUT_SPECS
from wanjax.media.pictures import ClipSource, PictureSource
from wanjax.pipelines.noise_inputs import NoiseInput
from wanjax.pipelines.observers import Step
from wanjax.pipelines.other_names import RENAMED, unknown_keyword
from wanjax.pipelines.settings import Settings, schema
from wanjax.pipelines.typed_settings import SettingsKeywords

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
KEYWORDS_ENTRY = re.compile(r" {4}\*\*\w+:.*\n(?: {8}.*\n)*")  # the `**` argument's entry in "Args:"
PictureInput = PictureSource | Array
ClipInput = ClipSource | Sequence[Array] | Array


class InputKeywords(SettingsKeywords, total=False):
    """Settings, images and clips, and how images and clips are resized and extended."""

    image: PictureInput | None
    last_image: PictureInput | None
    video: ClipInput | None
    face: ClipInput | None
    background: ClipInput | None
    mask: ClipInput | None
    references: Iterable[PictureInput] | None
    resize: str | None
    outpaint: str | None


class CallKeywords(InputKeywords, total=False):
    """The keyword arguments of a call that makes videos."""

    negative_prompt: str | None
    noise: NoiseInput | None
    callback: Callable[[Step], bool | None] | None
    tiling: Tiling | None
    batch_guidance: bool


CALL_KEYWORDS = ("seeds", *CallKeywords.__annotations__)


def check_keywords(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function. An unknown keyword then raises a WanjaxError that suggests the right keyword."""
    parameters = inspect.signature(function).parameters
    keyword_only = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    names = keyword_only or [name for name in parameters if name != "self"]

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name in kwargs:
            if name not in parameters:
                raise unknown_keyword(name, names, of_call=CALL_KEYWORDS)
        return function(*args, **kwargs)

    return run


def document_keywords(keywords: type) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function with `**` keywords of a TypedDict, so that `help` lists each keyword with its description."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        signature = inspect.signature(function)
        explicit = {p.name: p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        keyword_parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in get_type_hints(keywords).items()
            if name not in explicit
        ]
        function.__signature__ = signature.replace(parameters=[*explicit.values(), *keyword_parameters])  # pyright: ignore[reportFunctionMemberAccess]
        function.__doc__ = _add_descriptions(
            inspect.getdoc(function), [parameter.name for parameter in keyword_parameters]
        )

        @wraps(function)
        def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            for name in kwargs.keys() - explicit.keys():
                if RENAMED.get(name) in explicit:
                    raise unknown_keyword(name, explicit)
            return function(*args, **kwargs)

        return run

    return decorate


def _add_descriptions(doc: str | None, names: Iterable[str]) -> str | None:
    """Insert a description of each keyword into a docstring, below the entry of the `**` argument."""
    if not (entry := KEYWORDS_ENTRY.search(doc or "")):
        return doc
    descriptions = {
        "size": '(height, width), a text such as "832x480", width first, or a name in the pipeline\'s `sizes`.'
    }
    descriptions |= {name: setting.help.partition("  [")[0] for name, setting in schema(Settings).items()}
    descriptions |= {name: spec.help for name, spec in INPUT_SPECS.items()}
    lines = [
        fill(f"{name}: {descriptions[name]}", 110, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name in names
        if name in descriptions
    ]
    return entry.string[: entry.end()] + "\n".join([*lines, ""]) + entry.string[entry.end() :]
