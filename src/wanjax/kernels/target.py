# SPDX-License-Identifier: Apache-2.0
"""What arrays are computed on, as far as it can be known while a program is traced."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


class Target(NamedTuple):
    """A platform, `cpu`, `gpu` or `tpu`, and the kind of device in JAX's words, such as `TPU v6 lite`."""

    platform: str
    kind: str


def target_of(device: Any) -> Target:
    """That of a device of JAX's, which need not be there."""
    platform = str(device.platform)
    return Target(_PLATFORMS.get(platform, platform), device.device_kind)


def target(x: jax.Array | jax.ShapeDtypeStruct | None = None) -> Target:
    """The device that an array is on, or that a program which is being traced, with it or at all, is for.

    The array's own sharding says so, or else the mesh that `jax.set_mesh` set: both name the devices of a mesh, so that
    a program compiled on a CPU for TPUs that are only described (`jax.experimental.topologies`) knows that it is for
    TPUs. Where neither does, it is JAX's default device. `jax.lax.platform_dependent` would leave the choice to the
    lowering in every case, but it traces all branches, and could not say which one was taken.
    """
    meshes = (getattr(_sharding(x), "mesh", None), jax.sharding.get_abstract_mesh())
    for device in (getattr(mesh, "abstract_device", None) for mesh in meshes):
        if device is not None:
            break
    else:
        device = _default_device(x)
    return target_of(device)


def _default_device(x: jax.Array | jax.ShapeDtypeStruct | None) -> Any:
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        return next(iter(x.devices()))
    with jax.ensure_compile_time_eval():
        return next(iter(jnp.zeros(()).devices()))


def _sharding(x: jax.Array | jax.ShapeDtypeStruct | None) -> object:
    if x is None:
        return None
    return x.sharding if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).sharding
