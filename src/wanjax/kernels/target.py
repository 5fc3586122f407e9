# SPDX-License-Identifier: Apache-2.0
"""The device that a program is compiled for, as far as it is known while the program is traced."""

import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

from wanjax.sharding import local_devices

_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}
_MULTIPLY_BFLOAT16 = {"amx_bf16", "avx512_bf16"}  # as Linux names them


class Target(NamedTuple):
    """A platform (`cpu`, `gpu` or `tpu`) and the kind of device as JAX names it, such as `TPU v6 lite`."""

    platform: str
    kind: str


def target_of(device: Any) -> Target:
    """Return the target of a JAX device, which may be absent."""
    platform = str(device.platform)
    return Target(_PLATFORMS.get(platform, platform), device.device_kind)


def multiplies_bfloat16(x: jax.Array) -> bool:
    """Return True for a bfloat16 array on a CPU with bfloat16 instructions (AMX, AVX-512 BF16).

    XLA leaves such a product to a library if its result is float32; else it casts the operands to float32 first. On
    other CPUs a float32 result is slower.
    """
    return x.dtype == "bfloat16" and target(x).platform == "cpu" and not _MULTIPLY_BFLOAT16.isdisjoint(instructions())


@cache
def instructions() -> frozenset[str]:
    """Return the names of this processor's instruction sets as Linux lists them; none on other systems.

    Programs for CPUs are compiled for the processor that compiles them.
    """
    with suppress(OSError):
        if match := re.search(r"^(?:flags|Features)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return frozenset(match[1].split())
    return frozenset()


def operand_dtype(x: jax.Array, dtype: DTypeLike) -> DTypeLike:
    """Return the dtype for a product's operands: on TPUs bfloat16, unless `jax.default_matmul_precision` is set.

    The matrix units round float32 to bfloat16 in any case.
    """
    rounded = target(x).platform == "tpu" and jax.default_matmul_precision.value is None
    return jnp.bfloat16 if rounded else dtype


def target(x: jax.Array | jax.ShapeDtypeStruct | None = None) -> Target:
    """Return the target of an array, or of the program that is being traced.

    It follows from the array's sharding, else from the mesh that `jax.set_mesh` set, else it is JAX's default device. A
    mesh may have devices that are only described (`jax.experimental.topologies`), so that a program that a CPU compiles
    ahead of time knows that it is for TPUs. `jax.lax.platform_dependent` would decide at lowering, but it traces all
    branches and cannot report which one was taken.
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
    default_device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default_device, jax.Device):
        return default_device
    if default_device is None:
        return local_devices()[0]
    return jax.local_devices(backend=default_device)[0]  # asking an array would run a program first


def _sharding(x: jax.Array | jax.ShapeDtypeStruct | None) -> object:
    if x is None:
        return None
    return x.sharding if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).sharding
