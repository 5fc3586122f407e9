# SPDX-License-Identifier: Apache-2.0
"""The record of a video in its metadata: everything that shaped it, as JSON."""

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wanjax.layers.tiling import Tiling
from wanjax.pipelines.settings import Settings
from wanjax.schedulers import Scheduler, name_of
from wanjax.sharding import Partitioner

VERSION = version("wanjax")


def record(
    settings: Settings,
    sources: Mapping[str, Any],
    *,
    loaded: Mapping[str, Any],
    scheduler: Scheduler,
    partitioner: Partitioner | None,
    tiling: Tiling | None = None,
    batch_guidance: bool = False,
) -> dict[str, Any]:
    """Returns the settings, the scheduler, the devices and the version, and whichever else was given.

    `sources` are pictures, clips and noise by name; `loaded` are options of `wanjax.load`.
    """
    made = settings.to_json() | {"scheduler": name_of(scheduler)} | dict(loaded)
    made |= {name: described(source) for name, source in sources.items() if source is not None}
    if partitioner is not None:
        made |= {"mesh": str(partitioner), "rules": partitioner.rules_name}
    if tiling is not None:
        made |= {"tiling": tiling._asdict()}
    if batch_guidance:
        made |= {"batch_guidance": True}
    return made | {"devices": devices_of(partitioner), "version": VERSION}


def devices_of(partitioner: Partitioner | None) -> str:
    """Returns the number and the kind of a model's devices."""
    if partitioner is None:
        return f"1 x {jax.devices()[0].device_kind}"
    return f"{partitioner.mesh.size} x {partitioner.mesh.abstract_mesh.abstract_device.device_kind}"


def nameable(given: Any, read: Any) -> Any:
    """Returns the path, or the list of paths, by which a source was given, or else what was read from it."""
    listed = isinstance(given, list | tuple) and all(isinstance(one, str | Path) for one in given)
    return given if listed or isinstance(given, str | Path) else read


def described(source: Any) -> Any:
    """Returns a picture, clip or noise as JSON: a file by its full path, an array by its shape and a digest."""
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        return str(path.absolute()) if path.exists() else str(source)
    if isinstance(source, list | tuple):
        return [described(one) for one in source]
    if isinstance(source, Mapping):
        return {name: described(one) for name, one in source.items()}
    array = np.asarray(source)
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    return f"{array.dtype} {list(array.shape)}, sha256 {digest}"
