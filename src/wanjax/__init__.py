# SPDX-License-Identifier: Apache-2.0
"""Video diffusion in pure JAX and Flax NNX.

import wanjax
video = wanjax.load("nano")("a red circle moving right")
video.save("circle.mp4")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wanjax.dims import readable_signature

if TYPE_CHECKING:
    from wanjax.errors import WanjaxError
    from wanjax.layers.tiling import Tiling
    from wanjax.loading import load
    from wanjax.media.video import Video
    from wanjax.pipelines.family import Family
    from wanjax.pipelines.observers import Cancelled, Step
    from wanjax.pipelines.pipeline import Pipeline
    from wanjax.pipelines.previews.previews import Previews
    from wanjax.pipelines.settings import Settings
    from wanjax.pipelines.text.prompt_extension import extend_prompt
    from wanjax.plan.price import price
    from wanjax.registry import register
    from wanjax.sharding import make_mesh

    __version__: str

_MODULE_OF = {
    "Cancelled": "wanjax.pipelines.observers",
    "Family": "wanjax.pipelines.family",
    "Pipeline": "wanjax.pipelines.pipeline",
    "Previews": "wanjax.pipelines.previews.previews",
    "Settings": "wanjax.pipelines.settings",
    "Step": "wanjax.pipelines.observers",
    "Tiling": "wanjax.layers.tiling",
    "Video": "wanjax.media.video",
    "WanjaxError": "wanjax.errors",
    "extend_prompt": "wanjax.pipelines.text.prompt_extension",
    "load": "wanjax.loading",
    "make_mesh": "wanjax.sharding",
    "price": "wanjax.plan.price",
    "register": "wanjax.registry",
}
__all__ = [
    "Cancelled",
    "Family",
    "Pipeline",
    "Previews",
    "Settings",
    "Step",
    "Tiling",
    "Video",
    "WanjaxError",
    "__version__",
    "extend_prompt",
    "load",
    "make_mesh",
    "price",
    "register",
]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that `wanjax --help` does not wait for JAX."""
    if name == "__version__":
        return import_module("importlib.metadata").version("wanjax")
    if name not in _MODULE_OF:
        raise AttributeError(_suggest_name(name) or f"module 'wanjax' has no attribute {name!r}")
    import_module("wanjax.pricing.libtpu").silence()
    value = globals()[name] = readable_signature(getattr(import_module(_MODULE_OF[name]), name))
    return value


def _suggest_name(name: str) -> str | None:
    """Return a message that suggests a name similar to a missing name. Return None if there is no similar name."""
    if name.startswith("_"):
        return None
    similar = import_module("wanjax.errors").near_names(name, __all__, 1)
    sentence = import_module("wanjax.pipelines.other_names").advice_for(name)
    return sentence or (f"wanjax has no {name}: did you mean {similar[0]}?" if similar else None)


def __dir__() -> list[str]:
    """Return the public names, without imported submodules."""
    return __all__
