# SPDX-License-Identifier: Apache-2.0
"""The components of a pipeline: networks, tokenizers and the scheduler, each loaded at first use."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

import jax
from flax import nnx

from wanjax.errors import WanjaxError

SPARE = 0.25  # the share of a device's memory that is left for activations


class Components:
    """Components by name. Each is loaded at first use and stays in memory until it is freed.

    `options` are the options of loading that shape a video, as JSON.
    """

    def __init__(self, loaders: Mapping[str, Callable[[], Any]], options: Mapping[str, Any] | None = None):
        self._loaders = dict(loaders)
        self.options = dict(options or {})
        self._loaded: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """Returns a component; raises WanjaxError that names the others where there is none of this name."""
        if name not in self._loaded:
            if name not in self._loaders:
                raise WanjaxError(f"the model has no component {name!r}: it has {', '.join(self._loaders)}")
            self._loaded[name] = self._loaders[name]()
        return self._loaded[name]

    def has(self, name: str) -> bool:
        """Tells whether the component is loaded."""
        return name in self._loaded

    def put(self, name: str, component: Any) -> None:
        """Sets a component in place of loading it."""
        self._loaded[name] = component

    def free(self, *names: str) -> None:
        """Drops the named components, or all if none is named, and so frees their memory."""
        for name in names or tuple(self._loaded):
            self._loaded.pop(name, None)

    def take_over(self, name: str, others: tuple[str, ...]) -> tuple[Any, float]:
        """Returns a network and the seconds that it took to load.

        First frees any of the networks `others`, which have the same shape, if both would not fit in memory together.
        """
        start = perf_counter()
        for other in others:
            if other != name and self.has(other) and not self.has(name) and not fits_again(self.get(other)):
                self.free(other)
        network = self.get(name)
        jax.block_until_ready(nnx.state(network))
        return network, perf_counter() - start


def fits_again(network: nnx.Module) -> bool:
    """Tells whether a second copy of a network's weights would fit on each of its devices."""
    taken: dict[Any, int] = {}
    for weight in jax.tree.leaves(nnx.state(network)):
        for shard in weight.addressable_shards:
            taken[shard.device] = taken.get(shard.device, 0) + shard.data.nbytes
    return all(needed <= free_memory(device) for device, needed in taken.items())


def free_memory(device: Any) -> float:
    """Returns the bytes of a device's memory that are free for weights."""
    if stats := device.memory_stats():
        return max(0, (1 - SPARE) * stats["bytes_limit"] - stats["bytes_in_use"])
    with suppress(AttributeError, ValueError, OSError):  # some systems do not report it
        page = os.sysconf("SC_PAGE_SIZE")
        return max(0, page * (os.sysconf("SC_AVPHYS_PAGES") - SPARE * os.sysconf("SC_PHYS_PAGES")))
    return 0
