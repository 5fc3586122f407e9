# SPDX-License-Identifier: Apache-2.0
"""Reading of configs: entries of a config.json, and sizes from the shapes of tensors where there is none."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from wanjax.converters.rules import Described
from wanjax.errors import WanjaxError

Specs = Mapping[str, Described]


def check_kind(component: str, json: Mapping[str, Any], kind: Mapping[str, tuple]) -> None:
    """Raises WanjaxError if an entry of a component's config.json selects an architecture that is not supported.

    `kind` has the supported values of each entry; the first is that of a missing one.
    """
    for entry, offered in kind.items():
        if (value := json.get(entry, offered[0])) not in offered:
            right = " or ".join(map(repr, offered))
            raise WanjaxError(f"the {component}'s config.json has {entry} {value!r} where {right} is supported")


def check_entries(component: str, json: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """Raises WanjaxError unless a component's config.json has these entries, with these values."""
    for entry, value in right.items():
        if (found := json.get(entry)) != value:
            raise WanjaxError(f"the {component}'s config.json has {entry} {found!r} where {value!r} is right")


def shape_of(specs: Specs, key: str, rank: int) -> tuple[int, ...]:
    """Returns the shape of a tensor that determines a size. Raises WanjaxError unless it is there with this rank."""
    if key not in specs:
        raise WanjaxError(
            f"the checkpoint lacks {key}, which determines a size of the network: a complete file is needed"
        )
    shape = specs[key].shape
    if len(shape) != rank or 0 in shape:
        raise WanjaxError(f"{key} has the shape {list(shape)} where {rank} axes are right")
    return shape


def count_of(keys: Iterable[str], pattern: str) -> int:
    """Returns one more than the highest index in the keys, or 0 if no key matches."""
    return max((int(found[1]) for key in keys if (found := re.fullmatch(pattern, key))), default=-1) + 1
