# SPDX-License-Identifier: Apache-2.0
"""Maps between the names of a model's authors and ours, which are those of diffusers and transformers."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from wanjax.converters.weight_rules import PLACEHOLDER

Table = list[tuple[re.Pattern, str]]


@dataclass(frozen=True)
class NameMap:
    """Pairs (theirs, ours) of names of the same module or tensor; `{i}` stands for an index, the same in both.

    The names of a module's own tensors, such as `.weight`, are the same in both layouts. Where several pairs have one
    name of ours, the first is theirs, and the others are only read. `exchanged` are our modules whose tensors' rows
    come in two halves, of which their first is our second.
    """

    pairs: Sequence[tuple[str, str]]
    exchanged: Sequence[str] = ()

    def ours(self, theirs: str) -> str | None:
        """Return our name of their tensor or module; None if it has none."""
        return next(_translations(theirs, self._to_ours), None)

    def theirs(self, ours: str) -> str | None:
        """Return their name of our tensor or module; None if it has none."""
        return next(self.all_theirs(ours), None)

    def all_theirs(self, ours: str) -> Iterator[str]:
        """Yield every name that they have for our tensor or module."""
        return _translations(ours, self._to_theirs)

    def exchanges(self, ours: str) -> bool:
        """Return whether the halves of our tensor are exchanged in theirs."""
        return ours.rpartition(".")[0] in self.exchanged

    @cached_property
    def _to_ours(self) -> Table:
        return _table(self.pairs)

    @cached_property
    def _to_theirs(self) -> Table:
        return _table((ours, theirs) for theirs, ours in self.pairs)


def _table(pairs: Iterable[tuple[str, str]]) -> Table:
    return [(re.compile(_expression(name) + r"(?P<leaf>(\..*)?)"), new) for name, new in pairs]


def _expression(name: str) -> str:
    """Return a regular expression for a name with distinct placeholders."""
    return PLACEHOLDER.sub(r"(?P<\1>[0-9]{1,4})", name.replace(".", r"\."))


def _translations(name: str, table: Table) -> Iterator[str]:
    for pattern, new in table:
        if match := pattern.fullmatch(name):
            yield PLACEHOLDER.sub(lambda placeholder, match=match: match[placeholder[1]], new) + match["leaf"]
