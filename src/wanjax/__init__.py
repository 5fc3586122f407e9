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
    from wanjax.io import Video
    from wanjax.pipelines.base import Cancelled, Embeddings, Settings, Step
    from wanjax.registry import load
    from wanjax.sharding import make_mesh

_HOMES = {
    "Cancelled": "wanjax.pipelines.base",
    "Embeddings": "wanjax.pipelines.base",
    "Settings": "wanjax.pipelines.base",
    "Step": "wanjax.pipelines.base",
    "Video": "wanjax.io",
    "WanjaxError": "wanjax.errors",
    "load": "wanjax.registry",
    "make_mesh": "wanjax.sharding",
}
__all__ = ["Cancelled", "Embeddings", "Settings", "Step", "Video", "WanjaxError", "load", "make_mesh"]


def __getattr__(name: str) -> Any:
    """Imports what is asked for and nothing else, so that `wanjax --help` does not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'wanjax' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
