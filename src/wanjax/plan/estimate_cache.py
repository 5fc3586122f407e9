# SPDX-License-Identifier: Apache-2.0
"""The latest estimates of `wanjax plan`, in the user's cache, which the page of a server shows.

They are looked up by model, chip and number of devices, and hold what the page scales: settings and seconds by stage.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wanjax import __version__
from wanjax.stores.results import Results

if TYPE_CHECKING:  # a server reads estimates, and makes none
    from wanjax.pipelines.settings import Settings
    from wanjax.plan.estimate import Estimate

LATEST = 8  # estimates of one model on one slice
WORK = ("width", "height", "frames", "windows", "steps", "guidance_scale", "guidance_scale_2", "cache")


def store_estimate(priced: "Estimate", settings: "Settings") -> None:
    """Store the seconds of each stage, unless one does not fit."""
    seconds = {name: stage.seconds for name, stage in priced.stages.items()}
    if None in seconds.values():
        return
    chip, _, _ = priced.chip.partition("-")
    work = {name: value for name, value in settings.to_json().items() if name in WORK}
    earlier = [one for one in load_estimates(priced.model, chip, priced.devices) if one["settings"] != work]
    latest = [{"settings": work, "stage_seconds": seconds}, *earlier][:LATEST]
    Results().put("estimates", _key(priced.model, chip, priced.devices), latest)


def load_estimates(model: str, chip: str, devices: int) -> list[dict[str, Any]]:
    """Return `settings` and `stage_seconds` of the latest estimates, the newest first.

    Args:
        model: The model's name.
        chip: Without the size of a slice: v6e, h100, cpu.
        devices: The number of devices in the mesh.
    """
    return Results().get("estimates", _key(model, chip, devices)) or []


def _key(model: str, chip: str, devices: int) -> Mapping[str, Any]:
    return {"model": model, "chip": chip, "devices": devices, "version": __version__}
