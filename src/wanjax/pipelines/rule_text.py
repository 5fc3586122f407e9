# SPDX-License-Identifier: Apache-2.0
"""Values of several settings that a text describes, such as a step cache or a rule of guidance."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args, get_type_hints

from wanjax.errors import WanjaxError, choice, repr_short


def parse_rule(described: Any, kinds: Mapping[str, type[Any]], what: str, *, named: bool = False) -> Any:
    """Return the value that a text such as `NAME` or `NAME:1,2,c=3` describes; `kinds` are dataclasses by their names.

    Settings stand in their order, and after those by name; all by name where they are to be `named`. Raises
    WanjaxError, which calls it `what`, for anything else.
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
        raise WanjaxError(f"the {what} {repr_short(described)} is not written like {written}")
    return kinds[name](**arguments)
