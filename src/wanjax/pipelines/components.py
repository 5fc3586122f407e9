# SPDX-License-Identifier: Apache-2.0
"""The components of a pipeline: networks, tokenizers and the like, each loaded at first use, and freed for others."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, prod
from time import perf_counter
from typing import Any

import jax
import psutil
from flax import nnx

from wanjax.errors import WanjaxError, choice, repr_short
from wanjax.layers.placement import bytes_by_device
from wanjax.pipelines.memory import machine_memory

SPARE = 0.25  # the share of a device's memory that is left for activations
DECODER = "decoder"  # the component that decodes in place of the autoencoder, where there is one
MakeRoom = Callable[[nnx.Module], None]
Shapes = Callable[[], nnx.Module]  # of a network


class Components:
    """Components by name. Each is loaded at first use and stays in memory until it is freed.

    A loader receives `make_room`, and calls it with the network as shapes before its weights are read. `options` are
    the options of loading that shape a video. `sizes` are the bytes of the networks' weights, as far as they
    are known before anything is loaded. `source` is the checkpoint, if any, and `kinds` are its kinds of networks.
    `shapes` return networks as shapes with shardings, for runs that are traced.

    `offload` decides which networks are freed without being asked: with True each one at the end of the stage that used
    it, with False none, and with None as many as have to go where the next one would not fit in memory beside them. A
    freed network is loaded again at its next use. One that was set by `override` stays.
    """

    def __init__(
        self,
        loaders: Mapping[str, Callable[[MakeRoom], Any]],
        options: Mapping[str, Any] | None = None,
        offload: bool | None = None,
        sizes: Mapping[str, int] | None = None,
        source: Any = None,
        kinds: Sequence[Any] = (),
        shapes: Mapping[str, Shapes] | None = None,
    ):
        self._loaders = dict(loaders)
        self._shapes = dict(shapes or {})
        self._fits = fits
        self._loaded: dict[str, Any] = {}
        self._put: set[str] = set()
        self.options = dict(options or {})
        self.offload = offload
        self.sizes = dict(sizes or {})
        self.source = source
        self.kinds = tuple(kinds)

    def abstract(self, memory: int | None = None) -> "Components":
        """Return the same components with networks as shapes: nothing is loaded, and freeing frees nothing.

        `memory` is the memory of a device in bytes, which decides where a network has to go for another; None is enough
        for all. Tokenizers and the like are shared.
        """
        loaders = {name: partial(self._abstract, name) for name in self.names}
        components = Components(loaders, self.options, self.offload, self.sizes, self.source, self.kinds)
        components._put = set(self._put)
        limit = inf if memory is None else (1 - SPARE) * memory
        components._fits = lambda network: sum(map(bytes_of, [*components.networks(), network])) <= limit
        return components

    def __deepcopy__(self, memo: dict[int, Any]) -> "Components":
        """Return components with networks of their own, whose weights are shared, as are the loaders."""
        components = copy.copy(self)
        components._loaded = {
            name: nnx.clone(x) if isinstance(x, nnx.Module) else copy.deepcopy(x, memo)
            for name, x in self._loaded.items()
        }
        components._put, components.options, components.sizes = set(self._put), dict(self.options), dict(self.sizes)
        return components

    def _abstract(self, name: str, make_room: MakeRoom) -> Any:
        if name in self._shapes and name not in self._put:
            network = self._shapes[name]()
            make_room(network)
            return network
        component = self.get(name)
        return as_abstract(component) if isinstance(component, nnx.Module) else component

    @property
    def metadata(self) -> dict[str, Any]:
        """The options as JSON, for metadata."""
        return {name: x if isinstance(x, list | dict) else str(x) for name, x in self.options.items()}

    def networks(self) -> list[nnx.Module]:
        """Return the networks that are loaded."""
        return [x for x in self._loaded.values() if isinstance(x, nnx.Module)]

    @property
    def decoder(self) -> str:
        """The name of the component that decodes: the autoencoder, or what takes its place."""
        return DECODER if DECODER in self.names else "vae"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all components, loaded or not."""
        return tuple(dict.fromkeys((*self._loaders, *self._loaded)))

    def get(self, name: str) -> Any:
        """Return a component; raise WanjaxError that names the others where there is none of this name."""
        if name not in self._loaded:
            if name not in self._loaders:
                raise WanjaxError(f"the model has no component {name!r}: it has {', '.join(self._loaders)}")
            self._loaded[name] = self._loaders[name](self.make_room)
        return self._loaded[name]

    def has(self, name: str) -> bool:
        """Return whether the component is loaded."""
        return name in self._loaded

    def override(self, name: str, component: Any) -> None:
        """Set a component in place of loading it."""
        self._loaded[name] = component
        self._put.add(name)

    def free(self, *names: str) -> None:
        """Drop the named components, or all if none is named, and so frees their memory.

        Raises WanjaxError for a name that no component has.
        """
        if unknown := [name for name in names if name not in (*self._loaders, *self._loaded)]:
            raise WanjaxError(f"no component is named {repr_short(unknown[0])}: {choice(unknown[0], [*self._loaders])}")
        for name in names or tuple(self._loaded):
            self._loaded.pop(name, None)
            self._put.discard(name)

    def make_room(self, network: nnx.Module) -> None:
        """Free networks, the first loaded first, until this one, given as shapes, fits in memory beside the others."""
        freeable = self._replaceable() if self.offload is None else []
        while freeable and not self._fits(network):
            self.free(freeable.pop(0))

    def take_from(self, other: "Components", except_names: Sequence[str]) -> None:
        """Take over what another pipeline of the same checkpoint has loaded, without the named components."""
        loaded, put = dict(other._loaded), set(other._put)
        other.free()
        self._loaded |= {name: x for name, x in loaded.items() if name not in except_names}
        self._put |= put - set(except_names)

    def finish_stage(self, results: Any) -> Any:
        """Return the results of a stage; if `offload` is True, waits for them and frees the networks."""
        if self.offload:
            jax.block_until_ready(results)
            for name in self._replaceable():
                self.free(name)
        return results

    def swap_in(self, name: str, alternatives: tuple[str, ...]) -> tuple[Any, float]:
        """Return a network that takes the place of `alternatives`, and the seconds that it took to load."""
        start = perf_counter()
        if self.offload:
            for other in self._replaceable():
                if other in alternatives and other != name:
                    self.free(other)
        network = self.get(name)
        jax.block_until_ready(nnx.state(network))
        return network, perf_counter() - start

    def _replaceable(self) -> list[str]:
        """Return the names of the networks that can be loaded again, the first loaded first."""
        return [name for name, x in self._loaded.items() if isinstance(x, nnx.Module) and name not in self._put]


def as_abstract(network: nnx.Module) -> nnx.Module:
    """Return a network as shapes with shardings."""
    graphdef, state = nnx.split(network)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    return nnx.merge(graphdef, shapes)


def bytes_of(network: nnx.Module) -> int:
    """Return the bytes of a network's weights on one device."""
    leaves = jax.tree.leaves(nnx.state(network))
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def fits(network: nnx.Module) -> bool:
    """Return whether the weights of a network (perhaps as shapes) fit into the free memory of its devices."""
    return all(needed <= free_memory(device) for device, needed in bytes_by_device(network).items())


def free_memory(device: Any) -> float:
    """Return the bytes of a device's memory that are free for weights."""
    if stats := device.memory_stats():
        return max(0, (1 - SPARE) * stats["bytes_limit"] - stats["bytes_in_use"])
    total = machine_memory()  # of which a control group may allow less than is available
    available = min(psutil.virtual_memory().available, total - psutil.Process().memory_info().rss)
    return max(0, available - SPARE * total)
