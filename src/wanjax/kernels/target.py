# SPDX-License-Identifier: Apache-2.0
"""Determine the device for which a program is compiled, while the program is being traced."""

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
_MULTIPLY_BFLOAT16 = {"amx_bf16", "avx512_bf16"}  # Linux's names of the instruction sets


class Target(NamedTuple):
    """A platform (`cpu`, `gpu` or `tpu`), and JAX's name of the kind of device, such as `TPU v6 lite`."""

    platform: str
    device_kind: str


def target_of(device: Any) -> Target:
    """Return the target of a JAX device, or of a described device that this process does not have."""
    platform = str(device.platform)
    return Target(_PLATFORMS.get(platform, platform), device.device_kind)


def uses_bfloat16_instructions(x: jax.Array) -> bool:
    """Return whether x is a bfloat16 array on a CPU with bfloat16 instructions (AMX, AVX-512 BF16).

    On these CPUs, XLA calls a library for a product of bfloat16 operands if the result is float32. For another result
    dtype, XLA first casts the operands to float32. On other CPUs, a float32 result is slower.
    """
    return x.dtype == "bfloat16" and target(x).platform == "cpu" and not _MULTIPLY_BFLOAT16.isdisjoint(instructions())


@cache
def instructions() -> frozenset[str]:
    """Return the names of this processor's instruction sets, as Linux lists them. The result is empty on other systems.

    Programs for CPUs are compiled for the processor that compiles them.
    """
    with suppress(OSError):
        if match := re.search(r"^(?:flags|Features)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return frozenset(match[1].split())
    return frozenset()


def operand_dtype(x: jax.Array, dtype: DTypeLike) -> DTypeLike:
    """Return the dtype for the operands of a product: bfloat16 on TPUs, else `dtype`.

    The matrix units of TPUs round float32 operands to bfloat16 anyway. They do not if `jax.default_matmul_precision` is
    set, and `dtype` is then returned on TPUs too.
    """
    rounds_to_bfloat16 = target(x).platform == "tpu" and jax.default_matmul_precision.value is None
    return jnp.bfloat16 if rounds_to_bfloat16 else dtype


def target(x: jax.Array | jax.ShapeDtypeStruct | None = None) -> Target:
    """Return the target of an array, or of the program that is being traced.

    The target is that of the mesh in the array's sharding. Without such a mesh, it is that of the mesh that
    `jax.set_mesh` set. Without any mesh, it is that of JAX's default device. A mesh may have devices that this process
    does not have (`jax.experimental.topologies`). If a program is compiled on a CPU ahead of time for TPUs, the target
    is therefore a TPU. `jax.lax.platform_dependent` is no alternative, because it decides at lowering, traces all
    branches, and cannot report its decision.
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
    # An array would also show the device, but creating an array runs a program
    return jax.local_devices(backend=default_device)[0]


def _sharding(x: jax.Array | jax.ShapeDtypeStruct | None) -> object:
    if x is None:
        return None
    return x.sharding if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).sharding


def vmem_bytes() -> int | None:
    """Return the bytes of VMEM of a core of the target TPU, or None if the target is not a TPU."""
    from jax.experimental.pallas import tpu as pltpu  # imported late, because not every program has a kernel

    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except ValueError:
        return None


def has_fast_float8() -> bool:
    """Return True if the target is a TPU that multiplies 8-bit floats faster than bfloat16."""
    return _multiplies_faster("fp8")


def has_fast_int8() -> bool:
    """Return True if the target is a TPU that multiplies 8-bit integers faster than bfloat16."""
    return _multiplies_faster("int8")


def _multiplies_faster(dtype: str) -> bool:
    from jax.experimental.pallas import tpu as pltpu

    try:
        info = pltpu.get_tpu_info()
    except ValueError:
        return False
    return getattr(info, f"{dtype}_ops_per_second") > info.bf16_ops_per_second
