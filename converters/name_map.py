# SPDX-License-Identifier: Apache-2.0
"""Map tensor names between the layout of a model's authors and the layout of diffusers and transformers."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from wanjax.converters.weight_rules import PLACEHOLDER

Table = list[tuple[re.Pattern, str]]


@dataclass(frozen=True)
class NameMap:
    """Pairs of names for the same module or tensor in two layouts.

    Args:
        pairs: Pairs (authors' name, diffusers' name); `{i}` stands for an index, the same in both. A module's tensors,
            such as `.weight`, have the same names in both layouts. If several pairs have the same diffusers' name,
            the first is written and all are read.
        swapped: Modules, by diffusers' names, whose tensors have two halves of rows in the opposite order.
    """

    pairs: Sequence[tuple[str, str]]
    swapped: Sequence[str] = ()

    def to_diffusers(self, name: str) -> str | None:
        """Translate the authors' name of a tensor or module to diffusers' name; return None if there is none."""
        return next(_translations(name, self._to_diffusers_table), None)

    def to_authors(self, name: str) -> str | None:
        """Translate diffusers' name of a tensor or module to the authors' name; return None if there is none."""
        return next(self.all_author_names(name), None)

    def all_author_names(self, name: str) -> Iterator[str]:
        """Yield every name that the authors' files may use for a tensor or module with this name in diffusers."""
        return _translations(name, self._to_authors_table)

    def swaps_halves(self, name: str) -> bool:
        """Return whether the authors' layout swaps the two halves of a tensor; `name` is diffusers' name."""
        return name.rpartition(".")[0] in self.swapped

    @cached_property
    def _to_diffusers_table(self) -> Table:
        return _compile_table(self.pairs)

    @cached_property
    def _to_authors_table(self) -> Table:
        return _compile_table((diffusers, authors) for authors, diffusers in self.pairs)


def _compile_table(pairs: Iterable[tuple[str, str]]) -> Table:
    return [(re.compile(_pattern(name) + r"(?P<suffix>(\..*)?)"), replacement) for name, replacement in pairs]


def _pattern(name: str) -> str:
    """Return a regular expression that matches a name; each placeholder becomes a group."""
    return PLACEHOLDER.sub(r"(?P<\1>[0-9]{1,4})", name.replace(".", r"\."))


def _translations(name: str, table: Table) -> Iterator[str]:
    for pattern, replacement in table:
        if match := pattern.fullmatch(name):
            yield PLACEHOLDER.sub(lambda placeholder, match=match: match[placeholder[1]], replacement) + match["suffix"]
