# SPDX-License-Identifier: Apache-2.0
"""Parsing of a text with several settings, such as a step cache or a guidance rule."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args, get_type_hints

from wanjax.errors import WanjaxError, choice, repr_short


def parse_rule(described: Any, kinds: Mapping[str, type[Any]], what: str, *, named: bool = False) -> Any:
    """Parse a text such as `NAME` or `NAME:1,2,c=3` into a dataclass; `kinds` are the dataclasses by their names.

    Settings are given in their order, later ones by name; all by name if `named`. Raises WanjaxError for anything else;
    `what` is the word for the value in its message.
    """
    name, _, listed = described.partition(":") if isinstance(described, str) else ("", "", "")
    if name not in kinds:
        raise WanjaxError(f"there is no {what} {repr_short(described)}: {choice(name, kinds)}")
    fields, values = [field.name for field in dataclasses.fields(kinds[name])], listed.split(",") if listed else []
    hints, arguments = get_type_hints(kinds[name]), {}
    for place, text in enumerate(values):
        key, equals, value = text.partition("=")
        if not equals:
            in_order = not named and place < len(fields) and len(arguments) == place
            key, value = fields[place] if in_order else "", text
        with suppress(ValueError):
            if key in fields:
                arguments.setdefault(key, (get_args(hints[key]) or (hints[key],))[0](value))
    if len(arguments) != len(values):
        written = f"{kinds[name]()}, which has {', '.join(fields)}" if fields else str(kinds[name]())
        raise WanjaxError(f"the {what} {repr_short(described)} cannot be read: write it like {written}")
    return kinds[name](**arguments)
