# SPDX-License-Identifier: Apache-2.0
"""What is known of the published models without JAX: a listing that ships with the package, and what it refuses.

`python -m tests.support.listing` writes it from the presets.
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
from wanjax.media.inputs import INPUTS, check_inputs
from wanjax.pipelines.settings import check_shape, no_setting, sides
from wanjax.stores.paths import is_url

if TYPE_CHECKING:
    from wanjax.pipelines.request import VideoRequest

FILE = "models.json"
CHECKPOINT_FILES = ("model_index.json", "wanjax.json", "config.json", "*/config.json", "transformer/*/config.json")
"""Files that identify a checkpoint's layout; a folder without any of them is not a checkpoint."""


@cache
def _packaged_models() -> Mapping[str, Mapping[str, Any]]:
    return {model["name"]: model for model in json.loads((files("wanjax.cli") / FILE).read_text(encoding="utf-8"))}


def listed_models() -> Mapping[str, Mapping[str, Any]]:
    """Return the models known by name, as `registry.describe` tells them.

    Beside those that ship in the listing, there are those of families that were registered in this process.
    """
    if (registry := sys.modules.get("wanjax.registry")) is None:
        return _packaged_models()
    registered = registry.presets().keys() - _packaged_models().keys()
    return {
        **_packaged_models(),
        **{name: registry.describe(name) for name in registry.presets() if name in registered},
    }


def find_model(model: str) -> Mapping[str, Any] | None:
    """Return what is listed of a model, which may be named by its repository; None where it is not listed."""
    if (listed_model := listed_models().get(model)) is not None:
        return listed_model
    is_bare_name = "/" not in model and not os.path.exists(model)
    for entry in listed_models().values():
        ids = entry.get("ids", ())
        if model in ids or (is_bare_name and model in [id.rpartition("/")[2] for id in ids if id.count("/") == 1]):
            return entry
    return None


def check_name(model: str) -> None:
    """Raise WanjaxError for a name that is not a model, a checkpoint's folder, a file or a possible id on the hub."""
    path = Path(model).expanduser()
    if find_model(model) is not None or is_url(model):
        return
    if os.path.exists(path):  # os.path raises nothing for names that no file can have
        # A family that was registered in this process may have a layout with other files.
        is_checkpoint = "wanjax.registry" in sys.modules or any(any(path.glob(file)) for file in CHECKPOINT_FILES)
        if os.path.isdir(path) and not is_checkpoint:
            raise WanjaxError(no_checkpoint(model))
        return
    if "/" not in model:
        raise WanjaxError(unknown_model(model, listed_models()))
    from wanjax.checkpoints.hub import HUB_FILE, is_here  # imported late: it needs NumPy

    if not (HUB_FILE.fullmatch(model) and Path(model).suffix):
        is_here(model)


def describe_model(model: str) -> Mapping[str, Any]:
    """Return what `registry.describe` tells of a model, which is asked for one that is not listed."""
    if model in listed_models():
        return listed_models()[model]
    from wanjax import registry  # imported late: it needs JAX

    return registry.describe(model)


def check(model: str, request: "VideoRequest", *, is_complete: bool = False) -> None:
    """Raise WanjaxError for settings and inputs that a listed model does not take, before anything is imported.

    What it lets pass is checked again, with the model's own rules, when its pipeline is there.

    Args:
        model: The model.
        request: The request.
        is_complete: Whether it has all that a video is made from, so that an input that the model needs is missed.
    """
    if (listed_model := find_model(model)) is None:
        return
    defaults, settings = listed_model["defaults"], request.settings
    for name in settings:
        if name not in defaults and name not in ("prompt", "size", "seconds"):
            raise no_setting(name, listed_model["name"], defaults)
    shape = {name: settings.get(name, defaults[name]) for name in ("height", "width", "frames")}
    if (size := settings.get("size")) is not None:
        texts = listed_model["sizes"].items()
        shape |= sides(size, {name: (int(h), int(w)) for name, text in texts for w, h in [text.split("x")]})
    check_shape(**shape, spatial=listed_model["grid"], temporal=listed_model["frames_step"])
    specs = [
        INPUTS[name]._replace(required=is_complete and name in listed_model["needs"]) for name in listed_model["takes"]
    ]
    check_inputs(
        [name for name in INPUTS if request.inputs.get(name)], listed_model["name"], listed_model["task"], specs
    )
