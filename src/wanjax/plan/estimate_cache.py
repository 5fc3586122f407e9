# SPDX-License-Identifier: Apache-2.0
"""The latest estimates of `wanjax plan`, stored in the user's cache. A server's web page shows them.

They are looked up by model, chip and number of devices. Each holds what the page needs to scale it: the settings, and
the seconds of each stage.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wanjax import __version__
from wanjax.stores.results import Results

if TYPE_CHECKING:  # a server only reads estimates
    from wanjax.pipelines.settings import Settings
    from wanjax.plan.estimate import Estimate

MAX_ESTIMATES = 8  # stored estimates per model and slice
KEY_SETTINGS = ("width", "height", "frames", "windows", "steps", "guidance_scale", "guidance_scale_2", "cache")


def store_estimate(priced: "Estimate", settings: "Settings") -> None:
    """Store the seconds of each stage, unless a stage does not fit."""
    seconds = {name: stage.seconds for name, stage in priced.stages.items()}
    if None in seconds.values():
        return
    chip, _, _ = priced.chip.partition("-")
    settings_json = {name: value for name, value in settings.to_json().items() if name in KEY_SETTINGS}
    earlier = [
        estimate
        for estimate in load_estimates(priced.model, chip, priced.devices)
        if estimate["settings"] != settings_json
    ]
    latest = [{"settings": settings_json, "stage_seconds": seconds}, *earlier][:MAX_ESTIMATES]
    Results().put("estimates", _key(priced.model, chip, priced.devices), latest)


def load_estimates(model: str, chip: str, devices: int) -> list[dict[str, Any]]:
    """Return `settings` and `stage_seconds` of the latest estimates, newest first.

    Args:
        model: The model's name.
        chip: The chip's name, without the size of a slice: v6e, h100 or cpu.
        devices: The number of devices in the mesh.
    """
    return Results().get("estimates", _key(model, chip, devices)) or []


def _key(model: str, chip: str, devices: int) -> Mapping[str, Any]:
    return {"model": model, "chip": chip, "devices": devices, "version": __version__}
