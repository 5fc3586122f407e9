# SPDX-License-Identifier: Apache-2.0
"""Read configs from the entries of a config.json, or from the shapes of tensors if there is no config.json."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from wanjax.converters.weight_rules import ArraySpec
from wanjax.errors import WanjaxError, repr_short

Specs = Mapping[str, ArraySpec]
MAX_SIZE, MAX_SIZES = 2**24, 32  # the largest size, and the length of the longest list of sizes
MAX_STATISTICS = 1024  # the length of the longest list that has a number for each channel
Config = TypeVar("Config")


class Entries(Mapping[str, Any]):
    """The entries of a config.json.

    `read` collects the entries that were read, so that `read_config` can check them.
    """

    def __init__(self, json: Mapping[str, Any]):
        self.json, self.read = json, dict[str, Any]()

    def __getitem__(self, key: str) -> Any:
        self.read[key] = value = self.json[key]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.json)

    def __len__(self) -> int:
        return len(self.json)


def read_config(file: str, json: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Config]) -> Config:
    """Build a config from the entries of a config.json and check its fields.

    Args:
        file: The file's name, for messages.
        json: The entries of the file.
        read: The function that builds the config, a dataclass, from the entries.

    Raises:
        WanjaxError: An entry is missing, has a wrong type, or is out of bounds.
    """
    entries = Entries(json)
    try:
        config = read(entries)
    except WanjaxError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        if isinstance(error, KeyError) and error.args and error.args[0] not in json:
            raise WanjaxError(f"{file} has no {error.args[0]}: give a published config.json") from error
        invalid_keys = [key for key, value in entries.read.items() if not _is_size(value)]
        missing = [key for key, value in entries.read.items() if value is None]
        if not (names := [*invalid_keys, *missing, *list(entries.read)[-1:]]):
            raise WanjaxError(f"{file} is not a network's config: give a published config.json") from error
        raise _invalid_entry(file, names[0], json[names[0]], "a size, or a list of sizes") from error
    hints = get_type_hints(type(config))
    for config_field in fields(config):  # pyright: ignore[reportArgumentType]
        value = getattr(config, config_field.name)
        if expected := _expected_kind(value, hints[config_field.name], config_field.metadata.get("least", 1)):
            keys = [key for key, entry in entries.read.items() if entry == value or _is_list_of(entry, value)]
            raise _invalid_entry(file, [*keys, config_field.name][0], value, expected)
    return config


def _is_list_of(entry: Any, value: Any) -> bool:
    """Return whether `value` is a tuple of the same items as the list or string `entry`."""
    return isinstance(value, tuple) and isinstance(entry, list | str) and tuple(entry) == value


def _invalid_entry(file: str, name: str, value: Any, expected: str) -> WanjaxError:
    return WanjaxError(f"{file} has {name} {repr_short(value)}: give {expected}")


def _is_size(value: Any) -> bool:
    """Return whether a config may hold a value: a number in bounds, a boolean, a list of these, a mapping or None."""
    if isinstance(value, list | tuple):
        return len(value) <= MAX_STATISTICS and all(map(_is_size, value))
    if isinstance(value, Mapping) or value is None:
        return True
    return isinstance(value, int | float) and 0 <= value <= MAX_SIZE


def _expected_kind(value: Any, hint: Any, least: int) -> str:
    """Return a description of the values that a field accepts, or an empty string if `value` is valid."""
    type_arguments = get_args(hint)
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        problems = [_expected_kind(value, kind, least) for kind in type_arguments]
        return "" if "" in problems else " or ".join(filter(None, problems))
    if hint is type(None):
        return "" if value is None else "null"
    if get_origin(hint) is tuple:
        item_types = (
            type_arguments[:1] * len(value)
            if type_arguments[1:] == (...,) and isinstance(value, tuple)
            else type_arguments
        )
        max_length = MAX_STATISTICS if float in type_arguments else MAX_SIZES
        is_valid = isinstance(value, tuple) and len(value) == len(item_types) and len(value) <= max_length
        problems = (
            [_expected_kind(x, kind, least) for x, kind in zip(value, item_types, strict=True)] if is_valid else [""]
        )
        return (
            ""
            if is_valid and not any(problems)
            else f"a list of {max(problems) or f'{len(item_types)} sizes, and of at most {max_length}'}"
        )
    if hint is int:
        is_valid = type(value) is int and least <= value <= MAX_SIZE
        return "" if is_valid else f"a whole number from {least} to {MAX_SIZE}"
    if hint is float:
        is_valid = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
        return "" if is_valid else "a finite number"
    if isinstance(hint, type) and hint in (bool, str):
        return "" if isinstance(value, hint) else ("true or false" if hint is bool else "a string")
    return ""


def check_kind(component: str, json: Mapping[str, Any], kind: Mapping[str, tuple]) -> None:
    """Raise WanjaxError if an entry of a component's config.json selects an unsupported architecture.

    `kind` lists the supported values of each entry. A missing entry has the first supported value.
    """
    for entry, supported in kind.items():
        if (value := json.get(entry, supported[0])) not in supported:
            choices = " or ".join(map(repr, supported))
            raise WanjaxError(
                f"the {component}'s config.json has {entry} {repr_short(value)}, which is not supported: use {choices}"
            )
        if isinstance(json, Entries):
            json.read.pop(entry, None)  # a later error cannot be about this valid entry


def check_entries(component: str, json: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    """Raise WanjaxError unless a component's config.json has the `required` values."""
    for entry, value in required.items():
        if (actual := json.get(entry)) != value:
            raise WanjaxError(
                f"the {component}'s config.json has {entry} {actual!r}, which is not supported: use {value!r}"
            )


def shape_of(specs: Specs, key: str, rank: int) -> tuple[int, ...]:
    """Return the shape of a tensor; raise WanjaxError if the tensor is missing or has another rank."""
    if key not in specs:
        raise WanjaxError(f"the checkpoint lacks {key}, which determines a size of the network: give a complete file")
    shape = specs[key].shape
    if len(shape) != rank or 0 in shape:
        raise WanjaxError(f"{key} has the shape {list(shape)}, expected {rank} axes: get the file again")
    return shape


def count_modules(keys: Iterable[str], modules: str) -> int:
    """Count the modules of a list: one more than the highest index after `modules` in the keys; 0 if no key has one."""
    index = re.compile(re.escape(modules) + r"\.([0-9]{1,4})\.")
    return max((int(match[1]) for key in keys if (match := index.match(key))), default=-1) + 1
