# SPDX-License-Identifier: Apache-2.0
"""Reading of configs: entries of a config.json, and sizes from the shapes of tensors where there is none."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from wanjax.converters.weight_rules import Described
from wanjax.errors import WanjaxError, repr_short

Specs = Mapping[str, Described]
LARGEST, LONGEST = 2**24, 32  # of a size, and of a list of sizes
STATISTICS = 1024  # numbers of a list, one for each channel
Read = TypeVar("Read")


class Entries(Mapping[str, Any]):
    """The entries of a config.json; it records which are read, to be checked."""

    def __init__(self, json: Mapping[str, Any]):
        self.json, self.read = json, dict[str, Any]()

    def __getitem__(self, key: str) -> Any:
        self.read[key] = value = self.json[key]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.json)

    def __len__(self) -> int:
        return len(self.json)


def read_config(file: str, json: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Read]) -> Read:
    """Return the config, a dataclass, that a function reads from the entries of a config.json.

    Raises WanjaxError that names the file, the entry and its value where one is missing, of another type or out of
    bounds.
    """
    entries = Entries(json)
    try:
        config = read(entries)
    except WanjaxError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        if isinstance(error, KeyError) and error.args and error.args[0] not in json:
            raise WanjaxError(f"{file} has no {error.args[0]}, which a published one has") from error
        wrong = [key for key, value in entries.read.items() if not _is_size(value)]
        missing = [key for key, value in entries.read.items() if value is None]
        if not (names := [*wrong, *missing, *list(entries.read)[-1:]]):
            raise WanjaxError(f"{file} is no config of a network: give a published one") from error
        raise _misfit(file, names[0], json[names[0]], "a size, or a list of sizes") from error
    hints = get_type_hints(type(config))
    for each in fields(config):  # pyright: ignore[reportArgumentType]
        value = getattr(config, each.name)
        if right := _unlike(value, hints[each.name], each.metadata.get("least", 1)):
            same = [key for key, entry in entries.read.items() if entry == value or _is_list_of(entry, value)]
            raise _misfit(file, [*same, each.name][0], value, right)
    return config


def _is_list_of(entry: Any, value: Any) -> bool:
    """Return whether a tuple was made of an entry."""
    return isinstance(value, tuple) and isinstance(entry, list | str) and tuple(entry) == value


def _misfit(file: str, name: str, value: Any, right: str) -> WanjaxError:
    return WanjaxError(f"{file} has {name} {repr_short(value)}: give {right}")


def _is_size(value: Any) -> bool:
    """Return whether a value may be an entry that a network is made of: a number, truth, or a short list of these."""
    if isinstance(value, list | tuple):
        return len(value) <= STATISTICS and all(map(_is_size, value))
    if isinstance(value, Mapping) or value is None:
        return True
    return isinstance(value, int | float) and 0 <= value <= LARGEST


def _unlike(value: Any, hint: Any, least: int) -> str:
    """Return the kind of value that a field needs if a value is not of it, else an empty text."""
    kinds = get_args(hint)
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        wrong = [_unlike(value, kind, least) for kind in kinds]
        return "" if "" in wrong else " or ".join(filter(None, wrong))
    if hint is type(None):
        return "" if value is None else "null"
    if get_origin(hint) is tuple:
        each = kinds[:1] * len(value) if kinds[1:] == (...,) and isinstance(value, tuple) else kinds
        most = STATISTICS if float in kinds else LONGEST
        fits = isinstance(value, tuple) and len(value) == len(each) and len(value) <= most
        wrong = [_unlike(x, kind, least) for x, kind in zip(value, each, strict=True)] if fits else [""]
        return "" if fits and not any(wrong) else f"a list of {max(wrong) or f'{len(each)} sizes, or {most} at most'}"
    if hint is int:
        fits = type(value) is int and least <= value <= LARGEST
        return "" if fits else f"a whole number from {least} to {LARGEST}"
    if hint is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
        return "" if fits else "a finite number"
    if isinstance(hint, type) and hint in (bool, str):
        return "" if isinstance(value, hint) else ("true or false" if hint is bool else "a text")
    return ""


def check_kind(component: str, json: Mapping[str, Any], kind: Mapping[str, tuple]) -> None:
    """Raise WanjaxError if an entry of a component's config.json selects an architecture that is not supported.

    `kind` has the supported values of each entry; the first is that of a missing one.
    """
    for entry, offered in kind.items():
        if (value := json.get(entry, offered[0])) not in offered:
            right = " or ".join(map(repr, offered))
            raise WanjaxError(
                f"the {component}'s config.json has {entry} {repr_short(value)} where {right} is supported"
            )
        if isinstance(json, Entries):
            json.read.pop(entry, None)  # it is right


def check_entries(component: str, json: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """Raise WanjaxError unless a component's config.json has these entries, with these values."""
    for entry, value in right.items():
        if (actual := json.get(entry)) != value:
            raise WanjaxError(f"the {component}'s config.json has {entry} {actual!r} where {value!r} is supported")


def shape_of(specs: Specs, key: str, rank: int) -> tuple[int, ...]:
    """Return the shape of a tensor that determines a size. Raises WanjaxError unless it is there with this rank."""
    if key not in specs:
        raise WanjaxError(f"the checkpoint lacks {key}, which determines a size of the network: give a complete file")
    shape = specs[key].shape
    if len(shape) != rank or 0 in shape:
        raise WanjaxError(f"{key} has the shape {list(shape)} instead of {rank} axes: get the file again")
    return shape


def count_of(keys: Iterable[str], modules: str) -> int:
    """Return one more than the highest index that follows `modules` in the keys, or 0 if there is none."""
    index = re.compile(re.escape(modules) + r"\.([0-9]{1,4})\.")
    return max((int(match[1]) for key in keys if (match := index.match(key))), default=-1) + 1
