# SPDX-License-Identifier: Apache-2.0
"""Check the types of a training's settings, which people write in Python."""

from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from wanjax.errors import WanjaxError, repr_short


def check_types(settings: Any) -> None:
    """Raise WanjaxError unless the numbers, choices, switches and texts of a dataclass have their annotated types."""
    for name, annotation in get_type_hints(type(settings)).items():
        is_union = get_origin(annotation) in (Union, UnionType)
        kinds, value = get_args(annotation) if is_union else (annotation,), getattr(settings, name)
        if value is None and NoneType in kinds:
            continue
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if choices:
            is_valid, words = isinstance(value, str) and value in choices, " or ".join(choices)
        elif float in kinds:
            is_valid, words = isinstance(value, Real) and not isinstance(value, bool), "a number"
        elif int in kinds:
            is_valid, words = isinstance(value, Integral) and not isinstance(value, bool), "a whole number"
        elif bool in kinds:
            is_valid, words = isinstance(value, bool), "True or False"
        elif Path in kinds:
            is_valid, words = isinstance(value, str | Path), "a path"
        elif tuple[str, ...] in kinds:
            is_list = isinstance(value, list | tuple)
            is_valid, words = is_list and all(isinstance(text, str) for text in value), "a list of texts"
        else:
            continue
        if not is_valid:
            raise WanjaxError(f"{name} must be {words}, got {repr_short(value)}")
