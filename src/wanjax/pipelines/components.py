# SPDX-License-Identifier: Apache-2.0
"""The components of a pipeline: networks, tokenizers and similar objects. A component is loaded at its first use, and
freed when another one needs the memory."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, prod
from time import perf_counter
from typing import Any

import jax
from flax import nnx

from wanjax.errors import WanjaxError, repr_short, suggest_choice
from wanjax.layers.offload import AUTO_OFFLOAD, Offload
from wanjax.layers.placement import bytes_by_device, host_bytes
from wanjax.pipelines.memory import available_memory, machine_memory
from wanjax.sharding import is_in_host_memory

ACTIVATION_SHARE = 0.25  # the share of a device's memory that is reserved for activations
DECODER = "decoder"  # the component that replaces the autoencoder in the decode stage, if the model has one
MakeRoom = Callable[[nnx.Module], None]
BuildAbstract = Callable[[], nnx.Module]  # a function that returns a network as shapes


class Components:
    """Components by name. Each component is loaded at its first use, and stays in memory until it is freed.

    A loader receives the function `make_room`, and calls it with the network as shapes before it reads the weights.
    `options` are the loading options that change the video. `sizes` are the known bytes of the networks' weights.
    `source` is the checkpoint, if there is one, and `kinds` are its kinds of networks. The functions in `shapes` return
    networks as shapes with shardings, so that a run can be traced.

    `offload` decides which networks are freed automatically: no network, each network at the end of its stage, or
    loaded networks when the next network needs their memory. A freed network is loaded again at its next use. A
    component that was set by `override` is never freed automatically.
    """

    def __init__(
        self,
        loaders: Mapping[str, Callable[[MakeRoom], Any]],
        options: Mapping[str, Any] | None = None,
        offload: Offload = AUTO_OFFLOAD,
        sizes: Mapping[str, int] | None = None,
        source: Any = None,
        kinds: Sequence[Any] = (),
        shapes: Mapping[str, BuildAbstract] | None = None,
    ):
        self._loaders = dict(loaders)
        self._shapes = dict(shapes or {})
        self._fits = fits
        self._loaded: dict[str, Any] = {}
        self._overridden: set[str] = set()
        self.options = dict(options or {})
        self.offload = offload
        self.sizes = dict(sizes or {})
        self.source = source
        self.kinds = tuple(kinds)

    def abstract(self, memory: int | None = None) -> "Components":
        """Return the same components with shapes in place of networks: nothing is loaded or freed.

        `memory` is the memory of a device in bytes. This size decides when a network must be freed for another network.
        None means that all networks fit. Tokenizers and the like are shared.
        """
        loaders = {name: partial(self._abstract, name) for name in self.names}
        components = Components(loaders, self.options, self.offload, self.sizes, self.source, self.kinds)
        components._overridden = set(self._overridden)
        limit = inf if memory is None else (1 - ACTIVATION_SHARE) * memory
        components._fits = lambda network: sum(map(bytes_of, [*components.networks(), network])) <= limit
        return components

    def __deepcopy__(self, memo: dict[int, Any]) -> "Components":
        """Copy the components: each copy has its own networks, but weights and loaders are shared."""
        components = copy.copy(self)
        components._loaded = {
            name: nnx.clone(component) if isinstance(component, nnx.Module) else copy.deepcopy(component, memo)
            for name, component in self._loaded.items()
        }
        components._overridden, components.options, components.sizes = (
            set(self._overridden),
            dict(self.options),
            dict(self.sizes),
        )
        return components

    def _abstract(self, name: str, make_room: MakeRoom) -> Any:
        if name in self._shapes and name not in self._overridden:
            network = self._shapes[name]()
            make_room(network)
            return network
        component = self.get(name)
        return as_abstract(component) if isinstance(component, nnx.Module) else component

    @property
    def metadata(self) -> dict[str, Any]:
        """The options in the form of JSON, for the metadata of videos."""
        return {name: value if isinstance(value, list | dict) else str(value) for name, value in self.options.items()}

    def networks(self) -> list[nnx.Module]:
        """Return the loaded networks."""
        return [component for component in self._loaded.values() if isinstance(component, nnx.Module)]

    @property
    def decoder(self) -> str:
        """The name of the component that decodes: `decoder` if the model has this component, else `vae`."""
        return DECODER if DECODER in self.names else "vae"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all components, loaded or not."""
        return tuple(dict.fromkeys((*self._loaders, *self._loaded)))

    def get(self, name: str) -> Any:
        """Return a component, and load it if needed. Raises WanjaxError for an unknown name."""
        if name not in self._loaded:
            if name not in self._loaders:
                raise WanjaxError(f"the model has no component {name!r}: it has {', '.join(self._loaders)}")
            self._loaded[name] = self._loaders[name](self.make_room)
        return self._loaded[name]

    def has(self, name: str) -> bool:
        """Return whether the component is loaded."""
        return name in self._loaded

    def override(self, name: str, component: Any) -> None:
        """Replace a component of the checkpoint by another object."""
        self._loaded[name] = component
        self._overridden.add(name)

    def free(self, *names: str) -> None:
        """Drop the named components, or all components if no name is given, to free their memory.

        Raises WanjaxError for an unknown name.
        """
        if unknown := [name for name in names if name not in (*self._loaders, *self._loaded)]:
            raise WanjaxError(
                f"there is no component {repr_short(unknown[0])}: {suggest_choice(unknown[0], [*self._loaders])}"
            )
        for name in names or tuple(self._loaded):
            self._loaded.pop(name, None)
            self._overridden.discard(name)

    def make_room(self, network: nnx.Module) -> None:
        """Free networks until another network fits in memory, in the order in which they were loaded. `network` is the
        other network, with shapes in place of weights."""
        freeable = self._reloadable() if self.offload.frees_on_demand else []
        while freeable and not self._fits(network):
            self.free(freeable.pop(0))

    def move_from(self, other: "Components", except_names: Sequence[str]) -> None:
        """Take the loaded components from another pipeline of the same checkpoint, except for the named components."""
        loaded, overridden = dict(other._loaded), set(other._overridden)
        other.free()
        self._loaded |= {name: component for name, component in loaded.items() if name not in except_names}
        self._overridden |= overridden - set(except_names)

    def finish_stage(self, results: Any) -> Any:
        """Return the results of a stage. If stages are offloaded, wait for the results and free the networks."""
        if self.offload.frees_stages:
            jax.block_until_ready(results)
            for name in self._reloadable():
                self.free(name)
        return results

    def swap_in(self, name: str, alternatives: tuple[str, ...]) -> tuple[Any, float]:
        """Load a network in place of its alternatives. Return the network and the seconds that loading took."""
        start = perf_counter()
        if self.offload.frees_stages:
            for other in self._reloadable():
                if other in alternatives and other != name:
                    self.free(other)
        network = self.get(name)
        jax.block_until_ready(nnx.state(network))
        return network, perf_counter() - start

    def _reloadable(self) -> list[str]:
        """Return the names of the networks that can be loaded again, in the order in which they were loaded."""
        return [
            name
            for name, component in self._loaded.items()
            if isinstance(component, nnx.Module) and name not in self._overridden
        ]


def as_abstract(network: nnx.Module) -> nnx.Module:
    """Replace the weights of a network by shapes with shardings."""
    graphdef, state = nnx.split(network)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    return nnx.merge(graphdef, shapes)


def bytes_of(network: nnx.Module) -> int:
    """Return the bytes of a network's weights on one device. Weights in the host's memory do not count."""
    leaves = [x for x in jax.tree.leaves(nnx.state(network)) if not is_in_host_memory(x)]
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def fits(network: nnx.Module) -> bool:
    """Return whether a network's weights (or shapes) fit into the free memory of its devices and of the host."""
    fits_devices = all(needed <= free_memory(device) for device, needed in bytes_by_device(network).items())
    return fits_devices and host_bytes(network) <= free_host_memory()


def free_memory(device: Any) -> float:
    """Return the bytes of a device's memory that are free for weights."""
    if stats := device.memory_stats():
        return max(0, (1 - ACTIVATION_SHARE) * stats["bytes_limit"] - stats["bytes_in_use"])
    return free_host_memory()


def free_host_memory() -> float:
    """Return the bytes of this machine's memory that are free for weights."""
    return max(0, available_memory() - ACTIVATION_SHARE * machine_memory())
