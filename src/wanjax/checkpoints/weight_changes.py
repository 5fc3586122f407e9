# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose networks are changed while they are read: LoRAs merged in, or zeros for weights that they lack."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from wanjax.checkpoints.files import Reader, Tensors
from wanjax.checkpoints.lora import LoraFile, Merged
from wanjax.checkpoints.lora_keys import experts_of
from wanjax.checkpoints.lora_source import Lora
from wanjax.checkpoints.network_kinds import Kinds, network, read_network
from wanjax.checkpoints.readers import Combined, open_tensors
from wanjax.checkpoints.sources import CONFIGS, Component, Source
from wanjax.converters.name_map import NameMap
from wanjax.errors import WanjaxError

PREFIXES = {"transformer": "high", "transformer_2": "low"}  # prefixes of a LoRA for one of two transformers
Note = Callable[[str], Any]


def with_loras(source: Source, loras: Sequence[Lora], kinds: Kinds, note: Note | None = None) -> Source:
    """Return a checkpoint with LoRAs merged into its transformers.

    A file that tells two experts apart changes each by its own half.

    Args:
        source: The checkpoint.
        loras: The LoRAs, whose changes are added.
        kinds: The kinds of networks that the transformers may be.
        note: Receives a sentence on what was merged from each file; None warns of what was not.

    Raises:
        WanjaxError: A file cannot be found or read, too little of it fits the transformer, or the checkpoint lacks the
            expert that it is for.
    """
    present = [name for name in PREFIXES if name in source.components]
    files: defaultdict[str, list[tuple[LoraFile, float]]] = defaultdict(list)
    for lora in loras:
        chosen = [name for name in present if len(present) == 1 or lora.expert in (None, PREFIXES[name])]
        if lora.expert and len(present) == 1:
            expert = f"{lora.expert}="
            raise WanjaxError(f"{lora} is for one of two experts, which {source.name} has not: leave {expert} out")
        experts = experts_of(open_tensors(lora.path).specs) if len(present) > 1 else set()
        if experts:
            chosen = [name for name in chosen if PREFIXES[name] in experts]
            if not chosen:
                other = " and ".join(experts)
                raise WanjaxError(f"{lora} is for one expert, and the file changes the other, {other}: write {other}=")
        for name in chosen:
            entry, expert = network(source, name, kinds), PREFIXES[name] if experts else None
            file = LoraFile(lora.path, entry.specs, entry.kind.lora_names or NameMap([]), expert)
            files[name].append((file, lora.strength))
            if note:
                note(str(file.matches))
            elif file.matches.doubtful:
                warnings.warn(str(file.matches), stacklevel=2)

    def merged(component: Component, files: Sequence[tuple[LoraFile, float]]) -> Component:
        return replace(component, changes=(*component.changes, partial(Merged, files=files)))

    changed = {name: merged(source[name], each) for name, each in files.items()}
    return source.changed(changed, loras=tuple(loras), base=source.base or source)


def with_zeros(source: Source, entries: Mapping[str, Mapping[str, Any]], kinds: Kinds) -> Source:
    """Return a checkpoint with zeros for weights that its networks lack, for a training to change.

    Args:
        source: The checkpoint.
        entries: The entries of each network's config.json that call for these weights.
        kinds: The kinds of networks that these may be.
    """

    def extended(name: str, component: Component) -> Component:
        def config() -> dict[str, Any]:
            return component.config() | dict(entries[name])

        def change(tensors: Reader) -> Reader:
            held, specs = network(source, name, kinds).specs, read_network(component.kind, config(), kinds).specs
            return Combined(tensors, Tensors({key: np.zeros(*spec) for key, spec in specs.items() if key not in held}))

        return replace(
            component,
            config=config,
            files=lambda: [path for path in component.files() if path.name not in CONFIGS],
            changes=(*component.changes, change),
        )

    return source.changed({name: extended(name, source[name]) for name in entries}, extended=True)
