# SPDX-License-Identifier: Apache-2.0
"""Change a checkpoint's networks while they are read: merge LoRAs, or add zeros for missing weights."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from wanjax.checkpoints.files import TensorReader, Tensors
from wanjax.checkpoints.lora import LoraFile, MergedLoraReader
from wanjax.checkpoints.lora_keys import file_experts
from wanjax.checkpoints.lora_source import Lora
from wanjax.checkpoints.network_kinds import Kinds, network, read_network
from wanjax.checkpoints.readers import CombinedReader, open_tensors
from wanjax.checkpoints.sources import CONFIGS, Component, Source
from wanjax.converters.name_map import NameMap
from wanjax.errors import WanjaxError

EXPERTS = {"transformer": "high", "transformer_2": "low"}  # the name of the expert by the name of its component
Note = Callable[[str], Any]


def with_loras(source: Source, loras: Sequence[Lora], kinds: Kinds, note: Note | None = None) -> Source:
    """Merge LoRAs into a checkpoint's transformers.

    If a file has separate tensors for two experts, each expert gets its own tensors. Weights that are stored with 8
    bits become floats, are changed, and are quantized again.

    Args:
        source: The checkpoint.
        loras: The LoRAs. If several LoRAs change a weight, their changes are summed.
        kinds: The supported kinds of networks.
        note: Called with a summary of each file. If it is None, a file is only reported if some of its changes do not
            fit, by a warning.

    Raises:
        WanjaxError: A LoRA file cannot be read, has too few keys that fit the transformer, or is for an expert that the
            checkpoint lacks.
    """
    transformers = [name for name in EXPERTS if name in source.components]
    files: defaultdict[str, list[tuple[LoraFile, float]]] = defaultdict(list)
    for lora in loras:
        targets = [name for name in transformers if len(transformers) == 1 or lora.expert in (None, EXPERTS[name])]
        if lora.expert and len(transformers) == 1:
            expert = f"{lora.expert}="
            raise WanjaxError(
                f"{lora} is for one of two experts, but {source.name} has one network: leave {expert} out"
            )
        experts = file_experts(open_tensors(lora.path).specs) if len(transformers) > 1 else set()
        if experts:
            targets = [name for name in targets if EXPERTS[name] in experts]
            if not targets:
                expert_names = " and ".join(experts)
                raise WanjaxError(
                    f"{lora} is for one expert, but the file changes the other expert: write {expert_names}="
                )
        for name in targets:
            network_info, expert = network(source, name, kinds), EXPERTS[name] if experts else None
            file = LoraFile(lora.path, network_info.specs, network_info.kind.lora_names or NameMap([]), expert)
            files[name].append((file, lora.strength))
            if note:
                note(str(file.matches))
            elif file.matches.is_partial:
                warnings.warn(str(file.matches), stacklevel=2)

    def with_changes(component: Component, files: Sequence[tuple[LoraFile, float]]) -> Component:
        return replace(component, changes=(*component.changes, partial(MergedLoraReader, files=files)))

    changed_components = {name: with_changes(source[name], lora_files) for name, lora_files in files.items()}
    return source.with_components(changed_components, loras=tuple(loras), base=source.base or source)


def with_zeros(source: Source, entries: Mapping[str, Mapping[str, Any]], kinds: Kinds) -> Source:
    """Add zeros for weights that a checkpoint's networks lack, so that these weights can be trained.

    Args:
        source: The checkpoint.
        entries: For each network, the entries of config.json that give the network the additional weights.
        kinds: The supported kinds of networks.
    """

    source.check_floats("an added weight")

    def with_missing(name: str, component: Component) -> Component:
        def config() -> dict[str, Any]:
            return component.config() | dict(entries[name])

        def add_zeros(tensors: TensorReader) -> TensorReader:
            existing_specs, specs = (
                network(source, name, kinds).specs,
                read_network(component.kind, config(), kinds).specs,
            )
            return CombinedReader(
                tensors, Tensors({key: np.zeros(*spec) for key, spec in specs.items() if key not in existing_specs})
            )

        return replace(
            component,
            config=config,
            files=lambda: [path for path in component.files() if path.name not in CONFIGS],
            changes=(*component.changes, add_zeros),
        )

    return source.with_components({name: with_missing(name, source[name]) for name in entries}, is_extended=True)
