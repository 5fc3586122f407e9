# SPDX-License-Identifier: Apache-2.0
"""Layouts other than that of diffusers, and checkpoints whose components are recognised by their tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from wanjax.checkpoints.dequantized import Dequantized
from wanjax.checkpoints.files import Reader
from wanjax.checkpoints.readers import Renamed
from wanjax.checkpoints.sources import Component, Source, Storage, Weights, classes_in, folder_of, open_diffusers
from wanjax.errors import WanjaxError

TRANSFORMER_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "model.", "transformer.", "net.")
VAE_PREFIXES = ("", "vae.", "first_stage_model.")
"""Prefixes of names in single files, such as those for ComfyUI or of training runs."""


@dataclass(frozen=True)
class Layout:
    """A layout of checkpoints other than that of diffusers.

    `markers` are small files that identify the layout and are downloaded first; `is_folder` tells whether a folder has
    it, and `open` returns that folder's source, given the checkpoint's name, the folder, and its commit if it is of the
    hub. `open_file` returns a file's source, or None for a file of another layout. `beside` returns the names of files
    that belong to a file of this name, as far as its folder has them.
    """

    markers: tuple[str, ...]
    is_folder: Callable[[Path], bool]
    open: Callable[[str | Path, Path, str | None], Source]
    open_file: Callable[[Path], Source | None]
    beside: Callable[[str], Sequence[str]] = lambda name: ()


class RecognisedComponent(NamedTuple):
    """A recognised component: its config.json, and its tensors by their names in diffusers or transformers."""

    json: dict[str, Any]
    weights: Any  # Weights


def recognised_source(
    storage: Storage,
    index: Mapping[str, Any],
    find: Callable[[str], RecognisedComponent | None],
    *,
    configs: Mapping[str, dict[str, Any]],
    origin: str,
    known_as: str,
    fallback_repo: str,
    notes: Sequence[str] = (),
    files: Callable[[str], Sequence[Path] | None] = lambda component: None,
    held: Callable[[str], bool] | None = None,
) -> Source:
    """Return a checkpoint whose components are recognised by their tensors.

    Args:
        storage: Its files.
        index: The `model_index.json` that diffusers would write for it.
        find: Returns a component's config and tensors after a download; None where they are missing.
        configs: The configs of components without weights, such as the scheduler.
        origin: As in `Source`.
        known_as: As in `Source`.
        fallback_repo: The diffusers repository of the same model, from which missing components are loaded.
        notes: As in `Source`.
        files: Returns the files of a tokenizer or the like; None where they are missing.
        held: Returns whether a component that is not in `configs` is here or on the hub; None uses `find`.
    """
    fallbacks: list[Source] = []

    def fallback_for(component: str) -> Source:
        if not fallbacks:
            fallbacks.append(open_fallback(storage.name, fallback_repo, component))
        return fallbacks[0]

    def holds(component: str) -> bool:
        return component in configs or (find(component) is not None if held is None else held(component))

    def config(component: str) -> dict[str, Any]:
        if component in configs:
            return configs[component]
        return fallback_for(component)[component].config() if (part := find(component)) is None else part.json

    def weights(component: str) -> Weights:
        return fallback_for(component)[component].weights() if (part := find(component)) is None else part.weights

    def others(component: str) -> Sequence[Path]:
        if (there := files(component)) is not None:
            return there
        return [] if holds(component) else fallback_for(component)[component].files()

    def check(networks: Iterable[str], others: Iterable[str]) -> None:
        lacking = [[name for name in names if not holds(name)] for names in (networks, others)]
        if any(lacking) and fallback_repo != storage.name:
            fallback_for(next(chain(*lacking))).check(*lacking)

    components = {
        name: Component(
            kind, partial(config, name), partial(weights, name), partial(others, name), partial(holds, name)
        )
        for name, kind in classes_in(index).items()
    }
    return Source(storage, index, components, check, origin, known_as, fallback_repo, notes)


def open_fallback(name: str, repository: str, component: str) -> Source:
    """Open the diffusers repository of the same model as a checkpoint's, for a component that this lacks."""
    if repository == name:
        raise WanjaxError(
            f"{name} holds no {component}, and no published model has one that fits its transformer: a whole "
            "checkpoint is needed"
        )
    return open_diffusers(repository, *folder_of(repository))


def model_index(pipeline: str, classes: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Return the model_index.json of a pipeline with components of these classes, as diffusers writes it."""
    return {"_class_name": pipeline} | {name: list(kind) for name, kind in sorted(classes.items())}


def needs_transformer(name: object, components: Iterable[str], model: str) -> WanjaxError:
    """Return the error for a checkpoint that holds these components, or none, and no transformer."""
    listed = " and the ".join(components)
    problem = f"{name} holds {f'the {listed} of {model} alone' if listed else 'no transformer'}"
    return WanjaxError(f"{problem}: give a file or folder of {model}'s transformer, to which the rest is lent")


def has_authors_names(component: str, reader: Reader, telling: Sequence[str], model: str) -> bool:
    """Return whether a component's tensors have the authors' names rather than those of diffusers.

    telling: the names of tensors that only this component has, the authors' first. Raises WanjaxError where the reader
    has none of them, so that it holds no weights of the `model`.
    """
    if not any(name in reader.specs for name in telling):
        raise WanjaxError(f"the {component} lacks {' or '.join(telling)}: weights of {model} are needed")
    return telling[0] in reader.specs


def split_components(
    reader: Reader, telling: Mapping[str, Sequence[str]], prefixes: Mapping[str, Sequence[str]]
) -> dict[str, Reader]:
    """Return the components that a file holds, each without the prefix of its names.

    telling: the names of tensors that only this component has; prefixes: those that its names may have in a file.
    """
    reader = Dequantized(reader)  # by whose names a component is known
    prefix_of, present = {}, set(reader.specs)
    for component, names in telling.items():
        for prefix in prefixes[component]:
            if any(prefix + name in present for name in names):
                prefix_of[component] = prefix
                break
    return {name: _without(reader, prefix, prefix_of) for name, prefix in prefix_of.items()}


def _without(reader: Reader, prefix: str, prefix_of: Mapping[str, str]) -> Reader:
    """Return the tensors with a prefix; if it is empty, those that belong to no other component."""
    others = tuple(other for other in prefix_of.values() if other and other != prefix)

    def rename(key: str) -> str | None:
        mine = key.startswith(prefix) and not (prefix == "" and key.startswith(others))
        return key.removeprefix(prefix) if mine else None

    return Renamed(reader, rename)
