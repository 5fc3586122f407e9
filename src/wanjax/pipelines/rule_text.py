# SPDX-License-Identifier: Apache-2.0
"""Parsing of texts that hold several values, such as a step cache or a guidance rule."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from wanjax.errors import WanjaxError, comma_list, repr_short, suggest_choice


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
        raise WanjaxError(f"there is no {value_kind} {repr_short(text)}: {_suggest_rule(name, value_list, rules)}")
    rule, arguments = rules[name], dict[str, Any]()
    fields, hints = [field.name for field in dataclasses.fields(rule)], get_type_hints(rule)
    needs_name = keyword_only
    for index, item in enumerate(value_list.split(",") if value_list else []):
        key, equals, value = item.partition("=")
        needs_name = needs_name or bool(equals)
        if not equals:
            key, value = fields[index] if index < len(fields) and not needs_name else "", item
        kind: type = (get_args(hints[key]) or (hints[key],))[0] if key in fields else str
        problem = _problem(item, key, fields, arguments, needs_name=needs_name)
        try:
            arguments[key] = kind(value)
        except ValueError:
            problem = f"{key} must be a {'whole number' if kind is int else 'number'}, got {value!r}"
        if problem:
            advice = f"its fields are {comma_list(fields)}" if fields else f"write {name}"
            raise WanjaxError(f"the {value_kind} {repr_short(text)} is malformed: {problem}; {advice}")
    return rule(**arguments)


def _problem(item: str, key: str, fields: Sequence[str], earlier: Collection[str], *, needs_name: bool) -> str:
    """Return what is wrong with the field of one value, or "". `key` is "" if the value belongs to no field."""
    if not fields:
        return "it takes no values"
    if not key:
        return f"{item!r} needs the name of its field" if needs_name else f"it takes at most {len(fields)} values"
    if key not in fields:
        return f"it has no field {key!r}"
    return f"{key} is given twice" if key in earlier else ""


def _suggest_rule(name: str, value_list: str, rules: Mapping[str, type[Any]]) -> str:
    """Return advice for an unknown rule: the form with a colon, one rule instead of several, or a similar name."""
    words = re.split("[=,]", name)
    if len(words) > 1 and words[0] in rules and dataclasses.fields(rules[words[0]]):
        values = ",".join([*words[1:], *filter(None, [value_list])])
        return f"give one of them, such as {words[0]}" if words[1] in rules else f"write {words[0]}:{values}"
    return suggest_choice(name, rules)
