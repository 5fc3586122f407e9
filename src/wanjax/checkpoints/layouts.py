# SPDX-License-Identifier: Apache-2.0
"""Layouts other than that of diffusers, and checkpoints whose components are recognised by their tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from wanjax.checkpoints.descaled import Descaled
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


class Recognised(NamedTuple):
    """A recognised component: its config.json, and its tensors by their names in diffusers or transformers."""

    json: dict[str, Any]
    weights: Any  # Weights


def recognised(
    storage: Storage,
    index: Mapping[str, Any],
    find: Callable[[str], Recognised | None],
    *,
    configs: Mapping[str, dict[str, Any]],
    origin: str,
    known_as: str,
    lender: str,
    notes: Sequence[str] = (),
    files: Callable[[str], Sequence[Path] | None] = lambda component: None,
    held: Callable[[str], bool] | None = None,
) -> Source:
    """Return a checkpoint whose components are recognised by their tensors; what it lacks comes from the lender.

    Args:
        storage: Its files.
        index: The `model_index.json` that diffusers would write of it.
        find: Looks for a component's config and tensors, downloads them first; None where it is not there.
        configs: Those of components that are no more than a config, such as the scheduler's.
        origin: As in `Source`, and so `known_as` and `lender`, the diffusers repository of the same model, and `notes`.
        files: The files of a tokenizer or the like; None where they are not there.
        held: Tells whether another component than those of `configs` is there, or listed on the hub, as in
            `Component`; None looks for it.
    """
    lenders: list[Source] = []

    def lent_by(component: str) -> Source:
        if not lenders:
            lenders.append(open_lender(storage.name, lender, component))
        return lenders[0]

    def holds(component: str) -> bool:
        return component in configs or (find(component) is not None if held is None else held(component))

    def config(component: str) -> dict[str, Any]:
        if component in configs:
            return configs[component]
        return lent_by(component)[component].config() if (part := find(component)) is None else part.json

    def weights(component: str) -> Weights:
        return lent_by(component)[component].weights() if (part := find(component)) is None else part.weights

    def others(component: str) -> Sequence[Path]:
        if (there := files(component)) is not None:
            return there
        return [] if holds(component) else lent_by(component)[component].files()

    def check(networks: Iterable[str], others: Iterable[str]) -> None:
        lacking = [[name for name in names if not holds(name)] for names in (networks, others)]
        if any(lacking) and lender != storage.name:
            lent_by(next(chain(*lacking))).check(*lacking)

    components = {
        name: Component(
            kind, partial(config, name), partial(weights, name), partial(others, name), partial(holds, name)
        )
        for name, kind in classes_in(index).items()
    }
    return Source(storage, index, components, check, origin, known_as, lender, notes)


def open_lender(name: str, repository: str, component: str) -> Source:
    """Open the diffusers repository of the same model as a checkpoint's, for a component that this lacks."""
    if repository == name:
        raise WanjaxError(
            f"{name} holds no {component}, and no published model has one that fits its transformer: a whole "
            "checkpoint is needed"
        )
    return open_diffusers(repository, *folder_of(repository))


def model_index(pipeline: str, classes: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Returns the model_index.json that diffusers would write of a pipeline with components of these classes."""
    return {"_class_name": pipeline} | {name: list(kind) for name, kind in sorted(classes.items())}


def needs_transformer(name: object, components: Iterable[str], model: str) -> WanjaxError:
    """Returns the error for a checkpoint that holds these components, or none, and no transformer."""
    listed = " and the ".join(components)
    what = f"{name} holds {f'the {listed} of {model} alone' if listed else 'no transformer'}"
    return WanjaxError(f"{what}: give a file or folder of {model}'s transformer, to which the rest is lent")


def has_authors_names(component: str, reader: Reader, telling: Sequence[str], model: str) -> bool:
    """Tells whether a component has the names of its authors, not those of diffusers.

    telling: the names of tensors that only this component has, the authors' first. Raises WanjaxError where the reader
    has none of them, so that it holds no weights of the `model`.
    """
    if not any(name in reader.specs for name in telling):
        raise WanjaxError(f"the {component} lacks {' or '.join(telling)}: weights of {model} are needed")
    return telling[0] in reader.specs


def held(
    reader: Reader, telling: Mapping[str, Sequence[str]], prefixes: Mapping[str, Sequence[str]]
) -> dict[str, Reader]:
    """Returns the components that a file holds, each without the prefix of its names.

    telling: the names of tensors that only this component has; prefixes: those that its names may have in a file.
    """
    reader = Descaled(reader)  # by whose names a component is known
    found, present = {}, set(reader.specs)
    for component, names in telling.items():
        for prefix in prefixes[component]:
            if any(prefix + name in present for name in names):
                found[component] = prefix
                break
    return {name: _without(reader, prefix, found) for name, prefix in found.items()}


def _without(reader: Reader, prefix: str, found: Mapping[str, str]) -> Reader:
    """Returns the tensors with a prefix; if it is empty, those that belong to no other component."""
    others = tuple(other for other in found.values() if other and other != prefix)

    def rename(key: str) -> str | None:
        mine = key.startswith(prefix) and not (prefix == "" and key.startswith(others))
        return key.removeprefix(prefix) if mine else None

    return Renamed(reader, rename)
