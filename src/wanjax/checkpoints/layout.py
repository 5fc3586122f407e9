# SPDX-License-Identifier: Apache-2.0
"""Checkpoint layouts other than diffusers'. The tensors of their files show which component a file has."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from wanjax.checkpoints.dequantized import DequantizedReader
from wanjax.checkpoints.files import SUFFIXES, TensorReader
from wanjax.checkpoints.readers import RenamedReader
from wanjax.checkpoints.sources import Component, Source, Storage, Weights, classes_in, folder_of, open_diffusers
from wanjax.errors import WanjaxError

TRANSFORMER_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "model.", "transformer.", "net.")
VAE_PREFIXES = ("", "vae.", "first_stage_model.")
"""Prefixes of tensor names in single files, such as those for ComfyUI or from training runs."""


@dataclass(frozen=True)
class Layout:
    """A checkpoint layout other than diffusers'.

    Args:
        markers: Small files that identify the layout and are downloaded first.
        is_folder: Returns whether a folder has the layout.
        open: Opens a folder with the layout, given the checkpoint's name, the folder, and its commit or None.
        open_file: Opens a file; returns None for a file of another layout.
        companion_files: Returns the possible paths of further files of the same checkpoint, relative to the folder of
            the given file.
    """

    markers: tuple[str, ...]
    is_folder: Callable[[Path], bool]
    open: Callable[[str | Path, Path, str | None], Source]
    open_file: Callable[[Path], Source | None]
    companion_files: Callable[[str], Sequence[str]] = lambda path: ()


class RecognisedComponent(NamedTuple):
    """A recognised component: its config.json, and its tensors by the names of diffusers or transformers."""

    json: dict[str, Any]
    weights: Any  # Weights


def make_source(
    storage: Storage,
    index: Mapping[str, Any],
    find: Callable[[str], RecognisedComponent | None],
    *,
    configs: Mapping[str, dict[str, Any]],
    published_name: str,
    name_hint: str,
    fallback_repo: str,
    notes: Sequence[str] = (),
    files: Callable[[str], Sequence[Path] | None] = lambda component: None,
    has_component: Callable[[str], bool] | None = None,
) -> Source:
    """Build the source of a checkpoint whose components are recognised by their tensors.

    Args:
        storage: The checkpoint's files.
        index: The `model_index.json` that diffusers would write for the checkpoint.
        find: Returns a component's config and tensors, and downloads them if needed. Returns None for a missing
            component.
        configs: The configs of components without weights, such as the scheduler.
        published_name: As in `Source`.
        name_hint: As in `Source`.
        fallback_repo: The diffusers repository of the same model, from which missing components are loaded.
        notes: As in `Source`.
        files: Returns the files of a component without weights, such as a tokenizer; None if they are missing.
        has_component: Returns whether a component that is not in `configs` is on the disk or on the hub. If it is None,
            `find` is called instead.
    """
    fallbacks: list[Source] = []

    def fallback_for(component: str) -> Source:
        if not fallbacks:
            fallbacks.append(open_fallback(storage.name, fallback_repo, component))
        return fallbacks[0]

    def is_present(component: str) -> bool:
        return component in configs or (
            find(component) is not None if has_component is None else has_component(component)
        )

    def config(component: str) -> dict[str, Any]:
        if component in configs:
            return configs[component]
        return (
            fallback_for(component)[component].config() if (recognised := find(component)) is None else recognised.json
        )

    def weights(component: str) -> Weights:
        return (
            fallback_for(component)[component].weights()
            if (recognised := find(component)) is None
            else recognised.weights
        )

    def other_files(component: str) -> Sequence[Path]:
        if (existing := files(component)) is not None:
            return existing
        return [] if is_present(component) else fallback_for(component)[component].files()

    def check(networks: Iterable[str], others: Iterable[str]) -> None:
        missing = [[name for name in names if not is_present(name)] for names in (networks, others)]
        if any(missing) and fallback_repo != storage.name:
            fallback_for(next(chain(*missing))).check(*missing)

    components = {
        name: Component(
            kind, partial(config, name), partial(weights, name), partial(other_files, name), partial(is_present, name)
        )
        for name, kind in classes_in(index).items()
    }
    return Source(storage, index, components, check, published_name, name_hint, fallback_repo, notes)


def open_fallback(name: str, repository: str, component: str) -> Source:
    """Open the diffusers repository of a checkpoint's model, for a component that the checkpoint lacks."""
    if repository == name:
        raise WanjaxError(
            f"{name} contains no {component}, and no published model has one that fits its transformer: give a "
            "complete checkpoint"
        )
    return open_diffusers(repository, *folder_of(repository))


def find_encoder(folder: Path, pattern: re.Pattern[str]) -> Path | None:
    """Find the file of a text encoder in a folder, by its name. Return None if there is no such file.

    Args:
        folder: The folder, such as the folder of a transformer's file.
        pattern: A pattern that matches a part of an encoder's file name.

    Raises:
        WanjaxError: Several files fit.
    """
    files = sorted(x for x in folder.iterdir() if x.suffix in SUFFIXES and pattern.search(x.name))
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise WanjaxError(f"{folder} has several files of the text encoder: keep only one of {names}")
    return files[0] if files else None


def model_index(pipeline: str, classes: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Build the model_index.json of a pipeline with components of these classes, as diffusers writes it."""
    return {"_class_name": pipeline} | {name: list(kind) for name, kind in sorted(classes.items())}


def needs_transformer(name: object, components: Iterable[str], model: str) -> WanjaxError:
    """Build the error for a checkpoint without a transformer; it may contain other components."""
    component_names = " and the ".join(components)
    problem = f"{name} contains {f'only the {component_names} of {model}' if component_names else 'no transformer'}"
    return WanjaxError(
        f"{problem}: give a file or folder with {model}'s transformer; missing components are downloaded"
    )


def has_authors_names(component: str, reader: TensorReader, marker_tensors: Sequence[str], model: str) -> bool:
    """Return whether a component's tensors have the authors' names, and not diffusers' names.

    `marker_tensors` are names of tensors that only this component has, the authors' name first. Raises WanjaxError if
    the reader has none of these tensors, and therefore no weights of the `model`.
    """
    if not any(name in reader.specs for name in marker_tensors):
        raise WanjaxError(f"the {component} lacks {' or '.join(marker_tensors)}: give weights of {model}")
    return marker_tensors[0] in reader.specs


def split_components(
    reader: TensorReader, marker_tensors: Mapping[str, Sequence[str]], prefixes: Mapping[str, Sequence[str]]
) -> dict[str, TensorReader]:
    """Split a file into its components, and remove the prefixes of their names.

    Args:
        reader: The tensors of the file.
        marker_tensors: For each component, names of tensors that no other component has.
        prefixes: For each component, prefixes that its names may have.
    """
    reader = DequantizedReader(reader)  # dequantise first, because this changes the names of tensors
    prefix_of, keys = {}, set(reader.specs)
    for component, names in marker_tensors.items():
        for prefix in prefixes[component]:
            if any(prefix + name in keys for name in names):
                prefix_of[component] = prefix
                break
    return {name: _remove_prefix(reader, prefix, prefix_of) for name, prefix in prefix_of.items()}


def _remove_prefix(reader: TensorReader, prefix: str, prefix_of: Mapping[str, str]) -> TensorReader:
    """Select the tensors with a prefix and remove the prefix.

    An empty prefix selects the tensors that belong to no other component.
    """
    others = tuple(other for other in prefix_of.values() if other and other != prefix)

    def rename(key: str) -> str | None:
        belongs = key.startswith(prefix) and not (prefix == "" and key.startswith(others))
        return key.removeprefix(prefix) if belongs else None

    return RenamedReader(reader, rename)
