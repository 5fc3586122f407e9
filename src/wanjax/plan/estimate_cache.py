# SPDX-License-Identifier: Apache-2.0
"""The latest estimates of `wanjax plan`, stored in the user's cache. A server's web page shows them.

Each estimate is stored under its model, chip, number of devices and precision. An estimate holds the settings and the
seconds of each stage. The page derives the time of a similar video from them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wanjax import __version__
from wanjax.stores.results import ResultCache

if TYPE_CHECKING:  # only for type checkers: a server, which only reads estimates, does not need this import
    from wanjax.pipelines.settings import Settings
    from wanjax.plan.estimate import Estimate

MAX_ESTIMATES = 8  # the number of stored estimates for each model and slice
KEY_SETTINGS = ("width", "height", "frames", "windows", "steps", "guidance_scale", "guidance_scale_2", "cache")


def store_estimate(estimate: "Estimate", settings: "Settings") -> None:
    """Store an estimate with the seconds of each stage. Store nothing if a stage does not fit."""
    seconds = {name: stage.seconds for name, stage in estimate.stages.items()}
    if None in seconds.values():
        return
    chip, _, _ = estimate.chip.partition("-")
    settings_json = {name: value for name, value in settings.to_json().items() if name in KEY_SETTINGS}
    earlier_entries = [
        entry
        for entry in load_estimates(estimate.model, chip, estimate.devices, estimate.precision)
        if entry["settings"] != settings_json
    ]
    latest_entries = [{"settings": settings_json, "stage_seconds": seconds}, *earlier_entries][:MAX_ESTIMATES]
    ResultCache().put(
        "estimates", _cache_key(estimate.model, chip, estimate.devices, estimate.precision), latest_entries
    )


def load_estimates(model: str, chip: str, devices: int, precision: str) -> list[dict[str, Any]]:
    """Load the `settings` and `stage_seconds` of the latest estimates, newest first.

    Args:
        model: The model's name.
        chip: The chip's name, without the size of a slice: v6e, h100 or cpu.
        devices: The number of devices in the mesh.
        precision: The precision of the model's weights.
    """
    return ResultCache().get("estimates", _cache_key(model, chip, devices, precision)) or []


def _cache_key(model: str, chip: str, devices: int, precision: str) -> Mapping[str, Any]:
    return {"model": model, "chip": chip, "devices": devices, "precision": precision, "version": __version__}
