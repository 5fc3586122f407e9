# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose transformers have LoRAs merged in while they are read."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wanjax.checkpoints.files import Reader
from wanjax.checkpoints.lora import LoraFile, Merged
from wanjax.checkpoints.lora_keys import experts_of
from wanjax.checkpoints.lora_source import Lora
from wanjax.checkpoints.networks import Kinds, network
from wanjax.checkpoints.readers import open_tensors
from wanjax.checkpoints.sources import Source, Wrapped
from wanjax.converters.names import Names
from wanjax.converters.rules import Rule
from wanjax.errors import WanjaxError

PREFIXES = {"transformer": "high", "transformer_2": "low"}  # prefixes of a LoRA for one of two transformers
Note = Callable[[str], Any]


class AdaptedSource(Wrapped):
    """A source whose transformers have LoRAs merged in; everything else is unchanged.

    `note` receives a sentence on what was merged from each file; where it is None, a warning lists what was not.
    A file that tells two experts apart changes each by its own half. Raises WanjaxError where a file cannot be found or
    read, too little of it fits the transformer, or the source lacks the expert that it is for.
    """

    def __init__(self, source: Source, loras: Sequence[Lora], kinds: Kinds, note: Note | None = None):
        super().__init__(source)
        self.loras: list[tuple[str, Path]] = []
        self.read: dict[str, Path] = {}  # the files, as they were named
        present = [name for name in PREFIXES if name in source.components]
        self._files: dict[str, list[tuple[LoraFile, float]]] = {name: [] for name in present}
        for lora in loras:
            chosen = [name for name in present if len(present) == 1 or lora.expert in (None, PREFIXES[name])]
            if lora.expert and len(present) == 1:
                expert = f"{lora.expert}="
                raise WanjaxError(f"{lora} is for one of two experts, which {source.name} has not: leave {expert} out")
            self.read[lora.file] = lora.path
            self.loras.append((str(replace(lora, file=lora.path.name)), lora.path))
            experts = experts_of(open_tensors(lora.path).specs) if len(present) > 1 else set()
            if experts:
                chosen = [name for name in chosen if PREFIXES[name] in experts]
                if not chosen:
                    other = " and ".join(experts)
                    raise WanjaxError(
                        f"{lora} is for one expert, and the file changes the other, {other}: write {other}="
                    )
            for name in chosen:
                base, expert = network(source, name, kinds), PREFIXES[name] if experts else None
                file = LoraFile(lora.path, base.specs, base.kind.lora_names or Names([]), expert)
                self._files[name].append((file, lora.strength))
                if note:
                    note(str(file.matches))
                elif file.matches.doubtful:
                    warnings.warn(str(file.matches), stacklevel=2)

    def changes(self, component: str) -> bool:
        return bool(self._files.get(component))

    def tensors(self, component: str, rules: Iterable[Rule]) -> Reader:
        tensors = super().tensors(component, rules)
        return Merged(tensors, self._files[component]) if self.changes(component) else tensors
