# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose networks have weights that it does not hold: zeros, for a training or a LoRA to change."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wanjax.checkpoints.files import Reader, Tensors
from wanjax.checkpoints.networks import Kinds, network
from wanjax.checkpoints.readers import Together
from wanjax.checkpoints.sources import CONFIGS, Source, Wrapped
from wanjax.converters.rules import Rule


class ExtendedSource(Wrapped):
    """A source some of whose networks have more weights than it holds: zeros.

    `entries` are those of each network's config.json that call for them.
    """

    def __init__(self, source: Source, entries: Mapping[str, Mapping[str, Any]], kinds: Kinds):
        super().__init__(source)
        self.extended, self._entries, self._kinds = True, entries, kinds

    @property
    def base(self) -> Source:
        return self

    def changes(self, component: str) -> bool:
        return component in self._entries

    def config(self, component: str) -> dict[str, Any]:
        return super().config(component) | dict(self._entries.get(component, {}))

    def files(self, component: str) -> Sequence[Path]:
        files = super().files(component)
        return [path for path in files if path.name not in CONFIGS] if self.changes(component) else files

    def tensors(self, component: str, rules: Iterable[Rule]) -> Reader:
        if not self.changes(component):
            return super().tensors(component, rules)
        known = network(self._source, component, self._kinds)
        held, specs = known.specs, network(self, component, self._kinds).specs
        lacking = {key: np.zeros(*spec) for key, spec in specs.items() if key not in held}
        return Together(super().tensors(component, known.rules), Tensors(lacking))
