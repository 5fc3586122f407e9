# SPDX-License-Identifier: Apache-2.0
"""Parsing of texts that hold several values, such as a step cache or a guidance rule."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args, get_type_hints

from wanjax.errors import WanjaxError, repr_short, suggest_choice


def parse_rule(text: Any, rules: Mapping[str, type[Any]], value_kind: str, *, keyword_only: bool = False) -> Any:
    """Parse a text such as `NAME` or `NAME:1,2,c=3` into a dataclass.

    Args:
        text: The text. After the colon it has values in the order of the fields; the last values may have names.
        rules: The dataclasses by name.
        value_kind: The kind of the value for error messages, such as "guidance rule".
        keyword_only: Whether all fields must have names.

    Raises:
        WanjaxError: The text is malformed, or no dataclass has its name.
    """
    name, _, value_list = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name not in rules:
        raise WanjaxError(f"there is no {value_kind} {repr_short(text)}: {suggest_choice(name, rules)}")
    rule = rules[name]
    fields, items = [field.name for field in dataclasses.fields(rule)], value_list.split(",") if value_list else []
    hints, arguments = get_type_hints(rule), {}
    for index, item in enumerate(items):
        key, equals, value = item.partition("=")
        if not equals:
            is_positional = not keyword_only and index < len(fields) and len(arguments) == index
            key, value = fields[index] if is_positional else "", item
        with suppress(ValueError):
            if key in fields:
                arguments.setdefault(key, (get_args(hints[key]) or (hints[key],))[0](value))
    if len(arguments) != len(items):
        example = f"{rule()}, with the fields {', '.join(fields)}" if fields else str(rule())
        raise WanjaxError(f"the {value_kind} {repr_short(text)} is malformed: write it like {example}")
    return rule(**arguments)
