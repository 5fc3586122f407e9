# SPDX-License-Identifier: Apache-2.0
"""Logical axes of weights. The axes of a weight have names, and the sharding rules map the names to mesh axes.

The names are metadata of this library, not Flax's sharding metadata. With Flax's metadata, Flax would shard weights
while it builds a module, over the mesh that is set at that time.
"""

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from wanjax.sharding import (
    ONE_DEVICE_PARTITIONER,
    SHARDING_RULES,
    Partitioner,
    current_partitioner,
    is_in_host_memory,
    is_offloadable,
    use_partitioner,
)

Module = TypeVar("Module", bound=nnx.Module)
Call = TypeVar("Call", bound=Callable[..., Any])
Axes = tuple[str | None, ...]


def with_axes(initializer: nnx.Initializer, axes: Axes) -> nnx.Initializer:
    """Add logical names of the weight's axes to an initializer. Without a key, the new initializer returns zeros."""
    return nnx.with_metadata(partial(_initialize_or_zeros, initializer), axes=axes)


def param(
    initializer: nnx.Initializer, shape: tuple[int, ...], axes: Axes, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.Param:
    """Create a weight with logical names for its axes."""
    return nnx.Param(with_axes(initializer, axes)(rngs.params(), shape, dtype))


def _initialize_or_zeros(initializer: nnx.Initializer, key: jax.Array | None, *shape_and_dtype: Any) -> jax.Array:
    return jnp.zeros(*shape_and_dtype) if key is None else initializer(key, *shape_and_dtype)


class _NoKeys(nnx.Rngs):
    """A replacement for random streams that returns no keys, because tracing keys takes long."""

    def params(self) -> None:
        """Return None in place of a key."""


def as_shapes(make: Callable[[nnx.Rngs], Module]) -> Module:
    """Return the module that `make(rngs)` builds, with shapes and dtypes in place of weights."""
    return nnx.eval_shape(lambda: make(_NoKeys()))


def axes_of(weight: nnx.Variable) -> Axes | None:
    """Return the logical names of a weight's axes, or None if the axes have no names."""
    return weight.get_metadata("axes", None)


def with_shardings(abstract: Module, partitioner: Partitioner) -> Module:
    """Add shardings to an abstract module from `as_shapes`. The logical axes of a weight determine its sharding.

    A weight without names is replicated.
    """
    graphdef, state = nnx.split(abstract)

    def with_sharding(weight: nnx.Variable) -> nnx.Variable:
        x = weight.get_value()
        axes = axes_of(weight) or (None,) * len(x.shape)
        return weight.replace(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=partitioner.weight_sharding(axes, x.shape))
        )

    return nnx.merge(
        graphdef, nnx.from_flat_state([(path, with_sharding(leaf)) for path, leaf in nnx.to_flat_state(state)])
    )


def on_weights_mesh(call: Call) -> Call:
    """Decorate a network's `__call__`, so that outside `sharding.use_partitioner` it runs on the mesh of its weights.

    Kernels need the mesh to shard their work. Whatever the sharding of the weights is, they are gathered before use.
    """

    @wraps(call)
    def run(network: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if current_partitioner() is not ONE_DEVICE_PARTITIONER:
            return call(network, *args, **kwargs)
        sharding = getattr(jax.tree.leaves(nnx.state(network))[0], "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        with use_partitioner(
            Partitioner(mesh, SHARDING_RULES["fsdp"]) if isinstance(mesh, Mesh) else ONE_DEVICE_PARTITIONER
        ):
            return call(network, *args, **kwargs)

    return run  # pyright: ignore[reportReturnType]


def bytes_by_device(network: nnx.Module) -> dict[Any, int]:
    """Return the bytes of a network's weights on each of this process's devices.

    The network may be abstract, with shapes in place of weights. A weight without a sharding counts for JAX's default
    device. Weights in the host's memory count only if the device is a CPU, whose memory is the host's memory.
    """
    bytes_of: dict[Any, int] = {}
    for x in jax.tree.leaves(nnx.state(network)):
        sharding = x.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shard_bytes = math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for device in sharding.addressable_devices:
            if device.platform == "cpu" or not is_in_host_memory(x):
                bytes_of[device] = bytes_of.get(device, 0) + shard_bytes
    return bytes_of


def host_bytes(network: nnx.Module) -> int:
    """Return the bytes of a network's weights in the host's memory. The network may have shapes in place of weights."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(network)) if is_in_host_memory(x))


def offloaded_bytes(network: nnx.Module, blocks: int) -> tuple[int, int]:
    """Return the bytes that a network's weights need if its blocks are offloaded: on one device, and in the host's
    memory.

    Args:
        network: The network, or its shapes.
        blocks: The number of blocks that are on the device at a time.
    """
    on_device = on_host = 0
    for _, weight in nnx.to_flat_state(nnx.state(network)):
        x = weight.get_value()
        weight_bytes = x.size * x.dtype.itemsize
        if is_offloadable(axes_of(weight) or ()):
            on_host += weight_bytes
            on_device += weight_bytes * min(blocks, x.shape[0]) // x.shape[0]
        else:
            on_device += weight_bytes
    return on_device, on_host
