# SPDX-License-Identifier: Apache-2.0
"""Describe the published models without importing JAX. The models are in a list in the package. Requests are checked
against this list.

`python -m tests.support.listing` writes the list from the presets.
"""

import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanjax.errors import WanjaxError, no_checkpoint, unknown_model
from wanjax.media.inputs import INPUT_SPECS, VIDEO, check_inputs
from wanjax.media.training_data import CHECKPOINT_FOLDER, LORA_FILE, RUN_IDENTITY_FILE
from wanjax.pipelines.settings import (
    Settings,
    check_prompt_count,
    check_shape,
    missing_setting,
    parse_size,
    schema,
    strength_without_video,
)
from wanjax.stores.paths import is_url

if TYPE_CHECKING:
    from wanjax.pipelines.request import VideoRequest

MODELS_FILE = "models.json"
CHECKPOINT_FILES = ("model_index.json", "wanjax.json", "config.json", "*/config.json", "transformer/*/config.json")
"""Files that identify a checkpoint's layout; a folder without any of them is not a checkpoint."""


@cache
def _packaged_models() -> Mapping[str, Mapping[str, Any]]:
    return {
        model["name"]: model for model in json.loads((files("wanjax.cli") / MODELS_FILE).read_text(encoding="utf-8"))
    }


def listed_models() -> Mapping[str, Mapping[str, Any]]:
    """Map names of models to their descriptions, which have the form of `registry.describe`.

    The result has the models of the package's list and of families that were registered in this process.
    """
    if (registry := sys.modules.get("wanjax.registry")) is None:
        return _packaged_models()
    registered = registry.presets().keys() - _packaged_models().keys()
    return {
        **_packaged_models(),
        **{name: registry.describe(name) for name in registry.presets() if name in registered},
    }


def find_model(model: str) -> Mapping[str, Any] | None:
    """Find the entry of a model by its name or its repository. Return None for a model that is not listed."""
    if (listed_model := listed_models().get(model)) is not None:
        return listed_model
    is_bare_name = "/" not in model and not os.path.exists(model)
    for entry in listed_models().values():
        ids = entry.get("ids", ())
        if model in ids or (is_bare_name and model in [id.rpartition("/")[2] for id in ids if id.count("/") == 1]):
            return entry
    return None


def check_name(model: str) -> None:
    """Raise WanjaxError unless a name is the name of a model, of a checkpoint's folder or of a file, or may be an id on
    the hub."""
    path = Path(model).expanduser()
    if find_model(model) is not None or is_url(model):
        return
    if os.path.exists(path):  # os.path raises no error for an invalid name
        # A family that was registered in this process may have a layout with other files.
        is_checkpoint = "wanjax.registry" in sys.modules or any(any(path.glob(file)) for file in CHECKPOINT_FILES)
        if os.path.isdir(path) and not is_checkpoint:
            raise WanjaxError(_trained_part(model, path) or no_checkpoint(model))
        return
    if "/" not in model:
        raise WanjaxError(unknown_model(model, listed_models()))
    from wanjax.checkpoints.hub import HUB_FILE, is_local  # imported late, because this needs NumPy

    if not (HUB_FILE.fullmatch(model) and Path(model).suffix):
        is_local(model)


def _trained_part(model: str, folder: Path) -> str | None:
    """Return a message that says which part of a training's folder to give. Return None for another folder."""
    if not (folder / RUN_IDENTITY_FILE).is_file():
        return None
    if (folder / LORA_FILE).is_file():
        return f"{model} has a LoRA of a training, not a model: give the model that it changes, and --lora {model}"
    return f"{model} is the folder of a training: give its checkpoint {model}/{CHECKPOINT_FOLDER}, after the last step"


def describe_model(model: str) -> Mapping[str, Any]:
    """Describe a model as `registry.describe` does, but without importing JAX if the model is listed."""
    if model in listed_models():
        return listed_models()[model]
    from wanjax import registry  # imported late, because this needs JAX

    return registry.describe(model)


def check_strength(model: str, request: "VideoRequest") -> None:
    """Raise WanjaxError if a request for a listed model has a strength, but no video. In a list of requests, the
    strength may apply to the requests with a video."""
    listed_model = find_model(model)
    default = None if listed_model is None else listed_model["defaults"].get("strength")
    strength = request.settings.get("strength", default)
    if listed_model is not None and strength != default and VIDEO.name not in request.inputs:
        raise strength_without_video(strength)


def _first_model_with(input_name: str) -> str | None:
    """Return the first listed model that takes an input."""
    return next((name for name, entry in listed_models().items() if input_name in entry["takes"]), None)


def check(model: str, request: "VideoRequest", *, is_complete: bool = False) -> None:
    """Raise WanjaxError for settings and inputs that a listed model does not take, before JAX is imported.

    The pipeline checks them again, by the rules of the model.

    Args:
        model: The model.
        request: The request.
        is_complete: Whether the request is complete. In a complete request, all inputs that the model needs must be
            present.
    """
    if (listed_model := find_model(model)) is None:
        return
    defaults, settings = listed_model["defaults"], request.settings
    for name in settings:
        if name not in defaults and name not in ("prompt", "size", "seconds"):
            raise missing_setting(name, listed_model["name"], defaults)
    shape = {name: settings.get(name, defaults[name]) for name in ("height", "width", "frames")}
    if (size := settings.get("size")) is not None:
        texts = listed_model["sizes"].items()
        shape |= parse_size(size, {name: (int(h), int(w)) for name, text in texts for w, h in [text.split("x")]})
    for side in ("height", "width"):
        schema(Settings)[side].read(shape[side])
    if settings.get("windows") is not None:
        check_prompt_count(schema(Settings)["then"].read(settings.get("then") or ""), settings["windows"])
    check_shape(**shape, spatial=listed_model["grid"], temporal=listed_model["frames_step"])
    specs = [
        INPUT_SPECS[name]._replace(required=is_complete and name in listed_model["needs"])
        for name in listed_model["takes"]
    ]
    check_inputs(
        [name for name in INPUT_SPECS if request.inputs.get(name)],
        listed_model["name"],
        listed_model["task"],
        specs,
        _first_model_with,
    )
