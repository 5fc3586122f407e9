# SPDX-License-Identifier: Apache-2.0
"""Video diffusion in pure JAX and Flax NNX.

import wanjax
video = wanjax.load("nano")("a red circle moving right")
video.save("circle.mp4")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wanjax.errors import WanjaxError
    from wanjax.media.videos import Video
    from wanjax.pipelines.family import Family
    from wanjax.pipelines.settings import Settings
    from wanjax.pipelines.steps import Cancelled, Step
    from wanjax.registry import load, register
    from wanjax.sharding import make_mesh

_HOMES = {
    "Cancelled": "wanjax.pipelines.steps",
    "Family": "wanjax.pipelines.family",
    "Settings": "wanjax.pipelines.settings",
    "Step": "wanjax.pipelines.steps",
    "Video": "wanjax.media.videos",
    "WanjaxError": "wanjax.errors",
    "load": "wanjax.registry",
    "make_mesh": "wanjax.sharding",
    "register": "wanjax.registry",
}
__all__ = ["Cancelled", "Family", "Settings", "Step", "Video", "WanjaxError", "load", "make_mesh", "register"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `wanjax --help` does not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'wanjax' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
