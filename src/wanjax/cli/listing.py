# SPDX-License-Identifier: Apache-2.0
"""What is known of the published models without JAX: a listing that ships with the package, and what it refuses.

`python -m tests.support.listing` writes it from the presets.
"""

import json
import sys
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from wanjax.pipelines.settings import Settings, check_shape, no_setting, schema, sides

FILE = "models.json"


@cache
def _shipped() -> Mapping[str, Mapping[str, Any]]:
    return {model["name"]: model for model in json.loads((files("wanjax.cli") / FILE).read_text(encoding="utf-8"))}


def listed() -> Mapping[str, Mapping[str, Any]]:
    """Returns the models known by name, as `registry.describe` tells them.

    Beside those that ship in the listing, there are those of families that were registered in this process.
    """
    if (registry := sys.modules.get("wanjax.registry")) is None:
        return _shipped()
    more = registry.presets().keys() - _shipped().keys()
    return {**_shipped(), **{name: registry.describe(name) for name in registry.presets() if name in more}}


def described(model: str) -> Mapping[str, Any]:
    """Returns what `registry.describe` tells of a model, which is asked for one that is not listed."""
    if model in listed():
        return listed()[model]
    from wanjax import registry  # imported late: it needs JAX

    return registry.describe(model)


def check(model: str | None, given: Mapping[str, Any]) -> None:
    """Raises WanjaxError for given settings that a listed model does not take, before anything is imported for them.

    What it lets pass is checked again, with the model's own rules, when its pipeline is there.
    """
    if (known := listed().get(model or "")) is None:
        return
    own = known["defaults"]
    for name, setting in schema(Settings).items():
        if (value := given.get(name)) is None or name in ("cache", "guidance_rule"):  # read by their rules
            continue
        if name not in own and name not in ("model", "prompt"):
            raise no_setting(name, model, own)
        setting.read(value)
    shape = {name: own[name] if given.get(name) is None else given[name] for name in ("height", "width", "frames")}
    if given.get("size") is not None:
        texts = known["sizes"].items()
        shape |= sides(given["size"], {name: (int(h), int(w)) for name, text in texts for w, h in [text.split("x")]})
    check_shape(**shape, spatial=known["grid"], temporal=known["frames_step"])
