# SPDX-License-Identifier: Apache-2.0
"""Logical axes of weights: each weight carries their names, and rules map the names to a sharding.

The names are this library's own metadata. With Flax's sharding metadata, Flax would place weights at once, on whatever
mesh is set while a module is built.
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

from wanjax.sharding import ONE_DEVICE, RULES, Partitioner, current, use

Module = TypeVar("Module", bound=nnx.Module)
Call = TypeVar("Call", bound=Callable[..., Any])
Axes = tuple[str | None, ...]


def with_axes(initializer: nnx.Initializer, axes: Axes) -> nnx.Initializer:
    """Return the initializer of a weight whose axes have these logical names; without a key it returns zeros."""
    return nnx.with_metadata(partial(_initialize_or_zeros, initializer), axes=axes)


def param(
    initializer: nnx.Initializer, shape: tuple[int, ...], axes: Axes, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.Param:
    """Create a weight whose axes have these logical names."""
    return nnx.Param(with_axes(initializer, axes)(rngs.params(), shape, dtype))


def _initialize_or_zeros(initializer: nnx.Initializer, key: jax.Array | None, *shape_and_dtype: Any) -> jax.Array:
    return jnp.zeros(*shape_and_dtype) if key is None else initializer(key, *shape_and_dtype)


class _NoKeys(nnx.Rngs):
    """A replacement for random streams without keys, because tracing keys takes long."""

    def params(self) -> None:
        """Return no key."""


def as_shapes(make: Callable[[nnx.Rngs], Module]) -> Module:
    """Return the module that `make(rngs)` builds, as shapes and dtypes without values."""
    return nnx.eval_shape(lambda: make(_NoKeys()))


def axes_of(weight: nnx.Variable) -> Axes | None:
    """Return the logical names of a weight's axes, or None if it has none."""
    return weight.get_metadata("axes", None)


def with_shardings(abstract: Module, partitioner: Partitioner) -> Module:
    """Return an abstract module (`as_shapes`) with the sharding of each weight by its logical axes.

    A weight without names is replicated.
    """
    graphdef, state = nnx.split(abstract)

    def with_sharding(weight: nnx.Variable) -> nnx.Variable:
        x = weight.get_value()
        axes = axes_of(weight) or (None,) * len(x.shape)
        return weight.replace(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=partitioner.weight(axes, x.shape)))

    return nnx.merge(
        graphdef, nnx.from_flat_state([(path, with_sharding(leaf)) for path, leaf in nnx.to_flat_state(state)])
    )


def on_weights_mesh(call: Call) -> Call:
    """Decorate a network's forward, so that outside `sharding.use` it runs on the mesh of its weights.

    Kernels need to know which devices share their work. Weights are gathered on use, whatever their sharding.
    """

    @wraps(call)
    def run(network: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if current() is not ONE_DEVICE:
            return call(network, *args, **kwargs)
        sharding = getattr(jax.tree.leaves(nnx.state(network))[0], "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        with use(Partitioner(mesh, RULES["fsdp"]) if isinstance(mesh, Mesh) else ONE_DEVICE):
            return call(network, *args, **kwargs)

    return run  # pyright: ignore[reportReturnType]


def bytes_by_device(network: nnx.Module) -> dict[Any, int]:
    """Return the bytes of a network's weights on each of this process's devices.

    The network may be abstract, with shapes for weights; a weight without a sharding counts for JAX's default device.
    """
    bytes_of: dict[Any, int] = {}
    for x in jax.tree.leaves(nnx.state(network)):
        sharding = x.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shard_bytes = math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for device in sharding.addressable_devices:
            bytes_of[device] = bytes_of.get(device, 0) + shard_bytes
    return bytes_of
